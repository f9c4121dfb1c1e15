"""The seam between planning and the network. Above it nobody knows what is below.

One thread, the messenger, calls everything except `register`, which runs once before that thread starts.
"""

from enum import Enum, auto
from typing import Protocol

from vllm_pd_connector.errors import PeerLost
from vllm_pd_connector.geometry.page_table import PageTable, PageView
from vllm_pd_connector.kernels.bell import Bell
from vllm_pd_connector.kernels.poller import ANYWHERE, Poller, ThreadPlace, Trigger
from vllm_pd_connector.plan.write import BoundWrite


class WriteStatus(Enum):
    """Where a write is. DONE: its bytes are at the destination and its note was sent after them."""

    PREPARED = auto()
    ARMED = auto()  # a native thread is going to post it
    POSTED = auto()
    DONE = auto()
    FAILED = auto()
    WITHDRAWN = auto()  # not posted and never will be


class Peer(Protocol):
    """A connected remote rank. Made by `Transport.connect`; opaque to callers."""

    @property
    def pages(self) -> PageTable:
        """The remote rank's pages."""
        ...

    @property
    def is_connected(self) -> bool:
        """False once it was disconnected."""
        ...


class Lane(Protocol):
    """Prepared pieces of the local pages and of a peer's. Made by `Transport.open_lane`; opaque to callers."""

    @property
    def peer(self) -> Peer:
        """Whose pages they are."""
        ...


class WriteHandle(Protocol):
    """A write. Made by `Transport.prepare_write`; opaque to callers."""


class Transport(Protocol):
    """One rank's endpoint."""

    def register(self, pages: PageTable) -> None:
        """Make the rank's own pages readable and writable by peers. Called once.

        Raises:
            UnsupportedEngine: the backend cannot register this memory.
        """
        ...

    def descriptor(self) -> bytes:
        """What a peer needs to `connect`; under 1 KiB for NIXL with one region."""
        ...

    def connect(self, descriptor: bytes, pages: PageTable) -> Peer:
        """Reach a rank by its descriptor; the same descriptor again gives a fresh peer for the same rank.

        Raises:
            PeerLost: the descriptor is not usable.
        """
        ...

    def open_lane(self, peer: Peer, src: PageView, dst: PageView) -> Lane:
        """Prepare writes from pieces of the local pages to as many pieces of the peer's; it ends with the peer.

        Raises:
            PeerLost: the peer is gone.
        """
        ...

    def prepare_write(self, lane: Lane, write: BoundWrite, note: bytes) -> WriteHandle:
        """Everything that can be done before the pages are ready; reads none of them.

        Args:
            lane: which pages the pieces are of.
            write: which pieces.
            note: is delivered once, after the bytes.

        Raises:
            PeerLost: the peer is gone.
        """
        ...

    def post(self, handle: WriteHandle, note: bytes | None = None) -> None:
        """Start copying the pieces of a prepared write.

        Args:
            handle: prepared.
            note: instead of the one it was prepared with.

        Raises:
            PeerLost: the peer is gone; the write has FAILED.
        """
        ...

    def withdraw(self, handle: WriteHandle) -> bool:
        """True when a write was not posted and never will be."""
        ...

    def poll(self, handle: WriteHandle) -> WriteStatus:
        """Drive a write and say where it is. The note is only sent by such a call, so keep polling until it is over."""
        ...

    def release(self, handle: WriteHandle) -> bool:
        """Give a write's handle back; False while it is armed or posted and may still read and write pages.

        No transport can call a posted write back: NIXL's own release of such a handle returns at once and the write
        goes on (docs/adr/0008).
        """
        ...

    def notify(self, peer: Peer, note: bytes) -> None:
        """Send a note without bytes.

        Raises:
            PeerLost: it cannot be sent.
        """
        ...

    def notifications(self) -> list[bytes]:
        """Notes that arrived since the last call, in order for each sender. Also drives incoming writes."""
        ...

    def read_page(self, layer: int, block: int) -> bytes:
        """A copy of one local page, for digests.

        Raises:
            UnsupportedEngine: the memory cannot be read by the CPU.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Drop a peer that no write is in flight to. Idempotent.

        Its lanes end with it: whatever is prepared, posted or notified on one of them from now on raises PeerLost, also
        when the same rank has been connected again.
        """
        ...

    def close(self) -> None:
        """Deregister and stop. Idempotent."""
        ...


def check_connected(peer: Peer, name: str) -> None:
    """Raises:
    PeerLost: the peer was disconnected, so its lanes are no more.
    """
    if not peer.is_connected:
        raise PeerLost(f"{name} was disconnected")


def post_write(transport: Transport, lane: Lane, write: BoundWrite, note: bytes) -> WriteHandle:
    """Prepare a write and post it at once.

    Raises:
        PeerLost: the peer is gone; nothing was posted.
    """
    handle = transport.prepare_write(lane, write, note)
    transport.post(handle)
    return handle


class ArmingTransport(Transport, Protocol):
    """A transport whose writes can be posted by a native thread when their layers are ready."""

    def open_poller(self, bell: Bell, place: ThreadPlace = ANYWHERE) -> Poller:
        """Try native posting out and start the thread. Called once, after `register`.

        Args:
            bell: `_native.Bell`.
            place: where the thread runs.

        Raises:
            UnsupportedEngine: it does not work with what is installed; nothing has changed.
            ImportError: there is no compiled extension.
        """
        ...

    def arm(self, handle: WriteHandle, trigger: Trigger) -> None:
        """Have a prepared write posted once the trigger is met. The bell is rung when it is over; nobody need poll."""
        ...

    def moments(self, handle: WriteHandle) -> tuple[int, int]:
        """Monotonic ns at which an armed write's last layer was ready, and it was posted; 0 for what did not happen."""
        ...
