"""What two servers say of themselves, compared, and what a trial request says about them. Pure."""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from vllm_pd_connector.doctor.finding import Finding, failed, ok, warning
from vllm_pd_connector.wire.compatibility import differences
from vllm_pd_connector.wire.messages import ControlEndpoint, HelloReply

OUTCOMES = ("released", "failed", "prefilled_locally", "refused_params")
"""Counters of which a trial raises one."""


class Model(msgspec.Struct, frozen=True):
    """An entry of /v1/models. `max_model_len`: tokens; None where the server does not say."""

    id: str
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True)
class Server:
    """`models`: at least one. `hello`: None of a server that is no prefiller."""

    url: str
    models: list[Model]
    hello: HelloReply | None


def compare(here: Server, there: Server) -> list[Finding]:
    """What keeps `here` from having its prompts prefilled `there`."""
    name = f"{there.url} for {here.url}"
    findings: list[Finding] = []
    wanted = here.models[0]
    theirs = {model.id: model for model in there.models}
    if wanted.id not in theirs:
        findings.append(
            failed(
                name,
                f"model {wanted.id!r} is not among {', '.join(theirs)}",
                "Start both with the same --served-model-name; the decoder asks for its first.",
            )
        )
    elif (wanted.max_model_len or 0) > (theirs[wanted.id].max_model_len or 2**63):
        findings.append(
            warning(
                name,
                f"max_model_len {wanted.max_model_len} against {theirs[wanted.id].max_model_len}",
                "Longer prompts are refused there and prefilled by the decoder: start both with equal --max-model-len.",
            )
        )
    if here.hello is not None and there.hello is not None:
        differing = differences(here.hello.shape, there.hello.shape)
        fields = "; ".join(f"{field}: {mine} against {its}" for field, mine, its in differing)
        if differing:
            findings.append(failed(name, fields, "Start both with equal values."))
        else:
            findings.append(ok(name, "their pages fit"))
    return findings


def verdict(name: str, rise: Mapping[str, float], refusal: str = "") -> Finding:
    """Args:
    name: of the trial.
    rise: the decoder's counters, after it less before.
    refusal: what was answered instead of tokens.
    """
    told = ", ".join(f"{key} +{rise[key]:g}" for key in ("dispatched", *OUTCOMES, "pages_arrived") if rise.get(key))
    told = ": ".join(filter(None, (told, refusal)))
    if rise.get("refused_params"):
        return failed(name, told, "Not in the decoder's pool under this URL: write it as in its `prefillers`.")
    if rise.get("failed"):
        return failed(name, told, "The decoder's log says why: event=remote_prefill_failed.")
    if rise.get("prefilled_locally"):
        advice = (
            "See prefiller_absent and prefiller_misfit in the decoder's log; or is min_remote_tokens above the trial's?"
        )
        return failed(name, told, advice)
    if refusal:
        return failed(name, told, "Look into the decoder's log.")
    if rise.get("released"):
        return ok(name, told)
    return warning(name, "answered, but the decoder counted nothing", "Has it `prefillers`? Is it a kv_consumer?")


def check_controls(url: str, controls: Sequence[ControlEndpoint], silent: Sequence[str]) -> Finding:
    """Args:
    url: of a prefiller.
    controls: where its ranks take control messages, as it says.
    silent: for each, why there was no answer; empty where there was.
    """
    name = f"control ports of {url}"
    missing = [f"{control.endpoint}: {why}" for control, why in zip(controls, silent, strict=True) if why]
    if missing:
        advice = "Set advertise_host there to an address that is reached from here, open the port, and use one "
        advice += "control_key_file (here by --config): without it failed transfers keep their pages for long."
        seen = f"{len(missing)} of {len(controls)} do not answer: {', '.join(missing[:3])}"
        return failed(name, seen, advice)
    hosts = [urlsplit(control.endpoint).hostname or "" for control in controls]
    is_far = not is_loopback(urlsplit(url).hostname or "")
    if any(is_unspecified(host) or (is_far and is_loopback(host)) for host in hosts):
        advice = "Set advertise_host on the prefiller: a decoder elsewhere would look for it on its own machine."
        return warning(name, f"it advertises {', '.join(dict.fromkeys(hosts))}", advice)
    return ok(name, f"all {len(controls)} answer, the first at {controls[0].endpoint}")


def is_loopback(host: str) -> bool:
    return host == "localhost" or any(address.is_loopback for address in _addresses(host))


def is_unspecified(host: str) -> bool:
    """All addresses at once, as 0.0.0.0."""
    return host == "*" or any(address.is_unspecified for address in _addresses(host))


def _addresses(host: str) -> Sequence[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        return [ipaddress.ip_address(host)]
    except ValueError:  # a name
        return []
