"""First-token time of several arms that are up at the same time, repetitions interleaved."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from benchmarks.client import random_prompt
from benchmarks.machine import ForeignCpu, load_average, wait_calm
from benchmarks.records import RecordFile

Ask = Callable[[list[int]], list[float]]
"""A streamed request: start time, then the time of each token."""

PROMPT_TOKENS = (200, 1000, 3000, 8000)
MAX_TRIES = 3
MAX_FOREIGN_CORES = 0.05
"""Cores that others may use before a measurement counts as disturbed: what is compared are tens of milliseconds, and a
quarter of a core would be a second in the four that 8,000 tokens take."""

TICK_UNCERTAINTY_S = 0.03  # CPU time is counted in 10 ms ticks
SETTLE_S = 1.2
"""Pause before each request: vLLM's worker spins for a second after a message, on a core that two arms may share."""


def measure(
    records: RecordFile,
    session: str,
    arms: Mapping[str, Ask],
    leaders: Sequence[int],
    *,
    lengths: Sequence[int],
    reps: int,
    budget_s: float,
    spare: Collection[str] = (),
) -> None:
    """`reps` rounds of every length, after a warm-up round of each; a round asks every arm once.

    What is left of `budget_s` seconds goes to further rounds of the two longest lengths, whose differences are the
    smallest part of what is timed. Ends early, with whole rounds, when the time is over.

    Args:
        spare: arms that the further rounds leave out.
    """
    end = time.monotonic() + budget_s
    session = f"{session} {time.strftime('%H:%M:%S')}"  # rounds of two runs are never taken for one
    longest_s = 0.0
    for rep, length in rounds(lengths, reps):
        begun = time.monotonic()
        if begun > end - (longest_s if rep >= reps else 0.0):
            print(f"  {session}: out of time before round {rep} of {length} tokens", flush=True)
            return
        names = [name for name in arms if rep < reps or name not in spare]
        turn = rep % len(names)  # another arm begins each time
        for name in names[turn:] + names[:turn]:
            _ask(records, session, name, arms[name], leaders, length, rep)
        longest_s = max(longest_s, time.monotonic() - begun)


def rounds(lengths: Sequence[int], reps: int) -> Iterator[tuple[int, int]]:
    """(round, prompt tokens), without an end: the warm-up is round -1; after `reps` rounds only the longest two."""
    for rep in range(-1, reps):
        yield from ((rep, length) for length in lengths)
    for rep in itertools.count(reps):
        yield from ((rep, length) for length in sorted(lengths)[-2:])


def limit_cores(seconds: float) -> float:
    """Cores that others may use during a request that takes so long."""
    return MAX_FOREIGN_CORES + TICK_UNCERTAINTY_S / seconds


def _ask(records: RecordFile, session: str, name: str, ask: Ask, leaders: Sequence[int], length: int, rep: int) -> None:
    """Ask one arm; when others used the CPU meanwhile, record that and ask again, a few times."""
    for attempt in range(MAX_TRIES):
        time.sleep(SETTLE_S)
        wait_calm(leaders)
        load = load_average()
        prompt = random_prompt(length, session, name, rep, attempt)
        foreign = ForeignCpu(leaders)
        times = ask(prompt)
        cores, first_token_s = foreign.cores(), times[1] - times[0]
        disturbed = cores > limit_cores(times[-1] - times[0])
        records.add(
            "warmup" if rep < 0 else "ttft",
            session=session,
            arm=name,
            tokens=length,
            rep=rep,
            s=round(first_token_s, 5),
            load=round(load, 2),
            foreign_cores=round(cores, 3),
            disturbed=disturbed,
        )
        note = f" (disturbed: others used {cores:.2f} cores)" if disturbed else ""
        print(f"  {name}, {length} tokens, round {rep}: {first_token_s:.3f} s{note}", flush=True)
        if not disturbed or rep < 0:
            return
