"""`python -m benchmarks.micro.throughput RESULTS [REPS]`: our writer against raw NIXL WRITEs of the same pages.

One process writes four layers to another one, pages in random order: through the layer hooks, the writer and the
transport, and by plain NIXL calls from a bare loop; in turn, over the same memory. UCX takes its transports from the
environment (`UCX_TLS=tcp`); without it, it copies by shared memory. Each side has a core of its own, and the receiving
side does nothing but drive its transport. Our model thread sleeps until the writes should be over.
"""

from __future__ import annotations

import base64
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from benchmarks.micro.engine import WRITERS, Worker, worker_half
from benchmarks.micro.target import running
from benchmarks.records import RecordFile
from vllm_pd_connector.engine.step import StepMetadata
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.transport.base import WriteStatus
from vllm_pd_connector.transport.nixl import NixlTransport, NixlWrite
from vllm_pd_connector.wire.messages import DecoderRank

NUM_LAYERS = 4
PAGE_BYTES = 32_768
LAYER_MIB = (1, 4, 16, 64)
NUM_BLOCKS = max(LAYER_MIB) * (1 << 20) // PAGE_BYTES + 1
REPS = 15
SLOWEST = 1 << 30  # bytes a second that any of the carriers manages


class RawWriter:
    """An agent of its own over the same memory on both sides, and nothing around it."""

    def __init__(self, pages: PageTable, target: DecoderRank) -> None:
        self._agent = nixl_agent("raw", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        self._agent.register_memory([(pages.base, pages.size_bytes, 0, "")], "DRAM")
        peer = self._agent.add_remote_agent(base64.b64decode(target.descriptor))
        peer = peer.decode() if isinstance(peer, bytes) else peer
        self._local, self._remote = (
            self._agent.prep_xfer_dlist(name, np.asarray(_rows(table), dtype=np.uint64), "DRAM")
            for name, table in (("NIXL_INIT_AGENT", pages), (peer, target.pages))
        )

    def write(self, blocks: Sequence[int]) -> float:
        """Seconds for these blocks of every layer: one WRITE with a notification for each layer, all in flight."""
        numbers = np.asarray(blocks, dtype=np.int32)
        start = time.perf_counter()
        handles: list[Any] = []
        for layer in range(NUM_LAYERS):
            rows = numbers + layer * NUM_BLOCKS
            handle = self._agent.make_prepped_xfer("WRITE", self._local, rows, self._remote, rows, b"raw")
            self._agent.transfer(handle)
            handles.append(handle)
        pending = handles
        while pending:
            states = [(handle, self._agent.check_xfer_state(handle)) for handle in pending]
            if any(state == "ERR" for _, state in states):
                raise RuntimeError("a raw WRITE failed")
            pending = [handle for handle, state in states if state == "PROC"]
        elapsed = time.perf_counter() - start
        for handle in handles:
            self._agent.release_xfer_handle(handle)
        return elapsed


class StampedTransport(NixlTransport):
    """Remembers when it last told that a write is done: the writer knows it then, and the raw loop of its own."""

    done_at = 0.0

    def poll(self, handle: NixlWrite) -> WriteStatus:
        status = super().poll(handle)
        if status is WriteStatus.DONE:
            self.done_at = time.perf_counter()
        return status


def _rows(table: PageTable) -> list[tuple[int, int, int]]:
    return [
        (table.address(layer, block), table.page_bytes, 0) for layer in range(NUM_LAYERS) for block in range(NUM_BLOCKS)
    ]


def _write_ours(
    prefiller: Worker, transport: StampedTransport, target: DecoderRank, transfers: Iterator[str], blocks: list[int]
) -> float:
    """Seconds from the first layer's hook until the writer has seen its last write end."""
    transfer = next(transfers)
    half = prefiller.half
    begin = StepMetadata(begins=[prefiller.begin(transfer, target, blocks)])
    half.start_step(begin)
    orders = StepMetadata(writes=[prefiller.write(transfer, blocks, blocks)])
    half.start_step(orders)
    time.sleep(0.002)  # the messenger has taken the orders, as it has while a first layer computes
    start = time.perf_counter()
    for name in prefiller.names:
        half.layer_done(name)
    half.end_step()
    time.sleep(len(blocks) * PAGE_BYTES * NUM_LAYERS / SLOWEST)  # else waiting would take its core from the writer
    half.handle_preemptions([transfer])  # waits until nothing of it is in flight
    elapsed = transport.done_at - start
    prefiller.close(transfer)
    return elapsed


def measure(records: RecordFile, reps: int) -> None:
    """Each size in turn: our writers and the raw one in changing order, after a round to warm up."""
    own, *others = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {own})
    carrier = os.environ.get("UCX_TLS", "shared memory")
    size = {"num_layers": NUM_LAYERS, "num_blocks": NUM_BLOCKS, "page_bytes": PAGE_BYTES}
    transfers = (f"{number:032x}" for number in range(1 << 30))
    with running(**size, pause_s=0.0, cores=others or [own]) as target:
        transports = {writer: StampedTransport(f"throughput-{os.getpid()}") for writer in WRITERS}
        workers = {
            writer: worker_half("kv_producer", extra, transports[writer], **size) for writer, extra in WRITERS.items()
        }
        raw = RawWriter(workers["pure Python"].half.handshake().pages, target.rank)
        for mib in LAYER_MIB:
            blocks = random.Random(mib).sample(range(1, NUM_BLOCKS), mib * (1 << 20) // PAGE_BYTES)
            arms: dict[str, Callable[[], float]] = {"raw": partial(raw.write, blocks)}
            for writer, worker in workers.items():
                arms[writer] = partial(_write_ours, worker, transports[writer], target.rank, transfers, blocks)
            for rep in range(-1, reps):
                turn = rep % len(arms)  # another arm begins each time
                seconds = {arm: arms[arm]() for arm in [*list(arms)[turn:], *list(arms)[:turn]]}
                for writer in workers if rep >= 0 else ():
                    arm = {"carrier": carrier, "layer_mib": mib, "layers": NUM_LAYERS, "writer": writer, "rep": rep}
                    records.add("throughput", **arm, ours=seconds[writer], raw=seconds["raw"])
            print(f"  {carrier}, {mib} MiB a layer, s: {seconds}", flush=True)
        for worker in workers.values():
            worker.half.shutdown()


def main() -> int:
    measure(RecordFile(Path(sys.argv[1])), int(sys.argv[2]) if len(sys.argv) > 2 else REPS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
