"""CPU time of single threads, the whole machine's, and whose it is. Linux only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Threads = dict[tuple[int, int], "Thread"]
"""By process and thread id."""


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread as it stood.

    Attributes:
        name: the kernel's, at most 15 characters.
        core: where it ran last.
        ran_ms: CPU time so far.
        waited_ms: time so far in which it could have run and another thread had the core.
    """

    name: str
    core: int
    ran_ms: float
    waited_ms: float


def snapshot() -> Threads:
    """All threads that can be read."""
    found: Threads = {}
    for task in Path("/proc").glob("[0-9]*/task/[0-9]*"):
        try:
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            ran_ns, waited_ns, _turns = map(int, (task / "schedstat").read_text().split())
        except OSError:
            continue  # it ended while we looked
        core = int(rest.split()[36])
        found[int(task.parts[2]), int(task.name)] = Thread(name, core, ran_ns / 1e6, waited_ns / 1e6)
    return found


def shares(before: Threads, after: Threads, server: Mapping[int, str], core: int) -> dict[str, float]:
    """Milliseconds between two snapshots: what a vLLM server's threads used, and what others used on its core.

    Args:
        server: name of each of its processes, by process id.
        core: the one core that it is pinned to.
    """
    found = dict.fromkeys((MODEL, MODEL_WAITED, MESSENGER, GLOO, ENGINE, API, OTHERS), 0.0)
    for (pid, tid), thread in after.items():
        old = before.get((pid, tid))
        ran = thread.ran_ms - (old.ran_ms if old else 0.0)
        if pid not in server:
            found[OTHERS] += ran if thread.core == core else 0.0
            continue
        whose = _whose(server[pid], thread.name, is_main=pid == tid)
        found[whose] += ran
        if whose == MODEL:
            found[MODEL_WAITED] += thread.waited_ms - (old.waited_ms if old else 0.0)
    return found


MODEL, MODEL_WAITED = "model thread", "model thread waited for its core"
MESSENGER, GLOO = "the worker's other threads (our messenger)", "torch's gloo threads"
ENGINE, API, OTHERS = "engine process", "API server", "others on the same core"


def _whose(process: str, thread: str, *, is_main: bool) -> str:
    if process.startswith("VLLM::Worker"):
        return GLOO if thread.startswith("gloo") else MODEL if is_main else MESSENGER
    return ENGINE if process.startswith("VLLM::Engine") else API
