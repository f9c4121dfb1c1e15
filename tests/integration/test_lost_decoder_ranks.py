"""What a writer does with a decoder rank that lost a write, has other pages, or has not been written to for long."""

from typing import Any

import msgspec
import pytest
from worker_rig import LEASE_S, NUM_LAYERS, PAGE_BYTES, A, B, Cluster, Rank

from vllm_pd_connector.engine.links import IDLE_S
from vllm_pd_connector.engine.step import BeginTransfer
from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.plan.write import BoundWrite
from vllm_pd_connector.testing.shapes import reservation
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.memory import MemoryTransport
from vllm_pd_connector.transport.scripted import ScriptedFault, ScriptedTransport

C = "c" * 32


@pytest.fixture(autouse=True, params=["the messenger posts", "writes are armed"])
def _who_posts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cluster, "is_arming", request.param == "writes are armed")


class Watched(ScriptedTransport):
    """Keeps the peers it disconnected, and counts writes that were to be made on a lane of one of them."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner, [])
        self.dropped: list[Any] = []
        self.num_stale = 0

    def disconnect(self, peer: Any) -> None:
        self.dropped.append(peer)
        super().disconnect(peer)

    def prepare_write(self, lane: Any, write: BoundWrite, note: bytes) -> Any:
        self.num_stale += any(lane.peer is peer for peer in self.dropped)
        return super().prepare_write(lane, write, note)


def watched(*faults: ScriptedFault, **more: Any) -> tuple[Cluster, Watched]:
    made: list[Watched] = []

    def wrap(inner: Transport) -> Transport:
        made.append(Watched(inner))
        return made[-1]

    return Cluster(wrap=wrap, faults=faults, **more), made[0]


def write(cluster: Cluster, transfer: str, src: int, dst: int) -> None:
    for signal in cluster.start_step((transfer, [src], [dst])):
        signal.finish()
    cluster.settle()


def heads_over(tp_size: int) -> CacheGeometry:
    """Two KV heads, so that each of two decoder ranks needs one."""
    return CacheGeometry(
        tp_size=tp_size, num_kv_heads=2, block_size=4, slot_bytes=PAGE_BYTES // 4, layout="LBHNC", planes=((1, 8),)
    )


def begin(cluster: Cluster, transfer: str, rank: Rank, pages: PageTable | None = None) -> None:
    """A reservation of block 9 of any rank, as if it were a decoder of its own."""
    reserved = reservation(transfer, [[9]], cluster.dst, [(rank.transport.descriptor(), pages or rank.kv.table)])
    cluster.p.writer.begin(BeginTransfer(reservation=reserved, lease_s=LEASE_S, layers=()))


def finish(cluster: Cluster, transfer: str) -> None:
    cluster.close(transfer)
    cluster.settle()


def test_a_transfer_between_two_chunks_is_given_up_with_the_decoder_rank_that_lost_anothers_write() -> None:
    cluster, transport = watched(ScriptedFault("fail", NUM_LAYERS))
    for transfer, blocks in ((A, [5]), (B, [6, 7])):
        cluster.expect(transfer, len(blocks))
        cluster.begin(transfer, blocks)
    write(cluster, B, 2, 6)
    write(cluster, A, 1, 5)
    assert len(transport.dropped) == 1
    assert [transfer for transfer, _ in cluster.p.writer.failures] == [A, B]
    assert [transfer for transfer, _ in cluster.d.receiver.failures] == [A, B]  # law 8: nobody waits for the rest
    write(cluster, B, 3, 7)
    assert transport.num_stale == 0  # laws 1 and 3
    assert not cluster.d.kv.page(0, 7).any()


def test_a_transfer_that_has_nothing_more_to_post_is_not_given_up_with_another() -> None:
    cluster, _ = watched(ScriptedFault("fail", NUM_LAYERS), polls_per_write=4)
    for transfer, block in ((A, 5), (B, 6)):
        cluster.expect(transfer, 1)
        cluster.begin(transfer, [block])
    for transfer, src, dst in ((B, 2, 6), (A, 1, 5)):
        (signal,) = cluster.start_step((transfer, [src], [dst]))
        signal.finish()
        cluster.p.turn()
        cluster.close(transfer)
    cluster.settle()
    assert [transfer for transfer, _ in cluster.p.writer.failures] == [A]
    assert list(cluster.d.receiver.finished) == ["req-b"]


def test_a_transfer_that_begins_while_the_peer_is_to_be_dropped_is_refused_and_the_next_is_not() -> None:
    cluster, transport = watched(ScriptedFault("fail", 0), ScriptedFault("hang", 1))
    cluster.begin(A, [5])
    write(cluster, A, 1, 5)
    cluster.begin(B, [6])
    assert "connected again" in dict(cluster.p.writer.failures)[B]
    assert not transport.dropped  # law 2: a write to it hangs
    cluster.clock.advance(30.0)
    cluster.settle()
    assert len(transport.dropped) == 1
    cluster.begin(C, [7])
    write(cluster, C, 3, 7)
    assert cluster.has_landed(0, 3, 7)
    assert transport.num_stale == 0


def test_a_page_outside_the_pool_fails_its_own_transfer_only() -> None:
    """What one reservation says cannot end the transfers of others (law 12)."""
    cluster, transport = watched()
    cluster.begin(A, [5])
    cluster.begin(B, [99])
    write(cluster, B, 2, 99)
    write(cluster, A, 1, 5)
    assert [transfer for transfer, _ in cluster.p.writer.failures] == [B]
    assert cluster.has_landed(0, 1, 5)
    assert not transport.dropped


def test_only_the_rank_that_is_lost_is_dropped() -> None:
    cluster, transport = watched(src=heads_over(1), dst=heads_over(2))
    cluster.begin(A, [5])
    cluster.decoders[0].transport.close()
    write(cluster, A, 1, 5)
    assert [transfer for transfer, _ in cluster.p.writer.failures] == [A]
    assert [peer.name for peer in transport.dropped] == ["d0"]


@pytest.mark.parametrize("is_used", [True, False], ids=["in use", "unused"])
def test_another_page_table_under_the_same_descriptor_is_refused_and_what_is_under_way_goes_on(is_used: bool) -> None:
    cluster, transport = watched()
    cluster.begin(A, [5])
    if not is_used:
        write(cluster, A, 1, 5)
        finish(cluster, A)
    begin(cluster, B, cluster.d, msgspec.structs.replace(cluster.d.kv.table, num_blocks=12))
    assert "page table" in dict(cluster.p.writer.failures)[B]
    if is_used:
        write(cluster, A, 1, 5)
        finish(cluster, A)
    cluster.p.turn(2)
    assert cluster.has_landed(0, 1, 5)
    assert len(transport.dropped) == 1
    cluster.begin(C, [7])
    write(cluster, C, 3, 7)
    assert cluster.has_landed(0, 3, 7)


def test_decoder_ranks_without_a_transfer_for_long_are_dropped_when_another_one_connects() -> None:
    cluster, transport = watched()

    def generation(number: int) -> str:
        """A decoder that is gone after one transfer; it is never written to again, so no write to it fails."""
        rank = cluster._rank(cluster._worker(cluster.dst, 0), MemoryTransport(cluster.fabric, f"gen{number}"), False)
        transfer = f"{number:032x}"
        begin(cluster, transfer, rank)
        write(cluster, transfer, 1, 9)
        rank.transport.close()
        return transfer

    cluster.begin(A, [5])  # a long prompt: no transfer begins to its decoder, and it goes on
    for number in range(8):
        finish(cluster, generation(number))
        cluster.clock.advance(IDLE_S / 2 + 1)
        cluster.p.writer._ledger.leases.arm(A, cluster.clock() + LEASE_S)
    assert len(transport.dropped) == 6
    write(cluster, A, 1, 5)
    assert transport.num_stale == 0
