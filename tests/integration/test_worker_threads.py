"""`WorkerHalf` as vLLM drives it: registered tensors, layer hooks, its own threads, a fence over a socket, shutdown."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from scheduler_rig import BLOCK, LAYERS, make_rig

from vllm_pd_connector.config import PDConfig
from vllm_pd_connector.control.fence_client import FenceClient, FenceOutcome
from vllm_pd_connector.engine import worker_half
from vllm_pd_connector.engine.layer_signal import LayerSignals
from vllm_pd_connector.engine.step import BeginTransfer, CloseTransfer, ExpectTransfer, HandBack, StepMetadata
from vllm_pd_connector.engine.word_signal import make_signals
from vllm_pd_connector.engine.worker_half import WorkerHalf
from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.kernels import native
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.plan.write import ChunkWrite
from vllm_pd_connector.testing.shapes import reservation, whole_blocks
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport
from vllm_pd_connector.wire.messages import ControlEndpoint

NUM_BLOCKS, HEADS, CONTENT = 12, 2, 64
TRANSFER = "a" * 32


def caches(fill: float) -> dict[str, torch.Tensor]:
    """Two layers in one allocation, and a third name for the second one's memory (KV sharing)."""
    storage = torch.full((len(LAYERS), NUM_BLOCKS, HEADS, BLOCK, CONTENT), fill)
    views = {name: storage[index] for index, name in enumerate(LAYERS)}
    return {**views, "alias of l1": storage[1]}


class Side:
    """One worker process's half."""

    def __init__(
        self, directory: Path, role: str, transport: Callable[[str], Transport], fill: float, **settings: Any
    ) -> None:
        rig = make_rig(directory, role=role, num_blocks=NUM_BLOCKS)
        self.kv = caches(fill)
        self.half = WorkerHalf(
            PDConfig(min_write_bytes=1, **settings),  # layer by layer
            rig.scheduler.vllm_config,
            rig.scheduler.kv_cache_config,
            rank=0,
            open_transport=lambda name, _placement: transport(name),
        )
        self.half.register(self.kv)
        self.sent: list[str] = []
        self.received: list[str] = []

    def results(self) -> None:
        sent, received, _ = self.half.take_results()
        self.sent += sent
        self.received += received


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    fabric = MemoryFabric()
    made = (
        Side(tmp_path, "kv_producer", partial(MemoryTransport, fabric), 3.5),
        Side(tmp_path, "kv_consumer", partial(MemoryTransport, fabric), 0.0),
    )
    yield made
    for side in made:
        side.half.shutdown()
        side.half.shutdown()


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, what


def begin(prefiller: Side, decoder: Side, *writes: ChunkWrite) -> StepMetadata:
    handshake = decoder.half.handshake()
    ranks = [(handshake.descriptor, handshake.pages)]
    reserved = reservation(TRANSFER, [[4, 5]], handshake.shape.geometry(), ranks)
    orders = StepMetadata(begins=[BeginTransfer(reservation=reserved, lease_s=60.0)], writes=list(writes))
    prefiller.half.start_step(orders)
    return orders


WRITE = whole_blocks(TRANSFER, (1, 2), (4, 5), block_size=BLOCK)


def expect(decoder: Side) -> None:
    order = ExpectTransfer(transfer_id=TRANSFER, request_id="r", spans=(Span(0, 2 * BLOCK),))
    decoder.half.start_step(StepMetadata(expects=[order]))


def close(prefiller: Side) -> None:
    order = CloseTransfer(transfer_id=TRANSFER, request_id="r", cancel=False, report=True)
    prefiller.half.start_step(StepMetadata(closes=[order]))


def test_a_request_travels_layer_by_layer_and_is_reported_once_on_both_sides(sides: tuple[Side, Side]) -> None:
    prefiller, decoder = sides
    expect(decoder)
    begin(prefiller, decoder, WRITE)
    time.sleep(0.1)  # the messenger is asleep: the hook has to wake it
    prefiller.half.layer_done("l0")
    until(lambda: bool((decoder.kv["l0"][4:6] == 3.5).all()), "layer 0 does not arrive while layer 1 computes")
    assert not decoder.kv["l1"].any()
    prefiller.half.layer_done("alias of l1")
    prefiller.half.layer_done("no such layer")
    prefiller.half.layer_done("l1")
    prefiller.half.end_step()
    close(prefiller)

    def both() -> bool:
        prefiller.results()
        decoder.results()
        return bool(prefiller.sent and decoder.received)

    until(both, "not reported")
    both()
    assert (prefiller.sent, decoder.received) == (["r"], ["r"])  # law 7
    assert bool((decoder.kv["l1"][4:6] == 3.5).all())
    decoder.kv["l0"][4:6] = 0
    decoder.kv["l1"][4:6] = 0
    assert not decoder.kv["l0"].any()
    assert not decoder.kv["l1"].any()


def test_what_arrived_of_a_request_that_is_handed_back_is_reported_no_later_than_the_request(
    sides: tuple[Side, Side],
) -> None:
    prefiller, decoder = sides
    expect(decoder)
    begin(prefiller, decoder, whole_blocks(TRANSFER, (1,), (4,), block_size=BLOCK))
    prefiller.half.end_step()
    arrived = 0

    def has_arrived() -> bool:
        nonlocal arrived
        arrived += (decoder.half.take_stats() or {"counters": {}})["counters"].get("pages_arrived", 0)
        return arrived == len(LAYERS)

    until(has_arrived, "the first page does not arrive")
    order = HandBack(transfer_id=TRANSFER, request_id="r", failed=True)
    decoder.half.start_step(StepMetadata(hand_backs=[order]))
    reports: list[dict[str, list[int]]] = []

    def is_handed_back() -> bool:
        decoder.results()
        report = decoder.half.take_report()  # as vLLM does, after the results of the same step
        reports.extend([report.whole] if report else [])
        return bool(decoder.received)

    until(is_handed_back, "not handed back")
    assert reports == [{TRANSFER: [BLOCK]}]


def test_an_alias_of_a_layers_memory_is_neither_a_layer_nor_a_signal(sides: tuple[Side, Side]) -> None:
    prefiller, decoder = sides
    handshake = prefiller.half.handshake()
    assert handshake.pages.num_layers == len(LAYERS)
    assert handshake.shape.layers.split() == LAYERS
    begin(prefiller, decoder, WRITE)
    prefiller.half.layer_done("alias of l1")
    prefiller.half.layer_done("l0")
    until(lambda: bool((decoder.kv["l0"][4:6] == 3.5).all()), "layer 0 does not arrive")
    assert not decoder.kv["l1"].any()


def test_hooks_outside_a_step_with_writes_cost_nothing_and_do_nothing(sides: tuple[Side, Side]) -> None:
    prefiller, _ = sides
    prefiller.half.layer_done("l0")
    prefiller.half.end_step()
    prefiller.half.start_step(StepMetadata())
    prefiller.half.layer_done("l0")
    prefiller.half.end_step()
    assert prefiller.half.take_results() == (set(), set(), set())
    assert prefiller.half.take_report() is None


@pytest.fixture(params=["words", "a list"])
def _either_signal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiled extension (if there is one) and without."""
    if request.param == "a list":
        monkeypatch.setattr(native, "is_built", lambda: False)


def unannounced(side: Side) -> int:
    return (side.half.take_stats() or {"counters": {}})["counters"].get("layers_unannounced", 0)


def have_arrived(decoder: Side) -> bool:
    return all(bool((decoder.kv[name][4:6] == 3.5).all()) for name in LAYERS)


def blank(decoder: Side) -> None:
    for name in LAYERS:
        decoder.kv[name].zero_()


@pytest.mark.usefixtures("_either_signal")
def test_a_layer_without_a_hook_is_counted_and_its_pages_leave_at_the_steps_end(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    prefiller, decoder = sides
    with caplog.at_level("WARNING", logger="vllm_pd_connector"):
        begin(prefiller, decoder, WRITE)
        prefiller.half.layer_done("l0")
        prefiller.half.layer_done("l0")  # a drafter's hook fires again: that is one layer
        until(lambda: bool((decoder.kv["l0"][4:6] == 3.5).all()), "the announced layer does not arrive")
        assert not decoder.kv["l1"].any()
        assert unannounced(prefiller) == 0  # nobody can know before the step's end
        prefiller.half.end_step()
        until(lambda: have_arrived(decoder), "the layer without a hook does not arrive")
        assert unannounced(prefiller) == 1
        blank(decoder)
        prefiller.half.start_step(StepMetadata(writes=[WRITE]))
        prefiller.half.end_step()  # as after the replay of a full graph without signals: no hook at all
        until(lambda: have_arrived(decoder), "a step without hooks sends nothing")
    assert unannounced(prefiller) == 2
    (said,) = [record.getMessage() for record in caplog.records if "layers_unannounced" in record.getMessage()]
    assert "event=layers_unannounced rank=0 layers=1 of 2" in said  # once: the counter tells the rest


@pytest.mark.usefixtures("_either_signal")
def test_a_step_with_all_hooks_counts_no_layer_as_unannounced(
    sides: tuple[Side, Side], caplog: pytest.LogCaptureFixture
) -> None:
    prefiller, decoder = sides
    with caplog.at_level("WARNING", logger="vllm_pd_connector"):
        begin(prefiller, decoder, WRITE)
        for name in prefiller.kv:
            prefiller.half.layer_done(name)
        prefiller.half.end_step()
        prefiller.half.start_step(StepMetadata())  # one without writes expects no hook
        prefiller.half.end_step()
        until(lambda: have_arrived(decoder), "the pages do not arrive")
    assert unannounced(prefiller) == 0
    assert "layers_unannounced" not in caplog.text


def test_a_preemption_returns_when_the_pages_are_read_no_more(sides: tuple[Side, Side]) -> None:
    prefiller, decoder = sides
    begin(prefiller, decoder, WRITE)
    prefiller.half.end_step()
    prefiller.half.handle_preemptions([TRANSFER])
    assert bool((decoder.kv["l0"][4:6] == 3.5).all())  # law 2
    assert bool((decoder.kv["l1"][4:6] == 3.5).all())
    stats = prefiller.half.take_stats()
    assert stats is not None
    assert stats["counters"]["preemption_waits"] == 1
    assert stats["counters"]["preemption_wait_us"] > 0


def test_the_wait_for_preempted_pages_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_half, "PREEMPTION_WAIT_S", 1.0)
    fabric = MemoryFabric()
    prefiller = Side(tmp_path, "kv_producer", partial(MemoryTransport, fabric, polls_per_write=10**9), 3.5)
    decoder = Side(tmp_path, "kv_consumer", partial(MemoryTransport, fabric), 0.0)
    try:
        begin(prefiller, decoder, WRITE)
        prefiller.half.end_step()
        prefiller.half.handle_preemptions([TRANSFER])  # law 8: it returns, and the transfer fails instead
        report = prefiller.half.take_report()
        assert report is not None
        assert "preempted" in report.failures[TRANSFER]  # before anything can be overwritten
    finally:
        prefiller.half.shutdown()
        decoder.half.shutdown()


def test_a_fence_over_the_socket_stops_a_transfer_that_has_not_begun(sides: tuple[Side, Side]) -> None:
    prefiller, decoder = sides
    handshake = prefiller.half.handshake()

    async def nobody(_url: str, _host: str) -> bool:
        return False

    async def ask() -> FenceOutcome:
        client = FenceClient(None, nobody)
        control = ControlEndpoint(endpoint=handshake.control, generation=handshake.generation)
        try:
            return await client.ask([control], TRANSFER, 5.0)
        finally:
            client.close()

    assert asyncio.run(ask()).is_quiet
    begin(prefiller, decoder, WRITE)
    prefiller.half.end_step()
    close(prefiller)

    def is_sent() -> bool:
        prefiller.results()
        return bool(prefiller.sent)

    until(is_sent, "the cancelled transfer is not given back")
    assert not decoder.kv["l0"].any()  # law 1


def test_the_control_port_stays_open_while_a_worker_that_ends_may_still_post(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 1: decoders take a closed one for the end of all writes."""
    monkeypatch.setattr("vllm_pd_connector.engine.messenger.STOP_TIMEOUT_S", 0.3)
    begun, may_go_on = threading.Event(), threading.Event()

    class Slow(MemoryTransport):
        def prepare_write(self, *args: Any) -> Any:
            begun.set()
            may_go_on.wait(10)
            return super().prepare_write(*args)

    fabric = MemoryFabric()
    prefiller = Side(tmp_path, "kv_producer", partial(Slow, fabric), 3.5)
    decoder = Side(tmp_path, "kv_consumer", partial(MemoryTransport, fabric), 0.0)
    address = urlsplit(prefiller.half.handshake().control)
    try:
        begin(prefiller, decoder, WRITE)
        assert begun.wait(5)
        prefiller.half.shutdown()
        socket.create_connection((address.hostname, address.port), 5).close()
    finally:
        may_go_on.set()
        prefiller.half.shutdown()
        decoder.half.shutdown()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port), 5)


def test_a_decoder_listens_on_no_control_port(sides: tuple[Side, Side]) -> None:
    _, decoder = sides
    assert decoder.half.handshake().control == ""


@pytest.mark.parametrize(("role", "announces"), [("kv_producer", True), ("kv_both", True), ("kv_consumer", False)])
def test_only_what_sends_pages_makes_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, announces: bool
) -> None:
    """A decoder's graphs stay as they are without us: no kernel of ours is captured in them."""
    made: list[LayerSignals] = []

    def make(*args: Any, **kwargs: Any) -> LayerSignals:
        made.append(make_signals(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(worker_half, "make_signals", make)
    side = Side(tmp_path, role, partial(MemoryTransport, MemoryFabric()), 0.0)
    try:
        assert bool(made) is announces
        assert not side.half.is_capturing
    finally:
        side.half.shutdown()


def unregistered(directory: Path, role: str, config: PDConfig) -> WorkerHalf:
    rig = make_rig(directory, role=role, num_blocks=NUM_BLOCKS)
    return WorkerHalf(
        config,
        rig.scheduler.vllm_config,
        rig.scheduler.kv_cache_config,
        rank=0,
        open_transport=lambda name, _placement: MemoryTransport(MemoryFabric(), name),
    )


@pytest.mark.parametrize(
    ("views", "complaint"),
    [
        ({name: view[:, :, :, ::2] for name, view in caches(0.0).items()}, "contiguous"),
        ({**caches(0.0), "l0": caches(0.0)["l0"].transpose(1, 2)}, "every layer must match"),
        ({name: view[:, :1] for name, view in caches(0.0).items()}, "2 KV heads over 1 ranks make"),
    ],
    ids=["gaps in a page", "two layouts", "too few heads"],
)
def test_pages_that_cannot_be_moved_are_refused_at_start(
    tmp_path: Path, views: dict[str, torch.Tensor], complaint: str
) -> None:
    half = unregistered(tmp_path, "kv_producer", PDConfig())
    with pytest.raises(UnsupportedEngine, match=complaint):
        half.register(views)
    half.shutdown()  # as vLLM does with what it has made


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_page_verification_in_device_memory_is_refused_at_start(tmp_path: Path, role: str) -> None:
    """Reading the first page would have failed, and its writes have stayed prepared until the lease ended."""
    storage = torch.empty((len(LAYERS), NUM_BLOCKS, HEADS, BLOCK, CONTENT), device="meta")
    views = {name: storage[index] for index, name in enumerate(LAYERS)}
    half = unregistered(tmp_path, role, PDConfig(verify_pages=True))
    with pytest.raises(UnsupportedEngine, match="verify_pages must be false"):
        half.register(views)
    half.shutdown()
