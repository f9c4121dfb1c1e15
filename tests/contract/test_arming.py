"""Armed writes: a native thread that posts NIXL requests, and the stand-in that tests use, keep one contract."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from vllm_pd_connector.geometry.page_table import whole_pages
from vllm_pd_connector.kernels import native
from vllm_pd_connector.kernels.bell import Bell, PythonBell
from vllm_pd_connector.kernels.poller import Trigger
from vllm_pd_connector.testing.arming import ArmingByPoll
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.shapes import bind_whole, whole_blocks
from vllm_pd_connector.transport.base import ArmingTransport, Transport, WriteHandle, WriteStatus, post_write
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport

pytestmark = pytest.mark.skipif(not native.is_built(), reason=native.WHY_MISSING)

NUM_LAYERS = 3
FAR_NS = 2**62
LIMIT_S = 20.0
names = count()


@dataclass
class Armory:
    """A source that arms, a target, the memory of both, and the words of the source's layers."""

    src: ArmingTransport
    dst: Transport
    src_kv: KvBuffer
    dst_kv: KvBuffer
    bell: Bell
    wake: Callable[[], None] = lambda: None
    stop: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.words = native.extension().LayerWords(NUM_LAYERS)
        peer = self.src.connect(self.dst.descriptor(), self.dst_kv.table)
        self.lane = self.src.open_lane(peer, whole_pages(self.src_kv.table), whole_pages(self.dst_kv.table))
        self.notes: list[bytes] = []

    def arm(self, layers: list[int], block: int, note: bytes, *, step: int = 1, deadline: int = FAR_NS) -> Any:
        write = bind_whole(whole_blocks("t", [block], [block]), layers, self.src_kv.table, self.dst_kv.table)
        handle = self.src.prepare_write(self.lane, write, note)
        self.src.arm(handle, Trigger(self.words, layers, step, deadline))
        return handle

    def bump(self, layer: int, step: int = 1) -> None:
        self.words.bump(step, layer)
        self.wake()

    def until(self, handle: WriteHandle, *statuses: WriteStatus) -> WriteStatus:
        end = time.monotonic() + LIMIT_S
        while (status := self.src.poll(handle)) not in statuses:
            assert time.monotonic() < end, f"still {status}"
            self.notes += self.dst.notifications()
            time.sleep(0.0002)
        return status

    def wait_for_notes(self, *expected: bytes) -> None:
        end = time.monotonic() + LIMIT_S
        while sorted(self.notes) != sorted(expected):
            assert time.monotonic() < end, f"have {self.notes}"
            self.notes += self.dst.notifications()
            time.sleep(0.0002)

    def close(self) -> None:
        self.stop()
        self.src.close()
        self.dst.close()

    def has_landed(self, layer: int, block: int) -> bool:
        return bytes(self.dst_kv.page(layer, block)) == bytes(self.src_kv.page(layer, block))


def buffers() -> tuple[KvBuffer, KvBuffer]:
    src, dst = (KvBuffer(num_layers=NUM_LAYERS, num_blocks=8, page_bytes=256) for _ in range(2))
    src.fill_random(5)
    return src, dst


def by_poll() -> Armory:
    src_kv, dst_kv = buffers()
    fabric = MemoryFabric()
    src, dst = ArmingByPoll(MemoryTransport(fabric, "s")), MemoryTransport(fabric, "t")
    src.register(src_kv.table)
    dst.register(dst_kv.table)
    return Armory(src, dst, src_kv, dst_kv, PythonBell())


def by_nixl() -> Armory:
    pytest.importorskip("nixl._api")
    from vllm_pd_connector.transport.nixl import NixlTransport

    src_kv, dst_kv = buffers()
    src, dst = (NixlTransport(f"arm-{next(names)}") for _ in range(2))
    src.register(src_kv.table)
    dst.register(dst_kv.table)
    bell = native.extension().Bell()
    poller = src.open_poller(bell)
    return Armory(src, dst, src_kv, dst_kv, bell, poller.wake, poller.close)


@pytest.fixture(params=[by_poll, pytest.param(by_nixl, marks=pytest.mark.nixl)])
def armory(request: pytest.FixtureRequest) -> Iterator[Armory]:
    made = request.param()
    yield made
    made.close()


def test_a_write_goes_out_when_its_last_layer_is_there(armory: Armory) -> None:
    handle = armory.arm([0, 2], 3, b"n")
    armory.bump(0)
    time.sleep(0.01)
    assert armory.src.poll(handle) is WriteStatus.ARMED
    assert not armory.src.release(handle)
    assert not armory.dst_kv.array.any()
    armory.bump(2)
    assert armory.until(handle, WriteStatus.DONE, WriteStatus.FAILED) is WriteStatus.DONE
    armory.wait_for_notes(b"n")
    assert armory.has_landed(0, 3)
    assert armory.has_landed(2, 3)
    assert not armory.dst_kv.page(1, 3).any()  # law 3
    assert armory.src.release(handle)
    ready_ns, posted_ns = armory.src.moments(handle)
    assert 0 < ready_ns <= posted_ns


def test_layers_that_were_there_before_count_and_an_older_step_does_not(armory: Armory) -> None:
    armory.bump(1, step=4)
    early = armory.arm([1], 2, b"early", step=4)
    later = armory.arm([1], 5, b"later", step=5)
    assert armory.until(early, WriteStatus.DONE, WriteStatus.FAILED) is WriteStatus.DONE
    assert armory.src.poll(later) is WriteStatus.ARMED
    armory.bump(1, step=6)  # a step that came after it: its pages are in memory as well
    armory.until(later, WriteStatus.DONE)
    armory.wait_for_notes(b"early", b"later")


def test_what_was_withdrawn_is_never_posted(armory: Armory) -> None:
    """Law 1: after a fence was answered nothing more is written."""
    gone, stays = armory.arm([0], 1, b"gone"), armory.arm([0], 2, b"stays")
    assert armory.src.withdraw(gone)
    armory.bump(0)
    armory.until(stays, WriteStatus.DONE)
    armory.wait_for_notes(b"stays")
    assert armory.src.poll(gone) is WriteStatus.WITHDRAWN
    assert armory.src.withdraw(gone)
    assert not armory.dst_kv.page(0, 1).any()
    assert armory.src.release(gone)


def test_what_was_posted_cannot_be_withdrawn(armory: Armory) -> None:
    handle = armory.arm([0], 1, b"n")
    armory.bump(0)
    armory.until(handle, WriteStatus.POSTED, WriteStatus.DONE)
    assert not armory.src.withdraw(handle)
    assert armory.until(handle, WriteStatus.DONE, WriteStatus.FAILED) is WriteStatus.DONE


def test_nothing_is_posted_after_its_deadline(armory: Armory) -> None:
    handle = armory.arm([0], 1, b"late", deadline=time.monotonic_ns() + 1_000_000)
    time.sleep(0.002)
    armory.bump(0)
    assert armory.until(handle, WriteStatus.WITHDRAWN, WriteStatus.DONE) is WriteStatus.WITHDRAWN
    assert not armory.dst_kv.array.any()


def test_writes_posted_at_once_go_on_beside_armed_ones(armory: Armory) -> None:
    armed = armory.arm([1], 4, b"armed")
    write = bind_whole(whole_blocks("t", [6], [6]), [0], armory.src_kv.table, armory.dst_kv.table)
    armory.until(post_write(armory.src, armory.lane, write, b"now"), WriteStatus.DONE)
    armory.bump(1)
    armory.until(armed, WriteStatus.DONE)
    armory.wait_for_notes(b"now", b"armed")
    assert armory.has_landed(0, 6)
    assert armory.has_landed(1, 4)


@pytest.mark.nixl
def test_the_native_thread_posts_and_polls_by_itself() -> None:
    """Nobody polls the write on this side: its note is sent, and the bell says that it is over."""
    armory = by_nixl()
    try:
        handle = armory.arm([0, 1, 2], 7, b"n")
        for layer in range(NUM_LAYERS):
            armory.words.bump(1, layer)
        armory.wake()
        armory.wait_for_notes(b"n")
        assert armory.bell.wait_for(LIMIT_S)
        assert armory.src.poll(handle) is WriteStatus.DONE
    finally:
        armory.close()
