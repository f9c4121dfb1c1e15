"""The one configuration tree, parsed once from vLLM's `kv_connector_extra_config`.

Unknown keys and values out of range stop the server at start and name the key's path. Pure rooms are handed
plain numbers from here, never this object.
"""

import reprlib
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from vllm_pd_connector.errors import ConfigError

ROOT = "kv_connector_extra_config"

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Port = Annotated[int, Meta(ge=0, le=65_535)]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One scripted fault, for tests only: the `nth` write (counted from 0, per worker) suffers `action`."""

    action: Literal["wrong_page", "drop", "fail", "hang"]
    nth: Annotated[int, Meta(ge=0)] = 0
    count: Annotated[int, Meta(ge=1)] = 1


class PDConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator can set. Each field's `Meta` description is what `vllm-pd config --explain` prints."""

    prefillers: Annotated[
        list[str],
        Meta(description="Base URLs of the prefillers this decoder may dispatch to; empty: always prefill locally."),
    ] = []
    min_remote_tokens: Annotated[
        int, Meta(ge=1, description="Tokens. A prompt with fewer left to compute is prefilled locally.")
    ] = 64
    on_failure: Annotated[
        Literal["local", "error"],
        Meta(description="When a remote prefill fails: prefill on the decoder, or finish the request with an error."),
    ] = "local"
    request_deadline_s: Annotated[
        Seconds,
        Meta(
            description="Seconds from dispatch until remote prefill is given up, retries included (then `on_failure`)."
        ),
    ] = 120.0
    max_attempts: Annotated[
        int, Meta(ge=1, le=100, description="Prefillers that are tried for a request, each once; 1: never retry.")
    ] = 2
    max_held_share: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="Share of this decoder's pages that may be reserved for held requests or fenced. "
            "Over it a request waits (`busy_wait_s`) or is prefilled locally.",
        ),
    ] = 0.5
    max_outstanding_per_prefiller: Annotated[
        int,
        Meta(
            ge=0,
            description="Requests of this decoder that one prefiller may have at a time. When all have so many, a "
            "request waits here without pages (`busy_wait_s`) or is prefilled locally. 0: no limit; vLLM queues them.",
        ),
    ] = 0
    short_prompt_tokens: Annotated[
        int,
        Meta(
            ge=0, description="Tokens. Without room a prompt with at most this many left is prefilled locally at once."
        ),
    ] = 512
    settle_s: Annotated[
        Seconds, Meta(description="Seconds the last pages may take after the prefiller has said it is finished.")
    ] = 10.0
    fence_s: Annotated[
        Seconds, Meta(description="Seconds to wait for a prefiller to confirm that it stopped writing.")
    ] = 5.0
    quarantine_s: Annotated[
        Seconds,
        Meta(
            description="Seconds the pages of a dead prefiller or of a failed write stay unused: the latest that what "
            "was on the wire lands. 40 is above the retries of an RC queue pair."
        ),
    ] = 40.0
    unreachable_s: Annotated[
        Seconds,
        Meta(
            description="Seconds, after the lease, that the pages of a prefiller stay unused that neither answers nor "
            "is known to be dead; it is asked again meanwhile. 1000 is above TCP's retransmission. A process that "
            "stands still for longer and then goes on may write into pages that have new owners."
        ),
    ] = 1000.0
    connect_timeout_s: Annotated[Seconds, Meta(description="Seconds to open a connection to a prefiller.")] = 2.0
    retry_s: Annotated[
        Seconds, Meta(description="Seconds between attempts to greet a prefiller that did not answer.")
    ] = 2.0
    busy_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86_400,
            description="Seconds a request may wait for pages (`max_held_share`) or for room at a prefiller "
            "(`max_outstanding_per_prefiller`), and for prefillers that answer 429 or 503, whose Retry-After is kept; "
            "then it is prefilled locally.",
        ),
    ] = 2.0
    advertise_host: Annotated[
        str,
        Meta(
            min_length=1,
            description="Address on which this server's workers listen for control messages and that peers are told.",
        ),
    ] = "127.0.0.1"
    control_port: Annotated[
        Port,
        Meta(
            description="First control port; worker r of data-parallel rank d uses port + d*workers + r. 0: any free."
        ),
    ] = 0
    control_key_file: Annotated[
        str | None,
        Meta(
            description="File with the pool's CURVE key (`vllm-pd keygen`); the control channel then refuses strangers."
        ),
    ] = None
    prefiller_api_key_file: Annotated[
        str | None, Meta(description="File with the API key that is sent to the prefillers as a bearer token.")
    ] = None
    prefiller_ca_file: Annotated[
        str | None, Meta(description="PEM file of the authority that signed the prefillers' TLS certificates.")
    ] = None
    poll_pause_s: Annotated[
        float,
        Meta(gt=0, le=0.1, description="Seconds between polls while a transfer is in flight. Nothing polls when idle."),
    ] = 0.0005
    min_write_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Bytes of ready layers that are worth a write before the step ends. 0: chosen for each step "
            "from what writes and layers have taken so far.",
        ),
    ] = 0
    native_posting: Annotated[
        bool,
        Meta(
            description="Have a native thread post the writes, through NIXL's C ABI, without waiting for Python. Needs "
            "the compiled extension; where a trial write fails at start, and with `verify_pages`, Python posts."
        ),
    ] = False
    full_cuda_graphs: Annotated[
        bool,
        Meta(
            description="Let vLLM replay whole steps as CUDA graphs, in which no layer hook runs; off: attention runs "
            "between graph pieces. On a GPU turn it on for a kv_consumer, which has no layers to announce. A "
            "kv_producer or kv_both then announces them from inside the graphs, and needs nvcc at installation or the "
            "cupy extra for that; without, the pages of a replayed step leave at its end."
        ),
    ] = False
    max_parked: Annotated[
        int, Meta(ge=1, description="Transfers whose pages may arrive before this worker has been told of them.")
    ] = 4096
    nixl_backend: Annotated[str, Meta(min_length=1, description="NIXL backend that carries the pages.")] = "UCX"
    verify_pages: Annotated[
        bool,
        Meta(
            description="Compare a digest of each page after it arrived; a wrong page fails its transfer. To be set on "
            "both sides: a prefiller sends digests, a decoder compares those it gets. Costs CPU; host memory only."
        ),
    ] = False
    timeline_dir: Annotated[
        str | None, Meta(description="Directory for one JSON-lines file per process with each request's timeline.")
    ] = None
    faults: Annotated[list[Fault], Meta(description="Scripted transport faults. For tests only.")] = []


def parse(extra_config: dict[str, Any]) -> PDConfig:
    """The validated configuration.

    Args:
        extra_config: vLLM's `kv_connector_extra_config` as given by the operator.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong type or range; the text names the path, the value and
            what is allowed.
    """
    known = {field.name for field in msgspec.structs.fields(PDConfig)}
    for key in extra_config:
        if key not in known:
            raise ConfigError(f"{ROOT}.{key} is not a key of this connector. Known keys: {', '.join(sorted(known))}.")
    for key, value in extra_config.items():
        try:
            msgspec.convert({key: value}, PDConfig)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:
            raise ConfigError(
                f"{ROOT}.{key} = {_short.repr(value)} is refused: {_without_path(str(error))}. {_allowed(key)}"
            ) from None
    config = msgspec.convert(extra_config, PDConfig)
    for index, url in enumerate(config.prefillers):
        if not _is_base_url(url):
            raise ConfigError(
                f"{ROOT}.prefillers[{index}] = {url!r} is refused: it must be a base URL such as http://10.0.0.7:8100"
            )
    return msgspec.structs.replace(config, prefillers=[url.rstrip("/") for url in config.prefillers])


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_port_or_none = parts.port is None or parts.port > 0
    except ValueError:  # brackets or a port that cannot be
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and has_port_or_none
        and not parts.query + parts.fragment
    )


def explain() -> str:
    """Every key with its default, range and meaning, one paragraph each."""
    return "\n".join(_allowed(field.name) for field in msgspec.structs.fields(PDConfig))


def _allowed(key: str) -> str:
    field = next(f for f in msgspec.structs.fields(PDConfig) if f.name == key)
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    hint = get_type_hints(PDConfig, include_extras=True)[key]
    bounds: list[str] = []
    description = ""
    while get_origin(hint) is Annotated:
        hint, *metas = get_args(hint)
        for meta in metas:
            description = description or (meta.description or "")
            bounds += [f"{op} {limit}" for op, limit in _limits(meta)]
    kind = " or ".join(repr(c) for c in get_args(hint)) if get_origin(hint) is Literal else _name(hint)
    return f"{key}: {kind}{' ' + ', '.join(bounds) if bounds else ''}; default {default!r}. {description}"


def _limits(meta: Meta) -> list[tuple[str, float | int]]:
    pairs = ((">", meta.gt), (">=", meta.ge), ("<", meta.lt), ("<=", meta.le), ("length >=", meta.min_length))
    return [(op, limit) for op, limit in pairs if limit is not None]


def _name(hint: Any) -> str:
    return (
        hint.__name__
        if isinstance(hint, type) and not get_args(hint)
        else str(hint).replace("vllm_pd_connector.config.", "")
    )


def _without_path(text: str) -> str:
    return text.split(" - at `")[0]
