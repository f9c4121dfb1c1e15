"""`python -m benchmarks.gpu [RESULTS]`: watcher latency, WRITE against a device copy, a matmul beside a write.

Where torch finds no CUDA device the same code runs on host memory, and what only a device has is recorded as skipped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.gpu import bandwidth, watcher
from benchmarks.records import RecordFile


def main() -> int:
    records = RecordFile(Path(sys.argv[1])) if len(sys.argv) > 1 else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if records is not None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else ""
        records.add("device", device=device.type, name=name)
    for measure in (watcher.measure, bandwidth.measure):
        for record in measure(device):
            print("  " + ", ".join(f"{key} {value}" for key, value in record.items()), flush=True)
            if records is not None:
                records.add("gpu", **record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
