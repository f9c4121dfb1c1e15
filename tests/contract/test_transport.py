"""One suite for every transport, so that the one in memory cannot lie about what NIXL does."""

import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

import pytest

from vllm_pd_connector.errors import PeerLost
from vllm_pd_connector.geometry.page_table import PageView, whole_pages
from vllm_pd_connector.plan.write import BoundWrite
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.shapes import bind_whole, bound_pieces, whole_blocks
from vllm_pd_connector.transport.base import Lane, Peer, Transport, WriteHandle, WriteStatus, post_write
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport

NUM_LAYERS, NUM_BLOCKS, PAGE_BYTES = 3, 16, 256
DEADLINE_S = 20.0
names = count()


@dataclass
class Pair:
    """A source and a target endpoint, and the memory of both."""

    src: Transport
    dst: Transport
    src_kv: KvBuffer
    dst_kv: KvBuffer
    new: Callable[[], Transport]

    def connect(self) -> Peer:
        return self.src.connect(self.dst.descriptor(), self.dst_kv.table)

    def lane(self, peer: Peer | None = None) -> Lane:
        """Whole pages to whole pages."""
        src, dst = whole_pages(self.src_kv.table), whole_pages(self.dst_kv.table)
        return self.src.open_lane(peer or self.connect(), src, dst)

    def drive(self, *handles: WriteHandle) -> list[WriteStatus]:
        """Poll both sides until every write is over; the target's notes are kept in `notes`."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            self.notes += self.dst.notifications()
            statuses = [self.src.poll(handle) for handle in handles]
            if WriteStatus.POSTED not in statuses:
                return statuses
        raise AssertionError(f"writes are not over after {DEADLINE_S:g} s")

    def wait_for_notes(self, number: int) -> list[bytes]:
        end = time.monotonic() + DEADLINE_S
        while len(self.notes) < number and time.monotonic() < end:
            self.notes += self.dst.notifications()
            self.src.notifications()
        return self.notes

    def __post_init__(self) -> None:
        self.notes: list[bytes] = []


def memory_pair(polls_per_write: int) -> Pair:
    fabric = MemoryFabric()
    return make_pair(lambda: MemoryTransport(fabric, f"m{next(names)}", polls_per_write))


def nixl_pair() -> Pair:
    pytest.importorskip("nixl._api")
    from vllm_pd_connector.transport.nixl import NixlTransport

    return make_pair(lambda: NixlTransport(f"test-{next(names)}"))


def make_pair(new: Callable[[], Transport], *, page_bytes: int = PAGE_BYTES) -> Pair:
    src_kv = KvBuffer(num_layers=NUM_LAYERS, num_blocks=NUM_BLOCKS, page_bytes=page_bytes, gap=64)
    dst_kv = KvBuffer(num_layers=NUM_LAYERS, num_blocks=NUM_BLOCKS + 4, page_bytes=page_bytes)
    src_kv.fill_random(7)
    pair = Pair(new(), new(), src_kv, dst_kv, new)
    pair.src.register(src_kv.table)
    pair.dst.register(dst_kv.table)
    return pair


MAKERS = {"memory-0": lambda: memory_pair(0), "memory-3": lambda: memory_pair(3), "nixl": nixl_pair}


@pytest.fixture(params=["memory-0", "memory-3", pytest.param("nixl", marks=pytest.mark.nixl)])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = MAKERS[request.param]()
    yield made
    made.src.close()
    made.dst.close()


def bound(pair: Pair, src: list[int], dst: list[int], layers: list[int]) -> BoundWrite:
    return bind_whole(whole_blocks("t", src, dst), layers, pair.src_kv.table, pair.dst_kv.table)


def back_write(pair: Pair) -> BoundWrite:
    """The target's block 7 of layer 1 into the source's block 6 of layer 2."""
    pair.dst_kv.page(1, 7)[:] = 99
    return bound_pieces([whole_pages(pair.dst_kv.table).number(1, 7)], [whole_pages(pair.src_kv.table).number(2, 6)])


LAYOUTS = {
    "one page": ([3], [9]),
    "a run that merges": ([1, 2, 3, 4], [5, 6, 7, 8]),
    "scattered pages": ([9, 2, 14, 5], [1, 19, 4, 11]),
    "a run broken on one side": ([1, 2, 3, 4], [5, 6, 8, 9]),
    "the last page": ([15], [19]),
}


@pytest.mark.parametrize(("src", "dst"), LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("layers", [[0], [2, 0], [0, 1, 2]], ids=str)
def test_exactly_the_bound_pages_are_copied(pair: Pair, src: list[int], dst: list[int], layers: list[int]) -> None:
    lane = pair.lane()
    assert pair.drive(post_write(pair.src, lane, bound(pair, src, dst, layers), b"n")) == [WriteStatus.DONE]
    assert pair.wait_for_notes(1) == [b"n"]
    for layer in layers:
        for source, target in zip(src, dst, strict=True):
            assert bytes(pair.dst_kv.page(layer, target)) == bytes(pair.src_kv.page(layer, source))
            pair.dst_kv.page(layer, target)[:] = 0
    assert not pair.dst_kv.array.any()  # law 3


def test_the_note_may_be_chosen_when_the_write_is_posted(pair: Pair) -> None:
    """A digest of the pages can only be taken then."""
    handle = pair.src.prepare_write(pair.lane(), bound(pair, [1], [2], [0]), b"early")
    pair.src.post(handle, b"late")
    assert pair.drive(handle) == [WriteStatus.DONE]
    assert pair.wait_for_notes(1) == [b"late"]


def test_a_prepared_write_reads_its_pages_when_it_is_posted_and_never_if_it_is_withdrawn(pair: Pair) -> None:
    lane, write = pair.lane(), bound(pair, [1], [2], [0])
    kept, gone = pair.src.prepare_write(lane, write, b"kept"), pair.src.prepare_write(lane, write, b"gone")
    assert pair.src.poll(kept) is WriteStatus.PREPARED
    assert pair.src.withdraw(gone)
    assert pair.src.poll(gone) is WriteStatus.WITHDRAWN
    assert pair.src.release(gone)
    assert not pair.dst_kv.array.any()
    pair.src_kv.fill_random(99)
    pair.src.post(kept)
    assert not pair.src.withdraw(kept)
    assert pair.drive(kept) == [WriteStatus.DONE]
    assert pair.wait_for_notes(1) == [b"kept"]
    assert (pair.dst_kv.page(0, 2) == pair.src_kv.page(0, 1)).all()


def test_a_note_comes_after_its_bytes_and_once(pair: Pair) -> None:
    handle = post_write(pair.src, pair.lane(), bound(pair, [1, 2], [3, 4], [0, 1, 2]), b"note")
    end = time.monotonic() + DEADLINE_S
    while not pair.notes and time.monotonic() < end:
        pair.src.poll(handle)
        pair.notes += pair.dst.notifications()
    assert pair.notes == [b"note"]
    for layer in range(NUM_LAYERS):
        assert bytes(pair.dst_kv.page(layer, 3)) == bytes(pair.src_kv.page(layer, 1))
        assert bytes(pair.dst_kv.page(layer, 4)) == bytes(pair.src_kv.page(layer, 2))
    assert pair.drive(handle) == [WriteStatus.DONE]
    for _ in range(50):
        pair.src.poll(handle)
        pair.notes += pair.dst.notifications()
    assert pair.notes == [b"note"]


def test_a_finished_write_stays_finished_and_can_be_released(pair: Pair) -> None:
    handle = post_write(pair.src, pair.lane(), bound(pair, [1], [1], [0]), b"n")
    pair.drive(handle)
    assert [pair.src.poll(handle) for _ in range(3)] == [WriteStatus.DONE] * 3
    assert pair.src.release(handle)


def test_many_writes_in_flight_each_bring_their_note(pair: Pair) -> None:
    lane = pair.lane()
    handles = [
        post_write(pair.src, lane, bound(pair, [block], [block], [layer]), bytes([layer, block]))
        for layer in range(NUM_LAYERS)
        for block in range(1, NUM_BLOCKS)
    ]
    assert set(pair.drive(*handles)) == {WriteStatus.DONE}
    assert sorted(pair.wait_for_notes(len(handles))) == sorted(
        bytes([layer, block]) for layer in range(NUM_LAYERS) for block in range(1, NUM_BLOCKS)
    )
    for layer in range(NUM_LAYERS):
        for block in range(1, NUM_BLOCKS):
            assert bytes(pair.dst_kv.page(layer, block)) == bytes(pair.src_kv.page(layer, block))


def test_a_note_without_bytes_arrives_once(pair: Pair) -> None:
    pair.src.notify(pair.connect(), b"\x00failure\xff")
    assert pair.wait_for_notes(1) == [b"\x00failure\xff"]
    assert pair.dst.notifications() == []


@pytest.mark.parametrize("descriptor", [b"", b"not an agent", bytes(300)])
def test_a_descriptor_that_is_none_is_a_lost_peer(pair: Pair, descriptor: bytes) -> None:
    with pytest.raises(PeerLost):
        pair.src.connect(descriptor, pair.dst_kv.table)


def test_both_directions_work_at_once(pair: Pair) -> None:
    there = pair.lane()
    back = pair.dst.open_lane(
        pair.dst.connect(pair.src.descriptor(), pair.src_kv.table),
        whole_pages(pair.dst_kv.table),
        whole_pages(pair.src_kv.table),
    )
    handles = [post_write(pair.src, there, bound(pair, [1], [1], [0]), b"there")]
    handles_back = [post_write(pair.dst, back, back_write(pair), b"back")]
    notes: list[bytes] = []
    end = time.monotonic() + DEADLINE_S
    while (not notes or not pair.notes) and time.monotonic() < end:
        for transport, posted in ((pair.src, handles), (pair.dst, handles_back)):
            for handle in posted:
                transport.poll(handle)
        pair.notes += pair.dst.notifications()
        notes += pair.src.notifications()
    assert (pair.notes, notes) == ([b"there"], [b"back"])
    assert bytes(pair.src_kv.page(2, 6)) == bytes(pair.dst_kv.page(1, 7))


def test_the_same_descriptor_connects_again_after_a_disconnect(pair: Pair) -> None:
    first = pair.connect()
    pair.lane(first)
    pair.src.disconnect(first)
    again = pair.lane()
    assert pair.drive(post_write(pair.src, again, bound(pair, [1], [2], [0]), b"n")) == [WriteStatus.DONE]
    assert bytes(pair.dst_kv.page(0, 2)) == bytes(pair.src_kv.page(0, 1))


def test_a_write_to_a_disconnected_peer_fails_and_does_not_hang(pair: Pair) -> None:
    peer = pair.connect()
    lane = pair.lane(peer)
    pair.src.disconnect(peer)
    with pytest.raises(PeerLost):
        post_write(pair.src, lane, bound(pair, [1], [1], [0]), b"n")
    with pytest.raises(PeerLost):
        pair.src.notify(peer, b"n")
    assert not pair.dst_kv.array.any()


def test_a_lane_of_a_disconnected_peer_never_writes_however_often_its_rank_connects_again(pair: Pair) -> None:
    """Its memory becomes that of other lanes: NIXL would crash, or write into another rank's pages (laws 1, 3, 12)."""
    random, write = Random(1), bound(pair, [1], [2], [0])
    stale: list[Lane] = []
    lanes = [pair.lane()]
    for _ in range(60):
        prepared = pair.src.prepare_write(lanes[0], write, b"prepared")
        peer = lanes[0].peer
        pair.src.disconnect(peer)
        pair.src.disconnect(peer)
        with pytest.raises(PeerLost):
            pair.src.post(prepared)
        assert pair.src.poll(prepared) is WriteStatus.FAILED
        assert pair.src.release(prepared)
        stale += lanes
        peer = pair.connect()
        lanes = [pair.lane(peer) for _ in range(random.choice((1, 2, 4)))]
        for lane in stale:
            with pytest.raises(PeerLost):
                pair.src.prepare_write(lane, write, b"stale")
        with pytest.raises(PeerLost):
            pair.src.open_lane(stale[0].peer, whole_pages(pair.src_kv.table), whole_pages(pair.dst_kv.table))
        with pytest.raises(PeerLost):
            pair.src.notify(stale[0].peer, b"stale")
    assert not pair.dst_kv.array.any()
    assert pair.drive(post_write(pair.src, lanes[-1], write, b"n")) == [WriteStatus.DONE]
    assert pair.wait_for_notes(1) == [b"n"]


def test_a_page_is_read_as_it_is_in_memory(pair: Pair) -> None:
    assert pair.src.read_page(1, 3) == bytes(pair.src_kv.page(1, 3))
    assert pair.src.read_page(1, 3) == ctypes.string_at(pair.src_kv.table.address(1, 3), PAGE_BYTES)


def test_closing_twice_is_closing_once(pair: Pair) -> None:
    other = pair.new()
    other.register(pair.src_kv.table)
    other.close()
    other.close()


PIECES = {
    "a slice of each page": (((64, 32),), ((128, 32),)),
    "the end and the beginning": (((240, 16), (0, 16)), ((0, 16), (16, 16))),
    "many small pieces": (tuple((i * 8, 8) for i in range(32)), tuple((248 - i * 8, 8) for i in range(32))),
}


@pytest.mark.parametrize(("src", "dst"), PIECES.values(), ids=list(PIECES))
def test_pieces_of_pages_land_where_the_view_says(
    pair: Pair, src: tuple[tuple[int, int], ...], dst: tuple[tuple[int, int], ...]
) -> None:
    source, target = PageView(pair.src_kv.table, src), PageView(pair.dst_kv.table, dst)
    lane = pair.src.open_lane(pair.connect(), source, target)
    pages = [(0, 1, 7), (2, 15, 19), (1, 8, 8)]
    write = bound_pieces(
        [source.number(layer, block, piece) for layer, block, _ in pages for piece in range(len(src))],
        [target.number(layer, block, piece) for layer, _, block in pages for piece in range(len(src))],
    )
    assert pair.drive(post_write(pair.src, lane, write, b"n")) == [WriteStatus.DONE]
    assert pair.wait_for_notes(1) == [b"n"]
    for layer, block, other in pages:
        for (start, length), (at, _) in zip(src, dst, strict=True):
            landed = pair.dst_kv.page(layer, other)[at : at + length]
            assert bytes(landed) == bytes(pair.src_kv.page(layer, block)[start : start + length])
            landed[:] = 0
    assert not pair.dst_kv.array.any()  # law 3


def test_lanes_of_one_peer_do_not_disturb_each_other(pair: Pair) -> None:
    peer = pair.connect()
    whole = pair.lane(peer)
    half = ((0, PAGE_BYTES // 2),)
    part = pair.src.open_lane(peer, PageView(pair.src_kv.table, half), PageView(pair.dst_kv.table, half))
    write = bound(pair, [1], [1], [0])
    pair.drive(post_write(pair.src, part, write, b"part"))
    assert bytes(pair.dst_kv.page(0, 1)[: PAGE_BYTES // 2]) == bytes(pair.src_kv.page(0, 1)[: PAGE_BYTES // 2])
    assert not pair.dst_kv.page(0, 1)[PAGE_BYTES // 2 :].any()
    pair.drive(post_write(pair.src, whole, write, b"whole"))
    assert bytes(pair.dst_kv.page(0, 1)) == bytes(pair.src_kv.page(0, 1))
