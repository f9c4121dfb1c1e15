"""Armed writes without a native thread: each is posted by the first poll that finds its trigger met."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.errors import PeerLost
from vllm_pd_connector.transport.base import WriteStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.kernels.bell import Bell
    from vllm_pd_connector.kernels.poller import Poller, Trigger
    from vllm_pd_connector.plan.write import BoundWrite
    from vllm_pd_connector.transport.base import Transport


@dataclass(slots=True)
class PolledWrite:
    """A write of `ArmingByPoll`: armed, withdrawn, or posted with the transport below."""

    lane: Any
    write: BoundWrite
    note: bytes
    trigger: Trigger | None
    status: WriteStatus
    below: Any = None
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

    def open_poller(self, bell: Bell) -> Poller:
        raise NotImplementedError("there is no thread here: poll")

    def post_write(self, lane: Any, write: BoundWrite, note: bytes) -> PolledWrite:
        below = self._below.post_write(lane, write, note)
        return PolledWrite(lane, write, note, None, WriteStatus.POSTED, below)

    def arm_write(self, lane: Any, write: BoundWrite, note: bytes, trigger: Trigger) -> PolledWrite:
        return PolledWrite(lane, write, note, trigger, WriteStatus.ARMED)

    def withdraw(self, handle: PolledWrite) -> bool:
        if handle.status is WriteStatus.ARMED:
            handle.status = WriteStatus.WITHDRAWN
        return handle.status is WriteStatus.WITHDRAWN

    def moments(self, handle: PolledWrite) -> tuple[int, int]:
        return handle.ready_ns, handle.ready_ns

    def poll(self, handle: PolledWrite) -> WriteStatus:
        if handle.status is WriteStatus.ARMED:
            self._look(handle)
        if handle.below is not None:
            handle.status = self._below.poll(handle.below)
        return handle.status

    def release(self, handle: PolledWrite) -> bool:
        if handle.below is not None:
            return self._below.release(handle.below)
        return handle.status is not WriteStatus.ARMED

    def _look(self, handle: PolledWrite) -> None:
        trigger = handle.trigger
        assert trigger is not None
        now_ns = round(self._clock() * 1e9)
        if now_ns > trigger.deadline_ns:
            handle.status = WriteStatus.WITHDRAWN
        elif all(trigger.words.is_ready(layer, trigger.step) for layer in trigger.layers):
            handle.ready_ns = now_ns
            try:
                handle.below = self._below.post_write(handle.lane, handle.write, handle.note)
            except PeerLost:
                handle.status = WriteStatus.FAILED
