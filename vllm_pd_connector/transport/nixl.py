"""Pages over NIXL: the only module that imports nixl.

The agent runs without NIXL's progress thread, which would burn one core for each idle rank (law 15); whoever posts
polls, because NIXL sends a write's notification from that poll and nowhere else.
"""

import ctypes
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
from nixl import _api as nixl_api
from nixl._api import nixl_agent, nixl_agent_config, nixlBind
from packaging.version import Version

from vllm_pd_connector.errors import PeerLost, UnsupportedEngine
from vllm_pd_connector.geometry.page_table import PageTable, PageView
from vllm_pd_connector.kernels.bell import Bell
from vllm_pd_connector.kernels.poller import ANYWHERE, ArmedWrite, Poller, ThreadPlace, Trigger
from vllm_pd_connector.plan.write import BoundWrite
from vllm_pd_connector.transport.base import WriteStatus, check_connected
from vllm_pd_connector.transport.nixl_abi import tried_abi

_STATUS = {"DONE": WriteStatus.DONE, "PROC": WriteStatus.POSTED, "ERR": WriteStatus.FAILED}

NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    kind
    for name, kind in vars(nixlBind).items()
    if name.startswith("nixl") and isinstance(kind, type) and issubclass(kind, Exception)
)
"""Every exception of the binding. They have no common base below `Exception`, so they are collected by name."""

MIN_NIXL = (1, 5)
"""Older ones take no strided descriptors (below 1.5) and no sync mode (below 1.2): scripts/nixl-releases."""

_unique = itertools.count()


@dataclass(slots=True)
class NixlPeer:
    """A loaded remote agent and the descriptor lists prepared for it."""

    name: str
    pages: PageTable
    dlists: list[Any] = field(default_factory=list)
    is_connected: bool = True


@dataclass(slots=True)
class NixlLane:
    """Prepared descriptor lists of both sides, row for row."""

    peer: NixlPeer
    local: Any
    remote: Any


@dataclass(slots=True)
class NixlWrite:
    """A transfer request; `status` stays once it is over. `armed`: a native thread posts and polls it."""

    handle: Any
    note: bytes
    peer: NixlPeer
    status: WriteStatus = WriteStatus.PREPARED
    armed: ArmedWrite | None = None


class NixlTransport:
    """One NIXL agent. owned by: the messenger thread, after `register`.

    Args:
        name: unique among all agents that ever meet; carries the process generation.
        backend: NIXL backend name.
        devices: ports for UCX to use, as "mlx5_0:1"; empty: its own choice. The operator's UCX_NET_DEVICES wins.

    Raises:
        UnsupportedEngine: NIXL is too old, has no such backend, or it does not load.
    """

    def __init__(self, name: str, backend: str = "UCX", devices: Sequence[str] = ()) -> None:
        if devices:
            # NIXL's own parameter for this gives only the last name of a list its port.
            os.environ.setdefault("UCX_NET_DEVICES", ",".join(devices))
        self._agent = _open_agent(name, backend)
        self._pages: PageTable | None = None
        self._registration: Any = None
        self._dlists: dict[tuple[tuple[int, int], ...], Any] = {}
        self._poller: Poller | None = None
        self._backend = backend
        self._name = name

    def register(self, pages: PageTable) -> None:
        try:
            self._registration = self._agent.register_memory(
                [(pages.base, pages.size_bytes, pages.device_id, "")], pages.memory
            )
        except NIXL_ERRORS as error:
            raise UnsupportedEngine(
                f"NIXL cannot register {pages.size_bytes} B of {pages.memory}: {error!r}"
            ) from error
        self._pages = pages

    def descriptor(self) -> bytes:
        return self._agent.get_agent_metadata()

    def connect(self, descriptor: bytes, pages: PageTable) -> NixlPeer:
        try:
            name = self._agent.add_remote_agent(descriptor)
            name = name.decode() if isinstance(name, bytes) else name
            return NixlPeer(name, pages)
        except NIXL_ERRORS as error:
            raise PeerLost(f"agent descriptor of {len(descriptor)} B is not usable: {error!r}") from error

    def open_lane(self, peer: NixlPeer, src: PageView, dst: PageView) -> NixlLane:
        check_connected(peer, peer.name)
        try:
            if src.pieces not in self._dlists:
                self._dlists[src.pieces] = self._prepare("NIXL_INIT_AGENT", src)
            remote = self._prepare(peer.name, dst)
        except NIXL_ERRORS as error:
            raise PeerLost(f"{len(dst.pieces)} pieces of each page of {peer.name}: {error!r}") from error
        peer.dlists.append(remote)
        return NixlLane(peer, self._dlists[src.pieces], remote)

    def prepare_write(self, lane: NixlLane, write: BoundWrite, note: bytes) -> NixlWrite:
        # NIXL does not check: it reads a released list, whose memory may be that of another peer's list by now.
        check_connected(lane.peer, lane.peer.name)
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE", lane.local, write.src_pieces, lane.remote, write.dst_pieces, note
            )
        except NIXL_ERRORS as error:
            raise PeerLost(f"write to {lane.peer.name}: {error!r}") from error
        return NixlWrite(handle, note, lane.peer)

    def post(self, handle: NixlWrite, note: bytes | None = None) -> None:
        try:
            check_connected(handle.peer, handle.peer.name)
            handle.status = _STATUS[self._agent.transfer(handle.handle, note or handle.note)]
        except (PeerLost, *NIXL_ERRORS) as error:
            handle.status = WriteStatus.FAILED
            raise PeerLost(f"write to {handle.peer.name}: {error!r}") from error

    def open_poller(self, bell: Bell, place: ThreadPlace = ANYWHERE) -> Poller:
        try:
            abi = tried_abi(self._agent, _open_agent(f"{self._name}-probe", self._backend))
        except (*NIXL_ERRORS, AttributeError, TypeError) as error:  # the trial looks into the binding's own objects
            raise UnsupportedEngine(f"native_posting: NIXL's binding is not as expected: {error!r}") from error
        self._poller = Poller(bell, abi, place)
        return self._poller

    def arm(self, handle: NixlWrite, trigger: Trigger) -> None:
        assert self._poller is not None
        handle.armed = self._poller.arm(trigger, handle.handle._handle)
        handle.status = WriteStatus.ARMED

    def withdraw(self, handle: NixlWrite) -> bool:
        if handle.armed is not None:
            assert self._poller is not None
            return self._poller.disarm(handle.armed)
        if handle.status is WriteStatus.PREPARED:
            handle.status = WriteStatus.WITHDRAWN
        return handle.status is WriteStatus.WITHDRAWN

    def moments(self, handle: NixlWrite) -> tuple[int, int]:
        return (handle.armed.ready_ns, handle.armed.posted_ns) if handle.armed is not None else (0, 0)

    def poll(self, handle: NixlWrite) -> WriteStatus:
        if handle.armed is not None:
            handle.status = WriteStatus[handle.armed.state.name]
        elif handle.status is WriteStatus.POSTED:
            try:
                handle.status = _STATUS[self._agent.check_xfer_state(handle.handle)]
            except NIXL_ERRORS:
                handle.status = WriteStatus.FAILED
        return handle.status

    def release(self, handle: NixlWrite) -> bool:
        if handle.status in (WriteStatus.ARMED, WriteStatus.POSTED):
            return False
        try:
            handle.handle.release()
        except NIXL_ERRORS:
            return False
        return True

    def notify(self, peer: NixlPeer, note: bytes) -> None:
        check_connected(peer, peer.name)
        try:
            self._agent.send_notif(peer.name, note)
        except NIXL_ERRORS as error:
            raise PeerLost(f"notification to {peer.name}: {error!r}") from error

    def notifications(self) -> list[bytes]:
        return [note for notes in self._agent.get_new_notifs().values() for note in notes]

    def read_page(self, layer: int, block: int) -> bytes:
        assert self._pages is not None
        if self._pages.memory != "DRAM":
            raise UnsupportedEngine("verify_pages reads pages with the CPU; this KV cache is in device memory")
        return ctypes.string_at(self._pages.address(layer, block), self._pages.page_bytes)

    def disconnect(self, peer: NixlPeer) -> None:
        if not peer.is_connected:
            return
        peer.is_connected = False
        try:
            for dlist in peer.dlists:
                dlist.release()
            self._agent.remove_remote_agent(peer.name)
        except NIXL_ERRORS:
            pass  # already gone: that is what was asked for

    def close(self) -> None:
        if self._registration is None:
            return
        for dlist in self._dlists.values():
            dlist.release()
        self._agent.deregister_memory(self._registration)
        self._registration = None

    def _prepare(self, agent_name: str, view: PageView) -> Any:
        return self._agent.prep_xfer_dlist(agent_name, np.asarray(view.rows(), dtype=np.uint64), view.pages.memory)


def check_release() -> None:
    """Raises:
    UnsupportedEngine: names the release of NIXL that is installed and those that are supported.
    """
    package = nixl_agent.__module__.partition(".")[0].replace("_", "-")  # nixl-cu12, nixl-cu13, nixl-rocm
    try:
        found = version(package)
    except PackageNotFoundError:
        return  # built from source: the first agent shows what it can do
    if Version(found).release < MIN_NIXL:
        least = ".".join(map(str, MIN_NIXL))
        raise UnsupportedEngine(
            f"{package} {found} is installed; this vllm_pd_connector needs NIXL {least} or newer: "
            f"pip install 'nixl>={least}'"
        )


def _open_agent(name: str, backend: str) -> nixl_agent:
    check_release()
    config = nixl_agent_config(
        enable_prog_thread=False, backends=[], sync_mode=nixl_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    )
    try:
        agent = nixl_agent(f"{name}-{next(_unique)}", config)
        agent.create_backend(backend, {})
    except NIXL_ERRORS as error:
        raise UnsupportedEngine(f"NIXL backend {backend} does not start: {error!r}. Set nixl_backend.") from error
    return agent
