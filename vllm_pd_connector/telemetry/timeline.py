"""One JSON line for each moment in a request's life, when the operator asks for it (`timeline_dir`).

Times are this host's monotonic clock in nanoseconds: lines of two processes may be compared on one host only.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Protocol


class Timeline(Protocol):
    """Where moments go. Any thread may call."""

    def mark(self, transfer_id: str, moment: str, **fields: Any) -> None:
        """Record that `moment` of a transfer is now; `at_ns` in `fields` overrides the time."""
        ...

    def close(self) -> None: ...


class NoTimeline:
    """Records nothing."""

    def mark(self, transfer_id: str, moment: str, **fields: Any) -> None:
        pass

    def close(self) -> None:
        pass


class FileTimeline:
    """Appends to `<directory>/<role>-<pid>.jsonl`."""

    def __init__(self, directory: str, role: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._file = (Path(directory) / f"{role}-{os.getpid()}.jsonl").open("a", buffering=1)
        self._role = role
        self._lock = threading.Lock()

    def mark(self, transfer_id: str, moment: str, **fields: Any) -> None:
        at_ns = fields.pop("at_ns", None) or time.monotonic_ns()
        line = json.dumps({"transfer": transfer_id, "role": self._role, "moment": moment, "at_ns": at_ns, **fields})
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()


def open_timeline(directory: str | None, role: str) -> Timeline:
    """A timeline for one process half; records nothing without a directory.

    Raises:
        OSError: the directory cannot be written.
    """
    return FileTimeline(directory, role) if directory else NoTimeline()
