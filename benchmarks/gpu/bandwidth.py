"""WRITE from device memory to another process's, against a plain copy on the device, and beside a layer's matmul.

`python -m benchmarks.gpu.bandwidth DEVICE` is the other process: memory, how it is reached, and its transport driven
until standard input ends. With both on one GPU this is a copy inside it by way of UCX, not a network.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.gpu.watcher import NO_DEVICE
from benchmarks.summary import spread
from vllm_pd_connector.geometry.page_table import PageTable, whole_pages
from vllm_pd_connector.testing.shapes import bound_pieces
from vllm_pd_connector.transport.base import WriteStatus, post_write
from vllm_pd_connector.transport.nixl import NixlTransport

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE_BYTES = 65_536
NUM_BLOCKS = 1_024
MIB = (1, 4, 16, 64)
REPS = 20
LIMIT_S = 60.0
MATMUL = 4_096
HIDDEN = "hidden part of a WRITE of {mib} MiB beside a matmul"


def table(memory: torch.Tensor) -> PageTable:
    """One layer of pages over a flat uint8 tensor."""
    is_host = memory.device.type == "cpu"
    return PageTable(
        base=memory.data_ptr(),
        size_bytes=memory.numel(),
        device_id=0 if is_host else memory.device.index or 0,
        memory="DRAM" if is_host else "VRAM",
        num_blocks=NUM_BLOCKS,
        page_bytes=PAGE_BYTES,
        block_stride=PAGE_BYTES,
        layer_offsets=[0],
    )


def measure(device: torch.device) -> list[dict[str, Any]]:
    memory = torch.randint(0, 255, (NUM_BLOCKS * PAGE_BYTES,), dtype=torch.uint8, device=device)
    transport = NixlTransport(f"gpu-{os.getpid()}")
    transport.register(table(memory))
    with _target(device) as (descriptor, pages):
        peer = transport.connect(descriptor, pages)
        lane = transport.open_lane(peer, whole_pages(table(memory)), whole_pages(pages))
        found = [_bandwidth(transport, lane, memory, mib) for mib in MIB]
        if device.type == "cuda":
            found.append(_overlap(transport, lane, MIB[-1]))
        else:
            found.append({"what": HIDDEN.format(mib=MIB[-1]), "skipped": NO_DEVICE})
    transport.close()
    return found


def _bandwidth(transport: NixlTransport, lane: Any, memory: torch.Tensor, mib: int) -> dict[str, Any]:
    """Written and copied in turn; the ratio is of each pair."""
    num_bytes = mib << 20
    other = torch.empty(num_bytes, dtype=torch.uint8, device=memory.device)
    ratios: list[float] = []
    writes: list[float] = []
    for rep in range(-2, REPS):
        written = _seconds(lambda: _write(transport, lane, mib))
        copied = _seconds(lambda: other.copy_(memory[:num_bytes]))
        if rep >= 0:
            ratios.append(copied / written)
            writes.append(num_bytes / written / 1e9)
    ratio, speed = spread(ratios), spread(writes)
    return {
        "what": f"WRITE of {mib} MiB in pages of {PAGE_BYTES >> 10} KiB, {memory.device.type} memory",
        "n": speed.n,
        "GB/s": [round(v, 2) for v in (speed.median, speed.low, speed.high)],
        "of a copy": [round(v, 3) for v in (ratio.median, ratio.low, ratio.high)],
    }


def _overlap(transport: NixlTransport, lane: Any, mib: int) -> dict[str, Any]:
    """How much of the shorter of the two is hidden when a matmul and a write run at once: 1 is all of it."""
    left = torch.randn(MATMUL, MATMUL, device="cuda", dtype=torch.bfloat16)

    def matmul() -> None:
        for _ in range(8):
            torch.mm(left, left)

    def both() -> None:
        matmul()
        _write(transport, lane, mib)

    hidden: list[float] = []
    for rep in range(-2, REPS):
        layer, write, together = _seconds(matmul), _seconds(lambda: _write(transport, lane, mib)), _seconds(both)
        if rep >= 0:
            hidden.append((layer + write - together) / min(layer, write))
    found = spread(hidden)
    return {
        "what": HIDDEN.format(mib=mib),
        "n": found.n,
        "share": [round(v, 3) for v in (found.median, found.low, found.high)],
    }


def _write(transport: NixlTransport, lane: Any, mib: int) -> None:
    numbers = range((mib << 20) // PAGE_BYTES)
    handle = post_write(transport, lane, bound_pieces(numbers, numbers), b"n")
    end = time.monotonic() + LIMIT_S
    while (status := transport.poll(handle)) is WriteStatus.POSTED:
        if time.monotonic() > end:
            raise TimeoutError(f"a WRITE of {mib} MiB is not over after {LIMIT_S:g} s")
    if status is not WriteStatus.DONE:
        raise RuntimeError(f"a WRITE of {mib} MiB has failed")
    transport.release(handle)


def _seconds(action: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def _target(device: torch.device) -> Iterator[tuple[bytes, PageTable]]:
    command = [sys.executable, "-m", "benchmarks.gpu.bandwidth", device.type]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith(b"{"))
        told = json.loads(line)
        yield base64.b64decode(told["descriptor"]), msgspec.convert(told["pages"], PageTable)
    finally:
        process.communicate(timeout=LIMIT_S)


def main() -> int:
    memory = torch.zeros(NUM_BLOCKS * PAGE_BYTES, dtype=torch.uint8, device=sys.argv[1])
    transport = NixlTransport(f"gpu-target-{os.getpid()}")
    transport.register(table(memory))
    descriptor = base64.b64encode(transport.descriptor()).decode()
    print(json.dumps({"descriptor": descriptor, "pages": msgspec.to_builtins(table(memory))}), flush=True)
    is_over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), is_over.set()), daemon=True).start()
    while not is_over.wait(0.0002):
        transport.notifications()
    transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
