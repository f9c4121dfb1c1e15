"""What is fuzzed. Each target does one thing with damaged input and may end only as its documentation says (law 12)."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq
from scheduler_rig import BLOCK, SHAPE, Rig, handshake, make_rig
from vllm.exceptions import VLLMValidationError
from vllm.v1.request import Request
from worker_rig import Cluster

from fuzz.mutate import damage, distort
from vllm_pd_connector.config import PDConfig, parse
from vllm_pd_connector.control.fence_server import FenceServer
from vllm_pd_connector.control.keys import load_key
from vllm_pd_connector.control.prefiller_client import _seconds, _was_aborted
from vllm_pd_connector.control.request_guard import RequestGuard, check_body
from vllm_pd_connector.engine.step import BeginTransfer
from vllm_pd_connector.errors import ConfigError, ProtocolError
from vllm_pd_connector.wire.codec import decode_control, decode_note, encode
from vllm_pd_connector.wire.messages import (
    DecoderRank,
    DispatchReply,
    FailureNote,
    Fence,
    Hello,
    Inquiry,
    Quiet,
    Refused,
    Reservation,
    Standing,
    WriteNote,
)
from vllm_pd_connector.wire.transfer_params import HELLO, REPLY, RESERVATION, parse_params, parse_reply, to_params
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

Target = Callable[[random.Random], None]

T, G = "a" * 32, "b" * 16
NOTES = [
    encode(WriteNote(transfer_id=T, sender=0, seq=0, units=6, pages=6)),
    encode(
        WriteNote(
            transfer_id=T,
            sender=0,
            seq=1,
            units=2,
            pages=2,
            digests=b"12345678" * 2,
            layers=[0, 1],
            blocks=[5, 6],
            spots=[0, 0],
            pieces=[[(0, 16), (16, 16)]],
        )
    ),
    encode(FailureNote(transfer_id=T, sender=0, reason="why")),
]
CONTROLS = [
    encode(message)
    for message in (
        Fence(T, G),
        Quiet(T, 5),
        Quiet(T, 5, is_clean=False),
        Refused("no", T),
        Inquiry(T, G),
        Standing(T, True),
    )
]
KEY_PAIR = zmq.curve_keypair()
KEYS = ("prefiller", RESERVATION, HELLO, REPLY)
NUM_TOKENS = 3 * BLOCK + 5
RENEW_AFTER = 500
"""Cases after which an engine or cluster is replaced, so that a failure can be had again from the last few."""


def reservation(generation: str) -> dict[str, Any]:
    """A good one, as JSON."""
    message = Reservation(
        protocol=PROTOCOL_VERSION,
        transfer_id=T,
        decoder="d",
        decoder_generation=G,
        prefiller_generation=generation,
        local_tokens=0,
        blocks=[[5, 6, 7, 8]],
        lease_s=60.0,
        geometry=SHAPE.geometry(),
        ranks=[DecoderRank(descriptor="cmFuayAw", pages=handshake().pages)],
    )
    return to_params(RESERVATION, message)


HELLO_PARAMS = to_params(HELLO, Hello(protocol=PROTOCOL_VERSION, decoder="d"))
REPLY_PARAMS = to_params(REPLY, DispatchReply(pages=3, error="x"))


def notes(chance: random.Random) -> None:
    with suppress(ProtocolError):
        decode_note(damage(chance, chance.choice(NOTES), NOTES))


def controls(chance: random.Random) -> None:
    with suppress(ProtocolError):
        decode_control(damage(chance, chance.choice(CONTROLS), CONTROLS))


def parameters(chance: random.Random) -> None:
    value = distort(chance, chance.choice((reservation(G), HELLO_PARAMS, {"prefiller": "http://h:1"})), KEYS)
    with suppress(ProtocolError):
        parse_params(value)


def replies(chance: random.Random) -> None:
    answer = {"choices": [{"finish_reason": "abort"}], "kv_transfer_params": REPLY_PARAMS}
    answer = distort(chance, answer, KEYS)
    if isinstance(answer, dict):
        _was_aborted(answer)
        with suppress(ProtocolError):
            parse_reply(answer.get("kv_transfer_params"))
    _seconds(chance.choice((None, "", "1", "-1", "1.5", "٣", "9" * 400, "Wed, 21 Oct 2015 07:28:00 GMT", "²")))


def configuration(chance: random.Random) -> None:
    good = {"prefillers": ["http://h:1"], "min_remote_tokens": 5, "faults": [{"action": "drop"}], "settle_s": 1.0}
    keys = [field.name for field in msgspec.structs.fields(PDConfig)]
    value = distort(chance, good, keys)
    if isinstance(value, dict):
        with suppress(ConfigError):
            parse({str(key): item for key, item in value.items()})


def key_files(chance: random.Random) -> None:
    good = b"\n".join(KEY_PAIR) + b"\n"
    with tempfile.NamedTemporaryFile() as file, suppress(ConfigError):
        file.write(damage(chance, good, [good]))
        file.flush()
        load_key(file.name)


def bodies(chance: random.Random) -> None:
    params = distort(chance, chance.choice((reservation(G), {"prefiller": "x"})), KEYS)
    text = _json({"prompt": "x", "vllm_xargs": {"kv_transfer_params": params}, "kv_transfer_params": params})
    body = damage(chance, text, [text, b'{"kv_transfer_params":', b"[" * 200])
    with suppress(ProtocolError):
        check_body(body)


def middleware(chance: random.Random) -> None:
    """Any chunks and headers: the guard answers once or passes the whole body on."""
    text = _json({"kv_transfer_params": distort(chance, HELLO_PARAMS, KEYS)})
    body = damage(chance, text, [text])
    cut = chance.randrange(len(body) + 1)
    messages = [
        {"type": "http.request", "body": body[:cut], "more_body": True},
        {"type": "http.request", "body": body[cut:], "more_body": False},
    ]
    if chance.random() < 0.1:
        messages = [*messages[:1], {"type": "http.disconnect"}]
    passed: list[bytes] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append((await receive())["body"])

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    length = chance.choice((str(len(body)).encode(), b"", b"-1", b"x", b"9" * 30, b"\xff"))
    kind = chance.choice((b"application/json", b"", b"text/plain", b"\xff\xfe"))
    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", length), (b"content-type", kind)]}
    _finish(RequestGuard(app)(scope, receive, send))
    left = not passed and not sent
    assert left or passed == [body] or (not passed and sent[0]["status"] == 400)


def fence_frames(stack: ExitStack) -> Target:
    """A rank's control port: any frames get at most one answer each and never an exception."""
    server = FenceServer(
        "127.0.0.1",
        0,
        generation=G,
        key=None,
        on_fence=lambda transfer_id, answer: answer(Quiet(transfer_id, 0)),
        on_inquiry=lambda transfer_id, answer: answer(Standing(transfer_id, is_over=True)),
    )
    stack.callback(server._context.destroy, linger=0)

    def run(chance: random.Random) -> None:
        frames = [damage(chance, chance.choice(CONTROLS), CONTROLS) for _ in range(chance.choice((1, 1, 1, 0, 2, 3)))]
        server._receive([b"nobody", *frames])
        while server._answers.poll(0):
            server._answers.recv_multipart()

    return run


def receiver() -> Target:
    """A decoder rank: any notes; what it reports was told to it, and once."""

    def setting() -> tuple[Cluster, set[str]]:
        cluster = Cluster(verify=True)
        cluster.expect(T, 2)
        return cluster, set()

    cases = _renewed(setting)

    def run(chance: random.Random) -> None:
        cluster, reported = next(cases)
        peer = cluster.p.transport.connect(b"d0", cluster.d.kv.table)
        for _ in range(chance.randint(1, 3)):
            cluster.p.transport.notify(peer, damage(chance, chance.choice(NOTES), NOTES))
        cluster.d.receiver.advance()
        for request_id in cluster.d.receiver.finished:
            assert request_id == "req-a"
            assert request_id not in reported, "reported twice"
            reported.add(request_id)
        cluster.d.receiver.finished.clear()

    return run


def writer() -> Target:
    """A prefiller rank: any reservation that decodes; it posts nothing outside, and falls silent."""
    cases = _renewed(lambda: Cluster())

    def run(chance: random.Random) -> None:
        cluster = next(cases)
        good = reservation(G)[RESERVATION]
        good["geometry"] = msgspec.to_builtins(cluster.dst)
        good["ranks"] = [{"descriptor": "ZDA=", "pages": msgspec.to_builtins(cluster.d.kv.table)}]
        try:
            message = msgspec.convert(distort(chance, good), Reservation)
        except (msgspec.ValidationError, RecursionError, UnicodeEncodeError):
            return
        cluster.p.writer.begin(BeginTransfer(reservation=message, lease_s=message.lease_s))
        blocks = [block for group in message.blocks for block in group][:2]
        cluster.start_step((message.transfer_id, [1, 2][: len(blocks)], blocks))[0].finish()
        cluster.close(message.transfer_id)
        for _ in range(4):
            cluster.p.writer.advance()
        assert cluster.p.writer.sent, "a transfer never ended"
        cluster.p.writer.sent.clear()

    return run


def prefiller_engine() -> Target:
    """A prefiller's scheduler: any parameters with any prompt; the engine goes on and keeps nothing."""
    folder = Path(tempfile.mkdtemp(prefix="pd-fuzz-"))

    def setting() -> tuple[Rig, int, str]:
        rig = make_rig(folder, role="kv_producer")
        assert rig.half._prefill is not None
        return rig, rig.free_blocks, rig.half._prefill._hello.generation

    cases = _renewed(setting)

    def run(chance: random.Random) -> None:
        rig, before, generation = next(cases)
        good = chance.choice((reservation(generation), HELLO_PARAMS, {"prefiller": "http://h:1"}))
        params = distort(chance, good, KEYS) if chance.random() < 0.9 else good
        tokens = chance.choice((1, NUM_TOKENS, NUM_TOKENS, BLOCK))
        if _added(rig, tokens, params, chance) is None:
            return
        for _ in range(4):
            step = rig.schedule()
            rig.complete(step, sent={c.request_id for c in step.orders.closes if c.report} or None)
        assert not rig.scheduler.has_requests()
        assert rig.free_blocks == before
        rig.outputs.clear()

    return run


def decoder_engine() -> Target:
    """A decoder's scheduler: a client's parameters of any kind; held, refused or run, and nothing kept."""
    folder = Path(tempfile.mkdtemp(prefix="pd-fuzz-"))

    def setting() -> tuple[Rig, int]:
        rig = make_rig(folder)
        return rig, rig.free_blocks

    cases = _renewed(setting)

    def run(chance: random.Random) -> None:
        rig, before = next(cases)
        params = distort(chance, {"prefiller": "http://prefiller:8100"}, KEYS)
        request = _added(rig, chance.choice((1, NUM_TOKENS)), params, chance)
        if request is None:
            return
        rig.obey(rig.schedule())
        if not request.is_finished():
            rig.abort(request)
        rig.obey(rig.schedule())
        for transfer_id in rig.dispatcher.fenced:
            rig.dispatcher.answer_fence(transfer_id, is_quiet=True)
        rig.dispatcher.fenced.clear()
        rig.run_until_done()
        assert rig.free_blocks == before
        rig.outputs.clear()

    return run


def targets(stack: ExitStack) -> dict[str, Target]:
    """All of them, by name, ready to run; `stack` closes what they opened."""
    plain = (notes, controls, parameters, replies, configuration, key_files, bodies, middleware)
    made = (receiver, writer, prefiller_engine, decoder_engine)
    ready = {target.__name__: target for target in plain} | {make.__name__: make() for make in made}
    return {**ready, "fence_frames": fence_frames(stack)}


def _renewed(make: Callable[[], Any]) -> Iterator[Any]:
    """The same object for `RENEW_AFTER` cases, then a fresh one."""
    while True:
        made = make()
        for _ in range(RENEW_AFTER):
            yield made


def _added(rig: Rig, num_tokens: int, params: Any, chance: random.Random) -> Request | None:
    """A request with these parameters; None if vLLM itself refuses them before its engine sees them."""
    try:
        return rig.add(num_tokens, params=params, seed=chance.randrange(3), max_tokens=1)
    except (VLLMValidationError, RecursionError, UnicodeEncodeError):
        return None


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value).encode("utf-8", "surrogatepass")
    except RecursionError:
        return b'{"kv_transfer_params":' + b"[" * 3000


def _finish(coroutine: Any) -> None:
    """Run a coroutine that never has to wait."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")
