"""The whole examination: values are gathered here, judged elsewhere, and told in one order."""

import asyncio
import json
import os
import platform
import resource
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import msgspec

from vllm_pd_connector.config import PDConfig
from vllm_pd_connector.doctor import configuration, machine, probe
from vllm_pd_connector.doctor.finding import Finding, exit_status, failed, render, summary
from vllm_pd_connector.doctor.servers import Rounds
from vllm_pd_connector.errors import ConfigError
from vllm_pd_connector.kernels import native
from vllm_pd_connector.topology.device import Nic, PciDevice
from vllm_pd_connector.topology.sysfs import read_gpus, read_nics, read_node_cpus

DISTRIBUTIONS = ("vllm-pd-connector", "vllm", "nixl", "torch")
OVER_NETWORK = "^shm,self"
"""UCX_TLS for a path that could leave the machine."""


def doctor(
    *,
    config: str | None,
    prefillers: Sequence[str],
    decoders: Sequence[str],
    api_key_file: str | None,
    limit_s: float,
    tell: Callable[[str], None],
) -> int:
    """Examine this machine, a configuration if there is one, and the servers named.

    Args:
        config: as `--kv-transfer-config`, or a file that holds it.
        prefillers: base URLs; those of the configuration are added.
        decoders: base URLs.
        api_key_file: key for servers that want one; the configuration's wins.
        limit_s: seconds for one question to a server.
        tell: takes each line as soon as it is known.

    Returns:
        Exit status: 1 if a check failed.

    Raises:
        OSError: there is no such configuration file.
    """
    read = configuration.read(config) if config is not None else None
    values = read.values if read is not None else PDConfig()
    if values.prefiller_api_key_file is None:
        values = msgspec.structs.replace(values, prefiller_api_key_file=api_key_file)
    findings: list[Finding] = []

    def note(found: Sequence[Finding]) -> None:
        findings.extend(found)
        for finding in found:
            tell(render(finding))

    devices = read_gpus(), read_nics(), read_node_cpus()
    note(this_machine(*devices))
    note(read.findings if read is not None else [])
    transfer = json.dumps(read.transfer) if read is not None and read.transfer else ""
    note(asyncio.run(_probes(values.nixl_backend, transfer, *devices)))
    pool = list(dict.fromkeys([*prefillers, *values.prefillers]))
    note(asyncio.run(_servers(values, pool, decoders, limit_s)) if pool or decoders else [])
    tell(summary(findings))
    return exit_status(findings)


def this_machine(gpus: Sequence[PciDevice], nics: Sequence[Nic], node_cpus: machine.NodeCpus) -> list[Finding]:
    """What needs no process of its own."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [
        *machine.check_topology(gpus, nics, node_cpus),
        machine.check_versions({"Python": platform.python_version(), **{n: _version(n) for n in DISTRIBUTIONS}}),
        machine.check_extension(
            native.describe(),
            is_built=native.is_built(),
            has_cuda=native.is_built() and native.extension().has_cuda,
            has_gpu=bool(gpus),
        ),
        machine.check_locked_memory(None if limit == resource.RLIM_INFINITY else limit, nics),
        machine.check_environment(os.environ),
    ]


async def _probes(
    backend: str, transfer: str, gpus: Sequence[PciDevice], nics: Sequence[Nic], node_cpus: machine.NodeCpus
) -> list[Finding]:
    """vLLM and the plugin, and trial writes as the ranks of this machine would write."""
    advice = "Install this package beside a supported vLLM (`make setup`)."
    plugin = probe.run("plugin", text=transfer, otherwise=failed(probe.VLLM, "", advice))
    # Where the operator has chosen the transports, a second trial would take the same.
    places = [""] if "UCX_TLS" in os.environ else ["", OVER_NETWORK]
    sets = machine.port_sets(gpus, nics, node_cpus)
    trials = [_trial(backend, devices, tls, nics) for devices in sets for tls in places]
    return [finding for outcome in await asyncio.gather(plugin, *trials) for finding in outcome.findings]


async def _trial(backend: str, devices: Sequence[str], tls: str, nics: Sequence[Nic]) -> probe.Outcome:
    """A write, with UCX's path in what was seen; `tls`: of UCX_TLS, empty to leave it."""
    title = f"{probe.WRITE}{', no shared memory' if tls else ''}{''.join(f', {device}' for device in devices)}"
    outcome = await probe.run(
        "trial",
        title,
        backend,
        *devices,
        otherwise=failed(title, "", "Is NIXL installed (`pip install nixl`)? UCX_LOG_LEVEL=info says more."),
        env={"UCX_PROTO_INFO": "y", **({"UCX_TLS": tls} if tls else {})},
    )
    path = probe.write_path(outcome.log)
    findings = [
        replace(found, seen=f"{found.seen}, over {path}") if found.name == title and path else found
        for found in outcome.findings
        if found.name == title or not tls  # native posting is the same on every path
    ]
    if tls or "UCX_TLS" in os.environ:
        findings += machine.check_path(title, path, nics)
    return probe.Outcome(findings, outcome.log)


async def _servers(
    values: PDConfig, prefillers: Sequence[str], decoders: Sequence[str], limit_s: float
) -> list[Finding]:
    try:
        rounds = Rounds.start(values, limit_s)
    except ConfigError as error:
        return [failed("servers", f"not asked: {error}", "Mend that file first.")]
    try:
        return await rounds.visit(prefillers, decoders)
    finally:
        await rounds.close()


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
