"""Seeing layers and posting their writes without the GIL. All of it needs the compiled extension."""

from __future__ import annotations

import os
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING, Any, Protocol

from vllm_pd_connector.kernels import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_pd_connector.kernels.bell import Bell

logger = getLogger(__name__)

NAP_S = 20e-6
"""Between two looks while anything is armed or in flight. The core it needs meanwhile is the price of a layer hook that
only stores a word."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """When an armed write is to be posted.

    Attributes:
        words: `_native.LayerWords` of the rank.
        layers: all of them must be in memory.
        step: in this step, a number that grows.
        deadline_ns: not later than this, on the monotonic clock.
    """

    words: Any
    layers: Sequence[int]
    step: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class ThreadPlace:
    """Where a native thread runs.

    Attributes:
        cpus: cores it keeps to; empty: any.
        select_device: address of a C function `int f(void *device)` that is called once on the thread, before anything
            else there; 0: no device.
        device: what it is called with.
    """

    cpus: frozenset[int] = frozenset()
    select_device: int = 0
    device: int = 0


ANYWHERE = ThreadPlace()


class ArmedWrite(Protocol):
    """A write that waits for its trigger, then for its end.

    Attributes:
        state: ARMED, POSTED, DONE, FAILED or WITHDRAWN, by its `name`.
        ready_ns: monotonic time at which its last layer was bumped, or seen ready; 0 before.
        posted_ns: when the transport had taken it; 0 before.
    """

    state: Any
    ready_ns: int
    posted_ns: int


class Poller:
    """The native thread. Any thread may call it.

    Args:
        bell: compiled; rung when a write has come to an end or a watched layer is ready.
        abi: `_native.NixlAbi`, to post NIXL requests.
        place: where the thread runs; what of it cannot be had is logged, and the thread runs without it.

    Raises:
        ImportError: there is no compiled extension.
    """

    def __init__(self, bell: Bell, abi: Any = None, place: ThreadPlace = ANYWHERE) -> None:
        cpus = sorted(place.cpus)
        self._poller = native.extension().Poller(bell, abi, NAP_S, cpus, place.select_device, place.device)
        if self._poller.pin_error:
            logger.warning("event=poller_not_pinned cpus=%s reason=%s", cpus, os.strerror(self._poller.pin_error))
        if self._poller.device_error:
            logger.warning("event=poller_without_device reason=error %d of the driver", self._poller.device_error)

    def arm(self, trigger: Trigger, request: int) -> ArmedWrite:
        """Post a request once its trigger is met. Waits for a post that is under way."""
        armed: ArmedWrite = self._poller.arm(
            trigger.words, list(trigger.layers), trigger.step, request, trigger.deadline_ns
        )
        return armed

    def watch(self, trigger: Trigger) -> None:
        """Ring the bell once a trigger is met."""
        self.arm(trigger, 0)

    def disarm(self, write: ArmedWrite) -> bool:
        """True: it was not posted and never will be. Waits for a post that is under way."""
        return bool(self._poller.disarm(write))

    def wake(self) -> None:
        """Look now, without the rest of the nap. Microseconds."""
        self._poller.wake()

    def close(self) -> None:
        """The thread has ended when this returns. Idempotent."""
        self._poller.close()
