"""Real writers and receivers of engines whose shapes differ, over memory: bytes, counts, single reports."""

from collections.abc import Sequence

import numpy as np
import pytest
from worker_rig import NUM_LAYERS, A, Cluster, Rank

from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.plan.extent import Span, wanted_span
from vllm_pd_connector.plan.write import ChunkWrite, GroupWrite
from vllm_pd_connector.testing.oracle import kv_bytes
from vllm_pd_connector.transport.scripted import ScriptedFault
from vllm_pd_connector.wire.codec import decode_note
from vllm_pd_connector.wire.messages import Quiet, WriteNote

TOKENS = 21
CPU_PLANES = ((4, 2), (1, 8))


def geometry(
    tp: int = 1,
    *,
    heads: int = 4,
    block: int = 4,
    layout: str = "LBHNC",
    planes: tuple[tuple[int, int], ...] = ((1, 16),),
) -> CacheGeometry:
    return CacheGeometry(tp_size=tp, num_kv_heads=heads, block_size=block, slot_bytes=16, layout=layout, planes=planes)


PAIRS = {
    "TP 2 to 1": (geometry(2), geometry(1)),
    "TP 1 to 2": (geometry(1), geometry(2)),
    "TP 4 to 2": (geometry(4), geometry(2)),
    "TP 2 to 4": (geometry(2), geometry(4)),
    "1 head, TP 2 to 1": (geometry(2, heads=1), geometry(1, heads=1)),
    "1 head, TP 1 to 2": (geometry(1, heads=1), geometry(2, heads=1)),
    "1 head, TP 2 to 2": (geometry(2, heads=1), geometry(2, heads=1)),
    "2 heads, TP 4 to 1": (geometry(4, heads=2), geometry(1, heads=2)),
    "2 heads, TP 4 to 8": (geometry(4, heads=2), geometry(8, heads=2)),
    "2 heads, TP 1 to 4": (geometry(1, heads=2), geometry(4, heads=2)),
    "blocks of 4 to 8": (geometry(block=4), geometry(block=8)),
    "blocks of 8 to 4": (geometry(block=8), geometry(block=4)),
    "blocks of 8 to 4, packed as on a CPU": (
        geometry(block=8, planes=CPU_PLANES),
        geometry(block=4, planes=CPU_PLANES),
    ),
    "blocks and ranks": (geometry(2, block=4), geometry(4, block=8)),
    "NHD to HND": (geometry(layout="LBNHC"), geometry(2)),
    "HND to NHD": (geometry(2), geometry(layout="LBNHC")),
    "NHD to NHD": (geometry(2, layout="LBNHC"), geometry(layout="LBNHC")),
    "everything": (geometry(4, heads=2, block=8, layout="LBNHC"), geometry(1, heads=2, block=4)),
}


def fill(rank: Rank, tables: Sequence[Sequence[int]]) -> None:
    """The KV of the whole prompt, in the blocks of each cache group."""
    names = [int(name.removeprefix("l")) for name in rank.rank.layers]
    geometry = rank.rank.geometry
    for row, (layer, group) in enumerate(zip(names, rank.rank.groups, strict=True)):
        positions = range(len(tables[group]))
        tp_rank = rank.rank.tp_rank
        made, _ = kv_bytes(geometry.page(tp_rank), geometry.heads(tp_rank).start, positions, [layer])
        rank.kv.pages()[row][list(tables[group])] = made[0]


def check(rank: Rank, spans: Sequence[Span], blocks: Sequence[Sequence[int]]) -> None:
    """The wanted tokens are those of the model, and nothing beside their pages was touched."""
    geometry, tp_rank = rank.rank.geometry, rank.rank.tp_rank
    for layer, group in enumerate(rank.rank.groups):
        positions = spans[group].pages(geometry.block_size)
        want, token = kv_bytes(geometry.page(tp_rank), geometry.heads(tp_rank).start, positions, [layer])
        got = rank.kv.pages()[layer][list(blocks[group])]
        is_wanted = (token >= spans[group].start) & (token < spans[group].stop)
        assert (got[is_wanted] == want[0][is_wanted]).all()
        rank.kv.pages()[layer][list(blocks[group])] = 0
    assert not rank.kv.array.any()  # law 3


def send(cluster: Cluster, spans: list[Span], tables: list[list[int]], blocks: list[list[int]], cut: int) -> None:
    """Two forward passes; the first completes the granules of the first `cut` tokens."""
    granule = min(cluster.src.block_size, cluster.dst.block_size)
    cut -= cut % granule
    for start, stop in ((0, cut), (cut, TOKENS)):
        groups: list[GroupWrite] = []
        for wanted, table, targets in zip(spans, tables, blocks, strict=True):
            span = Span(max(wanted.start, start), max(wanted.start, start, min(stop, wanted.stop)))
            first = wanted.pages(cluster.dst.block_size).start
            groups.append(
                GroupWrite(
                    span=span,
                    src_blocks=tuple(table[p] for p in span.pages(cluster.src.block_size)),
                    dst_blocks=tuple(targets[p - first] for p in span.pages(cluster.dst.block_size)),
                )
            )
        for signal in cluster.start_chunks(ChunkWrite(transfer_id=A, groups=tuple(groups))):
            signal.bump(0)
            cluster.settle(2)
            signal.finish()
        cluster.settle()


@pytest.mark.parametrize("local_tokens", [0, 8])
@pytest.mark.parametrize(("src", "dst"), PAIRS.values(), ids=list(PAIRS))
def test_every_rank_gets_its_heads_and_reports_once(src: CacheGeometry, dst: CacheGeometry, local_tokens: int) -> None:
    cluster = Cluster(src=src, dst=dst, verify=True)
    spans = [wanted_span(num_tokens=TOKENS, local_tokens=local_tokens)]
    table = [9, 3, 1, 7, 5, 2][: -(-TOKENS // src.block_size)]
    blocks = [13, 2, 8, 4, 11, 6][: len(spans[0].pages(dst.block_size))]
    for rank in cluster.prefillers:
        fill(rank, [table])
    cluster.expect(spans=spans)
    cluster.begin(blocks=blocks, local_tokens=local_tokens)
    send(cluster, spans, [table], [blocks], 13)
    cluster.close()
    cluster.settle()
    for rank in cluster.decoders:
        check(rank, spans, [blocks])
        assert list(rank.receiver.finished) == ["req-a"]  # law 7
        counts = rank.tally.take()
        assert counts["pages_verified"] == counts["pages_arrived"]
        assert "pages_mismatched" not in counts
    assert [list(rank.writer.sent) for rank in cluster.prefillers] == [["req-a"]] * len(cluster.prefillers)


@pytest.mark.parametrize("local_tokens", [0, 8])
@pytest.mark.parametrize(("src", "dst"), PAIRS.values(), ids=list(PAIRS))
def test_of_a_transfer_that_breaks_off_every_rank_has_the_tokens_before_the_step_that_lacks_a_layer(
    src: CacheGeometry, dst: CacheGeometry, local_tokens: int
) -> None:
    cluster = Cluster(src=src, dst=dst)
    wanted = wanted_span(num_tokens=TOKENS, local_tokens=local_tokens)
    table = [9, 3, 1, 7, 5, 2][: -(-TOKENS // src.block_size)]
    blocks = [13, 2, 8, 4, 11, 6][: len(wanted.pages(dst.block_size))]
    for rank in cluster.prefillers:
        fill(rank, [table])
    cluster.expect(spans=[wanted])
    cluster.begin(blocks=blocks, local_tokens=local_tokens)
    first = Span(local_tokens, 16)
    for signal in cluster.start_chunks(step_of(first, wanted, cluster, table, blocks)):
        signal.finish()
    for signal in cluster.start_chunks(step_of(Span(16, TOKENS), wanted, cluster, table, blocks)):
        signal.bump(0)
    cluster.settle()
    cluster.hand_back()
    for rank in cluster.decoders:
        assert list(rank.receiver.whole) == [(A, 16)]
        kept = [blocks[: len(first.pages(dst.block_size))]]
        for block in set(blocks) - set(kept[0]):
            for layer in range(len(cluster.groups)):
                rank.kv.page(layer, block)[:] = 0
        check(rank, [first], kept)


def step_of(span: Span, wanted: Span, cluster: Cluster, table: list[int], blocks: list[int]) -> ChunkWrite:
    """What a step that computes these tokens has to write."""
    first = wanted.pages(cluster.dst.block_size).start
    return ChunkWrite(
        transfer_id=A,
        groups=(
            GroupWrite(
                span=span,
                src_blocks=tuple(table[p] for p in span.pages(cluster.src.block_size)),
                dst_blocks=tuple(blocks[p - first] for p in span.pages(cluster.dst.block_size)),
            ),
        ),
    )


@pytest.mark.parametrize(("first", "is_wrong"), [(TOKENS, False), (TOKENS - 1, True)], ids=["behind", "last"])
@pytest.mark.parametrize(("src", "dst"), PAIRS.values(), ids=list(PAIRS))
def test_digests_are_of_the_prompt_and_not_of_what_a_drafter_writes_behind_it(
    src: CacheGeometry, dst: CacheGeometry, first: int, is_wrong: bool
) -> None:
    """A drafter that guesses several tokens passes its layer more than once in a step, and the first pass announces it.

    Args:
        first: token whose bytes, and those of the tokens after it, change between post and copy.
        is_wrong: it is one of the prompt's.
    """
    cluster = Cluster(src=src, dst=dst, verify=True, polls_per_write=3)
    wanted = wanted_span(num_tokens=TOKENS, local_tokens=0)
    table = [9, 3, 1, 7, 5, 2][: -(-TOKENS // src.block_size)]
    blocks = [13, 2, 8, 4, 11, 6][: len(wanted.pages(dst.block_size))]
    for rank in cluster.prefillers:
        fill(rank, [table])
    cluster.expect(spans=[wanted])
    cluster.begin(blocks=blocks)
    for signal in cluster.start_chunks(step_of(wanted, wanted, cluster, table, blocks)):
        signal.finish()
    for rank in cluster.prefillers:
        rank.turn()
        page = src.page(rank.rank.tp_rank)
        _, token = kv_bytes(page, 0, [len(table) - 1], [0])
        rank.kv.pages()[:, table[-1]] ^= np.where(token[0] >= first, 255, 0).astype(np.uint8)
    cluster.settle()
    for rank in cluster.decoders:
        counts = rank.tally.take()
        assert counts["pages_verified"] + counts.get("pages_mismatched", 0) == counts["pages_arrived"]
        assert ("pages_mismatched" in counts) == is_wrong
        assert (list(rank.receiver.finished) == ["req-a"]) == (not is_wrong)


def test_replicas_that_nobody_needs_report_and_go_quiet_all_the_same() -> None:
    """With one wanted page only one of four ranks that hold the same head has anything to send."""
    cluster = Cluster(src=geometry(4, heads=1), dst=geometry(1, heads=1))
    cluster.expect(num_pages=1)
    cluster.begin(blocks=[5])
    for signal in cluster.start_step((A, [1], [5])):
        signal.finish()
    quiet: list[Quiet] = []
    cluster.settle()
    for rank in cluster.prefillers:
        rank.writer.fence(A, quiet.append)
    cluster.close()
    cluster.settle()
    assert sorted(answer.units for answer in quiet) == [0, 0, 0, 4 * 3]  # 4 tokens of one head in 3 layers
    assert [list(rank.writer.sent) for rank in cluster.prefillers] == [["req-a"]] * 4  # law 7
    assert list(cluster.d.receiver.finished) == ["req-a"]


def test_one_prompt_is_striped_over_all_replicas() -> None:
    cluster = Cluster(src=geometry(2, heads=1), dst=geometry(2, heads=1))
    cluster.begin(blocks=[5, 6, 7, 8])
    for signal in cluster.start_step((A, [1, 2, 3, 4], [5, 6, 7, 8])):
        signal.finish()
    cluster.settle()
    assert [rank.tally.take()["pages_written"] for rank in cluster.prefillers] == [12, 12]


def test_stages_of_a_pipeline_send_the_layers_they_own() -> None:
    groups = [0] * 4
    cluster = Cluster(src=geometry(2), dst=geometry(1), stages=2, groups=groups, verify=True)
    spans, table, blocks = [Span(0, TOKENS)], [9, 3, 1, 7, 5, 2], [13, 2, 8, 4, 11, 6]
    for rank in cluster.prefillers:
        fill(rank, [table])
    cluster.expect(spans=spans)
    cluster.begin(blocks=blocks)
    send(cluster, spans, [table], [blocks], 8)
    check(cluster.d, spans, [blocks])
    assert list(cluster.d.receiver.finished) == ["req-a"]
    cluster.hand_back()
    assert list(cluster.d.receiver.whole) == [(A, TOKENS)]
    assert [rank.rank.number for rank in cluster.prefillers] == [0, 1, 2, 3]


def test_window_groups_move_only_what_will_be_read() -> None:
    groups = [0, 1, 1]
    cluster = Cluster(src=geometry(2), dst=geometry(1, block=8), groups=groups, verify=True)
    spans = [wanted_span(num_tokens=TOKENS, local_tokens=0, window=window) for window in (None, 6)]
    assert spans == [Span(0, 21), Span(16, 21)]
    tables = [[9, 3, 1, 7, 5, 2], [0, 0, 0, 0, 4, 6]]  # vLLM has dropped what left the window
    blocks = [[13, 2, 8], [4]]
    for rank in cluster.prefillers:
        fill(rank, tables)
    cluster.expect(spans=spans)
    cluster.begin_groups(blocks)
    send(cluster, spans, tables, blocks, 8)
    check(cluster.d, spans, blocks)
    assert list(cluster.d.receiver.finished) == ["req-a"]
    cluster.hand_back()
    assert list(cluster.d.receiver.whole) == [(A, 0)]  # the first step has fewer tokens in the window
    written = sum(rank.tally.take()["bytes_written"] for rank in cluster.prefillers)
    assert written == 16 * 4 * (24 + 2 * 8)  # 6 granules of one layer, 2 of two


@pytest.mark.parametrize("rank", range(2))
def test_a_write_that_fails_fails_the_transfer_for_every_decoder_rank(rank: int) -> None:
    cluster = Cluster(src=geometry(1), dst=geometry(2), faults=[ScriptedFault("fail", rank)])
    cluster.expect(num_pages=1)
    cluster.begin(blocks=[5])
    cluster.start_step((A, [1], [5]))[0].finish()
    cluster.settle()
    assert [len(d.receiver.failures) for d in cluster.decoders] == [1, 1]
    assert [transfer for transfer, _ in cluster.p.writer.failures] == [A]


def test_a_decoder_rank_that_cannot_be_reached_fails_the_transfer() -> None:
    cluster = Cluster(src=geometry(1), dst=geometry(2))
    cluster.expect(num_pages=1)
    cluster.decoders[1].transport.close()
    cluster.begin(blocks=[5])
    cluster.start_step((A, [1], [5]))[0].finish()
    cluster.close()
    cluster.settle()
    assert len(cluster.p.writer.failures) == 1
    assert list(cluster.p.writer.sent) == ["req-a"]
    assert cluster.is_blank()


def test_notes_tell_tokens_of_heads_and_layers_apart_from_pages() -> None:
    cluster = Cluster(src=geometry(1), dst=geometry(2), layers_per_write=NUM_LAYERS)
    cluster.begin(blocks=[5, 6])
    cluster.start_step((A, [1, 2], [5, 6]))[0].finish()
    cluster.p.turn(3)
    (note,) = [decode_note(frame) for frame in cluster.decoders[1].transport.notifications()]
    assert isinstance(note, WriteNote)
    assert (note.units, note.pages) == (2 * 4 * 2 * 3, 2 * 3)
    assert np.count_nonzero(cluster.decoders[1].kv.array)
