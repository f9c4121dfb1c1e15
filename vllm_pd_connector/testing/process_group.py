"""A child process with everything it starts, as one group that can be ended for certain. Linux only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

TERM_S = 15.0
"""Seconds between SIGTERM and SIGKILL: a vLLM server with two workers needs about 5 on a busy core."""

REAP_S = 10.0
PAUSE_S = 0.05
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ProcessGroup:
    """A command in a session of its own, its output in a file.

    If this process is killed outright, the command gets SIGTERM from the kernel (needs util-linux' `setpriv`); it
    must then be started by a thread that lives as long as the process.

    Args:
        command: program and arguments.
        env: its whole environment.
        log: file for stdout and stderr, overwritten.
        cores: CPU cores it and its children may use; empty: all of ours.

    Raises:
        OSError: the program or the log file cannot be opened.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log: Path, cores: Sequence[int] = ()) -> None:
        prefix = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        prefix += ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, *command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._is_gone = False

    @property
    def is_alive(self) -> bool:
        """Whether the command itself still runs (its children may outlive it)."""
        return self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Signal every process of the group; none left is no error."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def wait_gone(self, timeout_s: float) -> bool:
        """Whether no process of the group runs any more, waiting up to `timeout_s` seconds. Reaps the command."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.process.poll()
            if self._is_gone or not _members(self.process.pid):
                self._is_gone = True
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)

    def pin(self, cores: Sequence[int]) -> None:
        """Move every thread of the group to these CPU cores."""
        for process in _members(self.process.pid):
            for task in Path(f"/proc/{process}/task").glob("[0-9]*"):
                with suppress(ProcessLookupError):  # a thread that has just ended
                    os.sched_setaffinity(int(task.name), cores)

    def kill(self) -> None:
        """SIGKILL to all, as a crash; returns when they are gone."""
        if not self._is_gone:  # else the number may be another's by now
            self.signal(signal.SIGKILL)
            self.process.wait(REAP_S)
            self.wait_gone(REAP_S)


def stop_all(groups: Sequence[ProcessGroup]) -> None:
    """SIGTERM to each command, SIGKILL to what is left of its group; the groups stop side by side.

    Signals to this process are ignored meanwhile, so that a second Ctrl-C leaves nothing behind.
    """
    with _handlers(signal.SIG_IGN, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)):
        for group in groups:
            if group.is_alive:
                group.process.terminate()  # the leader alone: vLLM's own shutdown then ends its children in order
        deadline = time.monotonic() + TERM_S
        for group in groups:
            while group.is_alive and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
            group.kill()


@contextmanager
def exit_on_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit within, so that `finally` blocks run. Main thread only; else no effect."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handlers(leave, (signal.SIGTERM, signal.SIGHUP)):
        yield


@contextmanager
def _handlers(handler: Any, numbers: Sequence[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, old if old is not None else signal.SIG_DFL)


def cpu_seconds(leaders: Collection[int]) -> float:
    """CPU time so far of all living processes in the sessions of these leaders: servers with their children."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[3]) in leaders:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS_PER_S


def _members(group: int) -> list[int]:
    """Processes of a group that are not zombies."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if int(pgrp) == group and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def session_members(leader: int) -> dict[int, str]:
    """Process id and title (first word of the command line) of everything that runs in a session."""
    found: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            title = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[3]) == leader:
            found[int(stat.parent.name)] = title[0].decode(errors="replace") if title else ""
    return found
