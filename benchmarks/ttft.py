"""First-token time of several arms that are up at the same time, repetitions interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.client import random_prompt
from benchmarks.machine import MAX_FOREIGN_CORES, ForeignCpu, load_average, wait_calm
from benchmarks.records import RecordFile

Ask = Callable[[list[int]], list[float]]
"""A streamed request: start time, then the time of each token."""

PROMPT_TOKENS = (200, 1000, 3000, 7000)
MAX_EXTRA_ROUNDS = 3
SETTLE_S = 1.3
"""Pause before each request: vLLM's worker spins for a second after a message, on a core that two arms may share."""


def measure(
    records: RecordFile,
    session: str,
    arms: Mapping[str, Ask],
    leaders: Sequence[int],
    *,
    lengths: Sequence[int],
    reps: int,
) -> None:
    """`reps` undisturbed rounds of every length (a round asks every arm once), after one warm-up round of each.

    A round during which others used the CPU is recorded as disturbed and repeated, up to `MAX_EXTRA_ROUNDS` times.
    """
    session = f"{session} {time.strftime('%H:%M:%S')}"  # rounds of two runs are never taken for one
    for length in lengths:
        _round(records, session, arms, leaders, length, -1)
    extra = dict.fromkeys(lengths, MAX_EXTRA_ROUNDS)
    todo = [(rep, length) for rep in range(reps) for length in lengths]
    while todo:
        rep, length = todo.pop(0)
        if _round(records, session, arms, leaders, length, rep) and extra[length]:
            extra[length] -= 1
            todo.append((rep + 100, length))


def _round(
    records: RecordFile, session: str, arms: Mapping[str, Ask], leaders: Sequence[int], length: int, rep: int
) -> bool:
    """Ask every arm once, beginning with another one each time. Whether others disturbed it."""
    names = list(arms)
    turn = rep % len(names)
    taken: list[tuple[str, float]] = []
    wait_calm(leaders)
    load = load_average()
    foreign = ForeignCpu(leaders)
    for name in names[turn:] + names[:turn]:
        time.sleep(SETTLE_S)
        times = arms[name](random_prompt(length, session, name, rep))
        taken.append((name, times[1] - times[0]))
    cores = foreign.cores()
    disturbed = cores > MAX_FOREIGN_CORES
    for name, first_token_s in taken:
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
    seen = ", ".join(f"{name} {s:.3f}" for name, s in taken)
    print(f"  {session} {length} tokens, round {rep}: {seen}{' (disturbed)' if disturbed else ''}", flush=True)
    return disturbed
