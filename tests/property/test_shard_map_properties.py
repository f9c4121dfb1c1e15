"""Head ownership, replicas and the common runs of pages, by brute force."""

from collections import Counter
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shape_cases import geometry_pairs

from vllm_pd_connector.errors import ConfigError, OutOfRegion
from vllm_pd_connector.geometry.cache_geometry import CacheGeometry, mismatches
from vllm_pd_connector.geometry.page import TokenRange, common_runs
from vllm_pd_connector.geometry.shard_map import holders, owned_heads, sources
from vllm_pd_connector.plan.route import routes
from vllm_pd_connector.testing.oracle import byte_map

SIZES = [1, 2, 3, 4, 6, 8, 12, 16]


def divide(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


shapes = st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from(SIZES)).filter(
    lambda s: divide(s[2], s[0]) and divide(s[2], s[1])
)


@given(shapes)
def test_every_destination_head_is_filled_once_from_the_same_global_head(shape: tuple[int, int, int]) -> None:
    src_tp, dst_tp, heads = shape
    for dst_rank in range(dst_tp):
        wanted = owned_heads(dst_rank, dst_tp, heads)
        filled: list[int] = []
        for part in sources(dst_rank, src_tp=src_tp, dst_tp=dst_tp, num_kv_heads=heads):
            for rank in part.src_ranks:
                held = owned_heads(rank, src_tp, heads)
                for i in range(part.num_heads):
                    assert held[part.src_head + i] == wanted[part.dst_head + i]
            filled += range(part.dst_head, part.dst_head + part.num_heads)
        assert filled == list(range(len(wanted)))


@given(shapes)
def test_holders_are_the_ranks_that_own_a_head(shape: tuple[int, int, int]) -> None:
    tp, _, heads = shape
    for head in range(heads):
        assert list(holders(head, tp, heads)) == [r for r in range(tp) if head in owned_heads(r, tp, heads)]


@given(st.sampled_from(SIZES), st.sampled_from(SIZES))
def test_ranks_together_hold_every_head_equally_often(heads: int, tp: int) -> None:
    if not divide(heads, tp):
        with pytest.raises(ConfigError, match="neither divides"):
            owned_heads(0, tp, heads)
        return
    held = [head for rank in range(tp) for head in owned_heads(rank, tp, heads)]
    assert sorted(held) == sorted(list(range(heads)) * max(1, tp // heads))


@given(shapes, st.text("0123456789abcdef", min_size=32, max_size=32))
def test_replicas_share_the_pages_of_one_request_evenly(shape: tuple[int, int, int], transfer_id: str) -> None:
    """Every page of every destination has one sender, and over as many pages as there are replicas each sends one."""
    src_tp, dst_tp, heads = shape
    src, dst = (
        CacheGeometry(tp_size=tp, num_kv_heads=heads, block_size=4, slot_bytes=2, layout="LBHNC")
        for tp in (src_tp, dst_tp)
    )
    senders: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(src_tp):
        for route in routes(rank, src, dst):
            for page in range(2 * route.num_replicas):
                if (page + route.turn(transfer_id)) % route.num_replicas == route.replica:
                    senders.setdefault((route.dst_rank, route.dst_pieces[0][0], page), []).append(rank)
    assert all(len(ranks) == 1 for ranks in senders.values())
    for dst_rank in range(dst_tp):
        for part in sources(dst_rank, src_tp=src_tp, dst_tp=dst_tp, num_kv_heads=heads):
            at = part.dst_head * 4 * 2
            sent = Counter(senders[dst_rank, at, page][0] for page in range(2 * len(part.src_ranks)))
            assert sent == dict.fromkeys(part.src_ranks, 2)


@given(geometry_pairs(), st.data())
def test_runs_carry_exactly_the_bytes_of_the_heads_and_tokens(
    pair: tuple[CacheGeometry, CacheGeometry], data: st.DataObject
) -> None:
    src, dst = (geometry.page() for geometry in pair)
    granule = min(src.block_size, dst.block_size)
    heads = data.draw(st.integers(1, min(src.num_heads, dst.num_heads)))
    src_head = data.draw(st.integers(0, src.num_heads - heads))
    dst_head = data.draw(st.integers(0, dst.num_heads - heads))
    src_token = data.draw(st.integers(0, src.block_size // granule - 1)) * granule
    dst_token = data.draw(st.integers(0, dst.block_size // granule - 1)) * granule
    runs = common_runs(
        src,
        dst,
        src_head=src_head,
        dst_head=dst_head,
        num_heads=heads,
        tokens=TokenRange(src_token, dst_token, granule),
    )
    moved: dict[int, int] = {}
    for start, at, length in runs:
        moved.update(zip(range(at, at + length), range(start, start + length), strict=True))
    assert len(moved) == sum(length for _, _, length in runs) == heads * granule * src.slot_bytes
    names = [
        {
            at: (head - first, token - begin, part)
            for at, (head, token, part) in enumerate(zip(*byte_map(page), strict=True))
        }
        for page, first, begin in ((src, src_head, src_token), (dst, dst_head, dst_token))
    ]
    for at, start in moved.items():
        assert names[1][at] == names[0][start]
    assert runs == sorted(runs, key=lambda run: run.dst)
    for left, right in pairwise(runs):
        assert (left.src + left.length, left.dst + left.length) != (right.src, right.dst)  # the fewest


@given(geometry_pairs(), st.integers(-2, 8), st.integers(-2, 8), st.integers(-2, 6))
def test_heads_and_tokens_that_are_not_there_are_refused(
    pair: tuple[CacheGeometry, CacheGeometry], first: int, count: int, token: int
) -> None:
    page = pair[0].page()
    is_there = first >= 0 and count >= 1 and first + count <= page.num_heads and token == 0
    tokens = TokenRange(token, token, page.block_size)
    if is_there:
        runs = common_runs(page, page, src_head=first, dst_head=first, num_heads=count, tokens=tokens)
        assert sum(run.length for run in runs) == count * page.block_size * page.slot_bytes
    else:
        with pytest.raises(OutOfRegion):
            common_runs(page, page, src_head=first, dst_head=first, num_heads=count, tokens=tokens)


@pytest.mark.parametrize(
    "changes", [{"slot_bytes": 8}, {"planes": ()}, {"block_size": 6}, {"layout": "LBNHC"}, {"num_kv_heads": 4}]
)
def test_pages_that_cannot_be_moved_into_each_other_have_no_runs(changes: dict[str, Any]) -> None:
    plain = CacheGeometry(
        tp_size=1, num_kv_heads=2, block_size=4, slot_bytes=6, layout="LBHNC", planes=((2, 1), (1, 4))
    )
    other = msgspec.structs.replace(plain, **changes)
    assert mismatches(plain, plain) == []
    assert mismatches(plain, other) == mismatches(other, plain) == list(changes)
    if "num_kv_heads" not in changes:
        with pytest.raises(OutOfRegion):
            routes(0, plain, other)


def test_a_slice_of_hnd_is_one_run_and_of_nhd_one_for_each_token() -> None:
    for layout, number in (("LBHNC", 1), ("LBNHC", 16)):
        whole, half = (
            CacheGeometry(tp_size=tp, num_kv_heads=8, block_size=16, slot_bytes=64, layout=layout, planes=((1, 64),))
            for tp in (1, 2)
        )
        assert [len(route.src_pieces) for route in routes(0, whole, half)] == [number, number]
        assert [len(route.src_pieces) for route in routes(0, whole, whole)] == [1]
        assert np.ptp([length for route in routes(0, whole, half) for _, length in route.src_pieces]) == 0
