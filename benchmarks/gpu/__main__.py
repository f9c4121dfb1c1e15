"""`python -m benchmarks.gpu [RESULTS]`: watcher latency, WRITE against a device copy, a matmul beside a write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import bandwidth, watcher
from benchmarks.machine import fingerprint
from benchmarks.records import RecordFile

ROOT = Path(__file__).resolve().parent.parent.parent


def main() -> int:
    records = RecordFile(Path(sys.argv[1])) if len(sys.argv) > 1 else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = {**fingerprint(ROOT), "device": device.type, "torch": torch.__version__}
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name()
    else:
        print("torch finds no CUDA device: host memory instead of a GPU's, no graphs, no overlap")
    found: list[dict[str, Any]] = [*watcher.measure(device), *bandwidth.measure(device)]
    for record in found:
        print("  " + ", ".join(f"{key} {value}" for key, value in record.items()), flush=True)
    if records is not None:
        records.add("machine", **machine)
        for record in found:
            records.add("gpu", **record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
