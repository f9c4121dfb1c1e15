"""Laws 3, 4 and 5 against a brute-force byte oracle: real buffers, any prompt, chunking, prefix hits and preemption."""

import ctypes
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.plan.expectation import expected_units, sent_units
from vllm_pd_connector.plan.extent import Extent, completed_pages, remote_extent
from vllm_pd_connector.plan.write import BoundWrite, ChunkWrite, bind
from vllm_pd_connector.testing.buffers import KvBuffer

NOT_COMPUTED = 0xEE
UNTOUCHED = 0x11
SLOT_BYTES = 8


@dataclass
class Case:
    block_size: int
    num_tokens: int
    local_tokens: int
    num_layers: int
    passes: list[tuple[int, list[int]]]
    """(prefix hit, chunk lengths) of each pass over the prompt; all but the last end in a preemption."""
    seed: int
    counts: dict[tuple[int, int], int] = field(default_factory=dict)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    num_tokens = draw(st.integers(1, 6 * block_size + 3))
    whole_blocks = (num_tokens - 1) // block_size
    hits = st.integers(0, whole_blocks).map(lambda blocks: blocks * block_size)
    passes: list[tuple[int, list[int]]] = []
    for _ in range(draw(st.integers(0, 2))):
        hit = draw(hits)
        reached = draw(st.integers(hit, num_tokens - 1))
        passes.append((hit, draw(chunkings(reached - hit))))
    hit = draw(hits)
    passes.append((hit, draw(chunkings(num_tokens - hit))))
    return Case(block_size, num_tokens, draw(hits), draw(st.integers(1, 3)), passes, draw(st.integers(0, 2**32 - 1)))


def chunkings(num_tokens: int) -> st.SearchStrategy[list[int]]:
    """Ways to schedule so many tokens in steps of at least one."""
    cuts = st.sets(st.integers(1, num_tokens - 1)) if num_tokens > 1 else st.just(set())
    edges = cuts.map(lambda inner: [0, *sorted(inner), num_tokens])
    return edges.map(lambda e: [b - a for a, b in pairwise(e) if b > a])


def kv_of(layer: int, token: int) -> np.ndarray:
    """The bytes a forward pass leaves for one token: the same whenever it is computed."""
    return np.frombuffer((layer * 100_003 + token + 1).to_bytes(SLOT_BYTES, "little"), dtype=np.uint8)


def compute(src: KvBuffer, blocks: list[int], tokens: range, case: Case) -> None:
    for layer in range(case.num_layers):
        for token in tokens:
            at = token % case.block_size * SLOT_BYTES
            src.page(layer, blocks[token // case.block_size])[at : at + SLOT_BYTES] = kv_of(layer, token)


def copy(bound: BoundWrite, src: KvBuffer, dst: KvBuffer, case: Case) -> None:
    for source, target in zip(bound.src_pages.tolist(), bound.dst_pages.tolist(), strict=True):
        page = divmod(target, dst.table.num_blocks)
        case.counts[page] = case.counts.get(page, 0) + 1
        address = src.table.address(*divmod(source, src.table.num_blocks))
        ctypes.memmove(dst.table.address(*page), address, src.table.page_bytes)


def run(case: Case, extent: Extent, src: KvBuffer, dst: KvBuffer, dst_blocks: list[int]) -> int:
    """Prefill as the engine does; the units sent."""
    random = np.random.default_rng(case.seed)
    num_pages = -(-case.num_tokens // case.block_size)
    sent_stop = units = 0
    for hit, chunks in case.passes:
        src.array[:] = NOT_COMPUTED
        blocks = (random.permutation(src.table.num_blocks - 1)[:num_pages] + 1).tolist()
        compute(src, blocks, range(hit), case)
        computed = hit
        posted: list[BoundWrite] = []
        for chunk in chunks:
            compute(src, blocks, range(computed, computed + chunk), case)
            computed += chunk
            positions = completed_pages(
                extent,
                sent_stop=sent_stop,
                computed_tokens=computed,
                num_tokens=case.num_tokens,
                block_size=case.block_size,
            )
            if not positions:
                continue
            sent_stop = positions.stop
            first = extent.first_page
            write = ChunkWrite(
                transfer_id="t",
                src_blocks=tuple(blocks[positions.start : positions.stop]),
                dst_blocks=tuple(dst_blocks[positions.start - first : positions.stop - first]),
            )
            layers = random.permutation(case.num_layers)
            split = int(random.integers(0, case.num_layers + 1))
            for part in (layers[:split], layers[split:]):
                bound = bind(write, part.tolist(), src.table, dst.table)
                units += bound.num_units
                posted.append(bound)
            # What is posted reads the pages now or later, but before they are lost: any order will do.
            if random.integers(2):
                flush(posted, random, src, dst, case)
        flush(posted, random, src, dst, case)
    return units


def flush(posted: list[BoundWrite], random: np.random.Generator, src: KvBuffer, dst: KvBuffer, case: Case) -> None:
    for index in random.permutation(len(posted)):
        copy(posted[index], src, dst, case)
    posted.clear()


@given(cases())
def test_needed_bytes_arrive_once_and_nothing_else_is_touched(case: Case) -> None:
    extent = remote_extent(num_tokens=case.num_tokens, local_tokens=case.local_tokens, block_size=case.block_size)
    page_bytes = case.block_size * SLOT_BYTES
    src = KvBuffer(num_layers=case.num_layers, num_blocks=12, page_bytes=page_bytes, gap=3)
    dst = KvBuffer(num_layers=case.num_layers, num_blocks=15, page_bytes=page_bytes, gap=5, fill=UNTOUCHED)
    random = np.random.default_rng(case.seed + 1)
    dst_blocks = (random.permutation(dst.table.num_blocks - 1)[: extent.num_pages] + 1).tolist()

    units = run(case, extent, src, dst, dst_blocks)

    assert case.counts == {(layer, block): 1 for layer in range(case.num_layers) for block in dst_blocks}  # law 4
    expected = expected_units(
        0, num_layers=case.num_layers, num_pages=extent.num_pages, src_tp=1, dst_tp=1, num_kv_heads=2
    )
    assert units == expected == sent_units(num_layers=case.num_layers, num_pages=extent.num_pages)  # law 5
    for layer in range(case.num_layers):
        for token in range(case.local_tokens, case.num_tokens):
            block = dst_blocks[token // case.block_size - extent.first_page]
            at = token % case.block_size * SLOT_BYTES
            assert dst.page(layer, block)[at : at + SLOT_BYTES].tobytes() == kv_of(layer, token).tobytes()
    for layer in range(case.num_layers):
        for block in dst_blocks:
            dst.page(layer, block)[:] = UNTOUCHED
    assert (dst.array == UNTOUCHED).all()  # law 3


@given(cases())
def test_extent_is_exactly_the_pages_of_missing_tokens(case: Case) -> None:
    extent = remote_extent(num_tokens=case.num_tokens, local_tokens=case.local_tokens, block_size=case.block_size)
    missing = {token // case.block_size for token in range(case.local_tokens, case.num_tokens)}
    assert set(range(extent.first_page, extent.stop)) == missing
