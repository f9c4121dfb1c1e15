"""vLLM's `kv_transfer_params` dictionary to and from our messages. Pure.

A client may set only `prefiller`. `pd_reservation`, `pd_hello` and `pd_reply` are engine to engine. Keys of other
connectors are ignored, so that a client written for them still gets an ordinary answer.
"""

from typing import Any

import msgspec

from vllm_pd_connector.errors import OtherProtocol, ProtocolError
from vllm_pd_connector.wire.messages import DispatchReply, Hello, Reservation
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

RESERVATION = "pd_reservation"
HELLO = "pd_hello"
REPLY = "pd_reply"
PREFILLER = "prefiller"

MAX_DEPTH = 16
"""Nesting allowed in the whole dictionary: ours needs 6, and 400 levels kill a stock vLLM 0.32 engine."""


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a request carries. At most one of the three is set."""

    prefiller: str | None = None
    reservation: Reservation | None = None
    hello: Hello | None = None


NOTHING = TransferParams()


def parse_params(params: Any) -> TransferParams:
    """What `kv_transfer_params` asks for. It may be any JSON value: vLLM passes `vllm_xargs` on unchecked.

    Raises:
        ProtocolError: names the key and what is wrong with it.
    """
    if params is None or params == {}:
        return NOTHING
    if not isinstance(params, dict):
        raise ProtocolError(f"kv_transfer_params is a {type(params).__name__}: it must be an object")
    check_depth(params)
    if RESERVATION in params:
        return TransferParams(reservation=_convert(params, RESERVATION, Reservation))
    if HELLO in params:
        return TransferParams(hello=_convert(params, HELLO, Hello))
    url = params.get(PREFILLER)
    if url is None:
        return NOTHING
    if not isinstance(url, str):
        raise ProtocolError(
            f"kv_transfer_params.{PREFILLER} = {url!r}: it must be the base URL of a prefiller in the pool"
        )
    return TransferParams(prefiller=url.rstrip("/"))


def parse_reply(params: Any) -> DispatchReply:
    """The prefiller's part of a completion response.

    Raises:
        ProtocolError: the server answered without one, as an ordinary vLLM does, or with a malformed one.
    """
    if not isinstance(params, dict) or REPLY not in params:
        raise ProtocolError(
            "the answer carries no kv_transfer_params.pd_reply: is that server running PDConnector "
            "with kv_role kv_producer or kv_both?"
        )
    check_depth(params)
    reply: DispatchReply = _typed(params, REPLY, DispatchReply)
    return reply


def to_params(key: str, message: Reservation | Hello | DispatchReply) -> dict[str, Any]:
    """The dictionary that carries a message."""
    return {key: msgspec.to_builtins(message)}


def check_depth(value: Any) -> None:
    """Refuse nesting that recursive code further on could not survive.

    Raises:
        ProtocolError: deeper than `MAX_DEPTH`.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for node in level for child in _children(node)]
        if not level:
            return
    raise ProtocolError(f"kv_transfer_params is nested more than {MAX_DEPTH} levels deep")


def _children(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return [v for v in node.values() if isinstance(v, dict | list)]
    if isinstance(node, list):
        return [v for v in node if isinstance(v, dict | list)]
    return []


def _convert(params: dict[str, Any], key: str, kind: type[Any]) -> Any:
    message = params[key]
    version = message.get("protocol") if isinstance(message, dict) else None
    if version != PROTOCOL_VERSION:
        raise OtherProtocol(
            f"kv_transfer_params.{key} speaks protocol {version!r}; this server speaks {PROTOCOL_VERSION}"
        )
    return _typed(params, key, kind)


def _typed(params: dict[str, Any], key: str, kind: type[Any]) -> Any:
    try:
        return msgspec.convert(params[key], kind)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter: half a surrogate pair for a Literal
        raise ProtocolError(f"kv_transfer_params.{key}: {error}") from None
