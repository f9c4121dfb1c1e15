"""What the layer hook costs the model thread: `WorkerHalf.layer_done`, the real one, with a running messenger."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.micro.engine import WRITERS, Worker, worker_half
from benchmarks.micro.timing import clock_ns, per_call, summarise
from vllm_pd_connector.engine.step import StepMetadata
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.transport.nixl import NixlTransport
from vllm_pd_connector.wire.messages import DecoderRank

NUM_LAYERS = 8
NUM_PAGES = 64
PAGE_BYTES = 32_768
NUM_STEPS = 200
LAYER_S = 0.002  # a layer of the small test model takes milliseconds; the messenger has long fallen asleep
BLOCKS = list(range(1, NUM_PAGES + 1))
TRANSFER = "0123456789abcdef" * 2


def measure() -> list[dict[str, Any]]:
    return [record for name, extra in WRITERS.items() for record in _measure(name, extra)]


def _measure(signal: str, extra: Mapping[str, Any]) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    with _workers(extra) as (worker, target, _):
        call = partial(worker.half.layer_done, worker.names[3])
        records.append(per_call("no transfer in the step", call, calls=10_000, repeats=30))
        orders = StepMetadata(writes=[worker.write(TRANSFER, BLOCKS, BLOCKS)])  # of a transfer that nobody began
        records.append(summarise("waking an idle messenger", _steps(worker, orders)))
    with _workers({**extra, "min_write_bytes": 1 << 40}) as (worker, target, _):
        records.append(summarise("too few bytes to wake the messenger", _steps(worker, orders, pause_s=0.0)))
    with _workers(extra) as (worker, target, arrived):
        worker.half.start_step(StepMetadata(begins=[worker.begin(TRANSFER, target, BLOCKS)]))
        records.append(summarise("messenger posts 64 pages of each layer", _steps(worker, orders)))
        worker.close(TRANSFER)
        if (posted := len(arrived.notifications())) < NUM_STEPS * NUM_LAYERS * 0.9:
            raise RuntimeError(f"{posted} writes for {NUM_STEPS * NUM_LAYERS} layers: this measured something else")
    return [{**record, "what": f"layer hook, {signal}, {record['what']}", "signal": signal} for record in records]


@contextmanager
def _workers(extra: Mapping[str, Any]) -> Iterator[tuple[Worker, DecoderRank, NixlTransport]]:
    """A prefiller's worker, and memory of this process that it can write to over NIXL."""
    source, target = NixlTransport("hook-source"), NixlTransport("hook-target")
    kv = KvBuffer(num_layers=NUM_LAYERS, num_blocks=NUM_PAGES + 1, page_bytes=PAGE_BYTES)
    target.register(kv.table)
    worker = worker_half(
        "kv_producer", extra, source, num_layers=NUM_LAYERS, num_blocks=NUM_PAGES + 1, page_bytes=PAGE_BYTES
    )
    try:
        yield worker, DecoderRank(descriptor=base64.b64encode(target.descriptor()).decode(), pages=kv.table), target
    finally:
        worker.half.shutdown()
        target.close()


def _steps(worker: Worker, orders: StepMetadata, pause_s: float = LAYER_S) -> list[float]:
    """Nanoseconds of every layer's hook, over many forward passes."""
    overhead, samples = clock_ns(), list[float]()
    for _ in range(NUM_STEPS):
        worker.half.start_step(orders)
        for name in worker.names:
            time.sleep(pause_s)
            start = time.perf_counter_ns()
            worker.half.layer_done(name)
            samples.append(time.perf_counter_ns() - start - overhead)
        worker.half.end_step()
    return samples
