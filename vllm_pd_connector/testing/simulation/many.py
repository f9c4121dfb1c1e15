"""Many seeds one after another: `vllm-pd simulate`."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.pool import Pool

from vllm_pd_connector.testing.simulation.run import Outcome, Run, quieten
from vllm_pd_connector.testing.simulation.scenario import Scenario, draw
from vllm_pd_connector.testing.simulation.shrink import shrink

REPORT_EVERY_S = 5.0
LOG_LINES = 120
"""Lines of a failing run's log that are printed: its end."""

Tell = Callable[[str], None]


@dataclass
class Totals:
    """What many runs added up to."""

    seeds: int = 0
    requests: int = 0
    events: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    longest_wait_s: float = 0.0

    def add(self, num_requests: int, outcome: Outcome) -> None:
        self.seeds += 1
        self.requests += num_requests
        self.events += outcome.num_events
        self.ends.update(outcome.ends)
        self.counters.update(outcome.counters)
        self.longest_wait_s = max(self.longest_wait_s, outcome.longest_wait_s)

    def text(self) -> str:
        """Lines for people."""
        ends = ", ".join(f"{number} {how}" for how, number in self.ends.most_common())
        names = ("dispatched", "retried", "released", "failed", "aborted", "prefilled_locally")
        names += ("tokens_kept", "fences_lifted", "fences_expired")
        counts = ", ".join(f"{name} {self.counters[name]}" for name in names)
        return (
            f"{self.seeds} seeds, {self.requests} requests, {self.events} events\n"
            f"ends: {ends}\ncounters: {counts}\nlongest wait of a client: {self.longest_wait_s:.1f} s (virtual)"
        )


def simulate(num_seeds: int, num_requests: int, *, first_seed: int = 0, jobs: int = 1, tell: Tell) -> int:
    """Run seeds until one fails; the exit status is 1 then.

    Args:
        num_seeds: runs.
        num_requests: client requests in each.
        first_seed: seeds count up from here.
        jobs: processes; the seeds decide everything, so the result does not depend on it.
        tell: takes lines to print.
    """
    totals = Totals()
    started = reported = time.monotonic()
    with _workers(jobs) as pool:
        seeds = iter(range(first_seed, first_seed + num_seeds))
        while batch := [(seed, num_requests) for seed in islice(seeds, 64 * jobs)]:  # a failure ends the run soon
            for seed, outcome in pool.imap(_run_one, batch, chunksize=4):
                totals.add(num_requests, outcome)
                if outcome.violation is not None:
                    for line in pool.apply(_explain, (seed, num_requests)):
                        tell(line)
                    return 1
                now = time.monotonic()
                if now - reported >= REPORT_EVERY_S:
                    reported = now
                    tell(f"{totals.seeds}/{num_seeds} seeds, {totals.requests / (now - started):.0f} requests/s")
    tell(totals.text())
    tell(f"{time.monotonic() - started:.0f} s; all laws hold")
    return 0


def explain(scenario: Scenario, outcome: Outcome, tell: Tell) -> None:
    """Print a failing seed, the smallest scenario found that breaks the same law, and its log."""
    law = outcome.violation.law if outcome.violation is not None else None

    def fails(candidate: Scenario) -> bool:
        found = Run(candidate).run().violation
        return found is not None and found.law == law

    tell(f"seed {scenario.seed} fails: {outcome.violation}")
    small = shrink(scenario, fails)
    again = Run(small, keep_log=True).run()
    tell(
        f"shrunk from {len(scenario.requests)} requests and {len(scenario.faults)} faults to {len(small.requests)} "
        f"requests, {len(small.faults)} faults, {small.num_decoders} decoder(s), {small.num_prefillers} prefiller(s), "
        f"{small.shape}, {small.noise}:"
    )
    for line in again.log[-LOG_LINES:]:
        tell(line)
    tell(f"repeat with: vllm-pd simulate --seeds 1 --requests {len(scenario.requests)} --first-seed {scenario.seed}")


@contextmanager
def _workers(jobs: int) -> Iterator[Pool]:
    """Fresh processes in which sets of text always have the same order, so that a seed is the same run everywhere."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        with multiprocessing.get_context("spawn").Pool(jobs, initializer=_prepare) as pool:
            yield pool
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def _prepare() -> None:
    """What is loaded once is not searched for garbage after each run."""
    quieten()
    Run(draw(0, 1)).run()
    gc.collect()
    gc.freeze()


def _run_one(work: tuple[int, int]) -> tuple[int, Outcome]:
    seed, num_requests = work
    return seed, Run(draw(seed, num_requests)).run()


def _explain(seed: int, num_requests: int) -> list[str]:
    lines: list[str] = []
    scenario = draw(seed, num_requests)
    explain(scenario, Run(scenario).run(), lines.append)
    return lines
