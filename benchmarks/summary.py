"""Raw records to figures. Pure: lists in, values out; every figure comes with its spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Record = dict[str, Any]

STALL_MS = 100.0
"""A gap of a running answer that a reader sees."""

SHARED, OURS, OURS_PREFILLER = "ordinary server", "ours", "our prefiller asked directly"
BY_LAYER, NOT_BY_LAYER = "layer by layer", "after the last layer"
PULL, PULL_PREFILLER = "NixlConnector (pull)", "NixlConnector's prefiller asked directly"
THREADLESS = "NixlConnector (pull) without its progress thread"
THREADLESS_PREFILLER = "its prefiller without the thread, asked directly"
PUSH, PUSH_PREFILLER = "NixlPushConnector", "NixlPushConnector's prefiller asked directly"

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of `n` measurements."""

    n: int
    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Added:
    """What a split pair adds to the first token, in seconds, against a reference; `ratio` is of the medians.

    Attributes:
        interval: of the median, as `median_interval`; None unless paired.
        differences: of each round that had both; none unless paired.
        is_paired: differences within rounds, arms up at the same time. Otherwise the difference of two medians, and the
            spread is the widest that the two sets of measurements allow.
    """

    tokens: int
    arm: str
    reference: str
    seconds: Spread
    ratio: float
    is_paired: bool
    interval: tuple[float, float] | None = None
    differences: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Gaps:
    """A running answer's gaps in milliseconds; each spread is over repetitions."""

    arm: str
    kind: str
    longest: Spread
    p99: Spread
    median: Spread
    stalled_share: Spread
    prompt_first_token_s: Spread | None


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("no measurement")
    return Spread(len(values), median(values), min(values), max(values))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The narrowest two values that hold the median of what was sampled between them with at least `CONFIDENCE`.

    Taken from the ranks alone, whatever the distribution; None where that needs more values, below six.
    """
    ordered, n = sorted(values), len(values)
    outside, rank = 0.0, 0  # the chance that the median lies beyond the rank-th value, on either side
    while rank < n // 2 and outside + 2 * math.comb(n, rank) / 2**n <= 1 - CONFIDENCE:
        outside += 2 * math.comb(n, rank) / 2**n
        rank += 1
    return (ordered[rank - 1], ordered[n - rank]) if rank else None


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the least value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def usable(records: Iterable[Record], kind: str) -> list[Record]:
    """Undisturbed records of a kind; where an (arm, length) has none, its disturbed ones rather than nothing."""
    of_kind = [r for r in records if r["kind"] == kind]
    calm = {_cell(r) for r in of_kind if not r["disturbed"]}
    return [r for r in of_kind if not r["disturbed"] or _cell(r) not in calm]


def first_token(records: Iterable[Record]) -> dict[tuple[int, str], Spread]:
    """Seconds to the first token by (prompt tokens, arm)."""
    cells: dict[tuple[int, str], list[float]] = {}
    for record in usable(records, "ttft"):
        cells.setdefault((record["tokens"], record["arm"]), []).append(record["s"])
    return {cell: spread(values) for cell, values in sorted(cells.items())}


def added(records: Iterable[Record], arm: str, reference: str) -> list[Added]:
    """What `arm` adds against `reference` at each prompt length that both were measured at."""
    rows = usable(records, "ttft")
    found: list[Added] = []
    for tokens in sorted({r["tokens"] for r in rows}):
        here = [r for r in rows if r["tokens"] == tokens and r["arm"] == arm]
        there = [r for r in rows if r["tokens"] == tokens and r["arm"] == reference]
        if not here or not there:
            continue
        by_round = {(r["session"], r["rep"]): r["s"] for r in there}
        paired = [r["s"] - by_round[key] for r in here if (key := (r["session"], r["rep"])) in by_round]
        a, b = spread([r["s"] for r in here]), spread([r["s"] for r in there])
        apart = Spread(min(a.n, b.n), a.median - b.median, a.low - b.high, a.high - b.low)
        seconds, interval = (spread(paired), median_interval(paired)) if paired else (apart, None)
        ratio = a.median / b.median
        found.append(Added(tokens, arm, reference, seconds, ratio, bool(paired), interval, tuple(paired)))
    return found


def gaps(records: Iterable[Record]) -> list[Gaps]:
    """Gaps of the running answer: without prompts ("quiet") and with prompts arriving ("gaps")."""
    rows: list[Gaps] = []
    records = list(records)
    for kind in ("quiet", "gaps"):
        kept = usable(records, kind)
        for arm in dict.fromkeys(r["arm"] for r in kept):
            answers = [r["gaps_ms"] for r in kept if r["arm"] == arm]
            waits = [s for r in kept if r["arm"] == arm for s in r["prompt_first_token_s"]]
            rows.append(
                Gaps(
                    arm=arm,
                    kind=kind,
                    longest=spread([max(a) for a in answers]),
                    p99=spread([percentile(a, 0.99) for a in answers]),
                    median=spread([median(a) for a in answers]),
                    stalled_share=spread([sum(g for g in a if g > STALL_MS) / sum(a) for a in answers]),
                    prompt_first_token_s=spread(waits) if waits else None,
                )
            )
    return rows


def idle(records: Iterable[Record]) -> dict[str, Spread]:
    """Cores used while idle, by arm."""
    cells: dict[str, list[float]] = {}
    for record in records:
        if record["kind"] == "idle":
            cells.setdefault(record["arm"], []).append(record["cores"])
    return {arm: spread(values) for arm, values in cells.items()}


def failed_sessions(records: Iterable[Record]) -> dict[str, str]:
    """Sets of servers that did not end as they should, and why; only the last run of each counts."""
    last = {r["servers"]: r["failure"] for r in records if r["kind"] == "session"}
    return {servers: failure for servers, failure in last.items() if failure}


def num_disturbed(records: Iterable[Record]) -> tuple[int, int]:
    """(disturbed, all) of the measurements that others' work can disturb."""
    rows = [r for r in records if r["kind"] in ("ttft", "gaps", "quiet")]
    return sum(r["disturbed"] for r in rows), len(rows)


def _cell(record: Record) -> tuple[Any, Any]:
    return record["arm"], record.get("tokens")
