"""Laws 3, 4 and 5 against a brute-force byte oracle: any two shapes, prompt, chunking, prefix hits and preemptions.

More of them: EXAMPLES=100000 python -m pytest --timeout 0 tests/property/test_plan_covers_every_byte.py -k wanted_bytes
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from shape_cases import NOT_COMPUTED, UNTOUCHED, Case, cases

from vllm_pd_connector.geometry.page_table import PageView
from vllm_pd_connector.plan.expectation import expected_units
from vllm_pd_connector.plan.extent import Span, completed_span, wanted_span
from vllm_pd_connector.plan.route import Route, routes
from vllm_pd_connector.plan.write import BoundWrite, ChunkWrite, GroupWrite, bind, select
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.oracle import kv_bytes

many = settings(
    max_examples=int(os.environ.get("EXAMPLES", "150")), derandomize="EXAMPLES" not in os.environ, deadline=None
)
NUM_BLOCKS = 64


@dataclass
class World:
    """Both engines' memory, the blocks of the prompt on each side, and what has been copied."""

    case: Case
    random: np.random.Generator
    sources: list[KvBuffer]
    targets: list[KvBuffer]
    spans: list[Span]
    dst_blocks: list[list[int]]
    times_written: list[np.ndarray]
    units: list[int]
    posted: list[tuple[int, Route, BoundWrite]] = field(default_factory=list)


def build(case: Case) -> World:
    random = np.random.default_rng(case.seed)
    sources = [buffer(case, case.src.page(rank).page_bytes, 3) for rank in range(case.src.tp_size)]
    targets = [buffer(case, case.dst.page(rank).page_bytes, 5) for rank in range(case.dst.tp_size)]
    spans = [
        wanted_span(num_tokens=case.num_tokens, local_tokens=case.local_tokens, window=window)
        for window in case.windows
    ]
    free = iter((random.permutation(NUM_BLOCKS - 1) + 1).tolist())
    blocks = [[next(free) for _ in span.pages(case.dst.block_size)] for span in spans]
    written = [np.zeros(target.array.shape, dtype=np.int64) for target in targets]
    return World(case, random, sources, targets, spans, blocks, written, [0] * len(targets))


def buffer(case: Case, page_bytes: int, gap: int) -> KvBuffer:
    return KvBuffer(num_layers=len(case.layers), num_blocks=NUM_BLOCKS, page_bytes=page_bytes, gap=gap, fill=UNTOUCHED)


def compute(world: World, tables: list[list[int]], start: int, stop: int) -> None:
    """Leave the KV of some tokens in every prefiller rank's pages."""
    case = world.case
    block = case.src.block_size
    positions = range(start // block, -(-stop // block))
    if not positions:
        return
    for rank, source in enumerate(world.sources):
        for layer, group in enumerate(case.layers):
            made, token = kv_bytes(case.src.page(rank), case.src.heads(rank).start, positions, [layer])
            pages = source.pages()[layer]
            blocks = [tables[group][position] for position in positions]
            is_new = (token >= start) & (token < stop)
            pages[blocks] = np.where(is_new, made[0], pages[blocks])


def chunk(world: World, tables: list[list[int]], sent_stop: int, computed: int) -> ChunkWrite:
    """What the prefiller's scheduler half orders after a step."""
    case = world.case
    groups: list[GroupWrite] = []
    for wanted, table, targets in zip(world.spans, tables, world.dst_blocks, strict=True):
        span = completed_span(
            wanted,
            sent_stop=sent_stop,
            computed_tokens=computed,
            num_tokens=case.num_tokens,
            granule=min(case.src.block_size, case.dst.block_size),
        )
        sources, pages = span.pages(case.src.block_size), span.pages(case.dst.block_size)
        first = wanted.pages(case.dst.block_size).start
        groups.append(
            GroupWrite(
                span=span,
                src_blocks=tuple(table[p] for p in sources),
                dst_blocks=tuple(targets[p - first] for p in pages),
            )
        )
    return ChunkWrite(transfer_id=case.transfer_id, groups=tuple(groups))


def post(world: World, write: ChunkWrite) -> None:
    """Every rank binds its share, layer by layer in any order and in any number of writes."""
    case = world.case
    for rank, source in enumerate(world.sources):
        for route in routes(rank, case.src, case.dst):
            table = world.targets[route.dst_rank].table
            for layer in world.random.permutation(len(case.layers)).tolist():
                group = write.groups[case.layers[layer]]
                granules = select(group, route, case.transfer_id, source.table, table)
                bound = bind(granules, route, source.table, table, src_layers=[layer], dst_layers=[layer])
                if bound.num_pages:
                    world.units[route.dst_rank] += bound.units
                    world.posted.append((rank, route, bound))


def flush(world: World) -> None:
    for index in world.random.permutation(len(world.posted)).tolist():
        rank, route, bound = world.posted[index]
        source, target = world.sources[rank], world.targets[route.dst_rank]
        counts = world.times_written[route.dst_rank]
        for (src, length), (dst, room) in zip(
            located(PageView(source.table, route.src_pieces), bound.src_pieces),
            located(PageView(target.table, route.dst_pieces), bound.dst_pieces),
            strict=True,
        ):
            assert length == room
            target.array[dst : dst + length] = source.array[src : src + length]
            counts[dst : dst + length] += 1
    world.posted.clear()


def located(view: PageView, numbers: np.ndarray) -> Iterator[tuple[int, int]]:
    """(offset in the region, length) of pieces."""
    view.check()
    for number in numbers.tolist():
        address, length = view.locate(number)
        yield address - view.pages.base, length


def run(world: World) -> None:
    """Prefill as the engine does, with preemptions that lose the pages and prefix hits that find them."""
    case = world.case
    sent_stop = 0
    num_pages = -(-case.num_tokens // case.src.block_size)
    for hit, chunks in case.passes:
        for source in world.sources:
            source.pages()[:] = NOT_COMPUTED
        blocks = (world.random.permutation(NUM_BLOCKS - 1) + 1).tolist()
        tables = [blocks[group * num_pages : (group + 1) * num_pages] for group in range(len(case.windows))]
        compute(world, tables, 0, hit)
        computed = hit
        for length in chunks:
            compute(world, tables, computed, computed + length)
            computed += length
            write = chunk(world, tables, sent_stop, computed)
            sent_stop = max(sent_stop, *(group.span.stop for group in write.groups if len(group.span)), 0)
            post(world, write)
            # What is posted reads the pages now or later, but before they are lost: any order will do.
            if world.random.integers(2):
                flush(world)
        flush(world)


def check_rank(world: World, rank: int) -> None:
    case, target = world.case, world.targets[rank]
    block = case.dst.block_size
    for layer, group in enumerate(case.layers):
        span = world.spans[group]
        positions = span.pages(block)
        if not positions:
            continue
        want, token = kv_bytes(case.dst.page(rank), case.dst.heads(rank).start, positions, [layer])
        got = target.pages()[layer][world.dst_blocks[group]]
        is_wanted = (token >= span.start) & (token < span.stop)
        assert (got[is_wanted] == want[0][is_wanted]).all()
        target.pages()[layer][world.dst_blocks[group]] = UNTOUCHED
    assert (target.array == UNTOUCHED).all()  # law 3
    assert world.times_written[rank].max(initial=0) <= 1  # law 4


@given(cases())
@many
def test_wanted_bytes_arrive_once_and_nothing_else_is_touched(case: Case) -> None:
    world = build(case)
    run(world)
    layers = [case.layers.count(group) for group in range(len(case.windows))]
    for rank in range(case.dst.tp_size):
        expected = expected_units(world.spans, layers=layers, num_heads=len(case.dst.heads(rank)))
        assert world.units[rank] == expected  # law 5
        check_rank(world, rank)


@given(cases())
@many
def test_the_wanted_pages_are_exactly_those_of_tokens_that_are_missing_and_read(case: Case) -> None:
    for window in case.windows:
        span = wanted_span(num_tokens=case.num_tokens, local_tokens=case.local_tokens, window=window)
        # The next token, number `num_tokens`, reads itself and `window - 1` before it.
        reads = range(case.num_tokens + 1)[-window if window else 0 :]
        missing = [t for t in range(case.local_tokens, case.num_tokens) if t in reads]
        assert list(range(span.start, span.stop)) == missing
        assert set(span.pages(case.dst.block_size)) == {t // case.dst.block_size for t in missing}
