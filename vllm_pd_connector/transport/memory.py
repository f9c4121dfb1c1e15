"""A transport inside one process: real addresses, real copies, no network. Shipped for tests, examples and benchmarks.

Writes are asynchronous on purpose: a write posted stays POSTED until it was polled `polls_per_write` times, so code
that treats posting as completion fails here as it would on a NIC.
"""

import ctypes
from collections import deque
from dataclasses import dataclass, field

from vllm_pd_connector.errors import PeerLost
from vllm_pd_connector.geometry.page_table import PageTable, PageView
from vllm_pd_connector.plan.write import BoundWrite
from vllm_pd_connector.transport.base import WriteStatus, check_connected


class MemoryFabric:
    """The network: transports that can reach each other by name."""

    def __init__(self) -> None:
        self._endpoints: dict[str, MemoryTransport] = {}

    def join(self, name: str, transport: "MemoryTransport") -> None:
        self._endpoints[name] = transport

    def leave(self, name: str) -> None:
        self._endpoints.pop(name, None)

    def find(self, name: str) -> "MemoryTransport | None":
        return self._endpoints.get(name)


@dataclass(slots=True)
class MemoryPeer:
    name: str
    pages: PageTable
    is_connected: bool = True


@dataclass(slots=True)
class MemoryLane:
    peer: MemoryPeer
    src: PageView
    dst: PageView


@dataclass(slots=True)
class MemoryWrite:
    lane: MemoryLane
    write: BoundWrite
    note: bytes
    polls_left: int
    status: WriteStatus = WriteStatus.PREPARED


@dataclass
class MemoryTransport:
    """One endpoint of a `MemoryFabric`.

    Args:
        fabric: the network it joins.
        name: unique on the fabric.
        polls_per_write: polls until a write is done; 0 completes it inside `post`.
    """

    fabric: MemoryFabric
    name: str
    polls_per_write: int = 1
    pages: PageTable | None = None
    _inbox: deque[bytes] = field(default_factory=deque)

    def register(self, pages: PageTable) -> None:
        self.pages = pages
        self.fabric.join(self.name, self)

    def descriptor(self) -> bytes:
        return self.name.encode()

    def connect(self, descriptor: bytes, pages: PageTable) -> MemoryPeer:
        name = descriptor.decode(errors="replace")
        target = self.fabric.find(name)
        if target is None:
            raise PeerLost(f"no endpoint {name!r} on this fabric")
        if target.pages != pages:
            raise PeerLost(f"endpoint {name!r} has registered other memory")
        return MemoryPeer(name, pages)

    def open_lane(self, peer: MemoryPeer, src: PageView, dst: PageView) -> MemoryLane:
        check_connected(peer, peer.name)
        return MemoryLane(peer, src, dst)

    def prepare_write(self, lane: MemoryLane, write: BoundWrite, note: bytes) -> MemoryWrite:
        check_connected(lane.peer, lane.peer.name)
        return MemoryWrite(lane, write, note, self.polls_per_write)

    def post(self, handle: MemoryWrite, note: bytes | None = None) -> None:
        peer, handle.note = handle.lane.peer, note or handle.note
        if not peer.is_connected or self.fabric.find(peer.name) is None:
            handle.status = WriteStatus.FAILED
            raise PeerLost(f"endpoint {peer.name!r} has left")
        handle.status = WriteStatus.POSTED
        if not handle.polls_left:
            self._finish(handle)

    def withdraw(self, handle: MemoryWrite) -> bool:
        if handle.status is WriteStatus.PREPARED:
            handle.status = WriteStatus.WITHDRAWN
        return handle.status is WriteStatus.WITHDRAWN

    def poll(self, handle: MemoryWrite) -> WriteStatus:
        if handle.status is WriteStatus.POSTED:
            handle.polls_left -= 1
            if handle.polls_left <= 0:
                self._finish(handle)
        return handle.status

    def release(self, handle: MemoryWrite) -> bool:
        return handle.status is not WriteStatus.POSTED

    def notify(self, peer: MemoryPeer, note: bytes) -> None:
        target = self.fabric.find(peer.name) if peer.is_connected else None
        if target is None:
            raise PeerLost(f"endpoint {peer.name!r} has left")
        target._inbox.append(note)

    def notifications(self) -> list[bytes]:
        notes = list(self._inbox)
        self._inbox.clear()
        return notes

    def read_page(self, layer: int, block: int) -> bytes:
        assert self.pages is not None
        return ctypes.string_at(self.pages.address(layer, block), self.pages.page_bytes)

    def disconnect(self, peer: MemoryPeer) -> None:
        peer.is_connected = False

    def close(self) -> None:
        self.fabric.leave(self.name)

    def _finish(self, handle: MemoryWrite) -> None:
        lane = handle.lane
        target = self.fabric.find(lane.peer.name) if lane.peer.is_connected else None
        if target is None:
            handle.status = WriteStatus.FAILED
            return
        for src, dst in zip(handle.write.src_pieces.tolist(), handle.write.dst_pieces.tolist(), strict=True):
            source, length = lane.src.locate(src)
            address, room = lane.dst.locate(dst)
            assert room == length, f"{length} B for a piece of {room} B"
            ctypes.memmove(address, source, length)
        target._inbox.append(handle.note)
        handle.status = WriteStatus.DONE
