"""A transport whose writes take time, fail, land late, and whose notes are lost, doubled and reordered by seed.

What it keeps, because NIXL does: a note leaves after its bytes have landed and only when its write is polled; bytes of
a dead process or of a failed write land within `late_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import PeerLost
from vllm_pd_connector.transport.base import WriteStatus, check_connected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_pd_connector.geometry.page_table import PageTable, PageView
    from vllm_pd_connector.plan.write import BoundWrite
    from vllm_pd_connector.testing.simulation.network import Network
    from vllm_pd_connector.testing.simulation.pages import Pages
    from vllm_pd_connector.testing.simulation.world import Process


@dataclass(slots=True, eq=False)
class SimulatedPeer:
    target: SimulatedTransport | None
    pages: PageTable
    is_connected: bool = True


@dataclass(slots=True, eq=False)
class SimulatedLane:
    """`src` and `dst`: the cells that each piece of a page is made of, on either side."""

    peer: SimulatedPeer
    src: list[range]
    dst: list[range]


@dataclass(slots=True, eq=False)
class SimulatedWrite:
    """A write.

    Attributes:
        fails_at: when the transport gives it up.
        bytes_now: the source's contents once they have left it.
    """

    lane: SimulatedLane
    write: BoundWrite
    note: bytes
    transfer_id: str
    fails_at: float = 0.0
    src_cells: Sequence[int] = ()
    dst_cells: Sequence[int] = ()
    status: WriteStatus = WriteStatus.PREPARED
    has_landed: bool = False
    is_over: bool = False
    bytes_now: list[int] | None = None

    @property
    def peer(self) -> SimulatedPeer:
        return self.lane.peer


class SimulatedTransport:
    """One rank's endpoint.

    Args:
        process: whose.
        network: which.
        rank: which rank.
        memory: what its pages hold and who may touch them.
    """

    def __init__(self, process: Process, network: Network, rank: int, memory: Pages) -> None:
        self._process = process
        self._network = network
        self._world = network.world
        self._rank = rank
        self._memory = memory
        self._name = f"{process}/{rank}".encode()
        self._inbox: list[bytes] = []
        self._in_flight: set[SimulatedWrite] = set()
        self.wake: Callable[[], None] = lambda: None
        network.endpoints[self._name] = self

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def register(self, pages: PageTable) -> None:
        pass

    def descriptor(self) -> bytes:
        return self._name

    def connect(self, descriptor: bytes, pages: PageTable) -> SimulatedPeer:
        target = self._network.endpoints.get(descriptor)
        if target is None and self._world.random.random() < 0.5:
            raise PeerLost(f"{descriptor.decode()} does not answer")
        return SimulatedPeer(target, pages)

    def open_lane(self, peer: SimulatedPeer, src: PageView, dst: PageView) -> SimulatedLane:
        there = peer.target._memory if peer.target is not None else self._memory
        return SimulatedLane(peer, self._memory.cells_of_pieces(src.pieces), there.cells_of_pieces(dst.pieces))

    def prepare_write(self, lane: SimulatedLane, write: BoundWrite, note: bytes) -> SimulatedWrite:
        check_connected(lane.peer, "the peer")
        return SimulatedWrite(lane, write, note, _transfer_of(note))

    def post(self, handle: SimulatedWrite, note: bytes | None = None) -> None:
        peer, handle.note = handle.peer, note or handle.note
        if not peer.is_connected:
            handle.status, handle.is_over = WriteStatus.FAILED, True
            raise PeerLost("disconnected")
        handle.status, handle.fails_at = WriteStatus.POSTED, self._world.now + self._network.noise.fail_s
        handle.src_cells = self._memory.cells(handle.lane.src, handle.write.src_pieces.tolist())
        self._memory.start_read(self._rank, handle.src_cells)
        if peer.target is not None:
            handle.dst_cells = peer.target._memory.cells(handle.lane.dst, handle.write.dst_pieces.tolist())
            peer.target._memory.check_posted_once(handle.transfer_id, peer.target._rank, handle.dst_cells)
        self._in_flight.add(handle)
        self._world.tell("%s posts %d cells of %s", self._process, len(handle.src_cells), handle.transfer_id[:6])
        noise, random = self._network.noise, self._world.random
        if peer.target is None or not peer.target._process.is_alive or random.random() < noise.write_fails:
            self._world.after(random.uniform(0.001, noise.fail_s), None, lambda: self._fail(handle))
        elif random.random() < noise.write_hangs:
            self._world.after(random.uniform(2.0, 4.0), None, lambda: self._land(handle))
        else:
            self._carry(handle)

    def withdraw(self, handle: SimulatedWrite) -> bool:
        if handle.status is WriteStatus.PREPARED:
            handle.status, handle.is_over = WriteStatus.WITHDRAWN, True
        return handle.status is WriteStatus.WITHDRAWN

    def poll(self, handle: SimulatedWrite) -> WriteStatus:
        if handle.has_landed and handle.status is WriteStatus.POSTED:
            handle.status = WriteStatus.DONE
            self.notify(handle.peer, handle.note)
        return handle.status

    def release(self, handle: SimulatedWrite) -> bool:
        return handle.is_over

    def notify(self, peer: SimulatedPeer, note: bytes) -> None:
        if not peer.is_connected:
            raise PeerLost("disconnected")
        target, random, noise = peer.target, self._world.random, self._network.noise
        if target is None or random.random() < noise.note_lost:
            return
        for _ in range(2 if random.random() < noise.note_twice else 1):
            self._network.carry(self._process.name, target._process.name, None, lambda: target._receive(note))

    def notifications(self) -> list[bytes]:
        notes, self._inbox = self._inbox, []
        return notes

    def read_page(self, layer: int, block: int) -> bytes:
        return self._memory.page(self._rank, layer, block)

    def disconnect(self, peer: SimulatedPeer) -> None:
        peer.is_connected = False

    def close(self) -> None:
        self._network.endpoints.pop(self._name, None)

    def die(self) -> None:
        """The process is gone: what it posted may still land, within the transport's bound."""
        self.close()
        for handle in list(self._in_flight):
            self._break_off(handle)

    def _carry(self, handle: SimulatedWrite) -> None:
        """The write is on its way; a link that is cut for long fails it."""
        here, target = self._process.name, handle.peer.target
        assert target is not None
        when = max(self._world.now, self._network.cut_until(here, target._process.name)) + self._network.latency()
        if when > handle.fails_at:
            self._world.at(handle.fails_at, None, lambda: self._fail(handle))
        else:
            self._world.at(when, None, lambda: self._try_land(handle))

    def _try_land(self, handle: SimulatedWrite) -> None:
        target = handle.peer.target
        assert target is not None
        if handle.is_over:
            return
        if self._network.is_cut(self._process.name, target._process.name):
            self._carry(handle)
        else:
            self._land(handle)

    def _land(self, handle: SimulatedWrite) -> None:
        if handle.is_over:
            return
        target = handle.peer.target
        if target is None or not target._process.is_alive:
            self._fail(handle)
            return
        self._end(handle)
        self._put(handle)
        handle.has_landed = True
        self.wake()

    def _fail(self, handle: SimulatedWrite) -> None:
        if handle.is_over:
            return
        self._break_off(handle)
        handle.status = WriteStatus.FAILED
        self.wake()

    def _break_off(self, handle: SimulatedWrite) -> None:
        """No completion will come; the bytes may have left already, and land when the network lets them."""
        if handle.is_over:
            return
        self._end(handle)
        if handle.peer.target is not None and self._world.random.random() < 0.7:
            delay = self._world.random.uniform(0.0, self._network.noise.late_s)
            self._world.after(delay, None, lambda: self._put(handle))

    def _end(self, handle: SimulatedWrite) -> None:
        handle.is_over = True
        contents = self._memory.contents[self._rank]
        handle.bytes_now = [contents[cell] for cell in handle.src_cells]
        self._in_flight.discard(handle)
        if self._process.is_alive:
            self._memory.end_read(self._rank, handle.src_cells)

    def _put(self, handle: SimulatedWrite) -> None:
        target = handle.peer.target
        assert target is not None
        assert handle.bytes_now is not None
        if not target._process.is_alive:
            return
        self._world.tell("%s's write of %s lands at %s", self._process, handle.transfer_id[:6], target._process)
        target._memory.check_land(handle.transfer_id, target._rank, handle.dst_cells)
        contents = target._memory.contents[target._rank]
        for cell, value in zip(handle.dst_cells, handle.bytes_now, strict=True):
            contents[cell] = value

    def _receive(self, note: bytes) -> None:
        if self._process.is_alive:
            self._inbox.append(note)
            self.wake()


def _transfer_of(note: bytes) -> str:
    from vllm_pd_connector.wire.codec import decode_note

    return decode_note(note).transfer_id
