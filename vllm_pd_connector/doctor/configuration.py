"""Checks a `--kv-transfer-config` with the code that the server reads it with, and what only this machine can tell."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vllm_pd_connector.config import PDConfig, parse
from vllm_pd_connector.control.fence_server import FenceServer
from vllm_pd_connector.control.keys import load_key
from vllm_pd_connector.control.prefiller_client import PrefillerClient
from vllm_pd_connector.doctor.finding import Finding, failed, ok, warning
from vllm_pd_connector.doctor.pair import is_loopback, is_unspecified
from vllm_pd_connector.errors import ConfigError
from vllm_pd_connector.plugin import NAME

NAME_OF_CHECK = "configuration"


@dataclass(frozen=True, slots=True)
class Configuration:
    """Attributes:
    findings: about it.
    values: ours; the defaults where they are refused.
    transfer: vLLM's own keys; empty where they cannot be read.
    """

    findings: list[Finding]
    values: PDConfig
    transfer: dict[str, Any]


def read(text: str) -> Configuration:
    """Args:
    text: JSON, or the path of a file that holds it.

    Raises:
        OSError: there is no such file.
    """
    source = text if text.lstrip().startswith("{") else Path(text).read_bytes()
    advice = "Give it as in --kv-transfer-config; `vllm-pd config --explain` prints every key."
    try:
        transfer = json.loads(source)
        if not isinstance(transfer, dict) or not isinstance(transfer.get("kv_connector_extra_config", {}), dict):
            raise ConfigError("it, and kv_connector_extra_config in it, must be JSON objects")
        values = parse(transfer.get("kv_connector_extra_config", {}))
    except (ConfigError, ValueError, RecursionError) as error:
        return Configuration([failed(NAME_OF_CHECK, str(error), advice)], PDConfig(), {})
    if (named := transfer.get("kv_connector")) != NAME:
        return Configuration(
            [failed(NAME_OF_CHECK, f"kv_connector is {named!r}", f'Set "kv_connector": "{NAME}".')], values, transfer
        )
    role = transfer.get("kv_role")
    seen = f"{role}, {', '.join(sorted(transfer.get('kv_connector_extra_config', {}))) or 'all keys at their defaults'}"
    return Configuration([ok(NAME_OF_CHECK, seen), *check_role(values, role), *check_files(values)], values, transfer)


def check_role(values: PDConfig, role: object) -> list[Finding]:
    """Settings that the role makes no use of, or that no server should have. Pure."""
    findings: list[Finding] = []
    if role == "kv_producer" and values.prefillers:
        findings.append(warning("prefillers", "a kv_producer never dispatches", "Set them on the decoders."))
    if role == "kv_consumer" and not values.prefillers:
        findings.append(warning("prefillers", "none: this decoder prefills everything itself", "Name some."))
    if values.faults:
        findings.append(warning("faults", f"{len(values.faults)} are scripted", "Leave `faults` out: it is for tests."))
    if role in ("kv_producer", "kv_both"):
        findings.append(check_host(values))
    return findings


def check_host(values: PDConfig) -> Finding:
    """Whether control messages can come in at `advertise_host`: it is bound once, as the server does."""
    name, host = "advertise_host", values.advertise_host
    advice = "Set it to an address of this machine that the decoders reach."
    try:
        server = FenceServer(
            host, 0, generation="0" * 16, key=None, on_fence=lambda *_: None, on_inquiry=lambda *_: None
        )
    except ConfigError as error:
        return failed(name, str(error), advice)
    server.start()
    server.close()
    if is_unspecified(host):
        return failed(name, f"{host} is no address that a decoder could reach", advice)
    others = [url for url in values.prefillers if not is_loopback(urlsplit(url).hostname or "")]
    if is_loopback(host) and others:
        return warning(name, f"{host}, but other servers of the pool are elsewhere: {others[0]}", advice)
    if is_loopback(host):
        return ok(name, f"{host}: decoders on this machine only")
    if values.control_key_file is None:
        return warning(
            name,
            f"{host}, without control_key_file: anyone who reaches the control port can stop transfers",
            "`vllm-pd keygen FILE`, the same file on every server.",
        )
    return ok(name, host)


def check_files(values: PDConfig) -> list[Finding]:
    """The files it names: read as the server does, and kept from others."""
    findings: list[Finding] = []
    for key, path, read_it in (
        ("control_key_file", values.control_key_file, lambda: load_key(values.control_key_file)),
        ("prefiller_api_key_file", values.prefiller_api_key_file, lambda: PrefillerClient(values)),
        ("prefiller_ca_file", values.prefiller_ca_file, lambda: PrefillerClient(values)),
    ):
        if path is None:
            continue
        try:
            read_it()
            mode = Path(path).stat().st_mode & 0o777
        except (ConfigError, OSError) as error:
            findings.append(failed(key, str(error), "Make it readable for the user that runs the server."))
            continue
        if key.endswith("key_file") and mode & 0o077:
            findings.append(warning(key, f"{path} has mode {mode:03o}", f"`chmod 600 {path}`: it holds a secret."))
        else:
            findings.append(ok(key, f"{path}, mode {mode:03o}"))
    return findings
