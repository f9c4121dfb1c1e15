"""Fences over real sockets on this host: answers, refusals, garbage, and strangers who never reach the handler."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from vllm_pd_connector.control.fence_client import MAX_AT_ONCE, FenceClient, FenceOutcome, IsServing, TransferOutlook
from vllm_pd_connector.control.fence_server import Answer, FenceServer
from vllm_pd_connector.control.keys import ControlKey, load_key, write_key
from vllm_pd_connector.errors import ConfigError
from vllm_pd_connector.wire.codec import MAX_CONTROL_BYTES, decode_control, encode
from vllm_pd_connector.wire.messages import ControlEndpoint, Fence, Inquiry, Quiet, Refused, Standing

GENERATION, OTHER = "a" * 16, "b" * 16
TRANSFER = "c" * 32
URL = "http://127.0.0.1:8000"
Open = Callable[..., FenceServer]
T = TypeVar("T")


class Handler:
    """Keeps what reached it; answers at once unless it is silent.

    Attributes:
        quiet: what it says to a fence.
        standing: what it says of an inquiry.
    """

    def __init__(self) -> None:
        self.fenced: list[str] = []
        self.is_silent = False
        self.quiet = Quiet(TRANSFER, 17)
        self.standing = Standing(transfer_id=TRANSFER, is_over=True)

    def inquire(self, transfer_id: str, answer: Callable[[Standing], None]) -> None:
        if not self.is_silent:
            answer(self.standing)

    def __call__(self, transfer_id: str, answer: Answer) -> None:
        self.fenced.append(transfer_id)
        if not self.is_silent:
            answer(self.quiet)


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture
def serve(handler: Handler) -> Iterator[Open]:
    servers: list[FenceServer] = []

    def open_server(key: ControlKey | None = None, generation: str = GENERATION) -> FenceServer:
        server = FenceServer(
            "127.0.0.1", 0, generation=generation, key=key, on_fence=handler, on_inquiry=handler.inquire
        )
        servers.append(server)
        server.start()
        return server

    yield open_server
    for server in servers:
        server.close()


def make_key(path: Path) -> ControlKey:
    write_key(str(path))
    key = load_key(str(path))
    assert key is not None
    return key


def started(host: str, handler: Handler) -> FenceServer:
    """One that the test closes itself."""
    server = FenceServer(host, 0, generation=GENERATION, key=None, on_fence=handler, on_inquiry=handler.inquire)
    server.start()
    return server


async def nobody(_url: str, _host: str) -> bool:
    return False


async def somebody(_url: str, _host: str) -> bool:
    return True


def ask(
    *endpoints: str,
    generation: str = GENERATION,
    key: ControlKey | None = None,
    timeout_s: float = 5.0,
    is_serving: IsServing = nobody,
    has_ended: bool = False,
    url: str = URL,
) -> FenceOutcome:
    controls = [ControlEndpoint(endpoint=e, generation=generation) for e in endpoints]

    async def question(client: FenceClient) -> FenceOutcome:
        if has_ended:
            await client.see_end(controls, url)
        return await client.ask(controls, TRANSFER, timeout_s, url)

    return with_client(key, question, is_serving)


def inquire(*endpoints: str, generation: str = GENERATION, timeout_s: float = 5.0) -> TransferOutlook:
    controls = [ControlEndpoint(endpoint=e, generation=generation) for e in endpoints]
    return with_client(None, lambda client: client.inquire(controls, TRANSFER, timeout_s))


def with_client(
    key: ControlKey | None, question: Callable[[FenceClient], Awaitable[T]], is_serving: IsServing = nobody
) -> T:
    """What a client that lives for one question is told."""

    async def run() -> T:
        client = FenceClient(key, is_serving)
        try:
            return await question(client)
        finally:
            client.close()

    return asyncio.run(run())


def test_a_rank_that_stopped_is_quiet(serve: Open, handler: Handler) -> None:
    assert ask(serve().endpoint) == FenceOutcome(is_quiet=True)
    assert handler.fenced == [TRANSFER]


def test_silence_after_a_failed_write_is_not_quiet_but_nothing_more_is_posted(serve: Open, handler: Handler) -> None:
    handler.quiet = Quiet(TRANSFER, 5, is_clean=False)
    outcome = ask(serve().endpoint)
    assert (outcome.is_quiet, outcome.is_dead) == (False, True)  # law 1: the decoder waits out the quarantine


def test_every_rank_has_to_be_quiet(serve: Open, handler: Handler) -> None:
    first, second = serve(), serve()
    assert ask(first.endpoint, second.endpoint).is_quiet
    assert handler.fenced == [TRANSFER] * 2
    gone = started("127.0.0.1", handler)
    gone.close()
    outcome = ask(first.endpoint, gone.endpoint, timeout_s=0.5, is_serving=somebody)
    assert (outcome.is_quiet, outcome.is_dead) == (False, True)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_refusal_counts_only_if_the_host_shows_that_it_is_the_one_that_refuses() -> None:
    """Law 1: where a link is down a router may refuse for a prefiller that lives and still writes."""
    rank = f"tcp://127.0.0.1:{closed_port()}"
    by_whom = ask(rank)
    assert (by_whom.is_quiet, by_whom.is_dead) == (False, False)
    assert "nobody listens there any more; but nothing shows" in by_whom.reason
    asked: list[tuple[str, str]] = []

    async def is_serving(url: str, host: str) -> bool:
        asked.append((url, host))
        return True

    assert ask(rank, is_serving=is_serving).is_dead
    assert asked == [(URL, "127.0.0.1")]
    assert ask(rank, has_ended=True).is_dead


def test_a_host_that_is_reached_again_must_refuse_once_more() -> None:
    """The link is mended between two looks: the first refusal was a router's."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))

        async def mended(_url: str, _host: str) -> bool:
            listener.listen()
            return True

        assert not ask(f"tcp://127.0.0.1:{listener.getsockname()[1]}", is_serving=mended).is_dead


def test_a_prefiller_that_lives_on_after_an_end_is_not_dead_when_it_is_refused_later(
    handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy has closed a connection, or vLLM was paused, which aborts what runs; then its link is cut."""
    monkeypatch.setattr("vllm_pd_connector.control.fence_client.END_S", 0.3)
    server = started("127.0.0.1", handler)
    controls = [ControlEndpoint(endpoint=server.endpoint, generation=GENERATION)]

    async def question(client: FenceClient) -> FenceOutcome:
        await client.see_end(controls, URL)
        server.close()
        return await client.ask(controls, TRANSFER, 1.0)

    assert not with_client(None, question).is_dead


def test_a_rank_that_stops_listening_soon_after_an_end_is_dead(handler: Handler) -> None:
    server = started("127.0.0.1", handler)
    controls = [ControlEndpoint(endpoint=server.endpoint, generation=GENERATION)]

    async def question(client: FenceClient) -> FenceOutcome:
        seen = asyncio.ensure_future(client.see_end(controls, URL))
        await asyncio.sleep(0.3)
        assert not seen.done()
        await asyncio.to_thread(server.close)
        await asyncio.wait_for(seen, 5)
        return await client.ask(controls, TRANSFER, 1.0)

    assert with_client(None, question).is_dead


def test_a_later_end_is_looked_at_as_long_as_the_first(handler: Handler, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM aborts new requests when it begins to end, and finishes the others before it has."""
    monkeypatch.setattr("vllm_pd_connector.control.fence_client.END_S", 1.0)
    server = started("127.0.0.1", handler)
    controls = [ControlEndpoint(endpoint=server.endpoint, generation=GENERATION)] * 2

    async def question(client: FenceClient) -> FenceOutcome:
        seen = asyncio.ensure_future(client.see_end(controls, URL))
        await asyncio.sleep(0.7)
        await client.see_end(controls, URL)
        await asyncio.sleep(0.7)
        await asyncio.to_thread(server.close)
        await asyncio.wait_for(seen, 5)
        return await client.ask(controls, TRANSFER, 1.0)

    assert with_client(None, question).is_dead


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_refusal_of_this_machine_says_nothing_of_a_prefiller_elsewhere(has_ended: bool) -> None:
    """Its `advertise_host` was left at 127.0.0.1: this decoder's own ports refuse, and its own API server answers."""
    rank = f"tcp://127.0.0.1:{closed_port()}"
    outcome = ask(rank, is_serving=somebody, has_ended=has_ended, url="http://192.0.2.77:8000")
    assert (outcome.is_quiet, outcome.is_dead) == (False, False)


def test_a_rank_whose_host_is_a_name_is_reached_and_seen_to_be_gone(handler: Handler) -> None:
    """Also where the name has an address of either kind."""
    server = started("localhost", handler)
    assert ask(server.endpoint).is_quiet
    server.close()
    assert ask(server.endpoint, is_serving=somebody).is_dead


def test_the_end_of_another_prefiller_proves_nothing() -> None:
    rank = ControlEndpoint(endpoint=f"tcp://127.0.0.1:{closed_port()}", generation=GENERATION)
    other = ControlEndpoint(endpoint=rank.endpoint, generation=OTHER)

    async def question(client: FenceClient) -> FenceOutcome:
        await client.see_end([other], URL)
        return await client.ask([rank], TRANSFER, 1.0)

    assert not with_client(None, question).is_dead


def test_a_rank_on_ipv6_is_reached(handler: Handler) -> None:
    server = started("::1", handler)
    try:
        assert ask(server.endpoint).is_quiet
    finally:
        server.close()


def test_more_questions_than_there_can_be_sockets_are_all_answered(serve: Open) -> None:
    """ZMQ opens 1,023 at most; a prefiller that stands still is asked about many transfers by many ranks."""
    control = ControlEndpoint(endpoint=serve().endpoint, generation=GENERATION)
    most = 0

    async def question(client: FenceClient) -> list[FenceOutcome]:
        make, opened = client._context.socket, list[Any]()

        def counted(kind: int) -> Any:
            nonlocal most
            opened[:] = [one for one in opened if not one.closed]
            opened.append(make(kind))
            most = max(most, len(opened))
            return opened[-1]

        client._context.socket = counted  # type: ignore[method-assign, assignment]
        return await asyncio.gather(*(client.ask([control], TRANSFER, 5.0) for _ in range(1500)))

    assert not [outcome.reason for outcome in with_client(None, question) if not outcome.is_quiet]
    assert most <= MAX_AT_ONCE


def test_a_rank_that_does_not_answer_is_neither_quiet_nor_dead(serve: Open, handler: Handler) -> None:
    handler.is_silent = True
    outcome = ask(serve().endpoint, timeout_s=0.2)
    assert (outcome.is_quiet, outcome.is_dead) == (False, False)
    assert "no answer" in outcome.reason


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:99999", "tcp://[::1", "tcp://", "nonsense", "tcp://a..b:1", "tcp://\ud800:1"]
)
def test_an_endpoint_that_is_no_address_is_neither_quiet_nor_dead(endpoint: str) -> None:
    """A prefiller names its endpoints itself, so they may be anything."""
    outcome = ask(endpoint, timeout_s=0.2)
    assert (outcome.is_quiet, outcome.is_dead) == (False, False)
    assert endpoint in outcome.reason


def test_another_process_at_the_address_cannot_answer(serve: Open, handler: Handler) -> None:
    outcome = ask(serve(generation=OTHER).endpoint)
    assert (outcome.is_quiet, outcome.is_dead) == (False, True)
    assert handler.fenced == []  # law 11


def test_an_answer_may_come_later_from_another_thread(serve: Open, handler: Handler) -> None:
    late: list[threading.Thread] = []

    def answer_later(transfer_id: str, answer: Answer) -> None:
        late.append(threading.Thread(target=answer, args=(Quiet(transfer_id, 3),)))
        late[-1].start()

    server = FenceServer(
        "127.0.0.1", 0, generation=GENERATION, key=None, on_fence=answer_later, on_inquiry=handler.inquire
    )
    server.start()
    try:
        assert ask(server.endpoint).is_quiet
    finally:
        late[0].join()
        server.close()


@pytest.mark.parametrize(("is_over", "error"), [(True, ""), (False, ""), (True, "decoder rank 0 cannot be reached")])
def test_a_rank_says_how_a_transfer_stands_and_does_not_stop_it(
    serve: Open, handler: Handler, is_over: bool, error: str
) -> None:
    handler.standing = Standing(transfer_id=TRANSFER, is_over=is_over, error=error)
    assert inquire(serve().endpoint) == TransferOutlook(is_over=is_over, error=error)
    assert handler.fenced == []


def test_pages_of_a_rank_that_is_gone_are_not_expected_any_more(serve: Open, handler: Handler) -> None:
    assert "gone" in inquire(serve(generation=OTHER).endpoint).error
    first = serve()
    gone = started("127.0.0.1", handler)
    gone.close()
    assert "gone" in inquire(first.endpoint, gone.endpoint).error


def test_a_rank_that_says_nothing_is_given_the_benefit_of_the_doubt(serve: Open, handler: Handler) -> None:
    handler.is_silent = True
    assert inquire(serve().endpoint, timeout_s=0.2) == TransferOutlook(is_over=False)


def exchange(endpoint: str, frames: list[bytes], *, wait_s: float) -> list[bytes] | None:
    """Send frames as a stranger would; the answer, or None without one."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    try:
        socket.connect(endpoint)
        socket.send_multipart(frames)
        return socket.recv_multipart() if socket.poll(int(wait_s * 1000)) else None
    finally:
        socket.close()
        context.term()


GARBAGE = {
    "nothing": [b""],
    "not msgpack": [b"\xc1\xff\x00"],
    "an unknown tag": [b"\x92\x63\x00"],
    "an answer, not a request": [encode(Quiet(transfer_id=TRANSFER, units=1))],
    "two frames": [encode(Fence(TRANSFER, GENERATION)), b"more"],
    "an answer to an inquiry": [encode(Standing(transfer_id=TRANSFER, is_over=True))],
    "an inquiry about nothing": [encode(Inquiry(TRANSFER, GENERATION))[:-3]],
    "a transfer id that is none": [b"\x93\x03\xa3abc\xa3abc"],
    "deep nesting": [b"\x91" * 4000],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=list(GARBAGE))
def test_garbage_costs_one_refusal_and_the_next_fence_is_served(
    serve: Open, handler: Handler, frames: list[bytes]
) -> None:
    server = serve()
    answer = exchange(server.endpoint, frames, wait_s=5)
    assert answer is not None
    assert isinstance(decode_control(answer[-1]), Refused)
    assert handler.fenced == []
    assert ask(server.endpoint).is_quiet  # law 12


def test_an_oversized_frame_is_dropped_and_the_next_fence_is_served(serve: Open, handler: Handler) -> None:
    server = serve()
    assert exchange(server.endpoint, [bytes(MAX_CONTROL_BYTES + 1)], wait_s=0.2) is None
    assert handler.fenced == []
    assert ask(server.endpoint).is_quiet


def test_a_pool_with_a_key_serves_its_own(serve: Open, handler: Handler, tmp_path: Path) -> None:
    key = make_key(tmp_path / "pool.key")
    assert ask(serve(key).endpoint, key=key).is_quiet
    assert handler.fenced == [TRANSFER]


@pytest.mark.parametrize("stranger", ["no key", "another key"])
def test_a_stranger_never_reaches_the_handler(serve: Open, handler: Handler, tmp_path: Path, stranger: str) -> None:
    key = make_key(tmp_path / "pool.key")
    wrong = None if stranger == "no key" else make_key(tmp_path / "other.key")
    server = serve(key)
    outcome = ask(server.endpoint, key=wrong, timeout_s=0.4)
    assert (outcome.is_quiet, outcome.is_dead) == (False, False)
    assert handler.fenced == []  # law 13
    assert ask(server.endpoint, key=key).is_quiet


def test_a_client_that_knows_only_the_public_key_is_refused(serve: Open, handler: Handler, tmp_path: Path) -> None:
    """It can speak CURVE to the server, but its own key is not the pool's."""
    key = make_key(tmp_path / "pool.key")
    server = serve(key)
    public, secret = zmq.curve_keypair()
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = key.public, public, secret
    socket.connect(server.endpoint)
    socket.send(encode(Fence(TRANSFER, GENERATION)))
    assert not socket.poll(400)
    socket.close()
    context.term()
    assert handler.fenced == []


def test_an_address_that_cannot_be_bound_is_a_config_error(serve: Open, handler: Handler) -> None:
    taken = int(serve().endpoint.rsplit(":", 1)[1])
    for host, port in (("127.0.0.1", taken), ("192.0.2.1", 0)):
        with pytest.raises(ConfigError, match="advertise_host"):
            FenceServer(host, port, generation=GENERATION, key=None, on_fence=handler, on_inquiry=handler.inquire)


@pytest.mark.parametrize(
    ("answer", "is_dead"),
    [
        (Refused(reason="another process answers here now", transfer_id=TRANSFER), True),
        (Refused(reason="control frame of 60 B: cannot be decoded"), False),
    ],
    ids=["another process", "not understood"],
)
def test_only_a_refusal_by_another_process_means_that_the_writer_is_gone(answer: Refused, is_dead: bool) -> None:
    """A rank that could not read the question may still be writing (law 1)."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def reply_once() -> None:
        if router.poll(5_000):
            router.send_multipart([router.recv_multipart()[0], encode(answer)])

    thread = threading.Thread(target=reply_once)
    thread.start()
    outcome = ask(f"tcp://127.0.0.1:{port}")
    thread.join()
    router.close()
    context.term()
    assert (outcome.is_quiet, outcome.is_dead) == (False, is_dead)


def test_a_recorded_session_cannot_be_played_again(serve: Open, handler: Handler, tmp_path: Path) -> None:
    """Whoever listened on the wire sends the same bytes in a connection of his own."""
    key = make_key(tmp_path / "pool.key")
    server = serve(key)
    address = ("127.0.0.1", int(server.endpoint.rsplit(":", 1)[1]))
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listens_in = threading.Thread(target=_relay, args=(listener, address, recorded))
        listens_in.start()
        assert ask(f"tcp://127.0.0.1:{listener.getsockname()[1]}", key=key).is_quiet
        listens_in.join()
    assert handler.fenced == [TRANSFER]
    play(recorded, address, handler, patience_s=2)
    assert handler.fenced == [TRANSFER]  # law 13
    assert ask(server.endpoint, key=key).is_quiet


def test_without_a_key_it_can(serve: Open, handler: Handler) -> None:
    """The control of the test above: the recording is complete, and what refuses it is CURVE."""
    server = serve()
    address = ("127.0.0.1", int(server.endpoint.rsplit(":", 1)[1]))
    recorded: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listens_in = threading.Thread(target=_relay, args=(listener, address, recorded))
        listens_in.start()
        assert ask(f"tcp://127.0.0.1:{listener.getsockname()[1]}").is_quiet
        listens_in.join()
    play(recorded, address, handler, patience_s=30)
    assert handler.fenced == [TRANSFER] * 2


def play(recorded: list[bytes], address: tuple[str, int], handler: Handler, *, patience_s: float) -> None:
    """Say the same again, with an ear to the answers, as the handshake wants it, and stay until it has had an effect.

    A connection that is closed with an answer unread takes with it what the other side has not read.
    """
    before = len(handler.fenced)
    deadline = time.monotonic() + patience_s
    with socket.create_connection(address) as replayed:
        replayed.settimeout(0.2)
        for chunk in recorded:
            with suppress(OSError):
                replayed.sendall(chunk)
                replayed.recv(4096)
        while len(handler.fenced) == before and time.monotonic() < deadline:
            try:
                if not replayed.recv(4096):
                    return  # refused
            except TimeoutError:
                continue
            except OSError:
                return


def test_a_fence_that_is_repeated_changes_nothing(serve: Open, handler: Handler) -> None:
    """On an open channel a copy of a frame is answered like the first one; a transfer that is fenced stays so."""
    server = serve()
    frame = encode(Fence(TRANSFER, GENERATION))
    answers = [exchange(server.endpoint, [frame], wait_s=5) for _ in range(3)]
    assert [decode_control(answer[-1]) for answer in answers if answer] == [handler.quiet] * 3


def _relay(listener: socket.socket, address: tuple[str, int], recorded: list[bytes]) -> None:
    """Pass connections on until the one that carried something has ended; keep what its client said."""
    listener.settimeout(5)
    while not recorded:
        client, _ = listener.accept()
        with client, socket.create_connection(address) as server:
            back = threading.Thread(target=_pump, args=(server, client, []))
            back.start()
            _pump(client, server, recorded)
            back.join()


def _pump(source: socket.socket, target: socket.socket, seen: list[bytes]) -> None:
    with suppress(OSError):
        while chunk := source.recv(4096):
            seen.append(chunk)
            target.sendall(chunk)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
