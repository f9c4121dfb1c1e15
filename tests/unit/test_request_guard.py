"""The guard in front of a vLLM server: what it refuses, and that it changes nothing else."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import pytest

from vllm_pd_connector.control import request_guard
from vllm_pd_connector.control.request_guard import MAX_BODY_DEPTH, Message, RequestGuard, check_body
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.wire.transfer_params import MAX_DEPTH

GOOD = [
    {},
    {"prompt": "x", "kv_transfer_params": None},
    {"kv_transfer_params": {}},
    {"kv_transfer_params": {"prefiller": "http://127.0.0.1:8100"}},
    {"kv_transfer_params": {"do_remote_decode": True, "remote_block_ids": [[1, 2]]}},
    {"messages": [{"role": "user", "content": '{"kv_transfer_params": 7}' + "[" * 5000}]},
    {"prompt": list(range(10_000))},
]
BAD = [
    ({"kv_transfer_params": "x"}, "must be an object"),
    ({"kv_transfer_params": [1]}, "must be an object"),
    ({"vllm_xargs": {"kv_transfer_params": "x"}}, "must be an object"),
    ({"sampling_params": {"extra_args": {"kv_transfer_params": {"prefiller": 7}}}}, "prefiller"),
    ([{"kv_transfer_params": False}], "must be an object"),
    ({"kv_transfer_params": {"prefiller": ["http://x"]}}, "prefiller"),
    ({"kv_transfer_params": {"pd_reservation": {"protocol": -1}}}, "pd_reservation"),
    ({"kv_transfer_params": {"pd_hello": 3}}, "pd_hello"),
]


def nested(depth: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * depth + "1" + closing * depth


class Behind:
    """An app that records what reached it and streams two chunks back."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.after: Message = {}

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        body, more = b"", scope["type"] == "http"
        while more:
            message = await receive()
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        self.after = await receive()
        await send({"type": "http.response.body", "body": b"two", "more_body": False})


async def call(
    chunks: Iterable[bytes], *, method: str = "POST", headers: Iterable[tuple[bytes, bytes]] = (), app: Any = None
) -> tuple[list[Message], Behind]:
    """Send a body through the guard; what it sent back, and the app."""
    behind = app or Behind()
    messages: list[Message] = [{"type": "http.request", "body": c, "more_body": True} for c in chunks]
    messages[-1]["more_body"] = False
    messages.append({"type": "http.disconnect"})
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/v1/completions", "headers": list(headers)}
    await RequestGuard(behind)(scope, receive, send)
    return sent, behind


@pytest.mark.parametrize("body", GOOD)
async def test_good_bodies_pass_unchanged(body: Any) -> None:
    raw = json.dumps(body).encode()
    sent, behind = await call([raw[:5], b"", raw[5:]])
    assert behind.bodies == [raw]
    assert [m.get("body") for m in sent] == [None, b"one", b"two"]


async def test_a_disconnect_still_reaches_the_app() -> None:
    _, behind = await call([b"{}"])
    assert behind.after == {"type": "http.disconnect"}


@pytest.mark.parametrize(("body", "says"), BAD)
async def test_bad_params_get_a_400_that_names_the_key(body: Any, says: str) -> None:
    sent, behind = await call([json.dumps(body).encode()])
    assert behind.bodies == []
    assert sent[0]["status"] == 400
    error = json.loads(sent[1]["body"])["error"]
    assert error["code"] == 400
    assert error["param"] == "kv_transfer_params"
    assert says in error["message"]


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 99, 400, 5_000, 200_000])
@pytest.mark.parametrize("brackets", [('{"a":', "}"), ("[", "]")])
async def test_deep_params_are_refused(depth: int, brackets: tuple[str, str]) -> None:
    sent, behind = await call([b'{"kv_transfer_params": {"x": ' + nested(depth, *brackets).encode() + b"}}"])
    assert sent[0]["status"] == 400
    assert behind.bodies == []


@pytest.mark.parametrize(
    "template",
    ['{{"tools": {deep}}}', '{{"prompt": "\\"[", "x": {deep}}}', '[{{"a": {deep}}}]', "{deep}", '{{"open": {deep}'],
)
def test_depth_is_limited_anywhere_in_the_body(template: str) -> None:
    check_body(template.format(deep=nested(MAX_BODY_DEPTH - 3)).encode())
    with pytest.raises(ProtocolError, match="levels deep"):
        check_body(template.format(deep=nested(100_000)).encode())


def test_params_at_the_limit_pass() -> None:
    check_body(f'{{"kv_transfer_params": {nested(MAX_DEPTH)}}}'.encode())
    with pytest.raises(ProtocolError, match=f"more than {MAX_DEPTH} levels"):
        check_body(f'{{"kv_transfer_params": {nested(MAX_DEPTH + 1)}}}'.encode())


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
def test_other_encodings_do_not_hide_anything(encoding: str) -> None:
    with pytest.raises(ProtocolError, match="must be an object"):
        check_body('{"kv_transfer_params": 1}'.encode(encoding))


def test_an_escaped_key_does_not_hide_anything() -> None:
    with pytest.raises(ProtocolError, match="must be an object"):
        check_body(rb'{"\u006bv_transfer_params": 1}')


@pytest.mark.parametrize("body", [b"", b"kv_transfer_params", b"{", b"\xff\xfe\xff", b'{"kv_transfer_params": nope}'])
async def test_what_is_not_json_is_left_to_the_server(body: bytes) -> None:
    _, behind = await call([body])
    assert behind.bodies == [body]


async def test_a_body_over_the_cap_is_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "MAX_BODY_BYTES", 10)
    for chunks, headers in (([b"x" * 11], []), ([b"x" * 6, b"x" * 6], []), ([b""], [(b"Content-Length", b"11")])):
        sent, behind = await call(chunks, headers=headers)
        assert sent[0]["status"] == 400
        assert b"larger than the 10 bytes" in sent[1]["body"]
        assert behind.bodies == []
    _, behind = await call([b"x" * 10])
    assert behind.bodies == [b"x" * 10]


@pytest.mark.parametrize(
    ("method", "headers"), [("GET", []), ("POST", [(b"content-type", b"multipart/form-data; boundary=x")])]
)
async def test_other_requests_are_not_read(method: str, headers: list[tuple[bytes, bytes]]) -> None:
    _, behind = await call([b'{"kv_transfer_params": 1}'], method=method, headers=headers)
    assert behind.bodies == [b'{"kv_transfer_params": 1}']


async def test_a_client_that_leaves_while_sending_starts_nothing() -> None:
    behind = Behind()
    messages = [{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        raise AssertionError(message)

    await RequestGuard(behind)({"type": "http", "method": "POST", "headers": []}, receive, send)
    assert behind.bodies == []


async def test_websockets_and_lifespan_pass() -> None:
    seen: list[str] = []

    async def app(scope: Message, _receive: Any, _send: Any) -> None:
        seen.append(scope["type"])

    for kind in ("lifespan", "websocket"):
        await RequestGuard(app)({"type": kind}, asyncio.Event().wait, asyncio.sleep)  # type: ignore[arg-type]
    assert seen == ["lifespan", "websocket"]


def test_a_long_string_costs_little() -> None:
    check_body(json.dumps({"kv_transfer_params": {}, "image": 'A\\"[' * 1_000_000, "x": [[]] * 200}).encode())
