"""The kernels of csrc/layer_signal.cu, compiled for the host, on a stream and in graphs that run when a test says so.

What they do is checked here on every machine: steps, replays, warm-ups, dummy batches, layers without a hook, and what
the native poller makes of it. That a device does it in order, and is seen doing it, is checked in tests/gpu.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from vllm_pd_connector.engine import word_signal
from vllm_pd_connector.engine.layer_signal import LayerSignal
from vllm_pd_connector.engine.word_signal import DeviceWords
from vllm_pd_connector.kernels import device_launch, native
from vllm_pd_connector.kernels.poller import Poller

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(not native.is_built(), reason=native.WHY_MISSING),
]

NUM_LAYERS = 4
LIMIT_S = 20.0
Work = list[Callable[[], None]]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    assert COMPILER is not None
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    source = device_launch.SOURCE.resolve()
    command = [COMPILER, "-std=c++17", "-Wall", "-Werror", "-DPD_ON_HOST", "-shared", "-fPIC", "-x", "c++", source]
    subprocess.run([*command, "-o", library], check=True, timeout=60)
    return ctypes.CDLL(str(library))


class HostStream:
    """A `DeviceLaunch` whose stream is a list: what is launched waits for `run`, or becomes part of a graph."""

    def __init__(self, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels
        self._waiting: Work = []
        self._graph: Work | None = None

    def begin_step(self, stream: int, epoch: int, step: int) -> None:
        self._launch(self._kernels.pd_begin_step, ctypes.c_void_p(epoch), ctypes.c_uint64(step))

    def signal_layer(self, stream: int, epoch: int, word: int) -> None:
        self._launch(self._kernels.pd_signal_layer, ctypes.c_void_p(epoch), ctypes.c_void_p(word))

    def finish_step(self, stream: int, epoch: int, words: int, num_layers: int, unannounced: int) -> None:
        pointers = map(ctypes.c_void_p, (epoch, words))
        count = ctypes.c_int(num_layers)
        self._launch(self._kernels.pd_finish_step, *pointers, count, ctypes.c_void_p(unannounced))

    def run(self) -> None:
        """The stream catches up."""
        waiting, self._waiting = self._waiting, []
        for kernel in waiting:
            kernel()

    def capture(self, words: DeviceWords, layers: range) -> Work:
        """A graph of a forward pass in which these layers have hooks. Nothing of it runs now."""
        self._graph = []
        for layer in layers:
            words.capture(layer)
        graph, self._graph = self._graph, None
        return graph

    def replay(self, graph: Work) -> None:
        self._waiting += graph

    def _launch(self, kernel: Callable[..., None], *arguments: object) -> None:
        (self._waiting if self._graph is None else self._graph).append(partial(kernel, *arguments))


@pytest.fixture
def stream(kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> HostStream:
    monkeypatch.setattr(word_signal, "_stream", lambda: 0)
    return HostStream(kernels)


@pytest.fixture
def poller() -> Iterator[Poller]:
    made = Poller(native.extension().Bell())
    yield made
    made.close()


@pytest.fixture
def words(stream: HostStream, poller: Poller) -> DeviceWords:
    return DeviceWords(NUM_LAYERS, torch.device("cpu"), stream, poller)


def layers(signal: LayerSignal) -> list[int]:
    return sorted(layer for layer, _ in signal.take())


def test_a_layer_is_ready_when_the_stream_has_passed_it(words: DeviceWords, stream: HostStream) -> None:
    signal = words.begin_step()
    signal.bump(1)
    assert layers(signal) == []
    stream.run()
    assert layers(signal) == [1]
    assert layers(signal) == []


def test_what_no_hook_announced_is_ready_at_the_end_and_counted(words: DeviceWords, stream: HostStream) -> None:
    signal = words.begin_step()
    signal.bump(2)
    assert signal.finish() == 0  # not counted yet
    stream.run()
    assert layers(signal) == [0, 1, 2, 3]
    assert words.begin_step().finish() == NUM_LAYERS - 1  # of the step before
    stream.run()
    last = words.begin_step()
    for layer in range(NUM_LAYERS):
        last.bump(layer)
    assert last.finish() == NUM_LAYERS
    stream.run()
    assert words.begin_step().finish() == 0


def test_every_replay_announces_its_layers_once(words: DeviceWords, stream: HostStream) -> None:
    graph = stream.capture(words, range(NUM_LAYERS - 1))
    for _ in range(50):
        signal = words.begin_step()
        stream.run()
        assert layers(signal) == []  # not those of the replay before
        stream.replay(graph)
        stream.run()
        assert layers(signal) == [0, 1, 2]
        signal.finish()
        stream.run()
        assert layers(signal) == [3]


def test_pieces_of_a_step_may_be_graphs_and_others_not(words: DeviceWords, stream: HostStream) -> None:
    first, last = stream.capture(words, range(2)), stream.capture(words, range(3, 4))
    for _ in range(3):
        signal = words.begin_step()
        stream.replay(first)
        stream.run()
        assert layers(signal) == [0, 1]
        signal.bump(2)
        stream.replay(last)
        stream.run()
        assert layers(signal) == [2, 3]


def test_warm_ups_captures_and_dummy_batches_announce_nothing_of_the_next_step(
    words: DeviceWords, stream: HostStream
) -> None:
    graph = stream.capture(words, range(NUM_LAYERS))
    for _ in range(7):
        stream.replay(graph)  # no step has begun
    stream.run()
    signal = words.begin_step()
    stream.run()
    assert layers(signal) == []
    stream.replay(graph)
    signal.finish()
    for _ in range(3):
        stream.replay(graph)  # batches of an idle data-parallel rank
    stream.run()
    assert layers(signal) == [0, 1, 2, 3]
    later = words.begin_step()
    stream.run()
    assert layers(later) == []


def test_graphs_captured_again_use_the_same_words(words: DeviceWords, stream: HostStream) -> None:
    """As after vLLM's `reset_capture_state`, and for graphs of several batch sizes."""
    graphs = [stream.capture(words, range(NUM_LAYERS)) for _ in range(2)]
    for graph in (*graphs, graphs[0], stream.capture(words, range(NUM_LAYERS))):
        signal = words.begin_step()
        stream.replay(graph)
        stream.run()
        assert layers(signal) == [0, 1, 2, 3]


def test_a_step_that_begins_before_the_last_one_has_run_does_not_overtake_it(
    words: DeviceWords, stream: HostStream
) -> None:
    """The model thread enqueues steps ahead: the number is read when the stream gets there."""
    graph = stream.capture(words, range(NUM_LAYERS))
    one = words.begin_step()
    stream.replay(graph)
    one.finish()
    two = words.begin_step()
    assert layers(one) == layers(two) == []
    stream.run()
    assert layers(one) == [0, 1, 2, 3]
    assert layers(two) == []


def test_the_native_poller_rings_for_a_portion(stream: HostStream) -> None:
    bell = native.extension().Bell()
    watching = Poller(bell)
    words = DeviceWords(NUM_LAYERS, torch.device("cpu"), stream, watching)
    try:
        signal = words.begin_step()
        assert signal.is_watched
        signal.watch([[0, 1], [2, 3]])
        signal.bump(0)
        stream.run()
        assert not bell.wait_for(0.05)
        signal.bump(1)
        stream.run()
        assert bell.wait_for(LIMIT_S)
        assert layers(signal) == [0, 1]
        signal.finish()
        stream.run()
        assert bell.wait_for(LIMIT_S)
    finally:
        watching.close()
