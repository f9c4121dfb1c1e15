"""Stops requests that would harm the engine before they reach it.

    vllm serve ... --middleware vllm_pd_connector.control.request_guard.RequestGuard

`kv_transfer_params` is client-supplied JSON that vLLM hands to its engine as it is: nested about 400 objects deep it
kills a stock vLLM 0.32 (RecursionError while the scheduler's output is pickled), before any connector sees it.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.wire.transfer_params import check_depth, parse_params

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

KEY = "kv_transfer_params"
MAX_BODY_BYTES = 64 << 20
"""Several images in base64 fit; the largest reservation (a million blocks) has 8 MiB."""
MAX_BODY_DEPTH = 100
"""Levels in the whole body: deep tool schemas have some 20, and json.loads gives up at about 1,000."""

# Strings first, so that brackets within them do not count. Possessive: a long string costs no backtracking memory.
_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{]|[\]}]', re.DOTALL)


class RequestGuard:
    """ASGI middleware: refuses harmful bodies with status 400 and passes all else through as it came.

    Args:
        app: the server behind.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or _is_form(scope):
            await self._app(scope, receive, send)
            return
        try:
            body = await _read(scope, receive)
            if body is None:
                return  # the client left; nothing was started
            check_body(body)
        except ProtocolError as error:
            await _refuse(send, str(error))
            return
        await self._app(scope, _replay(body, receive), send)


def check_body(body: bytes) -> None:
    """Refuse a request body that could harm an engine. What is not JSON is left for the server to refuse.

    Raises:
        ProtocolError: names the key and what is allowed.

    Cost: linear; parses only bodies that may hold `kv_transfer_params`.
    """
    if len(body) > MAX_BODY_BYTES:
        raise _too_large()
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass")  # as json.loads does
    except UnicodeDecodeError:
        return
    if _is_deeper(text, MAX_BODY_DEPTH):
        raise ProtocolError(f"the request body is nested more than {MAX_BODY_DEPTH} levels deep")
    if KEY not in text and "\\u" not in text:  # a key may be written with escapes
        return
    try:
        parsed = json.loads(text)
    except RecursionError:
        raise ProtocolError("the request body is nested too deep to be parsed") from None
    except ValueError:
        return
    for params in _all_params(parsed):
        _check_params(params)


def error_body(message: str) -> bytes:
    """The JSON of an OpenAI-style error with status 400."""
    error = {"message": message, "type": "BadRequestError", "param": KEY if KEY in message else None, "code": 400}
    return json.dumps({"error": error}).encode()


def _check_params(params: Any) -> None:
    if params is None:
        return
    if not isinstance(params, dict):
        raise ProtocolError(f"{KEY} must be an object (or null or absent), not {type(params).__name__}")
    check_depth(params)
    parse_params(params)


def _all_params(parsed: Any) -> Iterator[Any]:
    """Every value of that key, wherever vLLM may take it from (`vllm_xargs`, `sampling_params.extra_args`, batches)."""
    level = [parsed]
    while level:
        dicts = [node for node in level if isinstance(node, dict)]
        yield from (node[KEY] for node in dicts if KEY in node)
        children = [child for node in dicts for name, child in node.items() if name != KEY]
        children += [child for node in level if isinstance(node, list) for child in node]
        level = [child for child in children if isinstance(child, dict | list)]


def _is_deeper(text: str, limit: int) -> bool:
    """Whether JSON text opens more than `limit` brackets within each other. No recursion."""
    if text.count("{") + text.count("[") <= limit:
        return False
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in "[{":
            depth += 1
            if depth > limit:
                return True
        elif token in "]}":
            depth -= 1
    return False


def _is_form(scope: Message) -> bool:
    """File uploads are never parsed as JSON, and may be large."""
    return _header(scope, b"content-type").lower().startswith(b"multipart/")


def _header(scope: Message, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key.lower() == name), b"")


async def _read(scope: Message, receive: Receive) -> bytes | None:
    """The whole body; None when the client left before its end.

    Raises:
        ProtocolError: it is larger than the cap; it is not read to its end then.
    """
    announced = _header(scope, b"content-length")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, in one message; then the server's own messages, so that a disconnect is still seen."""
    is_replayed = False

    async def replay() -> Message:
        nonlocal is_replayed
        if is_replayed:
            return await receive()
        is_replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _refuse(send: Send, message: str) -> None:
    body = error_body(message)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _too_large() -> ProtocolError:
    return ProtocolError(f"the request body is larger than the {MAX_BODY_BYTES} bytes allowed")
