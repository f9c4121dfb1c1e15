"""Random pairs of engines whose pages can be moved into each other, with a prompt to move."""

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import strategies as st

from vllm_pd_connector.geometry.cache_geometry import CacheGeometry

NOT_COMPUTED = 0xEE
UNTOUCHED = 0x11


@dataclass
class Case:
    """Attributes:
    windows: of each cache group; None reads everything.
    layers: cache group of each layer.
    passes: (prefix hit, chunk lengths) of each pass over the prompt; all but the last end in a preemption.
    """

    src: CacheGeometry
    dst: CacheGeometry
    windows: list[int | None]
    layers: list[int]
    num_tokens: int
    local_tokens: int
    passes: list[tuple[int, list[int]]]
    transfer_id: str
    seed: int


@st.composite
def geometry_pairs(draw: st.DrawFn) -> tuple[CacheGeometry, CacheGeometry]:
    """Two engines whose pages can be moved into each other."""
    heads = draw(st.sampled_from([1, 1, 2, 3, 4, 6]))
    sizes = [tp for tp in (1, 2, 3, 4, 6, 8) if heads % tp == 0 or tp % heads == 0]
    planes = draw(st.sampled_from([((1, 3),), ((1, 4),), ((3, 1), (1, 3)), ((2, 2), (1, 4)), ()]))
    slot_bytes = sum(rows * size for rows, size in planes) or 4
    granule, ratio = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 1, 2, 3])) if planes else 1
    blocks = [granule, granule * ratio]
    if draw(st.booleans()):
        blocks.reverse()
    is_linear = len(planes) == 1
    layouts = [draw(st.sampled_from(["LBHNC", "LBNHC"])) if is_linear else "LBHNC" for _ in range(2)]
    src, dst = (
        CacheGeometry(
            tp_size=draw(st.sampled_from(sizes)),
            num_kv_heads=heads,
            block_size=block,
            slot_bytes=slot_bytes,
            layout=layout,
            planes=planes,
        )
        for block, layout in zip(blocks, layouts, strict=True)
    )
    return src, dst


@st.composite
def cases(draw: st.DrawFn) -> Case:
    src, dst = draw(geometry_pairs())
    num_tokens = draw(st.integers(1, 4 * max(src.block_size, dst.block_size) + 2))
    windows = draw(st.sampled_from([[None], [None], [None, 3], [5, None], [None, 1, 4]]))
    layers = [*range(len(windows)), *draw(st.lists(st.integers(0, len(windows) - 1), max_size=2))]
    local = draw(st.integers(0, (num_tokens - 1) // dst.block_size)) * dst.block_size
    hits = st.integers(0, (num_tokens - 1) // src.block_size).map(lambda blocks: blocks * src.block_size)
    passes: list[tuple[int, list[int]]] = []
    for _ in range(draw(st.integers(0, 2))):
        hit = draw(hits)
        passes.append((hit, draw(chunkings(draw(st.integers(hit, num_tokens - 1)) - hit))))
    hit = draw(hits)
    passes.append((hit, draw(chunkings(num_tokens - hit))))
    transfer_id = draw(st.sampled_from(["0", "1", "2", "7", "f"])) * 32
    return Case(src, dst, windows, layers, num_tokens, local, passes, transfer_id, draw(st.integers(0, 2**32 - 1)))


def chunkings(num_tokens: int) -> st.SearchStrategy[list[int]]:
    """Ways to schedule so many tokens in steps of at least one."""
    cuts = st.sets(st.integers(1, num_tokens - 1), max_size=4) if num_tokens > 1 else st.just(set())
    edges = cuts.map(lambda inner: [0, *sorted(inner), num_tokens])
    return edges.map(lambda e: [b - a for a, b in pairwise(e) if b > a])
