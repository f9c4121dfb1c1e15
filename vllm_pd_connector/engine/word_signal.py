"""Signals by words: one 64-bit word per layer holds the number of the last step in which its KV reached memory.

A number that is stored, instead of a counter that grows, needs no base to count from: replays, warm-ups and dummy
batches store the number of the latest step, which is there already (docs/adr/0011).
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, Any

import torch

from vllm_pd_connector.engine.layer_signal import LayerSignal, LayerSignals, PlainSignals
from vllm_pd_connector.kernels import device_launch, native
from vllm_pd_connector.kernels.poller import Trigger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_pd_connector.kernels.device_launch import DeviceLaunch
    from vllm_pd_connector.kernels.poller import Poller

logger = getLogger(__name__)

WORD_BYTES = 8
NEVER_NS = 2**62


class HostWords:
    """A rank's words where the model thread computes."""

    is_capturing = False

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._words = native.extension().LayerWords(num_layers)
        self._steps = itertools.count(1)

    def begin_step(self) -> LayerSignal:
        step = next(self._steps)
        return WordSignal(self._words, self._num_layers, step, partial(self._words.bump, step), self._words.finish)

    def capture(self, layer: int) -> None:
        pass  # no graphs


class DeviceWords:
    """A rank's words on a CUDA device: pinned host memory that one-thread kernels write, also from inside graphs.

    owned by: the model thread; the stream is the one current there.
    """

    def __init__(self, num_layers: int, device: torch.device, launch: DeviceLaunch, poller: Poller) -> None:
        # The last word counts layers that no hook announced.
        self._memory = torch.zeros(num_layers + 1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._epoch = torch.zeros(1, dtype=torch.int64, device=device)
        self._launch = launch
        self._poller = poller
        self._num_layers = num_layers
        self._words = native.extension().LayerWords(self._memory.data_ptr(), num_layers)
        self._words_address, self._epoch_address = self._memory.data_ptr(), self._epoch.data_ptr()
        self._stream = 0
        self._steps = itertools.count(1)
        self._num_unannounced = 0

    @property
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def begin_step(self) -> LayerSignal:
        step = next(self._steps)
        self._stream = _stream()  # a step's layers are all on one stream
        self._launch.begin_step(self._stream, self._epoch_address, step)
        return WordSignal(self._words, self._num_layers, step, self._bump, self._finish, self._poller)

    def capture(self, layer: int) -> None:
        self._launch.signal_layer(_stream(), self._epoch_address, self._words_address + layer * WORD_BYTES)

    def _bump(self, layer: int) -> None:
        self._launch.signal_layer(self._stream, self._epoch_address, self._words_address + layer * WORD_BYTES)

    def _finish(self, _step: int) -> int:
        count = self._words_address + self._num_layers * WORD_BYTES
        self._launch.finish_step(self._stream, self._epoch_address, self._words_address, self._num_layers, count)
        before, self._num_unannounced = self._num_unannounced, int(self._memory[-1])
        return self._num_unannounced - before


class WordSignal:
    """One step over a rank's words."""

    must_poll = False
    has_triggers = True

    def __init__(
        self,
        words: Any,
        num_layers: int,
        step: int,
        bump: Callable[[int], None],
        finish: Callable[[int], int],
        watcher: Poller | None = None,
    ) -> None:
        self._words = words
        self._step = step
        self.bump = bump  # called as it is: a method in between would cost the model thread as much again
        self._finish = finish
        self._watcher = watcher
        self.is_watched = watcher is not None
        self._untaken = list(range(num_layers))

    def finish(self) -> int:
        return self._finish(self._step)

    def take(self) -> list[tuple[int, int]]:
        fresh = [layer for layer in self._untaken if self._words.is_ready(layer, self._step)]
        if fresh:
            self._untaken = [layer for layer in self._untaken if layer not in set(fresh)]
        now = time.monotonic_ns()
        return sorted(((layer, self._words.bumped_ns(layer) or now) for layer in fresh), key=lambda pair: pair[1])

    def watch(self, portions: Sequence[Sequence[int]]) -> None:
        if self._watcher is not None:
            for layers in portions:
                self._watcher.watch(self.trigger(layers, NEVER_NS))

    def trigger(self, layers: Sequence[int], deadline_ns: int) -> Trigger:
        return Trigger(self._words, layers, self._step, deadline_ns)


def make_signals(
    device: torch.device, num_layers: int, poller: Poller | None, *, has_full_graphs: bool = False
) -> LayerSignals:
    """The best signals this installation has for a device.

    Args:
        device: where the KV cache is.
        num_layers: layers of the rank.
        poller: None where nothing was compiled.
        has_full_graphs: vLLM may replay whole steps, in which no Python runs.
    """
    if device.type != "cuda" and native.is_built():
        return HostWords(num_layers)
    if device.type == "cuda" and poller is not None and device_launch.is_available():
        return DeviceWords(num_layers, device, device_launch.make_launch(), poller)
    if device.type == "cuda" and has_full_graphs:
        logger.warning(
            "event=graphs_without_signals full_cuda_graphs is on, but no kernels are here that announce layers from "
            "inside a graph: pages of replayed steps leave at the step's end; turn it off, or install nvcc or cupy"
        )
    return PlainSignals(device.type, num_layers)


def _stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)
