"""The connector as vLLM's model runners drive it, V1 and V2: when hooks fire, when pages leave, what is reported."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from runner_rig import BLOCK, COMPUTED, LAYERS, FirstRunner, Runner, SecondRunner, Worker, make_worker
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.v1.outputs import KVConnectorOutput

from vllm_pd_connector.engine import connector
from vllm_pd_connector.engine.step import BeginTransfer, CloseTransfer, ExpectTransfer, StepMetadata
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.testing.shapes import reservation, whole_blocks
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport

TRANSFER = "a" * 32
TARGET, DRAFTER = LAYERS[:2], LAYERS[2]


@pytest.fixture(scope="module", autouse=True)
def _world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's process groups of one rank: the connector asks for its number."""
    with set_current_vllm_config(VllmConfig()):
        address = f"file://{tmp_path_factory.mktemp('world')}/rendezvous"
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@dataclass
class Pair:
    """A prefiller's worker under the runner that is looked at, and a decoder's under V2."""

    prefiller: Runner
    decoder: Runner
    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    unannounced: int = 0

    @property
    def worker(self) -> Worker:
        return self.prefiller.worker

    def arrived(self, layer: str, *blocks: int) -> bool:
        return bool((self.decoder.worker.kv[layer][list(blocks) or [4, 5]] == COMPUTED).all())

    def is_blank(self, *layers: str) -> bool:
        return not any(self.decoder.worker.kv[name].any() for name in layers or LAYERS)

    def note(self, output: KVConnectorOutput) -> None:
        """Keep what a prefiller's step reported."""
        self.sent += sorted(output.finished_sending or ())
        if output.kv_connector_stats is not None:
            self.unannounced += output.kv_connector_stats.data["counters"].get("layers_unannounced", 0)

    def turn(self) -> None:
        """An idle step on both sides."""
        self.note(self.prefiller.idle(StepMetadata()))
        self.received += sorted(self.decoder.idle(StepMetadata()).finished_recving or ())

    def step(self, forward: Callable[[], None], *, orders: StepMetadata | None = None, **how: Any) -> None:
        """A prefiller's step that begins the transfer and sends both pages, unless it is told otherwise."""
        self.note(self.prefiller.step(orders or StepMetadata(begins=[self.begin()], writes=[WRITE]), forward, **how))

    def begin(self) -> BeginTransfer:
        handshake = self.decoder.worker.connector.get_handshake_metadata()
        ranks = [(handshake.descriptor, handshake.pages)]
        reserved = reservation(TRANSFER, [[4, 5]], handshake.shape.geometry(), ranks)
        return BeginTransfer(reservation=reserved, lease_s=60.0)


WRITE = whole_blocks(TRANSFER, (1, 2), (4, 5), block_size=BLOCK)
EXPECT = ExpectTransfer(transfer_id=TRANSFER, request_id="r", spans=(Span(0, 2 * BLOCK),))
CLOSE = CloseTransfer(transfer_id=TRANSFER, request_id="r", cancel=False, report=True)

MakePair = Callable[..., Pair]
RUNNERS = {"V1": FirstRunner, "V2": SecondRunner}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePair]:
    fabric = MemoryFabric()
    monkeypatch.setattr(connector, "_open_transport", lambda _config, name, _placement: MemoryTransport(fabric, name))
    workers: list[Worker] = []

    def build(runner: Callable[..., Runner], **settings: Any) -> Pair:
        workers.extend(make_worker(tmp_path / role, role) for role in ("kv_producer", "kv_consumer"))
        return Pair(runner(workers[0], **settings), SecondRunner(workers[1]))

    yield build
    for worker in workers:
        worker.connector.shutdown()


@pytest.fixture(params=RUNNERS)
def pair(request: pytest.FixtureRequest, make: MakePair) -> Pair:
    return make(RUNNERS[request.param])


@pytest.fixture(params=RUNNERS)
def drafting(request: pytest.FixtureRequest, make: MakePair) -> Pair:
    """With speculative decoding V1 collects results before the drafter runs, V2 after it."""
    return make(FirstRunner, has_drafter=True) if request.param == "V1" else make(SecondRunner)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


def stays(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 0.1
    while time.monotonic() < end:
        assert condition()
        time.sleep(0.005)


def test_a_layer_leaves_while_the_next_one_is_computed_and_the_request_is_reported_once(pair: Pair) -> None:
    pair.decoder.idle(StepMetadata(expects=[EXPECT]))

    def forward() -> None:
        pair.worker.compute("l0")
        until(lambda: pair.arrived("l0"), "layer 0 does not arrive while layer 1 computes")
        assert pair.is_blank("l1", "l2")
        pair.worker.compute("l1", "l2")

    pair.step(forward)
    until(lambda: all(map(pair.arrived, LAYERS)), "the pages do not arrive")
    pair.note(pair.prefiller.idle(StepMetadata(closes=[CLOSE])))

    def both() -> bool:
        pair.turn()
        return bool(pair.sent and pair.received)

    until(both, "not reported")
    for _ in range(5):
        pair.turn()
    assert (pair.sent, pair.received) == (["r"], ["r"])  # law 7
    assert pair.worker.hooks == LAYERS
    assert pair.unannounced == 0
    assert not pair.worker.connector.has_connector_metadata()


def test_each_chunk_is_announced_by_its_own_step(pair: Pair) -> None:
    first, last = (whole_blocks(TRANSFER, (block,), (to,), block_size=BLOCK) for block, to in ((1, 4), (2, 5)))
    pair.step(
        lambda: pair.worker.compute(*LAYERS, blocks=(1,)),
        orders=StepMetadata([], begins=[pair.begin()], writes=[first]),
    )
    until(lambda: all(pair.arrived(name, 4) for name in LAYERS), "the first chunk does not arrive")

    def forward() -> None:
        stays(lambda: not any(pair.arrived(name, 5) for name in LAYERS))  # the words of the step before do not count
        pair.worker.compute(*LAYERS, blocks=(2,))

    pair.step(forward, orders=StepMetadata(writes=[last]))
    until(lambda: all(map(pair.arrived, LAYERS)), "the last chunk does not arrive")
    assert pair.unannounced == 0


def test_pages_of_a_replayed_step_leave_at_its_end(pair: Pair) -> None:
    """A row of one prompt token that V2 takes for decoding, or any batch with `cudagraph_mode` FULL."""

    def sample() -> None:
        stays(pair.is_blank)

    pair.step(lambda: pair.worker.replay(*LAYERS), is_full=True, sample=sample if is_second(pair) else None)
    until(lambda: all(map(pair.arrived, LAYERS)), "the pages do not leave")
    pair.turn()
    assert pair.worker.hooks == []
    assert pair.unannounced == len(LAYERS)


def test_a_step_without_writes_after_a_replayed_one_has_nothing_left_of_it(pair: Pair) -> None:
    pair.step(lambda: pair.worker.replay(*LAYERS), is_full=True)

    def forward() -> None:
        assert pair.worker.half._hooks == {}
        pair.worker.compute(*LAYERS, blocks=(3,))

    pair.step(forward, orders=StepMetadata())
    until(lambda: all(map(pair.arrived, LAYERS)), "the pages do not leave")
    pair.turn()
    assert pair.unannounced == len(LAYERS)  # of the first step alone
    assert (pair.sent, pair.received) == ([], [])


def test_dummy_batches_run_no_hook_and_announce_nothing(pair: Pair) -> None:
    pair.prefiller.dummy(lambda: pair.worker.compute(*LAYERS, blocks=()))

    def forward() -> None:
        stays(pair.is_blank)
        pair.worker.compute(*LAYERS)

    pair.step(forward)
    until(lambda: all(map(pair.arrived, LAYERS)), "the pages do not arrive")
    assert pair.worker.hooks == LAYERS
    pair.prefiller.dummy(lambda: pair.worker.compute(*LAYERS, blocks=()))
    assert pair.worker.hooks == LAYERS
    pair.turn()  # a dummy batch has left the connector on
    assert pair.unannounced == 0


def test_a_capture_enqueues_each_layers_signal_and_announces_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals = pair.worker.half._signals
    captured: list[int] = []
    monkeypatch.setattr(type(signals), "capture", lambda _self, layer: captured.append(layer))
    monkeypatch.setattr(type(signals), "is_capturing", True)
    pair.prefiller.capture(lambda: pair.worker.compute(*LAYERS, blocks=()))
    monkeypatch.setattr(type(signals), "is_capturing", False)
    assert captured == [0, 1, 2]
    assert pair.worker.hooks == []

    def forward() -> None:
        stays(pair.is_blank)
        pair.worker.compute(*LAYERS)

    pair.step(forward)
    until(lambda: all(map(pair.arrived, LAYERS)), "the pages do not arrive")
    assert pair.unannounced == 0


def test_a_drafters_layer_is_announced_once_though_its_hook_fires_for_each_guess(drafting: Pair) -> None:
    drafting.decoder.idle(StepMetadata(expects=[EXPECT]))

    def draft() -> None:
        until(lambda: all(map(drafting.arrived, TARGET)), "the target's layers wait for the drafter")
        assert drafting.is_blank(DRAFTER)
        drafting.worker.compute(DRAFTER)
        until(lambda: drafting.arrived(DRAFTER), "the drafter's layer waits for the step's end")
        for _ in range(3):
            drafting.worker.compute(DRAFTER, blocks=(3,))  # guesses lie behind the prompt

    drafting.step(lambda: drafting.worker.compute(*TARGET), sample=draft)
    assert drafting.worker.hooks == [*TARGET, *[DRAFTER] * 4]
    drafting.note(drafting.prefiller.idle(StepMetadata(closes=[CLOSE])))

    def both() -> bool:
        drafting.turn()
        return bool(drafting.sent and drafting.received)

    until(both, "not reported")
    drafting.turn()
    assert (drafting.sent, drafting.received) == (["r"], ["r"])
    assert drafting.unannounced == 0
    assert not drafting.worker.connector.has_connector_metadata()


def test_the_pages_of_a_replayed_drafter_leave_at_the_steps_end(drafting: Pair) -> None:
    def draft() -> None:
        drafting.worker.replay(DRAFTER)
        stays(lambda: drafting.is_blank(DRAFTER))

    drafting.step(lambda: drafting.worker.compute(*TARGET), sample=draft)
    until(lambda: all(map(drafting.arrived, LAYERS)), "the drafter's pages do not leave")
    drafting.turn()
    assert drafting.unannounced == 1


def test_a_step_that_v1_never_ends_is_ended_by_the_next_one(make: MakePair) -> None:
    """An early pipeline stage of V1 with a drafter: `wait_for_save` and `clear_connector_metadata` are not called."""
    pair = make(FirstRunner, has_drafter=True)
    runner = pair.prefiller
    assert isinstance(runner, FirstRunner)
    orders = StepMetadata(begins=[pair.begin()], writes=[WRITE])
    runner.step_of_an_early_stage(orders, lambda: pair.worker.replay(*LAYERS))
    runner.step_of_an_early_stage(StepMetadata(), lambda: None)
    until(lambda: all(map(pair.arrived, LAYERS)), "the pages of the unfinished step do not leave")


def test_a_decoders_steps_run_hooks_that_do_nothing(make: MakePair) -> None:
    """Why a decoder may replay full graphs: it has no pages to announce."""
    for runner in (pair := make(SecondRunner)).decoder, pair.prefiller:
        output = runner.step(StepMetadata(), lambda worker=runner.worker: worker.compute(*LAYERS, blocks=(3,)))
        assert output.is_empty()
        assert runner.worker.hooks == LAYERS
    output = pair.decoder.step(StepMetadata(expects=[EXPECT]), lambda: None, is_full=True)
    assert output.kv_connector_stats is None
    assert pair.decoder.worker.half._signal is None


def is_second(pair: Pair) -> bool:
    return isinstance(pair.prefiller, SecondRunner)
