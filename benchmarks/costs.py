"""Raw records of single transfers and operations to figures. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.summary import Record, Spread, median_interval, percentile, spread, usable

HOOK = re.compile(r"layer hook, (?P<writer>.+) writer, ")
NOTED = "note_arrived"

Moments = Sequence[Mapping[str, Any]]
"""The timeline of one transfer."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A layer hook's calls under one load, or the baseline beside them (`writer` is None), in microseconds.

    Attributes:
        p50: the median of a round, spread over rounds.
        least: of all calls.
        n: calls of all rounds.
    """

    what: str
    writer: str | None
    p50: Spread
    least: float
    greatest: float
    n: int


@dataclass(frozen=True, slots=True)
class Posted:
    """From a layer's hook to its write posted, in microseconds. `p50` is spread over rounds.

    Attributes:
        is_default: the switch interval is the one that our worker sets.
    """

    writer: str
    load: str
    switch_s: float
    cores: str
    is_default: bool
    p50: Spread
    p99: float
    greatest: float
    n: int


@dataclass(frozen=True, slots=True)
class Throughput:
    """Our writer against raw writes of the same pages; `ratio` is within rounds, over 1 when ours was faster."""

    writer: str
    carrier: str
    layer_mib: int
    ratio: Spread
    ours_mib_per_s: Spread
    raw_mib_per_s: Spread


@dataclass(frozen=True, slots=True)
class Exposure:
    """How much of a transfer the request waits for, in milliseconds.

    Attributes:
        exposed: from the end of the last layer's compute until the decoder releases the request.
        under_way: the exposed time, and before it all time from the post of a write until the writer sees its end;
            writes that overlap are counted once.
        whole: from the first write's post until the release, compute between the writes included.
        share: exposed ÷ whole.
        busy_share: exposed ÷ under way.
        landed: from the end of the last write, as the prefiller's writer sees it, until the release.
        noted: from the last note's arrival at the decoder, which NIXL delivers after the bytes, until the release.
    """

    arm: str
    tokens: int
    exposed: Spread
    under_way: Spread
    whole: Spread
    share: Spread
    busy_share: Spread
    landed: Spread
    noted: Spread


@dataclass(frozen=True, slots=True)
class Growth:
    """The cost of one unit at each size, and what it has grown to at the largest one."""

    what: str
    unit: str
    measure: str
    cells: Mapping[int, Spread]

    @property
    def ratio(self) -> float:
        """Cost of a unit at the largest size ÷ at the smallest one."""
        return self.cells[max(self.cells)].median / self.cells[min(self.cells)].median


@dataclass(frozen=True, slots=True)
class Part:
    """Milliseconds of a first token, and the interval of their median where there are rounds enough."""

    what: str
    ms: Spread
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Share:
    """Of a thread's time: `busy` of all samples it ran, `plugin` of all samples with a frame of this plugin."""

    process: str
    thread: str
    busy: float
    plugin: float
    samples: int


def hooks(records: Iterable[Record]) -> list[Hook]:
    """Every load of every writer with the rounds it was measured in, and the baseline.

    Rounds that others disturbed are left out, where there are others; older records do not say.
    """
    rounds: dict[str, list[Record]] = {}
    for r in records:
        if r["kind"] == "micro" and (HOOK.match(r["what"]) or "is_baseline" in r):
            rounds.setdefault(r["what"], []).append(r)
    found: list[Hook] = []
    for what, every in rounds.items():
        rows = [r for r in every if not r.get("disturbed")] or every
        of_writer = HOOK.match(what)
        low, high = min(r["low_ns"] for r in rows), max(r["high_ns"] for r in rows)
        found.append(
            Hook(
                what,
                of_writer["writer"] if of_writer else None,
                spread([r["median_ns"] / 1000 for r in rows]),
                low / 1000,
                high / 1000,
                sum(r["n"] for r in rows),
            )
        )
    return found


def posted(records: Iterable[Record]) -> list[Posted]:
    arms: dict[tuple[str, str, float, str, bool], list[list[float]]] = {}
    for r in records:
        if r["kind"] == "posted":
            arm = (r["writer"], r["load"], r["switch_s"], r["cores"], r["is_default"])
            arms.setdefault(arm, []).append(r["samples_us"])
    found: list[Posted] = []
    for arm, rounds in arms.items():
        samples = [sample for one in rounds for sample in one]
        p50 = Spread(len(rounds), percentile(samples, 0.5), *_range(percentile(one, 0.5) for one in rounds))
        found.append(Posted(*arm, p50, percentile(samples, 0.99), max(samples), len(samples)))
    return found


def throughput(records: Iterable[Record]) -> list[Throughput]:
    cells: dict[tuple[str, str, int], list[Record]] = {}
    for r in records:
        if r["kind"] == "throughput":
            cells.setdefault((r["writer"], r["carrier"], r["layer_mib"]), []).append(r)
    return [
        Throughput(
            writer,
            carrier,
            mib,
            spread([r["raw"] / r["ours"] for r in rows]),
            spread([mib * r["layers"] / r["ours"] for r in rows]),
            spread([mib * r["layers"] / r["raw"] for r in rows]),
        )
        for (writer, carrier, mib), rows in sorted(cells.items())
    ]


def exposures(records: Iterable[Record]) -> list[Exposure]:
    cells: dict[tuple[int, str], list[Moments]] = {}
    for r in usable(records, "transfer"):
        cells.setdefault((r["tokens"], r["arm"]), []).append(r["moments"])
    found: list[Exposure] = []
    for (tokens, arm), transfers in sorted(cells.items()):
        exposed, under_way, whole = zip(*[_exposure(moments) for moments in transfers], strict=True)
        share = spread([a / b for a, b in zip(exposed, whole, strict=True)])
        busy_share = spread([a / b for a, b in zip(exposed, under_way, strict=True)])
        landed, noted = (spread([until_released(m, since) for m in transfers]) for since in ("write_done", NOTED))
        found.append(
            Exposure(arm, tokens, spread(exposed), spread(under_way), spread(whole), share, busy_share, landed, noted)
        )
    return found


def growths(records: Iterable[Record]) -> list[Growth]:
    found: dict[str, Growth] = {}
    for r in records:
        if r["kind"] == "growth":
            old = found.get(r["what"])
            cells = {**(old.cells if old else {}), r["size"]: spread(r["each"])}
            found[r["what"]] = Growth(r["what"], r["unit"], r["in"], dict(sorted(cells.items())))
    return list(found.values())


def parts(records: Iterable[Record]) -> list[Part]:
    """What a first token consists of, from rounds that nobody disturbed; its prompt's tokens are in the records."""
    cells: dict[str, list[float]] = {}
    for r in records:
        if r["kind"] == "parts" and not r["disturbed"]:
            for what, value in r["ms"].items():
                cells.setdefault(what, []).append(value)
    return [Part(what, spread(values), median_interval(values)) for what, values in cells.items()]


def profile(records: Iterable[Record]) -> list[Share]:
    return [
        Share(r["process"], r["thread"], r["busy"] / r["samples"], r["plugin"] / r["samples"], r["samples"])
        for r in records
        if r["kind"] == "profile"
    ]


def until_released(moments: Moments, since: str) -> float:
    """Milliseconds from the last moment of a name until the decoder let the request run.

    Raises:
        ValueError: the transfer's timeline lacks one of them.
    """
    times = _times(moments)
    return max(times.get("released", ())) - max(times.get(since, ()))


def _times(moments: Moments) -> dict[str, list[float]]:
    """Milliseconds of each moment."""
    times: dict[str, list[float]] = {}
    for moment in moments:
        times.setdefault(moment["moment"], []).append(moment["at_ns"] / 1e6)
    return times


def _exposure(moments: Moments) -> tuple[float, float, float]:
    """Milliseconds of one transfer: exposed, under way, whole."""
    times = _times(moments)
    computed, released = max(times["layer_computed"]), max(times["released"])
    # Sorted, because writes need not end in the order in which they were posted; the union is the same.
    flights = list(zip(sorted(times["write_posted"]), sorted(times["write_done"]), strict=True))
    under_way, until = 0.0, 0.0
    for begin, end in sorted([*flights, (computed, released)]):
        under_way += max(0.0, end - max(begin, until))
        until = max(until, end)
    whole = released - min(computed, flights[0][0])
    return released - computed, under_way, whole


def _range(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[0], ordered[-1]
