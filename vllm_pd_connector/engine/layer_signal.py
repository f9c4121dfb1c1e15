"""How the writer learns that a layer's KV is in memory.

The model thread pays one store, one kernel launch or one CUDA event per layer (law 14).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_pd_connector.kernels.poller import Trigger


class LayerSignal(Protocol):
    """One step's layers. `bump` and `finish` are called by the model thread, the others by the messenger thread.

    Attributes:
        must_poll: a layer may become ready later than its bump, without anybody waking the messenger.
        is_watched: somebody wakes the messenger when a portion is ready, so the hook need not.
        has_triggers: a native poller can wait for its layers.
    """

    must_poll: bool
    is_watched: bool
    has_triggers: bool

    def bump(self, layer: int) -> None:
        """The layer's attention has been enqueued (device) or is done (CPU)."""
        ...

    def finish(self) -> int:
        """The forward pass has been enqueued or is done: layers whose hook never fired count as bumped.

        Returns:
            How many those were; where a device counts them, those of earlier steps it has told of since.
        """
        ...

    def take(self) -> list[tuple[int, int]]:
        """(layer, monotonic ns when it was seen ready) for layers in memory that were not taken before."""
        ...

    def watch(self, portions: Sequence[Sequence[int]]) -> None:
        """Have the messenger woken when all layers of a portion are ready, where `is_watched`."""
        ...

    def trigger(self, layers: Sequence[int], deadline_ns: int) -> Trigger:
        """What a native poller has to wait for. Only where `has_triggers`."""
        ...


class LayerSignals(Protocol):
    """Makes a rank's signals. owned by: the model thread."""

    def begin_step(self) -> LayerSignal:
        """Before the forward pass of a step that has pages to send; at most one step is between this and `finish`."""
        ...

    def capture(self, layer: int) -> None:
        """The layer's hook runs while a CUDA graph is being captured."""
        ...

    @property
    def is_capturing(self) -> bool:
        """Hooks must run although no step is bound."""
        ...


class HostLayerSignal:
    """For backends that run in the model thread: when the hook runs, the KV is in memory."""

    must_poll = is_watched = has_triggers = False

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._bumps: list[tuple[int, int]] = []
        self._taken: set[int] = set()
        self._is_finished = False

    def bump(self, layer: int) -> None:
        self._bumps.append((layer, time.monotonic_ns()))

    def finish(self) -> int:
        self._is_finished = True
        return self._num_layers - len({layer for layer, _ in self._bumps})

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

    def watch(self, portions: Sequence[Sequence[int]]) -> None:
        pass

    def trigger(self, layers: Sequence[int], deadline_ns: int) -> Trigger:
        raise NotImplementedError("has_triggers is False")


class EventLayerSignal:
    """For CUDA streams where no kernel can be launched by us: one event after each layer's attention.

    The writer queries, never synchronises. Not inside CUDA graphs: a replay records no event that can be queried.
    """

    must_poll = True
    is_watched = has_triggers = False

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._events: list[tuple[int, Any]] = []
        self._next = 0
        self._taken: set[int] = set()

    def bump(self, layer: int) -> None:
        event = torch.cuda.Event()
        event.record()
        self._events.append((layer, event))

    def finish(self) -> int:
        announced = {layer for layer, _ in self._events}
        event = torch.cuda.Event()
        event.record()
        self._events.extend((layer, event) for layer in range(self._num_layers))
        return self._num_layers - len(announced)

    def take(self) -> list[tuple[int, int]]:
        fresh: list[tuple[int, int]] = []
        while self._next < len(self._events) and self._events[self._next][1].query():
            layer = self._events[self._next][0]
            self._next += 1
            if layer not in self._taken:
                self._taken.add(layer)
                fresh.append((layer, time.monotonic_ns()))
        return fresh

    def watch(self, portions: Sequence[Sequence[int]]) -> None:
        pass

    def trigger(self, layers: Sequence[int], deadline_ns: int) -> Trigger:
        raise NotImplementedError("has_triggers is False")


class PlainSignals:
    """Signals that need nothing compiled."""

    is_capturing = False

    def __init__(self, device_type: str, num_layers: int) -> None:
        self._kind = EventLayerSignal if device_type == "cuda" else HostLayerSignal
        self._num_layers = num_layers

    def begin_step(self) -> LayerSignal:
        return self._kind(self._num_layers)

    def capture(self, layer: int) -> None:
        pass  # a replay is announced by `finish`
