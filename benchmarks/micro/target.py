"""`python -m benchmarks.micro.target LAYERS BLOCKS PAGE_BYTES PAUSE_S`: memory that another process writes to.

It prints how it is reached, takes notifications in until its standard input ends, and then prints how many came.
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.transport.nixl import NixlTransport
from vllm_pd_connector.wire.messages import DecoderRank

ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 60.0


@dataclass(frozen=True)
class Target:
    """A running target process. `rank` is how a writer reaches it."""

    rank: DecoderRank
    process: subprocess.Popen[bytes]


@contextmanager
def running(
    *, num_layers: int, num_blocks: int, page_bytes: int, pause_s: float, cores: Sequence[int]
) -> Iterator[Target]:
    """A second process with memory of this shape, on these cores, gone at the end.

    Args:
        pause_s: seconds between its looks at the transport; 0: none, it uses a core.
    """
    size = [str(num) for num in (num_layers, num_blocks, page_bytes, pause_s)]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.micro.target", *size],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        os.sched_setaffinity(process.pid, cores)
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        assert process.stdout is not None
        lines = iter(process.stdout.readline, b"")  # NIXL's log comes before ours
        line = next((line for line in lines if line.startswith(b"{")), b"")
        watchdog.cancel()
        yield Target(msgspec.json.decode(line, type=DecoderRank), process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    num_layers, num_blocks, page_bytes = map(int, sys.argv[1:4])
    pause_s = float(sys.argv[4])
    kv = KvBuffer(num_layers=num_layers, num_blocks=num_blocks, page_bytes=page_bytes)
    transport = NixlTransport(f"target-{os.getpid()}")
    transport.register(kv.table)
    rank = DecoderRank(descriptor=base64.b64encode(transport.descriptor()).decode(), pages=kv.table)
    sys.stdout.buffer.write(msgspec.json.encode(rank) + b"\n")
    sys.stdout.flush()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.buffer.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        transport.notifications()
        if pause_s:
            time.sleep(pause_s)
    transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
