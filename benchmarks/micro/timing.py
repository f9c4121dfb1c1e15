"""Repeated timing of one operation."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any


def summarise(what: str, samples_ns: list[float]) -> dict[str, Any]:
    """A record: median, least and greatest of the samples."""
    low, high = min(samples_ns), max(samples_ns)
    return {
        "what": what,
        "n": len(samples_ns),
        "median_ns": round(median(samples_ns)),
        "low_ns": round(low),
        "high_ns": round(high),
    }


def per_call(what: str, call: Callable[[], object], *, calls: int, repeats: int) -> dict[str, Any]:
    """`repeats` samples, each the mean of `calls` calls in a row."""
    samples: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter_ns() - start) / calls)
    return summarise(what, samples)


def clock_ns(samples: int = 1000) -> float:
    """What reading the clock twice costs: taken off single-call samples."""
    return median(-(time.perf_counter_ns() - time.perf_counter_ns()) for _ in range(samples))


def wait(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Return once it holds.

    Raises:
        TimeoutError: it did not in time; the text is `what`.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} within {timeout_s:g} s")
        time.sleep(0.0005)
