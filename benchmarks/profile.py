"""`python -m benchmarks.profile FILE`: whose time a thread's is, from py-spy's collapsed stacks.

`measure` takes them of the engine and the worker of busy servers; py-spy halts a process for each sample, so nothing
is timed meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.records import RecordFile
from vllm_pd_connector.testing.process_group import session_members

RATE_HZ = 100
MAX_STACKS = 150
"""The most frequent stacks of each process are kept."""

PLUGIN = "vllm_pd_connector/"
KINDS = {"VLLM::Worker": "worker", "VLLM::EngineCore": "engine"}
"""What vLLM calls its processes."""


def measure(
    records: RecordFile, directory: Path, leaders: Mapping[str, int], load: Callable[[], None], *, seconds: int
) -> None:
    """Profile every engine and worker process of the servers while `load` is called again and again.

    Args:
        directory: for the collapsed stacks of each process, `profile-<server>-<process>.txt`.
        leaders: process id of each server, the leader of its session.
    """
    spy = Path(sys.executable).parent / "py-spy"
    targets = [
        (f"{name}, {KINDS[kind]}", pid)
        for name, leader in leaders.items()
        for pid, kind in session_members(leader).items()
        if kind in KINDS
    ]
    with _repeated(load):
        time.sleep(2.0)
        running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
        for name, pid in targets:
            file = directory / f"profile-{name.replace(', ', '-').replace(' ', '-')}.txt"
            options = ["--duration", str(seconds), "--rate", str(RATE_HZ), "--format", "raw", "--threads", "--nolineno"]
            command = [str(spy), "record", "--pid", str(pid), *options, "--output", str(file)]
            running.append((name, file, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)))
        for name, file, process in running:
            _, errors = process.communicate(timeout=seconds + 60)
            if process.returncode:
                raise RuntimeError(f"py-spy of {name}: {errors.decode(errors='replace')[-300:]}")
            lines = file.read_text().splitlines()
            file.write_text("\n".join(sorted(lines, key=_count, reverse=True)[:MAX_STACKS]) + "\n")
            for thread, (busy, ours) in shares(lines).items():
                records.add(
                    "profile",
                    process=name,
                    thread=thread,
                    samples=seconds * RATE_HZ,
                    busy=busy,
                    plugin=ours,
                    stacks=file.name,
                )


def shares(lines: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Samples of each thread in which it ran, and those of them with a frame of this plugin, by the thread's name.

    Args:
        lines: "thread (id): name;frame;frame;... samples", outermost frame first.
    """
    busy: Counter[str] = Counter()
    plugin: Counter[str] = Counter()
    for line in lines:
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        name = thread.partition(": ")[2] or "unnamed"
        busy[name] += int(count)
        plugin[name] += int(count) if any(PLUGIN in frame for frame in frames) else 0
    return {name: (num, plugin[name]) for name, num in busy.items()}


def _count(line: str) -> int:
    return int(line.rpartition(" ")[2])


@contextmanager
def _repeated(load: Callable[[], None]) -> Iterator[None]:
    """`load` in a thread of its own, over and over, until the end."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            load()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main() -> int:
    for name, (busy, ours) in shares(Path(sys.argv[1]).read_text().splitlines()).items():
        print(f"{name}: {busy} samples, {ours} of them in the plugin ({100 * ours / busy:.2f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
