"""`python -m benchmarks.micro [RAW_FILE] [--quick]`: measure, print, and append to a raw file."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.micro import growth, hook, layouts, plan, requests
from benchmarks.records import RecordFile

CHILD_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro", description=__doc__)
    parser.add_argument("raw", type=Path, nargs="?", help="raw.jsonl of a results directory")
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it work at all")
    parser.add_argument(
        "--only", choices=("hook", "writes"), help="the layer hook alone, or planning, layouts and requests"
    )
    parser.add_argument("--rounds", type=int, default=hook.NUM_ROUNDS, help="of the layer hook, about 20 s each")
    args = parser.parse_args()
    records = RecordFile(args.raw.parent if args.raw else Path(tempfile.mkdtemp(prefix="pd-bench-")))
    if args.only == "hook":
        _add(records, hook.measure(args.rounds))
        return 0
    if args.only == "writes":
        _writes(records)
        return 0
    # Processes of their own: UCX reads its environment at start, and these two need both cores.
    _child("latency", records, "2" if args.quick else "10")
    _child("throughput", records, "3" if args.quick else "15")
    _child("throughput", records, "3" if args.quick else "15", UCX_TLS="tcp")
    _add(records, hook.measure(1 if args.quick else args.rounds))
    _writes(records)
    for record in growth.measure():
        what = f"{record['what']}, {record['size']:,} {record['unit']}s"
        print(f"  {what}: {median(record['each']):,.0f} {record['in']} for each", flush=True)
        records.add("growth", **record)
    return 0


def _writes(records: RecordFile) -> None:
    """Pins this process to one core."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    _add(records, [*plan.measure(), *layouts.measure(), *requests.measure()])


def _add(records: RecordFile, found: Iterable[Mapping[str, Any]]) -> None:
    for record in found:
        spread = f"{record['low_ns']:,} … {record['high_ns']:,}"
        print(f"  {record['what']}: {record['median_ns']:,} ns ({spread}, n={record['n']})", flush=True)
        records.add("micro", **record)


def _child(module: str, records: RecordFile, repetitions: str, **env: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.micro.{module}", str(records.path.parent), repetitions]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "OPENBLAS_NUM_THREADS": "1", **env}
    subprocess.run(command, check=True, env=environment, timeout=CHILD_S)


if __name__ == "__main__":
    sys.exit(main())
