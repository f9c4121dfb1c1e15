"""What is compiled, and its equivalents in Python: bells, layer words, the poller as a watcher, the CUDA source."""

import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from vllm_pd_connector.engine.layer_signal import HostLayerSignal, LayerSignal, PlainSignals
from vllm_pd_connector.engine.word_signal import HostWords, make_signals
from vllm_pd_connector.kernels import device_launch, native
from vllm_pd_connector.kernels.bell import Bell, PythonBell
from vllm_pd_connector.kernels.poller import Poller, Trigger

needs_extension = pytest.mark.skipif(not native.is_built(), reason=native.WHY_MISSING)
LIMIT_S = 20.0
FAR_NS = 2**62


@pytest.fixture(params=["python", pytest.param("native", marks=needs_extension)])
def bell(request: pytest.FixtureRequest) -> Bell:
    return PythonBell() if request.param == "python" else native.extension().Bell()


class TestBell:
    def test_rings_before_the_wait_count_once(self, bell: Bell) -> None:
        bell.ring()
        bell.ring()
        assert bell.wait_for(LIMIT_S)
        assert not bell.wait_for(0.001)

    def test_a_waiting_thread_is_woken(self, bell: Bell) -> None:
        woken = threading.Event()

        def wait() -> None:
            bell.wait()
            woken.set()

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        assert not woken.wait(0.02)
        bell.ring()
        assert woken.wait(LIMIT_S)
        thread.join(LIMIT_S)

    def test_other_threads_compute_while_one_waits(self, bell: Bell) -> None:
        """It waits without the GIL: else nobody could ring."""
        ringer = threading.Timer(0.02, bell.ring)
        ringer.start()
        assert bell.wait_for(LIMIT_S)
        ringer.join()


@pytest.fixture(params=["plain", pytest.param("words", marks=needs_extension)])
def signals(request: pytest.FixtureRequest) -> PlainSignals | HostWords:
    return PlainSignals("cpu", 4) if request.param == "plain" else HostWords(4)


def layers(signal: LayerSignal) -> list[int]:
    return [layer for layer, _ in signal.take()]


class TestSignals:
    """The same for the signal in Python and the one in words."""

    def test_layers_come_once_in_the_order_of_their_bumps(self, signals: PlainSignals | HostWords) -> None:
        signal = signals.begin_step()
        assert layers(signal) == []
        signal.bump(2)
        signal.bump(0)
        assert layers(signal) == [2, 0]
        signal.bump(2)
        signal.bump(3)
        assert layers(signal) == [3]
        assert layers(signal) == []

    def test_finish_gives_and_counts_the_layers_without_a_hook(self, signals: PlainSignals | HostWords) -> None:
        signal = signals.begin_step()
        signal.bump(1)
        assert layers(signal) == [1]
        assert signal.finish() == 3
        assert sorted(layers(signal)) == [0, 2, 3]

    def test_a_whole_step_has_none_without_a_hook(self, signals: PlainSignals | HostWords) -> None:
        signal = signals.begin_step()
        for layer in range(4):
            signal.bump(layer)
        assert signal.finish() == 0

    def test_a_new_step_begins_with_nothing_ready(self, signals: PlainSignals | HostWords) -> None:
        signals.begin_step().finish()
        second = signals.begin_step()
        assert layers(second) == []
        second.bump(3)
        assert layers(second) == [3]

    def test_times_are_those_of_the_bumps(self, signals: PlainSignals | HostWords) -> None:
        signal = signals.begin_step()
        before = time.monotonic_ns()
        signal.bump(1)
        after = time.monotonic_ns()
        ((_, at_ns),) = signal.take()
        assert before <= at_ns <= after


@needs_extension
class TestWords:
    def test_an_older_step_that_was_not_taken_is_ready_once_a_newer_one_is(self) -> None:
        """Its pages are in memory; a word holds the last number only."""
        words = HostWords(2)
        old = words.begin_step()
        new = words.begin_step()
        new.bump(1)
        assert layers(old) == [1]

    def test_a_layer_that_is_none_is_refused(self) -> None:
        with pytest.raises(IndexError):
            HostWords(2).begin_step().bump(2)

    def test_the_cpu_has_words_where_they_are_compiled(self) -> None:
        assert isinstance(make_signals(torch.device("cpu"), 2, None), HostWords)

    def test_a_watched_layer_rings_without_a_look_from_python(self) -> None:
        bell = native.extension().Bell()
        poller = Poller(bell)
        words = native.extension().LayerWords(2)
        try:
            poller.watch(Trigger(words, [0, 1], 1, FAR_NS))
            words.bump(1, 0)
            assert not bell.wait_for(0.02)
            words.bump(1, 1)
            assert bell.wait_for(LIMIT_S)
        finally:
            poller.close()

    def test_words_that_a_device_writes_are_looked_at_again_and_again(self) -> None:
        """No wake: memory changes under the poller, as a kernel changes it."""
        memory = torch.zeros(2, dtype=torch.int64)
        words = native.extension().LayerWords(memory.data_ptr(), 2)
        bell = native.extension().Bell()
        poller = Poller(bell)
        try:
            poller.watch(Trigger(words, [1], 7, FAR_NS))
            assert not bell.wait_for(0.02)
            memory[1] = 7
            assert bell.wait_for(LIMIT_S)
        finally:
            poller.close()

    def test_a_request_needs_a_way_to_post(self) -> None:
        poller = Poller(native.extension().Bell())
        try:
            with pytest.raises(ValueError, match="without a way to post"):
                poller.arm(Trigger(native.extension().LayerWords(1), [0], 1, FAR_NS), request=1)
        finally:
            poller.close()

    def test_an_idle_poller_uses_no_cpu(self) -> None:
        """Law 15, after it has had something to do."""
        bell = native.extension().Bell()
        poller = Poller(bell)
        words = native.extension().LayerWords(1)
        try:
            words.bump(1, 0)
            poller.watch(Trigger(words, [0], 1, FAR_NS))
            assert bell.wait_for(LIMIT_S)
            before = time.process_time()
            time.sleep(0.2)
            assert time.process_time() - before < 0.05
        finally:
            poller.close()


def test_without_the_extension_everything_is_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_native", None)
    assert isinstance(make_signals(torch.device("cpu"), 2, None).begin_step(), HostLayerSignal)
    with pytest.raises(ImportError):
        native.extension()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.timeout(180)
def test_the_cuda_source_compiles_for_every_architecture(tmp_path: Path) -> None:
    """By nvcc with the host part, and its kernels alone, as NVRTC sees them."""
    source = device_launch.SOURCE.resolve()
    for arch in ("80", "90", "100"):
        target = f"-gencode=arch=compute_{arch},code=sm_{arch}"
        subprocess.run(
            ["nvcc", "-std=c++17", target, "-c", source, "-o", tmp_path / f"{arch}.o"], check=True, timeout=100
        )
        kernels = ["nvcc", "-DPD_KERNELS_ONLY", target, "-cubin", source, "-o", tmp_path / f"{arch}.cubin"]
        subprocess.run(kernels, check=True, timeout=100)
        names = (tmp_path / f"{arch}.cubin").read_bytes()
        assert all(name in names for name in (b"pd_begin_step", b"pd_signal_layer", b"pd_finish_step"))
