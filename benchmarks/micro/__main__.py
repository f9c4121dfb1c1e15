"""`python -m benchmarks.micro [RAW_FILE]`: measure, print, and append to a raw file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.micro import hook, layouts, plan
from benchmarks.records import RecordFile


def main() -> int:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # as a pinned server: all threads share the core
    records = RecordFile(Path(sys.argv[1]).parent) if len(sys.argv) > 1 else None
    for record in [*hook.measure(), *plan.measure(), *layouts.measure()]:
        spread = f"{record['low_ns']:,} … {record['high_ns']:,}"
        print(f"  {record['what']}: {record['median_ns']:,} ns ({spread}, n={record['n']})", flush=True)
        if records is not None:
            records.add("micro", **record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
