"""The layer signal on a device: after its layer, before the next, inside CUDA graphs, and right over any replay."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from vllm_pd_connector.engine.layer_signal import LayerSignal
from vllm_pd_connector.engine.word_signal import DeviceWords
from vllm_pd_connector.kernels import native
from vllm_pd_connector.kernels.device_launch import DeviceLaunch, RuntimeCompiled, make_launch
from vllm_pd_connector.kernels.poller import Poller

NUM_LAYERS = 4
LIMIT_S = 20.0


@pytest.fixture(params=[make_launch, RuntimeCompiled], ids=["compiled", "NVRTC"])
def launch(request: pytest.FixtureRequest) -> DeviceLaunch:
    try:
        return request.param()
    except ImportError as error:
        pytest.skip(str(error))


@pytest.fixture
def words(launch: DeviceLaunch) -> Iterator[DeviceWords]:
    bell = native.extension().Bell()
    poller = Poller(bell)
    made = DeviceWords(NUM_LAYERS, torch.device("cuda"), launch, poller)
    made.bell = bell  # type: ignore[attr-defined]
    yield made
    torch.cuda.synchronize()
    poller.close()


def busy(seconds: float = 0.05) -> None:
    """Keep the stream busy for about so long."""
    torch.cuda._sleep(round(seconds * 1.5e9))


def layers(signal: LayerSignal) -> list[int]:
    return sorted(layer for layer, _ in signal.take())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.0005)


def test_a_layer_is_ready_when_the_stream_has_passed_it(words: DeviceWords) -> None:
    signal = words.begin_step()
    busy()
    signal.bump(1)
    assert layers(signal) == []
    torch.cuda.synchronize()
    assert layers(signal) == [1]
    assert layers(signal) == []


def test_what_the_stream_wrote_before_is_there(words: DeviceWords) -> None:
    for number in range(200):
        target = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        source = torch.full((1,), number + 1, device="cuda")
        signal = words.begin_step()
        target.copy_(source, non_blocking=True)
        signal.bump(0)
        until(lambda signal=signal: 0 in layers(signal))
        assert int(target) == number + 1


def test_finish_announces_and_counts_what_no_hook_did(words: DeviceWords) -> None:
    signal = words.begin_step()
    signal.bump(2)
    assert signal.finish() == 0  # the device has not counted yet
    torch.cuda.synchronize()
    assert layers(signal) == [0, 1, 2, 3]
    assert words.begin_step().finish() == NUM_LAYERS - 1  # of the step before


def test_the_bell_rings_without_a_look(words: DeviceWords) -> None:
    signal = words.begin_step()
    signal.watch([[0, 1], [2, 3]])
    busy()
    signal.bump(0)
    signal.bump(1)
    assert words.bell.wait_for(LIMIT_S)  # type: ignore[attr-defined]
    assert layers(signal) == [0, 1]


def capture(words: DeviceWords) -> torch.cuda.CUDAGraph:
    """A graph of a whole step in which layer 3 has no hook."""
    data = torch.ones(1 << 20, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        data.mul_(1.0)  # warm-up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(NUM_LAYERS - 1):
            data.mul_(1.0)
            assert words.is_capturing
            words.capture(layer)
    assert not words.is_capturing
    return graph


def test_a_replay_announces_its_layers_each_time(words: DeviceWords) -> None:
    graph = capture(words)
    for _ in range(50):
        signal = words.begin_step()
        busy(0.001)
        assert layers(signal) == []
        graph.replay()
        torch.cuda.synchronize()
        assert layers(signal) == [0, 1, 2]
        signal.finish()
        torch.cuda.synchronize()
        assert layers(signal) == [3]


def test_capture_and_dummy_replays_announce_nothing_of_the_next_step(words: DeviceWords) -> None:
    """Warm-up, capture, and batches of an idle data-parallel rank: no step is bound, nothing may be counted."""
    graph = capture(words)
    for _ in range(7):
        graph.replay()
    signal = words.begin_step()
    torch.cuda.synchronize()
    assert layers(signal) == []
    graph.replay()
    signal.finish()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert layers(signal) == [0, 1, 2, 3]
    later = words.begin_step()
    torch.cuda.synchronize()
    assert layers(later) == []


def test_two_graphs_share_the_words(words: DeviceWords) -> None:
    first, second = capture(words), capture(words)
    for graph in (first, second, first):
        signal = words.begin_step()
        graph.replay()
        torch.cuda.synchronize()
        assert layers(signal) == [0, 1, 2]
        signal.finish()
