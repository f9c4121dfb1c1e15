"""Any transport, with faults by operation number: the n-th write is lost, fails, hangs or hits a wrong page.

Scripted by number and not by chance, so that a failing test fails again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from vllm_pd_connector.geometry.page_table import PageTable, PageView
from vllm_pd_connector.plan.write import BoundWrite
from vllm_pd_connector.transport.base import Transport, WriteStatus, check_connected

HANG_S = 5.0
"""Seconds a write hangs."""

Action = Literal["wrong_page", "drop", "fail", "hang"]


@dataclass(frozen=True, slots=True)
class ScriptedFault:
    """`count` writes from the `nth` on suffer `action`.

    wrong_page: the first page carries the bytes of another one, and nobody is told.
    drop: nothing is written, and the sender believes it was.
    fail: the write ends as FAILED.
    hang: the write stays POSTED for `HANG_S`, then ends as FAILED, as one does whose retries are used up.
    """

    action: Action
    nth: int
    count: int = 1


@dataclass(slots=True)
class _Write:
    """A write, and what became of it; `below` once the wrapped transport has it."""

    lane: Any
    write: BoundWrite
    note: bytes
    status: WriteStatus = WriteStatus.PREPARED
    ends_at: float = 0.0
    below: Any = None


class ScriptedTransport:
    """Wraps a transport. owned by: as the wrapped one. `clock`: monotonic seconds."""

    def __init__(
        self, inner: Transport, faults: Sequence[ScriptedFault], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._faults = {fault.nth + i: fault.action for fault in faults for i in range(fault.count)}
        self._num_writes = 0

    def prepare_write(self, lane: Any, write: BoundWrite, note: bytes) -> _Write:
        check_connected(lane.peer, "its decoder rank")
        return _Write(lane, write, note)

    def post(self, handle: _Write, note: bytes | None = None) -> None:
        action = self._faults.get(self._num_writes)
        self._num_writes += 1
        handle.status = WriteStatus.POSTED
        if action == "drop":
            handle.status = WriteStatus.DONE
        elif action == "fail":
            handle.status = WriteStatus.FAILED
        elif action == "hang":
            handle.ends_at = self._clock() + HANG_S
        else:
            write = _with_wrong_page(handle.write) if action == "wrong_page" else handle.write
            handle.below = self._inner.prepare_write(handle.lane, write, note or handle.note)
            self._inner.post(handle.below)

    def withdraw(self, handle: _Write) -> bool:
        if handle.status is WriteStatus.PREPARED:
            handle.status = WriteStatus.WITHDRAWN
        return handle.status is WriteStatus.WITHDRAWN

    def poll(self, handle: _Write) -> WriteStatus:
        if handle.below is not None:
            handle.status = self._inner.poll(handle.below)
        elif handle.status is WriteStatus.POSTED and self._clock() > handle.ends_at:
            handle.status = WriteStatus.FAILED
        return handle.status

    def release(self, handle: _Write) -> bool:
        if handle.below is not None:
            return self._inner.release(handle.below)
        return handle.status is not WriteStatus.POSTED

    def register(self, pages: PageTable) -> None:
        self._inner.register(pages)

    def descriptor(self) -> bytes:
        return self._inner.descriptor()

    def connect(self, descriptor: bytes, pages: PageTable) -> Any:
        return self._inner.connect(descriptor, pages)

    def open_lane(self, peer: Any, src: PageView, dst: PageView) -> Any:
        return self._inner.open_lane(peer, src, dst)

    def notify(self, peer: Any, note: bytes) -> None:
        self._inner.notify(peer, note)

    def notifications(self) -> list[bytes]:
        return self._inner.notifications()

    def read_page(self, layer: int, block: int) -> bytes:
        return self._inner.read_page(layer, block)

    def disconnect(self, peer: Any) -> None:
        self._inner.disconnect(peer)

    def close(self) -> None:
        self._inner.close()


def _with_wrong_page(write: BoundWrite) -> BoundWrite:
    other = np.array(write.src_pieces, copy=True)
    other[0] = other[-1] if other[-1] != other[0] else other[0] + 1
    return replace(write, src_pieces=other)
