"""`python -m benchmarks.micro.latency RESULTS [STEPS]`: from a layer's hook to its write posted, over real NIXL.

A prefiller's worker half in this process, the memory it writes to in another one; 16 pages of 4 KiB a layer, a layer
every 3 ms. "Posted" is when NIXL's post has returned, UCX's copy by shared memory included. Between two hooks the main
thread sleeps, works in numpy, or works in pure Python and holds the GIL as much as Python lets it.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.micro.engine import WRITERS, Worker, worker_half
from benchmarks.micro.target import running
from benchmarks.records import RecordFile
from vllm_pd_connector.engine.step import StepMetadata
from vllm_pd_connector.plan.write import BoundWrite
from vllm_pd_connector.transport.nixl import NixlLane, NixlTransport, NixlWrite

NUM_LAYERS = 32
NUM_PAGES = 16
PAGE_BYTES = 4096
LAYER_S = 0.003
ROUNDS = 3
SWITCH_S = {0.005, 0.0001}
"""Python's own default switch interval, and a short one; the one that our worker sets is measured as well."""

EXTRA: dict[str, Any] = {"min_write_bytes": 1}
"""Every layer wakes the writer, however small."""


class StampedTransport(NixlTransport):
    """Remembers when each layer's post had returned."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.posted: dict[int, int] = {}
        self.prepared: list[tuple[list[int], NixlWrite]] = []

    def prepare_write(self, lane: NixlLane, write: BoundWrite, note: bytes) -> NixlWrite:
        handle = super().prepare_write(lane, write, note)
        self.prepared.append((self._layers(write), handle))
        return handle

    def post(self, handle: NixlWrite, note: bytes | None = None) -> None:
        super().post(handle, note)
        self.posted[id(handle)] = time.monotonic_ns()

    def take(self) -> dict[int, int]:
        """Monotonic ns at which each layer's post had returned, since the last call."""
        posted = {
            layer: self.posted.get(id(handle)) or self.moments(handle)[1]
            for layers, handle in self.prepared
            for layer in layers
        }
        self.posted, self.prepared = {}, []
        return posted

    def _layers(self, write: BoundWrite) -> list[int]:
        assert self._pages is not None
        return sorted(set((write.src_pieces // self._pages.num_blocks).tolist()))


def _idle(end_ns: int) -> None:
    time.sleep(max(0.0, (end_ns - time.monotonic_ns()) / 1e9))


def _numpy(end_ns: int) -> None:
    rows = np.ones((96, 96), dtype=np.float32)
    while time.monotonic_ns() < end_ns:
        rows = np.tanh(rows @ rows)


def _python(end_ns: int) -> None:
    total = 0
    while time.monotonic_ns() < end_ns:
        for number in range(100):
            total += number * number


LOADS: dict[str, Callable[[int], None]] = {"idle": _idle, "numpy": _numpy, "pure Python": _python}


def _measure_step(prefiller: Worker, transport: StampedTransport, transfer: str, target: Any, load: str) -> list[float]:
    """Microseconds from each layer's hook to its write posted, in one forward pass."""
    blocks = list(range(1, NUM_PAGES + 1))
    bumped: dict[int, int] = {}
    work = LOADS[load]

    def compute(_layer: int) -> None:
        work(time.monotonic_ns() + round(LAYER_S * 1e9))

    def bump(layer: int) -> None:
        bumped[layer] = time.monotonic_ns()

    orders = StepMetadata(
        begins=[prefiller.begin(transfer, target, blocks)], writes=[prefiller.write(transfer, blocks, blocks)]
    )
    prefiller.step(orders, compute, bump)
    prefiller.close(transfer)
    posted = transport.take()
    return [(posted[layer] - at) / 1000 for layer, at in bumped.items()]


def measure(records: RecordFile, num_steps: int) -> None:
    """Rounds of every arm in turn: writer, switch interval, load of the main thread, whether threads share a core."""
    cores = sorted(os.sched_getaffinity(0))
    size = {"num_layers": NUM_LAYERS, "num_blocks": NUM_PAGES + 1, "page_bytes": PAGE_BYTES}
    transfers = (f"{number:032x}" for number in range(1 << 30))
    with running(**size, pause_s=0.0005, cores=cores[-1:]) as target:
        sides: dict[str, tuple[Worker, StampedTransport]] = {}
        for writer, extra in WRITERS.items():
            transport = StampedTransport(f"latency-{os.getpid()}")
            sides[writer] = (worker_half("kv_producer", {**EXTRA, **extra}, transport, **size), transport)
            _measure_step(*sides[writer], next(transfers), target.rank, "idle")  # connects
        default_s = round(sys.getswitchinterval(), 5)  # CPython keeps whole microseconds
        arms = itertools.product(
            range(ROUNDS),
            (("two cores", cores), ("one core", cores[:1])),
            sorted({*SWITCH_S, default_s}),
            LOADS,
            sides,
        )
        for rep, (where, own), switch_s, load, writer in arms:
            _move_threads(own)
            sys.setswitchinterval(switch_s)
            samples: list[float] = []
            for _ in range(num_steps):
                samples += _measure_step(*sides[writer], next(transfers), target.rank, load)
            arm = {"writer": writer, "load": load, "switch_s": switch_s, "cores": where}
            _add(records, samples, **arm, is_default=switch_s == default_s, rep=rep)
        _move_threads(cores)
        for worker, _ in sides.values():
            worker.half.shutdown()


def _add(records: RecordFile, samples: Sequence[float], **arm: Any) -> None:
    records.add("posted", **arm, samples_us=[round(sample, 1) for sample in samples])
    ordered = sorted(samples)
    print(
        f"  signal to posted, {arm}: p50 {ordered[len(ordered) // 2]:.0f} us, "
        f"p99 {ordered[len(ordered) * 99 // 100]:.0f} us, max {ordered[-1]:.0f} us",
        flush=True,
    )


def _move_threads(cores: Sequence[int]) -> None:
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def main() -> int:
    num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 10
    measure(RecordFile(Path(sys.argv[1])), num_steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
