"""Head ownership and page slices by brute force: each destination head is filled once, from the same global head."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.errors import ConfigError, OutOfRegion
from vllm_pd_connector.geometry.page import PageLayout, PageShape
from vllm_pd_connector.geometry.shard_map import owned_heads, sources
from vllm_pd_connector.plan.expectation import expected_units

SIZES = [1, 2, 3, 4, 6, 8, 12, 16]


def divide(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


shapes = st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from(SIZES)).filter(
    lambda s: divide(s[2], s[0]) and divide(s[2], s[1])
)


@given(shapes)
def test_every_destination_head_has_one_source_with_the_same_global_number(shape: tuple[int, int, int]) -> None:
    src_tp, dst_tp, heads = shape
    for dst_rank in range(dst_tp):
        wanted = owned_heads(dst_rank, dst_tp, heads)
        filled: list[int] = []
        for part in sources(dst_rank, src_tp=src_tp, dst_tp=dst_tp, num_kv_heads=heads):
            held = owned_heads(part.src_rank, src_tp, heads)
            for i in range(part.num_heads):
                assert held[part.src_head + i] == wanted[part.dst_head + i]
                filled.append(part.dst_head + i)
        assert filled == list(range(len(wanted)))


@given(shapes)
def test_equal_sides_pair_rank_with_rank(shape: tuple[int, int, int]) -> None:
    tp, _, heads = shape
    assert [[s.src_rank for s in sources(r, src_tp=tp, dst_tp=tp, num_kv_heads=heads)] for r in range(tp)] == [
        [r] for r in range(tp)
    ]


@given(shapes, st.integers(1, 4), st.integers(1, 9))
def test_units_expected_are_the_slices_all_sources_write(
    shape: tuple[int, int, int], num_layers: int, num_pages: int
) -> None:
    src_tp, dst_tp, heads = shape
    for dst_rank in range(dst_tp):
        slices = sources(dst_rank, src_tp=src_tp, dst_tp=dst_tp, num_kv_heads=heads)
        sent = sum(1 for _ in slices for _ in range(num_layers * num_pages))
        assert sent == expected_units(
            dst_rank, num_layers=num_layers, num_pages=num_pages, src_tp=src_tp, dst_tp=dst_tp, num_kv_heads=heads
        )


@given(st.sampled_from(SIZES), st.sampled_from(SIZES))
def test_ranks_together_hold_every_head_equally_often(heads: int, tp: int) -> None:
    if not divide(heads, tp):
        with pytest.raises(ConfigError, match="neither divides"):
            owned_heads(0, tp, heads)
        return
    held = [head for rank in range(tp) for head in owned_heads(rank, tp, heads)]
    assert sorted(held) == sorted(list(range(heads)) * max(1, tp // heads))


pages = st.builds(
    PageShape,
    num_heads=st.integers(1, 6),
    block_size=st.integers(1, 5),
    slot_bytes=st.integers(1, 7),
    layout=st.sampled_from(PageLayout),
)


def owner_of_each_byte(page: PageShape) -> list[int]:
    """Brute force: the head that owns each byte of the page."""
    heads, tokens = range(page.num_heads), range(page.block_size)
    if page.layout is PageLayout.HND:
        return [head for head in heads for _ in tokens for _ in range(page.slot_bytes)]
    return [head for _ in tokens for head in heads for _ in range(page.slot_bytes)]


@given(pages, st.data())
def test_slices_are_exactly_the_bytes_of_the_heads(page: PageShape, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, page.num_heads - 1))
    count = data.draw(st.integers(1, page.num_heads - first))
    owners = owner_of_each_byte(page)
    assert len(owners) == page.page_bytes
    covered = np.zeros(page.page_bytes, dtype=int)
    runs = page.slices(first, count)
    for offset, length in runs:
        covered[offset : offset + length] += 1
    assert covered.tolist() == [int(first <= owner < first + count) for owner in owners]
    assert runs == sorted(runs)


@given(pages, st.integers(-2, 8), st.integers(-2, 8))
def test_slices_of_heads_that_are_not_there_are_refused(page: PageShape, first: int, count: int) -> None:
    if first >= 0 and count >= 1 and first + count <= page.num_heads:
        assert sum(length for _, length in page.slices(first, count)) == count * page.block_size * page.slot_bytes
    else:
        with pytest.raises(OutOfRegion):
            page.slices(first, count)
