"""What a layout costs on the wire: NIXL WRITEs of the same bytes, as adjacent pages, scattered pages and head slices.

Two agents in one process; UCX copies inside the post. HND against NHD is the reason why the connector asks for HND,
adjacent against scattered shows that NIXL merges neighbours in a prepared list by itself.
"""

from __future__ import annotations

import random
import time
from typing import Any

from benchmarks.micro.plan import geometry
from benchmarks.micro.timing import summarise
from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.geometry.page_table import PageView
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.plan.route import routes
from vllm_pd_connector.plan.write import GroupWrite, bind, select
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.transport.base import WriteStatus, post_write
from vllm_pd_connector.transport.nixl import NixlTransport

NUM_PAGES = 256
REPEATS = 30
BLOCK_TOKENS, HEADS = 16, 8
TRANSFER = "0123456789abcdef" * 2


def measure() -> list[dict[str, Any]]:
    adjacent = list(range(1, NUM_PAGES + 1))
    scattered = random.Random(1).sample(range(1, 4 * NUM_PAGES), NUM_PAGES)
    hnd, nhd = (geometry(1, HEADS, BLOCK_TOKENS, layout) for layout in ("LBHNC", "LBNHC"))
    half_hnd, half_nhd = (geometry(2, HEADS, BLOCK_TOKENS, layout) for layout in ("LBHNC", "LBNHC"))
    small = geometry(1, 1, BLOCK_TOKENS, "LBHNC")
    return [
        _write("adjacent pages, in order: NIXL merges them", small, small, adjacent),
        _write("the same pages, in random order", small, small, random.Random(2).sample(adjacent, NUM_PAGES)),
        _write("whole pages, adjacent", hnd, hnd, adjacent),
        _write("whole pages, scattered", hnd, hnd, scattered),
        _write("whole pages, NHD, scattered", nhd, nhd, scattered),
        _write("half the heads, HND to HND", hnd, half_hnd, scattered),
        _write("half the heads, NHD to NHD", nhd, half_nhd, scattered),
        _write("half the heads, HND to NHD", hnd, half_nhd, scattered),
    ]


def _write(what: str, src: CacheGeometry, dst: CacheGeometry, blocks: list[int]) -> dict[str, Any]:
    """One WRITE of one layer to the first destination rank, from planning to completion."""
    sides = [
        KvBuffer(num_layers=1, num_blocks=4 * NUM_PAGES + 1, page_bytes=side.page().page_bytes) for side in (src, dst)
    ]
    sender, receiver = NixlTransport("sender"), NixlTransport("receiver")
    for transport, kv in zip((sender, receiver), sides, strict=True):
        transport.register(kv.table)
    peer = sender.connect(receiver.descriptor(), sides[1].table)
    route = routes(0, src, dst)[0]
    lane = sender.open_lane(
        peer, PageView(sides[0].table, route.src_pieces), PageView(sides[1].table, route.dst_pieces)
    )
    numbers = tuple(blocks)
    write = GroupWrite(span=Span(0, NUM_PAGES * BLOCK_TOKENS), src_blocks=numbers, dst_blocks=numbers)
    samples: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        granules = select(write, route, TRANSFER, sides[0].table, sides[1].table)
        bound = bind(granules, route, sides[0].table, sides[1].table, src_layers=[0], dst_layers=[0])
        handle = post_write(sender, lane, bound, b"n")
        while sender.poll(handle) is WriteStatus.POSTED:
            receiver.notifications()
        samples.append(time.perf_counter_ns() - start)
        sender.release(handle)
        receiver.notifications()
    sender.disconnect(peer)
    sender.close()
    receiver.close()
    kilobytes = NUM_PAGES * route.spot_bytes // 1024
    return summarise(
        f"NIXL WRITE of {NUM_PAGES} pages ({kilobytes:,} KiB, {len(bound.src_pieces):,} pieces): {what}", samples
    )
