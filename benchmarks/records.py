"""Raw records: one JSON line for each single measurement, written as soon as it is taken."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

Record = dict[str, Any]
RAW = "raw.jsonl"


class RecordFile:
    """Appends to `raw.jsonl` of a results directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / RAW

    def add(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "at": time.strftime("%H:%M:%S", time.gmtime()), **fields})
        with self.path.open("a") as file:
            file.write(line + "\n")


def read_records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
