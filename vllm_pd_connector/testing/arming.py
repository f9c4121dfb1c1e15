"""Armed writes without a native thread: each is posted by the first poll that finds its trigger met."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.errors import PeerLost
from vllm_pd_connector.kernels.poller import ANYWHERE
from vllm_pd_connector.transport.base import WriteStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.kernels.bell import Bell
    from vllm_pd_connector.kernels.poller import Poller, ThreadPlace, Trigger
    from vllm_pd_connector.plan.write import BoundWrite
    from vllm_pd_connector.transport.base import Transport


@dataclass(slots=True)
class PolledWrite:
    """A write of `ArmingByPoll` and that of the transport below; armed while it has a trigger that is not met."""

    below: Any
    trigger: Trigger | None = None
    ready_ns: int = 0


class ArmingByPoll:
    """An `ArmingTransport` over any transport; everything else is passed on.

    Args:
        below: the transport that carries the bytes.
        clock: monotonic seconds, as in the triggers.
    """

    def __init__(self, below: Transport, clock: Callable[[], float] = time.monotonic) -> None:
        self._below = below
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def open_poller(self, bell: Bell, place: ThreadPlace = ANYWHERE) -> Poller:
        raise NotImplementedError("there is no thread here: poll")

    def prepare_write(self, lane: Any, write: BoundWrite, note: bytes) -> PolledWrite:
        return PolledWrite(self._below.prepare_write(lane, write, note))

    def post(self, handle: PolledWrite, note: bytes | None = None) -> None:
        self._below.post(handle.below, note)

    def arm(self, handle: PolledWrite, trigger: Trigger) -> None:
        handle.trigger = trigger

    def withdraw(self, handle: PolledWrite) -> bool:
        handle.trigger = None
        return self._below.withdraw(handle.below)

    def moments(self, handle: PolledWrite) -> tuple[int, int]:
        return handle.ready_ns, handle.ready_ns

    def poll(self, handle: PolledWrite) -> WriteStatus:
        if handle.trigger is not None:
            self._look(handle, handle.trigger)
        return self._below.poll(handle.below) if handle.trigger is None else WriteStatus.ARMED

    def release(self, handle: PolledWrite) -> bool:
        return handle.trigger is None and self._below.release(handle.below)

    def _look(self, handle: PolledWrite, trigger: Trigger) -> None:
        now_ns = round(self._clock() * 1e9)
        if now_ns > trigger.deadline_ns:
            self.withdraw(handle)
        elif all(trigger.words.is_ready(layer, trigger.step) for layer in trigger.layers):
            handle.ready_ns, handle.trigger = now_ns, None
            with suppress(PeerLost):  # it has failed, as the next poll tells
                self.post(handle)
