"""One JSON line for each moment in a request's life, when the operator asks for it (`timeline_dir`).

Times are this host's monotonic clock in nanoseconds: lines of two processes may be compared on one host only.
"""

import json
import os
import threading
import time
from logging import getLogger
from pathlib import Path
from typing import Any, Protocol

logger = getLogger(__name__)


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
    """Appends to `<directory>/<role>-<pid>.jsonl`. A full disk costs moments, never the thread that marks them."""

    def __init__(self, directory: str, role: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._file = (Path(directory) / f"{role}-{os.getpid()}.jsonl").open("ab", buffering=0)
        self._role = role
        self._is_torn = False
        self._lock = threading.Lock()

    def mark(self, transfer_id: str, moment: str, **fields: Any) -> None:
        at_ns = fields.pop("at_ns", None) or time.monotonic_ns()
        line = json.dumps({"transfer": transfer_id, "role": self._role, "moment": moment, "at_ns": at_ns, **fields})
        with self._lock:
            if not self._file.closed:
                self._append((line + "\n").encode())

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _append(self, line: bytes) -> None:
        if self._is_torn:
            line = b"\n" + line  # what is left of an earlier line must not spoil this one
        try:
            is_whole = self._file.write(line) == len(line)
        except OSError as error:
            if not self._is_torn:
                logger.warning("event=timeline_lost file=%s reason=%s", self._file.name, error.strerror)
            is_whole = False
        self._is_torn = not is_whole


def open_timeline(directory: str | None, role: str) -> Timeline:
    """A timeline for one process half; records nothing without a directory.

    Raises:
        OSError: the directory cannot be written.
    """
    return FileTimeline(directory, role) if directory else NoTimeline()
