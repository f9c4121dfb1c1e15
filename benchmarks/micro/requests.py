"""What a write needs before it can be posted: descriptor lists, once for a pair of ranks, and a transfer request each.

Two NIXL agents in one process; nothing is posted, so no byte is copied.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np

from benchmarks.micro.timing import summarise
from vllm_pd_connector.geometry.page_table import PageTable, whole_pages
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.shapes import bound_pieces
from vllm_pd_connector.transport.base import Lane
from vllm_pd_connector.transport.nixl import NixlTransport

NUM_BLOCKS = 16_384
NUM_PAGES = (16, 64, 1024, 8192)
PAGE_BYTES = 4096
REPEATS = 30
NOTE = b"n" * 52


def measure() -> list[dict[str, Any]]:
    """Records of both costs."""
    sides = [KvBuffer(num_layers=1, num_blocks=NUM_BLOCKS, page_bytes=PAGE_BYTES) for _ in range(2)]
    sender, receiver = NixlTransport("requests-sender"), NixlTransport("requests-receiver")
    for transport, kv in zip((sender, receiver), sides, strict=True):
        transport.register(kv.table)
    try:
        lists, lane = _lists(sender, receiver, sides[0].table, sides[1].table)
        return [lists, *(_requests(sender, lane, size) for size in NUM_PAGES)]
    finally:
        sender.close()
        receiver.close()


def _lists(
    sender: NixlTransport, receiver: NixlTransport, src: PageTable, dst: PageTable
) -> tuple[dict[str, Any], Lane]:
    """Each time with a peer that is new; the last one's lane."""
    descriptor = receiver.descriptor()
    samples: list[float] = []
    for rep in range(REPEATS):
        peer = sender.connect(descriptor, dst)
        start = time.perf_counter_ns()
        lane = sender.open_lane(peer, whole_pages(src), whole_pages(dst))
        samples.append(time.perf_counter_ns() - start)
        if rep < REPEATS - 1:
            sender.disconnect(peer)
    # The sender's own list is kept: it is in the first sample only.
    return summarise(f"prepare the descriptor list of a new peer, {NUM_BLOCKS:,} pages", samples[1:]), lane


def _requests(sender: NixlTransport, lane: Lane, num_pages: int) -> dict[str, Any]:
    """Of other pages each time, as in an engine."""
    draw = random.Random(num_pages)
    samples: list[float] = []
    for _ in range(REPEATS):
        src, dst = (np.array(draw.sample(range(NUM_BLOCKS), num_pages)) for _ in range(2))
        write = bound_pieces(src, dst)
        start = time.perf_counter_ns()
        handle = sender.prepare_write(lane, write, NOTE)
        samples.append(time.perf_counter_ns() - start)
        sender.withdraw(handle)
        if not sender.release(handle):
            raise RuntimeError("a request that was never posted cannot be released")
    return summarise(f"make a transfer request of {num_pages:,} pages in random order, nothing posted", samples)
