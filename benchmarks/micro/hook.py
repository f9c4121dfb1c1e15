"""What the layer hook costs the model thread: `WorkerHalf.layer_done`, the real one, with a running messenger.

Rounds, because one pass over a writer can meet a slow minute of the machine: writers and loads take turns.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from benchmarks.machine import MAX_FOREIGN_CORES, ForeignCpu
from benchmarks.micro.engine import WRITERS, Worker, worker_half
from benchmarks.micro.target import running
from benchmarks.micro.timing import clock_ns, per_call, summarise
from vllm_pd_connector.engine.step import StepMetadata
from vllm_pd_connector.transport.nixl import NixlTransport
from vllm_pd_connector.wire.messages import DecoderRank

NUM_LAYERS = 8
NUM_PAGES = 64
PAGE_BYTES = 32_768
NUM_ROUNDS = 3
NUM_STEPS = 200
LAYER_S = 0.002  # a layer of the small test model takes milliseconds; the messenger has long fallen asleep
ROWS = np.ones((128, 128), dtype=np.float32)
BLOCKS = list(range(1, NUM_PAGES + 1))
POSTING = "64 pages of each layer are posted"
BARE_WAKE = "waking a thread that sleeps, no code of ours"
TRANSFER = "0123456789abcdef" * 2
WAKES_S = 30.0


class Alone:
    """Whether others used the machine since it was made; the target's few percent of a core count as others' here."""

    def __init__(self) -> None:
        self._foreign = ForeignCpu([])

    def flags(self) -> dict[str, Any]:
        cores = self._foreign.cores()
        return {"foreign_cores": round(cores, 3), "disturbed": cores > MAX_FOREIGN_CORES}


def measure(rounds: int = NUM_ROUNDS) -> Iterator[dict[str, Any]]:
    """Records of each writer that this installation has, by round; the memory it writes to is another process's."""
    cores = sorted(os.sched_getaffinity(0))
    size = {"num_layers": NUM_LAYERS, "num_blocks": NUM_PAGES + 1, "page_bytes": PAGE_BYTES}
    for rep in range(rounds):
        with running(**size, pause_s=0.0005, cores=cores[:1]) as target:
            for name, extra in list(WRITERS.items())[:: 1 if rep % 2 else -1]:
                yield from ({**record, "rep": rep} for record in _measure(name, extra, target.rank, size))
        alone = Alone()
        yield {**summarise(BARE_WAKE, _wakes()), "is_baseline": True, "rep": rep, **alone.flags()}


def _measure(
    writer: str, extra: Mapping[str, Any], target: DecoderRank, size: Mapping[str, int]
) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    with _worker(extra, size) as worker:
        hook = partial(worker.half.layer_done, worker.names[3])
        alone = Alone()
        records.append({**per_call("no transfer in the step", hook, calls=10_000, repeats=30), **alone.flags()})
        orders = StepMetadata(writes=[worker.write(TRANSFER, BLOCKS, BLOCKS)])  # of a transfer that nobody began
        alone = Alone()
        records.append({**summarise("nobody has anything to post", _steps(worker, orders)), **alone.flags()})
    with _worker({**extra, "min_write_bytes": 1 << 40}, size) as worker:
        alone = Alone()
        samples = _steps(worker, orders, pause_s=0.0)
        records.append({**summarise("too few bytes to wake anybody", samples), **alone.flags()})
    with _worker(extra, size) as worker:
        worker.half.start_step(StepMetadata(begins=[worker.begin(TRANSFER, target, BLOCKS)]))
        alone = Alone()
        record = {**summarise(POSTING, _steps(worker, orders)), **alone.flags()}
        worker.close(TRANSFER)
        counted = (worker.half.take_stats() or {"counters": {}})["counters"]
        if counted.get("pages_written") != NUM_STEPS * NUM_LAYERS * NUM_PAGES:
            raise RuntimeError(f"not every page was written, this measured something else: {counted}")
        records.append({**record, "writes": counted["writes"]})
    return [{**record, "what": f"layer hook, {writer} writer, {record['what']}"} for record in records]


@contextmanager
def _worker(extra: Mapping[str, Any], size: Mapping[str, int]) -> Iterator[Worker]:
    worker = worker_half("kv_producer", extra, NixlTransport(f"hook-{os.getpid()}"), **size)
    try:
        yield worker
    finally:
        worker.half.shutdown()


def _wakes() -> list[float]:
    """Nanoseconds that waking a sleeping thread costs the caller, by an event file and nothing else."""
    # A semaphore: a read takes one ring, also when the sleeper was late and two had come together.
    file = os.eventfd(0, os.EFD_SEMAPHORE)
    overhead, samples = clock_ns(), list[float]()
    sleeper = threading.Thread(target=lambda: [os.read(file, 8) for _ in range(NUM_STEPS)], daemon=True)
    sleeper.start()
    for _ in range(NUM_STEPS):
        _compute(LAYER_S)
        start = time.perf_counter_ns()
        os.eventfd_write(file, 1)
        samples.append(time.perf_counter_ns() - start - overhead)
    sleeper.join(WAKES_S)
    if sleeper.is_alive():
        raise RuntimeError(f"the sleeper still waits for a ring after {WAKES_S:g} s")
    os.close(file)
    return samples


def _compute(seconds: float) -> None:
    """What a layer does before its hook: the caches hold other things, and the core is awake."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        np.tanh(ROWS)


def _steps(worker: Worker, orders: StepMetadata, pause_s: float = LAYER_S) -> list[float]:
    """Nanoseconds of every layer's hook, over many forward passes."""
    overhead, samples = clock_ns(), list[float]()
    for _ in range(NUM_STEPS):
        worker.half.start_step(orders)
        for name in worker.names:
            _compute(pause_s)
            start = time.perf_counter_ns()
            worker.half.layer_done(name)
            samples.append(time.perf_counter_ns() - start - overhead)
        worker.half.end_step()
    return samples
