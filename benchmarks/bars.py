"""The table of figures with their bars: what is asked, what was measured, whether it is met. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import costs, ratios
from benchmarks import summary as s

HOOK_US = {"pure Python": 10.0, "native": 2.0}
POSTED_US = {"pure Python": 400.0, "native": 80.0}
MIN_THROUGHPUT = 0.95
MIN_LAYER_MIB = 4
MAX_EXPOSED = 0.25
MAX_ADDED_RATIO = 0.5
MAX_ADDED_S, MAX_ADDED_SHARE = 0.020, 0.01
MAX_IDLE_CORES = 0.03
MAX_GROWTH = 1.2
"""Linear, with room for what caches of the CPU do."""

OUR_SERVERS = ("our prefiller", "our decoder")
PEERS = (
    ("NixlConnector's (pull)", s.PULL, s.PULL_PREFILLER),
    ("NixlPushConnector's", s.PUSH, s.PUSH_PREFILLER),
    ("NixlConnector's (pull) without its progress thread", s.THREADLESS, s.THREADLESS_PREFILLER),
)
SURE = f"{100 * s.CONFIDENCE:.0f} % interval "
AS_SHIPPED = (s.PULL, s.PUSH)
"""The bar is for these."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `is_met` is None where no bar was set."""

    figure: str
    bar: str
    value: str
    is_met: bool | None


def rows(records: Sequence[s.Record]) -> list[Row]:
    """Only what the records hold."""
    return [
        *_hook(records),
        *_posted(records),
        *_throughput(records),
        *_exposed(records),
        *_first_token(records),
        *_attempts(records),
        *_interference(records),
        *_idle(records),
        *_growth(records),
        *_profile(records),
        *_failures(records),
    ]


def table(records: Sequence[s.Record]) -> list[str]:
    """Markdown, empty without rows."""
    found = rows(records)
    if not found:
        return []
    met = {True: "yes", False: "**no**", None: "–"}
    lines = ["| figure | bar | value: median (least … greatest), n | met |", "|---|---|---|---|"]
    lines += [f"| {row.figure} | {row.bar} | {row.value} | {met[row.is_met]} |" for row in found]
    return ["\n".join(lines)]


def _hook(records: Sequence[s.Record]) -> Iterator[Row]:
    """The bar is for every load: a step without a write of ours is not what a hook may be slow in, either."""
    for h in costs.hooks(records):
        bar = None if h.writer is None else HOOK_US[h.writer]
        yield Row(
            h.what,
            "–" if bar is None else f"p50 ≤ {bar:g} µs",
            f"p50 {_text(h.p50, 2)} {'round' if h.p50.n == 1 else 'rounds'}; "
            f"least {h.least:,.2f}, max {h.greatest:,.2f} µs of {h.n:,}",
            None if bar is None else h.p50.median <= bar,
        )


def _posted(records: Sequence[s.Record]) -> Iterator[Row]:
    """The bar is for a main thread busy in Python; the other loads are shown beside it."""
    for p in costs.posted(records):
        bar = POSTED_US[p.writer] if p.load == "pure Python" and p.is_default else None
        yield Row(
            f"signal → posted, {p.writer} writer, main thread {p.load}, {p.cores}, "
            f"switch interval {1000 * p.switch_s:g} ms",
            "–" if bar is None else f"p50 ≤ {bar:g} µs",
            f"p50 {_text(p.p50, 0)} rounds; p99 {p.p99:,.0f}, max {p.greatest:,.0f} µs of {p.n:,}",
            None if bar is None else p.p50.median <= bar,
        )


def _throughput(records: Sequence[s.Record]) -> Iterator[Row]:
    for t in costs.throughput(records):
        has_bar = t.layer_mib >= MIN_LAYER_MIB
        yield Row(
            f"throughput of the {t.writer} writer ÷ raw NIXL WRITE, {t.carrier}, {t.layer_mib} MiB per layer",
            f"≥ {MIN_THROUGHPUT}" if has_bar else "–",
            f"{_text(t.ratio, 2)} ({t.ours_mib_per_s.median:,.0f} against {t.raw_mib_per_s.median:,.0f} MiB/s)",
            t.ratio.median >= MIN_THROUGHPUT if has_bar else None,
        )


def _exposed(records: Sequence[s.Record]) -> Iterator[Row]:
    found = costs.exposures(records)
    for e in found:
        has_bar = e.arm == s.BY_LAYER and e.tokens == max(other.tokens for other in found)
        for share, of, what in (
            (e.share, e.whole, "whole transfer time"),
            (e.busy_share, e.under_way, "time with pages under way"),
        ):
            yield Row(
                f"exposed transfer ÷ {what}, {e.tokens:,} tokens, {e.arm}",
                f"≤ {MAX_EXPOSED}" if has_bar else "–",
                f"{_text(share, 3)}: {e.exposed.median:.1f} of {of.median:.1f} ms",
                share.median <= MAX_EXPOSED if has_bar else None,
            )
    for e in found:
        if e.arm == s.BY_LAYER:
            for what, landed in (("write's end, seen by the prefiller", e.landed), ("note, at the decoder", e.noted)):
                figure = f"last byte landed (last {what}) → request released, {e.tokens:,} tokens"
                yield Row(figure, "–", f"{_text(landed, 1)} ms", None)


def _first_token(records: Sequence[s.Record]) -> Iterator[Row]:
    """What is added is paired within rounds; the bar is for its median."""
    peers = [(whose, arm, {a.tokens: a for a in s.added(records, arm, own)}) for whose, arm, own in PEERS]
    shared = s.first_token(records)
    for a in s.added(records, s.OURS, s.OURS_PREFILLER):
        limit = MAX_ADDED_S + MAX_ADDED_SHARE * shared[a.tokens, s.OURS_PREFILLER].median
        yield Row(
            f"added first-token time, {a.tokens:,} tokens",
            f"≤ 20 ms + 1 % of the shared time = {1000 * limit:.0f} ms",
            _added_ms(a),
            a.seconds.median <= limit,
        )
        for whose, arm, others in peers:
            if a.tokens in others:
                other = others[a.tokens]
                ratio = ratios.added(a, other)
                yield Row(
                    f"the same ÷ {whose}, {a.tokens:,} tokens",
                    f"≤ {MAX_ADDED_RATIO}" if arm in AS_SHIPPED else "–",
                    f"{ratios.text(ratio, SURE)}: {1000 * a.seconds.median:.1f} against {_added_ms(other)}",
                    ratio.value <= MAX_ADDED_RATIO if arm in AS_SHIPPED else None,
                )


def _added_ms(a: s.Added) -> str:
    v = s.Spread(a.seconds.n, *(1000 * value for value in (a.seconds.median, a.seconds.low, a.seconds.high)))
    if a.interval is None:
        return f"{_text(v, 1)} ms"
    low, high = (1000 * value for value in a.interval)
    return f"{_text(v, 1)} ms; {100 * s.CONFIDENCE:.0f} % interval of the median {low:.1f} … {high:.1f}"


def _attempts(records: Sequence[s.Record]) -> Iterator[Row]:
    """Connectors that may not complete at all."""
    for r in {r["what"]: r for r in records if r["kind"] == "attempt"}.values():
        yield Row(f"a request to {r['what']}", "–", f"{r['outcome']} ({r['s']:.1f} s)", None)


def _interference(records: Sequence[s.Record]) -> Iterator[Row]:
    for g in s.gaps(records):
        load = "nothing else" if g.kind == "quiet" else "6,000-token prompts"
        yield Row(
            f"longest gap of a running answer beside {load}, {g.arm}",
            "–",
            f"{_text(g.longest, 1)} ms; p99 {g.p99.median:.1f} ms",
            None,
        )


def _failures(records: Sequence[s.Record]) -> Iterator[Row]:
    for servers, failure in s.failed_sessions(records).items():
        yield Row(f"measurements of the session `{servers}`", "complete", failure.replace("|", "/"), False)


def _idle(records: Sequence[s.Record]) -> Iterator[Row]:
    for arm, cores in s.idle(records).items():
        is_ours = arm in OUR_SERVERS
        yield Row(
            f"CPU while idle, {arm}",
            f"≤ {MAX_IDLE_CORES} core" if is_ours else "–",
            f"{_text(cores, 3)} core",
            cores.median <= MAX_IDLE_CORES if is_ours else None,
        )


def _growth(records: Sequence[s.Record]) -> Iterator[Row]:
    for g in costs.growths(records):
        first, last = min(g.cells), max(g.cells)
        yield Row(
            f"{g.what}, for each {g.unit}, from {first:,} to {last:,}",
            f"linear or better: ratio ≤ {MAX_GROWTH}",
            f"{g.ratio:.2f}: {g.cells[first].median:,.0f} → {g.cells[last].median:,.0f} {g.measure}, "
            f"n={g.cells[last].n}",
            g.ratio <= MAX_GROWTH,
        )


def _profile(records: Sequence[s.Record]) -> Iterator[Row]:
    for p in costs.profile(records):
        if p.thread == "MainThread":
            of_busy = p.plugin / p.busy if p.busy else 0.0
            yield Row(
                f"our share of the main thread's time, {p.process}",
                "–",
                f"{100 * p.plugin:.2f} % of all its time, {100 * of_busy:.2f} % of the {100 * p.busy:.0f} % it ran "
                f"(py-spy, {p.samples:,} samples)",
                None,
            )


def _text(v: s.Spread, digits: int) -> str:
    return f"{v.median:,.{digits}f} ({v.low:,.{digits}f} … {v.high:,.{digits}f}), n={v.n}"
