"""How the writer learns that a layer's KV is in memory.

The model thread pays one append, or one CUDA event, per layer (law 14).
"""

import time
from typing import Any, Protocol

import torch


class LayerSignal(Protocol):
    """One step's layers. `bump` and `finish` are called by the model thread, `take` by the messenger thread.

    Attributes:
        must_poll: a layer may become ready later than its bump, without anybody waking the messenger.
    """

    must_poll: bool

    def bump(self, layer: int) -> None:
        """The layer's attention has been enqueued (device) or is done (CPU)."""
        ...

    def finish(self) -> None:
        """The forward pass has been enqueued or is done: layers whose hook never fired count as bumped."""
        ...

    def take(self) -> list[tuple[int, int]]:
        """(layer, monotonic ns when it was seen ready) for layers in memory that were not taken before."""
        ...


class HostLayerSignal:
    """For backends that run in the model thread: when the hook runs, the KV is in memory."""

    must_poll = False

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._bumps: list[tuple[int, int]] = []
        self._taken: set[int] = set()
        self._is_finished = False

    def bump(self, layer: int) -> None:
        self._bumps.append((layer, time.monotonic_ns()))

    def finish(self) -> None:
        self._is_finished = True

    def take(self) -> list[tuple[int, int]]:
        # Read the flag first: bumps made before `finish` are then in the list.
        is_finished = self._is_finished
        ready = dict(reversed(self._bumps[:]))
        if is_finished:
            now = time.monotonic_ns()
            ready = {**dict.fromkeys(range(self._num_layers), now), **ready}
        fresh = sorted((at, layer) for layer, at in ready.items() if layer not in self._taken)
        self._taken.update(layer for _, layer in fresh)
        return [(layer, at) for at, layer in fresh]


class CudaLayerSignal:
    """For CUDA streams: one event recorded after each layer's attention; the writer queries, never synchronises."""

    must_poll = True

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._events: list[tuple[int, Any]] = []
        self._next = 0
        self._taken: set[int] = set()

    def bump(self, layer: int) -> None:
        event = torch.cuda.Event()
        event.record()
        self._events.append((layer, event))

    def finish(self) -> None:
        event = torch.cuda.Event()
        event.record()
        self._events.extend((layer, event) for layer in range(self._num_layers))

    def take(self) -> list[tuple[int, int]]:
        fresh: list[tuple[int, int]] = []
        while self._next < len(self._events) and self._events[self._next][1].query():
            layer = self._events[self._next][0]
            self._next += 1
            if layer not in self._taken:
                self._taken.add(layer)
                fresh.append((layer, time.monotonic_ns()))
        return fresh


def make_signal(device_type: str, num_layers: int) -> LayerSignal:
    """The signal for the device the KV cache is on."""
    return CudaLayerSignal(num_layers) if device_type == "cuda" else HostLayerSignal(num_layers)
