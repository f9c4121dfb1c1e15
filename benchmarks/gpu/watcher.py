"""From a layer's end to the moment somebody knows: the native poller, and a Python thread that queries.

On a GPU a step of `NUM_LAYERS` kernels of about `LAYER_S` is one CUDA graph; the kernel's end is known from the words
themselves, so the latency is measured against a spinning reader in the main thread. On a CPU the bump is the end.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.summary import spread
from vllm_pd_connector.engine.word_signal import DeviceWords
from vllm_pd_connector.kernels import device_launch, native
from vllm_pd_connector.kernels.poller import Poller, Trigger

NUM_LAYERS = 16
NUM_STEPS = 50
LAYER_S = 0.001
FAR_NS = 2**62
NO_DEVICE = "torch finds no CUDA device"
ON_HOST = "bump to seen by the native poller, main thread busy in Python, us"
ON_DEVICE = "word written by a graph to seen by the native poller, us (a spinning reader is 0)"


def measure(device: torch.device) -> list[dict[str, Any]]:
    if not native.is_built():
        return [{"what": what, "skipped": native.WHY_MISSING} for what in (ON_HOST, ON_DEVICE)]
    if device.type != "cuda":
        return [_host(), {"what": ON_DEVICE, "skipped": NO_DEVICE}]
    if not device_launch.is_available():
        return [{"what": ON_DEVICE, "skipped": "neither nvcc at installation nor cupy"}]
    return [_device()]


def _host() -> dict[str, Any]:
    """A busy main thread bumps."""
    poller = Poller(native.extension().Bell())
    words = native.extension().LayerWords(NUM_LAYERS)
    samples: list[float] = []
    try:
        for step in range(1, NUM_STEPS + 1):
            seen = [poller.arm(Trigger(words, [layer], step, FAR_NS), 0) for layer in range(NUM_LAYERS)]
            for layer in range(NUM_LAYERS):
                _compute_for(LAYER_S)
                words.bump(step, layer)
            _compute_for(LAYER_S)
            samples += [(one.posted_ns - one.ready_ns) / 1e3 for one in seen]
    finally:
        poller.close()
    return _summary(ON_HOST, samples)


def _device() -> dict[str, Any]:
    """A graph of kernels and signals; the main thread spins on the words in pinned memory, which is the truth."""
    poller = Poller(native.extension().Bell())
    words = DeviceWords(NUM_LAYERS, torch.device("cuda"), device_launch.make_launch(), poller)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(NUM_LAYERS):
            torch.cuda._sleep(round(LAYER_S * 1.5e9))
            words.capture(layer)
    samples: list[float] = []
    try:
        for _ in range(NUM_STEPS):
            signal = words.begin_step()
            triggers = [signal.trigger([layer], FAR_NS) for layer in range(NUM_LAYERS)]
            seen = [poller.arm(trigger, 0) for trigger in triggers]
            graph.replay()
            for layer, (trigger, one) in enumerate(zip(triggers, seen, strict=True)):
                while not trigger.words.is_ready(layer, trigger.step):
                    pass
                truth = time.monotonic_ns()
                while not one.posted_ns:
                    pass
                samples.append((one.posted_ns - truth) / 1e3)
    finally:
        poller.close()
    return _summary(ON_DEVICE, samples)


def _compute_for(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _summary(what: str, samples: list[float]) -> dict[str, Any]:
    ordered = sorted(samples)
    return {
        "what": what,
        "n": len(ordered),
        "p50": round(spread(samples).median, 1),
        "p99": round(ordered[int(len(ordered) * 0.99)], 1),
        "max": round(ordered[-1], 1),
    }
