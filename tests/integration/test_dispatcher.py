"""The dispatcher against prefillers that only speak HTTP: who is tried, for how long, and what is reported."""

import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from server_tier.ask import until
from server_tier.fake_prefiller import FakePrefiller, Reply, fake_prefiller

from vllm_pd_connector.config import parse
from vllm_pd_connector.control.dispatcher import Dispatch, Dispatcher, DispatchOutcome, FenceResult
from vllm_pd_connector.control.fence_server import Answer, FenceServer
from vllm_pd_connector.control.prefiller_client import MAX_ANSWER_BYTES
from vllm_pd_connector.lifecycle.decode_request import DecodeEvent
from vllm_pd_connector.lifecycle.prefiller import PrefillerState
from vllm_pd_connector.telemetry.timeline import NoTimeline
from vllm_pd_connector.testing.machine import free_ports
from vllm_pd_connector.testing.shapes import some_shape
from vllm_pd_connector.wire.messages import (
    ControlEndpoint,
    DispatchReply,
    HelloReply,
    Quiet,
    Reservation,
    Standing,
)
from vllm_pd_connector.wire.transfer_params import RESERVATION
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

GENERATION = "a" * 16
TRANSFER = "0123456789abcdef" * 2
OTHER_TRANSFER = "fedcba9876543210" * 2
SHAPE = some_shape()
Open = Callable[..., Dispatcher]


class Rank:
    """A prefiller rank's control port. Attributes: standing: what it says of the transfer."""

    def __init__(self) -> None:
        self.standing = Standing(transfer_id=TRANSFER, is_over=False)
        self.num_inquiries = 0
        self.num_fences = 0
        self.is_silent = False
        self.server = FenceServer(
            "127.0.0.1", 0, generation=GENERATION, key=None, on_fence=self._fence, on_inquiry=self._inquire
        )
        self.server.start()
        self.is_stopped = False

    def stop(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            self.server.close()

    def _fence(self, transfer_id: str, answer: Answer) -> None:
        self.num_fences += 1
        if not self.is_silent:
            answer(Quiet(transfer_id, 0))

    def _inquire(self, _transfer_id: str, answer: Callable[[Standing], None]) -> None:
        self.num_inquiries += 1
        answer(self.standing)


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank()
    yield rank
    rank.stop()


@pytest.fixture
def hello(rank: Rank) -> HelloReply:
    return HelloReply(
        engine="p",
        generation=GENERATION,
        shape=SHAPE,
        controls=[ControlEndpoint(endpoint=rank.server.endpoint, generation=GENERATION)],
    )


@pytest.fixture
def fakes(hello: HelloReply) -> Iterator[list[FakePrefiller]]:
    with ExitStack() as stack:
        fakes = [stack.enter_context(fake_prefiller(port, "")) for port in free_ports(2)]
        for fake in fakes:
            fake.on_hello = reply(hello=hello)
            fake.on_dispatch = reply(pages=1)
        yield fakes


@pytest.fixture
def start(fakes: list[FakePrefiller]) -> Iterator[Open]:
    """A started dispatcher whose prefillers are all usable."""
    made: list[Dispatcher] = []

    def start(**extra: Any) -> Dispatcher:
        config = parse({"prefillers": [fake.url for fake in fakes], "retry_s": 0.05, **extra})
        made.append(Dispatcher(config, engine_id="d", model="m", shape=SHAPE, key=None, timeline=NoTimeline()))
        made[-1].start()
        until(lambda: all(c.state is PrefillerState.USABLE for c in made[-1].pool()), 5, "all greeted")
        return made[-1]

    yield start
    for dispatcher in made:
        dispatcher.close()


def reply(**fields: Any) -> Reply:
    return Reply.params(msgspec.to_builtins(DispatchReply(**fields)))


def send(dispatcher: Dispatcher, fakes: list[FakePrefiller], transfer_id: str = TRANSFER) -> None:
    reservation = Reservation(
        protocol=PROTOCOL_VERSION,
        transfer_id=transfer_id,
        decoder="d",
        decoder_generation="d" * 16,
        prefiller_generation="",
        local_tokens=0,
        blocks=[[1]],
        lease_s=60.0,
        geometry=SHAPE.geometry(),
        ranks=[],
    )
    urls = [fake.url for fake in fakes]
    dispatcher.dispatch(Dispatch(body={}, reservation=reservation, urls=urls, ends_at=time.monotonic() + 60))


def wait(dispatcher: Dispatcher, count: int = 1, deadline_s: float = 8.0) -> list[DispatchOutcome]:
    events: list[DispatchOutcome | FenceResult] = []

    def have_come() -> bool:
        events.extend(dispatcher.take_events())
        return len(events) >= count

    until(have_come, deadline_s, f"{count} events")
    outcomes = [event for event in events if isinstance(event, DispatchOutcome)]
    assert len(outcomes) == count
    return outcomes


def dispatches(fakes: list[FakePrefiller]) -> list[int]:
    return [fake.num_dispatches for fake in fakes]


def test_a_prefiller_that_does_not_fit_is_refused_with_every_differing_field(
    start: Open, fakes: list[FakePrefiller], rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    other = some_shape(tensor_parallel_size=4, block_size=48, dtype="float16", model_config='{"rope_theta": 5e5}')
    dispatcher = start()
    hello = HelloReply(
        engine="p",
        generation=GENERATION,
        shape=other,
        controls=[ControlEndpoint(endpoint=rank.server.endpoint, generation=GENERATION)],
    )
    fakes[0].on_hello = reply(hello=hello)
    fakes[0].on_dispatch = reply(error="restarted", hello=hello)
    send(dispatcher, fakes[:1])
    until(lambda: dispatcher.pool()[0].state is PrefillerState.REFUSED, 5, "refused")
    (complaint,) = [c.complaint for c in dispatcher.pool() if c.complaint]
    for text in ("block_size: here 32, there 48", "dtype: here x, there float16", "model_config: here x, there"):
        assert text in complaint
        assert text in caplog.text
    assert "tensor_parallel_size" not in complaint  # that may differ
    assert dispatcher.pool()[1].state is PrefillerState.USABLE


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        pytest.param(Reply(200, b"[" * 100_000), "not JSON", id="nested deeper than Python parses"),
        pytest.param(Reply(200, b" " * (MAX_ANSWER_BYTES + 1)), f"more than {MAX_ANSWER_BYTES} B", id="endless"),
    ],
)
def test_an_answer_that_cannot_be_parsed_costs_one_greeting(
    fakes: list[FakePrefiller], hello: HelloReply, answer: Reply, complaint: str
) -> None:
    """And not the task that greets: the prefiller is usable once it answers properly."""
    fakes[0].on_hello = answer
    config = parse({"prefillers": [fakes[0].url], "retry_s": 0.05})
    dispatcher = Dispatcher(config, engine_id="d", model="m", shape=SHAPE, key=None, timeline=NoTimeline())
    dispatcher.start()
    until(lambda: complaint in dispatcher.pool()[0].complaint, 5, complaint)
    fakes[0].on_hello = reply(hello=hello)
    until(lambda: dispatcher.pool()[0].state is PrefillerState.USABLE, 5, "greeted")
    dispatcher.close()


def test_the_first_prefiller_that_takes_it_answers(start: Open, fakes: list[FakePrefiller]) -> None:
    dispatcher = start()
    send(dispatcher, fakes)
    (outcome,) = wait(dispatcher)
    assert (outcome.event, outcome.url) == (DecodeEvent.ANSWERED, fakes[0].url)
    assert dispatches(fakes) == [1, 0]


@pytest.mark.parametrize("refusal", [Reply(429, b""), Reply(503, b""), reply(error="full", declined=True)])
def test_one_that_does_not_take_it_is_passed_over(start: Open, fakes: list[FakePrefiller], refusal: Reply) -> None:
    fakes[0].on_dispatch = refusal
    dispatcher = start()
    send(dispatcher, fakes)
    (outcome,) = wait(dispatcher)
    assert (outcome.event, outcome.url) == (DecodeEvent.ANSWERED, fakes[1].url)


def expiry(fake: FakePrefiller) -> float | None:
    """Seconds on the prefiller's clock when the last dispatch to it ends."""
    return fake.last_dispatch["kv_transfer_params"][RESERVATION]["expires_at"]


def test_a_prefiller_is_told_on_its_own_clock_when_its_decoder_stops_waiting(
    start: Open, fakes: list[FakePrefiller], hello: HelloReply
) -> None:
    """By its latest reading, whatever that is: it is never compared with the decoder's clock (law 10)."""
    fakes[0].on_hello = reply(hello=hello, clock=-7e5)
    fakes[0].on_dispatch = reply(pages=1, clock=3e6)
    dispatcher = start()
    for reading in (-7e5, 3e6):
        send(dispatcher, fakes)
        wait(dispatcher)
        found = expiry(fakes[0])
        assert found is not None
        assert 0 < found - reading <= 60 + 10  # the reading is older than the dispatch by what a busy machine takes
        dispatcher.finish(TRANSFER)


def test_a_prefiller_that_sends_no_readings_is_told_a_duration_only(start: Open, fakes: list[FakePrefiller]) -> None:
    dispatcher = start()
    send(dispatcher, fakes)
    wait(dispatcher)
    assert expiry(fakes[0]) is None


def test_an_old_reading_costs_another_dispatch(start: Open, fakes: list[FakePrefiller], hello: HelloReply) -> None:
    fakes[0].on_hello = reply(hello=hello, clock=0.0)
    fakes[0].first = [reply(error="too late", declined=True, expired=True, clock=5e3)]
    dispatcher = start(busy_wait_s=10)
    send(dispatcher, fakes[:1])
    (outcome,) = wait(dispatcher)
    assert outcome.event is DecodeEvent.ANSWERED
    assert dispatches(fakes) == [2, 0]
    found = expiry(fakes[0])
    assert found is not None
    assert found > 5e3


def test_readings_of_a_process_that_is_gone_are_forgotten(
    start: Open, fakes: list[FakePrefiller], hello: HelloReply
) -> None:
    fakes[0].on_hello = reply(hello=hello, clock=5e3)
    dispatcher = start()
    hellos = fakes[0].num_hellos
    fakes[0].on_hello = reply(hello=hello)
    fakes[0].first = [reply(error="restarted", hello=hello)]
    send(dispatcher, fakes)
    wait(dispatcher)
    until(lambda: fakes[0].num_hellos > hellos, 5, "greeted again")
    until(lambda: dispatcher.pool()[0].state is PrefillerState.USABLE, 5, "usable again")
    dispatcher.finish(TRANSFER)
    send(dispatcher, fakes)
    wait(dispatcher)
    assert expiry(fakes[0]) is None


def test_busy_prefillers_are_asked_again_until_one_has_room(start: Open, fakes: list[FakePrefiller]) -> None:
    for fake in fakes:
        fake.first = [Reply(503, b"")] * 2
    dispatcher = start(busy_wait_s=10)
    send(dispatcher, fakes)
    (outcome,) = wait(dispatcher)
    assert outcome.event is DecodeEvent.ANSWERED
    assert 5 <= sum(dispatches(fakes)) <= 6


def test_a_retry_after_is_kept(start: Open, fakes: list[FakePrefiller]) -> None:
    fakes[0].first = [Reply(429, b"", retry_after="1")]
    dispatcher = start(busy_wait_s=10)
    began = time.monotonic()
    send(dispatcher, fakes[:1])
    (outcome,) = wait(dispatcher)
    assert outcome.event is DecodeEvent.ANSWERED
    assert time.monotonic() - began >= 1.0
    assert dispatches(fakes) == [2, 0]


@pytest.mark.parametrize(
    ("busy_wait_s", "refusal"),
    [(0, Reply(503, b"")), (0.5, Reply(503, b"", retry_after="1")), (0.5, Reply(429, b""))],
    ids=["never wait", "longer than it may wait", "busy all the time"],
)
def test_the_wait_for_busy_prefillers_is_bounded(
    start: Open, fakes: list[FakePrefiller], busy_wait_s: float, refusal: Reply
) -> None:
    for fake in fakes:
        fake.on_dispatch = refusal
    dispatcher = start(busy_wait_s=busy_wait_s)
    send(dispatcher, fakes)
    (outcome,) = wait(dispatcher)
    assert outcome.event is DecodeEvent.NEVER_SENT  # law 8
    assert str(refusal.status) in outcome.reason
    assert (sum(dispatches(fakes)) > 2) == (refusal.status == 429)


class TestLimitPerPrefiller:
    """`max_outstanding_per_prefiller`: 1, and a prefiller that does not answer until it is told to."""

    @pytest.fixture
    def released(self, fakes: list[FakePrefiller]) -> Iterator[threading.Event]:
        released = threading.Event()
        fakes[0].on_dispatch = dataclasses.replace(reply(pages=1), wait_for=released)
        yield released
        released.set()

    def test_a_full_prefiller_is_passed_over(
        self, start: Open, fakes: list[FakePrefiller], released: threading.Event
    ) -> None:
        dispatcher = start(max_outstanding_per_prefiller=1)
        send(dispatcher, fakes)
        until(lambda: dispatches(fakes) == [1, 0], 5, "the first dispatch")
        assert [(c.outstanding, c.is_full) for c in dispatcher.pool()] == [(1, True), (0, False)]
        send(dispatcher, fakes, OTHER_TRANSFER)
        (outcome,) = wait(dispatcher)
        assert (outcome.transfer_id, outcome.url) == (OTHER_TRANSFER, fakes[1].url)
        released.set()
        (outcome,) = wait(dispatcher)
        assert (outcome.transfer_id, outcome.url) == (TRANSFER, fakes[0].url)
        assert [c.outstanding for c in dispatcher.pool()] == [0, 0]

    def test_where_all_are_full_it_is_sent_when_one_has_room(
        self, start: Open, fakes: list[FakePrefiller], released: threading.Event
    ) -> None:
        dispatcher = start(max_outstanding_per_prefiller=1, busy_wait_s=10)
        send(dispatcher, fakes[:1])
        send(dispatcher, fakes[:1], OTHER_TRANSFER)
        until(lambda: dispatches(fakes) == [1, 0], 5, "the first dispatch")
        time.sleep(0.3)
        assert dispatches(fakes) == [1, 0]
        released.set()
        assert [o.event for o in wait(dispatcher, 2)] == [DecodeEvent.ANSWERED] * 2
        assert dispatches(fakes) == [2, 0]

    def test_the_wait_for_room_is_bounded(
        self, start: Open, fakes: list[FakePrefiller], released: threading.Event
    ) -> None:
        dispatcher = start(max_outstanding_per_prefiller=1, busy_wait_s=0.3)
        send(dispatcher, fakes[:1])
        send(dispatcher, fakes[:1], OTHER_TRANSFER)
        (outcome,) = wait(dispatcher)
        assert (outcome.transfer_id, outcome.event) == (OTHER_TRANSFER, DecodeEvent.NEVER_SENT)  # law 8
        assert "already" in outcome.reason

    @pytest.mark.parametrize("is_late", [False, True])
    def test_a_reply_to_a_transfer_that_is_over_is_awaited_for_a_while(
        self, start: Open, fakes: list[FakePrefiller], released: threading.Event, is_late: bool
    ) -> None:
        """A machine may die when its last page has arrived: it never answers, and no connection is closed."""
        dispatcher = start(settle_s=0.2 if is_late else 60)
        send(dispatcher, fakes)
        until(lambda: dispatches(fakes) == [1, 0], 5, "the dispatch")
        dispatcher.finish(TRANSFER)
        time.sleep(0.1)
        assert dispatcher.pool()[0].outstanding == 1
        if not is_late:
            released.set()
        until(lambda: not dispatcher.pool()[0].outstanding, 5, "nothing outstanding")  # law 8
        outcomes = wait(dispatcher, 0 if is_late else 1)
        assert [outcome.event for outcome in outcomes] == [DecodeEvent.ANSWERED] * len(outcomes)

    def test_what_was_handed_over_counts_before_the_loop_has_seen_it(self, fakes: list[FakePrefiller]) -> None:
        """Otherwise one step of the engine would hand a burst to a prefiller with room for one."""
        config = parse({"prefillers": [fake.url for fake in fakes], "max_outstanding_per_prefiller": 1})
        dispatcher = Dispatcher(config, engine_id="d", model="m", shape=SHAPE, key=None, timeline=NoTimeline())
        send(dispatcher, fakes)
        assert [(c.outstanding, c.is_full) for c in dispatcher.pool()] == [(1, True), (0, False)]
        dispatcher._loop.close()


def test_a_prefiller_that_shuts_down_is_lost_and_the_transfer_fenced(start: Open, fakes: list[FakePrefiller]) -> None:
    """vLLM answers HTTP 200 with `finish_reason` abort, to new requests and to those that had begun."""
    aborted = Reply.json({"choices": [{"index": 0, "text": "", "finish_reason": "abort"}], "kv_transfer_params": None})
    fakes[0].on_dispatch = aborted
    dispatcher = start()
    fakes[0].on_hello = aborted
    send(dispatcher, fakes)
    (outcome,) = wait(dispatcher)
    assert (outcome.event, outcome.url) == (DecodeEvent.FAILED, fakes[0].url)
    assert "shutting down" in outcome.reason
    assert [c.state for c in dispatcher.pool()] == [PrefillerState.LOST, PrefillerState.USABLE]
    dispatcher.fence(TRANSFER)
    (result,) = [e for e in _events(dispatcher) if isinstance(e, FenceResult)]
    assert result.is_quiet


def test_late_news_of_an_old_process_does_not_lose_the_new_one(start: Open, fakes: list[FakePrefiller]) -> None:
    """Two requests see the same process die, one of them after its successor was greeted."""
    dispatcher = start()
    first, second = "0" * 32, "1" * 32
    early, late = threading.Event(), threading.Event()
    fakes[0].first = [Reply(0, b"", wait_for=early), Reply(0, b"", wait_for=late)]
    send(dispatcher, fakes, transfer_id=first)
    until(lambda: fakes[0].num_dispatches >= 1, 5, "the first is sent")
    send(dispatcher, fakes, transfer_id=second)
    until(lambda: fakes[0].num_dispatches >= 2, 5, "the second is sent")
    early.set()
    wait(dispatcher)
    until(lambda: dispatcher.pool()[0].state is PrefillerState.USABLE, 5, "greeted again")
    hellos = fakes[0].num_hellos
    late.set()
    wait(dispatcher)
    assert dispatcher.pool()[0].state is PrefillerState.USABLE
    assert fakes[0].num_hellos == hellos


def test_a_rank_that_failed_says_so_when_the_pages_are_late(
    start: Open, fakes: list[FakePrefiller], rank: Rank
) -> None:
    dispatcher = start(settle_s=30)
    rank.standing = Standing(transfer_id=TRANSFER, is_over=True, error="decoder rank 0 cannot be reached")
    send(dispatcher, fakes)
    answered, failed = wait(dispatcher, 2)
    assert (answered.event, failed.event) == (DecodeEvent.ANSWERED, DecodeEvent.FAILED)
    assert "cannot be reached" in failed.reason


@pytest.mark.parametrize("is_over", [True, False])
def test_pages_that_are_merely_late_are_waited_for(
    start: Open, fakes: list[FakePrefiller], rank: Rank, is_over: bool
) -> None:
    dispatcher = start()
    rank.standing = Standing(transfer_id=TRANSFER, is_over=is_over)
    send(dispatcher, fakes)
    wait(dispatcher)
    until(lambda: rank.num_inquiries >= (1 if is_over else 2), 5, "it was asked")
    dispatcher.finish(TRANSFER)
    assert dispatcher.take_events() == []


def test_nobody_is_asked_about_a_transfer_that_is_complete(start: Open, fakes: list[FakePrefiller], rank: Rank) -> None:
    dispatcher = start()
    send(dispatcher, fakes)
    wait(dispatcher)
    dispatcher.finish(TRANSFER)
    time.sleep(0.5)  # longer than the first pause
    assert rank.num_inquiries == 0


def _events(dispatcher: Dispatcher) -> list[Any]:
    events: list[Any] = []

    def have_come() -> bool:
        events.extend(dispatcher.take_events())
        return bool(events)

    until(have_come, 5, "an event")
    return events


def test_a_prefiller_that_does_not_answer_a_fence_is_asked_again(
    start: Open, fakes: list[FakePrefiller], rank: Rank
) -> None:
    dispatcher = start(fence_s=0.2)
    rank.is_silent = True
    send(dispatcher, fakes)
    wait(dispatcher)
    dispatcher.fence(TRANSFER)
    (result,) = [e for e in _events(dispatcher) if isinstance(e, FenceResult)]
    assert not result.is_quiet
    assert not result.is_dead
    rank.is_silent = False
    (result,) = [e for e in _events(dispatcher) if isinstance(e, FenceResult)]
    assert result.is_quiet
    assert rank.num_fences >= 2


ABORTED = Reply.json({"choices": [{"text": "", "finish_reason": "abort"}]})
SERVING = {"/version": lambda: Reply.json({"version": "0.32.0"})}
OTHERS_PAGE = {"/version": lambda: Reply(200, b"<html>no such host</html>")}


@pytest.mark.parametrize(
    ("answer", "pages", "is_dead"),
    [
        pytest.param(Reply(0, b""), {}, True, id="it has ended the connection"),
        pytest.param(Reply(500, b"{}"), {}, True, id="its engine has died"),
        pytest.param(ABORTED, {}, True, id="it has aborted what ran"),
        pytest.param(None, {}, False, id="behind a cut, with a router that refuses"),
        pytest.param(None, OTHERS_PAGE, False, id="behind a cut, with a proxy that answers"),
        pytest.param(None, SERVING, True, id="its API server goes on answering"),
    ],
)
def test_a_refused_port_shows_a_death_only_with_a_sign_of_the_prefiller_itself(
    start: Open,
    fakes: list[FakePrefiller],
    rank: Rank,
    monkeypatch: pytest.MonkeyPatch,
    answer: Reply | None,
    pages: dict[str, Any],
    is_dead: bool,
) -> None:
    """Law 1: what lives behind a cut may write on."""
    monkeypatch.setattr("vllm_pd_connector.control.dispatcher.LOOK_PAUSE_S", 0.1)
    dispatcher = start()
    never = threading.Event()
    fakes[0].first = [answer or Reply(0, b"", wait_for=never)]
    fakes[0].pages = pages
    send(dispatcher, fakes)
    until(lambda: fakes[0].num_dispatches >= 1, 5, "it is sent")
    rank.stop()
    (outcome,) = wait(dispatcher)
    assert outcome.event is DecodeEvent.FAILED
    dispatcher.fence(TRANSFER)
    results = [e for e in _events(dispatcher) if isinstance(e, FenceResult)]
    if is_dead and not results[0].is_dead:  # it was asked before the end was seen
        results = [e for e in _events(dispatcher) if isinstance(e, FenceResult)]
    assert (results[-1].is_quiet, results[-1].is_dead) == (False, is_dead)
    never.set()


@pytest.mark.parametrize("answer", [ABORTED, Reply(0, b"")], ids=["paused", "a proxy ended the connection"])
def test_a_prefiller_that_goes_on_listening_has_not_ended(
    start: Open, fakes: list[FakePrefiller], rank: Rank, monkeypatch: pytest.MonkeyPatch, answer: Reply
) -> None:
    """Law 1: what is refused a while later may be so by a router."""
    monkeypatch.setattr("vllm_pd_connector.control.fence_client.END_S", 0.2)
    dispatcher = start()
    fakes[0].first = [answer]
    send(dispatcher, fakes)
    wait(dispatcher)
    assert dispatcher._fences is not None
    until(lambda: not dispatcher._fences._ending, 5, "it has looked long enough")
    rank.stop()
    dispatcher.fence(TRANSFER)
    (result,) = [e for e in _events(dispatcher) if isinstance(e, FenceResult)]
    assert (result.is_quiet, result.is_dead) == (False, False)


def test_a_prefiller_whose_host_has_vanished_did_not_take_the_request(
    start: Open, fakes: list[FakePrefiller], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was sent to it, so that there is nothing to be fenced."""
    dispatcher = start(connect_timeout_s=0.2)
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # its queue is full, and the kernel says nothing to those who come now
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(silent.getsockname())
        real = dispatcher._client.complete

        async def complete(_url: str, *args: Any) -> Any:
            return await real(f"http://127.0.0.1:{silent.getsockname()[1]}", *args)

        monkeypatch.setattr(dispatcher._client, "complete", complete)
        send(dispatcher, fakes[:1])
        (outcome,) = wait(dispatcher)
    assert (outcome.event, "imeout" in outcome.reason) == (DecodeEvent.NEVER_SENT, True)


def test_a_busy_answer_that_is_not_the_prefillers_own_is_fenced(start: Open, fakes: list[FakePrefiller]) -> None:
    """A proxy says 503 also when its connection broke after it had passed the request on."""
    fakes[0].on_dispatch = Reply(503, b"upstream connect error", content_type="text/plain")
    dispatcher = start()
    send(dispatcher, fakes)
    (outcome,) = wait(dispatcher)
    assert (outcome.event, outcome.url) == (DecodeEvent.FAILED, fakes[0].url)


def test_nobody_is_asked_again_about_pages_that_are_back(start: Open, fakes: list[FakePrefiller], rank: Rank) -> None:
    dispatcher = start(fence_s=0.2)
    rank.is_silent = True
    send(dispatcher, fakes)
    wait(dispatcher)
    dispatcher.fence(TRANSFER)
    assert _events(dispatcher)
    dispatcher.finish(TRANSFER)
    asked = rank.num_fences
    until(lambda: not dispatcher._tasks, 5, "it gives up")
    assert rank.num_fences == asked


def test_a_prefiller_whose_engine_has_ended_is_not_waited_for(
    start: Open, fakes: list[FakePrefiller], rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's API server keeps a request that it took while its engine ended; the connection stays open."""
    monkeypatch.setattr("vllm_pd_connector.control.dispatcher.LOOK_PAUSE_S", 0.1)
    dispatcher = start()
    never = threading.Event()
    fakes[0].first = [Reply(0, b"", wait_for=never)]
    send(dispatcher, fakes)
    until(lambda: fakes[0].num_dispatches >= 1, 5, "it is sent")
    until(lambda: rank.num_inquiries >= 2, 5, "its ranks are looked at")
    assert dispatcher.take_events() == []  # they live: it may take long
    rank.stop()
    (outcome,) = wait(dispatcher)
    assert (outcome.event, outcome.url) == (DecodeEvent.FAILED, fakes[0].url)
    assert "is gone" in outcome.reason
    until(lambda: fakes[0].num_hellos >= 2, 5, "it was lost, and is greeted again")
    never.set()
