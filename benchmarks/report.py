"""Figures as Markdown tables with bars, and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import bars, costs, ratios
from benchmarks import summary as s

BAR_CELLS = 20
BEGIN, END = "<!-- {what}: begin -->", "<!-- {what}: end -->"
COMPARISONS = [
    (s.OURS, s.OURS_PREFILLER),
    (s.OURS, s.SHARED),
    (s.PULL, s.PULL_PREFILLER),
    (s.PULL, s.SHARED),
    (s.THREADLESS, s.THREADLESS_PREFILLER),
]
CAVEATS = """\
- Every server is pinned to one core (`taskset`); the machine has two. Spread is least … greatest.
- "Disturbed" measurements (others used more than about a quarter of a core, for a first token a twentieth) are
  in the raw file; they were repeated and are left out here, unless a cell has no other.
- vLLM's NixlConnector polls with a thread of its own (`enable_prog_thread`). Pinned to one core, that thread takes time
  from the model itself; with spare cores that part goes away and a core is merely burnt. Its first-token times on this
  machine therefore say little about machines with spare cores; what it adds against its own prefiller says more.
"""


def bar(value: float, greatest: float) -> str:
    """A bar of up to `BAR_CELLS` cells; at least a sliver for anything above zero."""
    if value <= 0 or greatest <= 0:
        return ""
    eighths = max(1, round(BAR_CELLS * 8 * min(value / greatest, 1.0)))
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def markdown(records: Sequence[s.Record]) -> str:
    """The whole summary; only what the records hold."""
    parts = ["# Benchmark results", *_machine(records)]
    for title, lines in (
        ("Figures and their bars", bars.table(records)),
        ("Time to the first token", _first_token(records)),
        ("Added to the first token", _added(records)),
        ("A running answer while 6,000-token prompts arrive", _gaps(records)),
        ("What a first token consists of", first_token_parts(records)),
        ("CPU while idle", _idle(records)),
        ("Growth", _growth(records)),
        ("Micro", _micro(records)),
        ("Parts that a GPU is for", _gpu(records)),
        ("Attempts", _attempts(records)),
    ):
        if lines:
            parts += [f"## {title}", *lines]
    disturbed, total = s.num_disturbed(records)
    if total:
        parts += ["## How to read this", f"- {disturbed} of {total} timed measurements were disturbed.\n{CAVEATS}"]
    return "\n\n".join(parts).rstrip() + "\n"


def page(text: str, records: Sequence[s.Record], source: str) -> str:
    """A page with what stands between its two marks replaced by the table of bars and the growth, from `source`.

    Raises:
        ValueError: the page lacks a mark.
    """
    parts = [f"Raw records: [`{source}`](../{source})", *_machine(records), *bars.table(records), *_growth(records)]
    return replace_between(text, "measured", "\n\n".join(parts))


def replace_between(text: str, what: str, lines: str) -> str:
    """A page with what stands between the two marks of `what` replaced.

    Raises:
        ValueError: the page lacks a mark.
    """
    begin, end = BEGIN.format(what=what), END.format(what=what)
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"the page lacks {begin} or {end}")
    return f"{before}{begin}\n\n{lines}\n\n{end}{after}"


def figures(records: Sequence[s.Record]) -> dict[str, Any]:
    """The same as plain values."""
    first = [{"tokens": tokens, "arm": arm, **asdict(value)} for (tokens, arm), value in s.first_token(records).items()]
    return {
        "machine": [r for r in records if r["kind"] == "machine"],
        "first_token_s": first,
        "added_s": [asdict(row) for pair in COMPARISONS for row in s.added(records, *pair)],
        "gaps_ms": [asdict(row) for row in s.gaps(records)],
        "idle_cores": {arm: asdict(value) for arm, value in s.idle(records).items()},
        "bars": [asdict(row) for row in bars.rows(records)],
        "posted_us": [asdict(row) for row in costs.posted(records)],
        "throughput": [asdict(row) for row in costs.throughput(records)],
        "exposed_ms": [asdict(row) for row in costs.exposures(records)],
        "growth": [asdict(row) for row in costs.growths(records)],
        "profile": [asdict(row) for row in costs.profile(records)],
        "micro": [r for r in records if r["kind"] == "micro"],
        "sessions": [r for r in records if r["kind"] == "session"],
        "attempts": [r for r in records if r["kind"] == "attempt"],
        "disturbed_of": s.num_disturbed(records),
    }


def _machine(records: Iterable[s.Record]) -> list[str]:
    lines: list[str] = []
    for r in (r for r in records if r["kind"] == "machine"):
        dirty = " with uncommitted changes" if r["uncommitted_changes"] else ""
        lines.append(
            f"- {r.get('servers', '')}, {r['started']}: {r['cpu']}, {r['cores']} cores, {r['memory_gib']} GiB, "
            f"Python {r['python']}, "
            f"vLLM {r.get('vllm', '?')}, NIXL {r.get('nixl', '?')}, torch {r.get('torch', '?')}, "
            f"commit {r['commit']}{dirty}; `{r['command']}`"
        )
    return ["\n".join(lines)] if lines else []


def _first_token(records: Sequence[s.Record]) -> list[str]:
    cells = s.first_token(records)
    rows: list[str] = []
    for (tokens, arm), v in cells.items():
        greatest = max(other.median for (length, _), other in cells.items() if length == tokens)
        rows.append(
            f"| {tokens:,} | {arm} | {v.median:.3f} | {v.low:.3f} … {v.high:.3f} | {v.n} | {bar(v.median, greatest)} |"
        )
    return table("prompt tokens | arm | median s | spread s | n | (longest bar: slowest at this length)", rows)


def _added(records: Sequence[s.Record]) -> list[str]:
    found = [row for pair in COMPARISONS for row in s.added(records, *pair)]
    rows: list[str] = []
    for a in sorted(found, key=lambda a: a.tokens):
        greatest = max(abs(b.seconds.median) for b in found if b.tokens == a.tokens)
        v = a.seconds
        how = "same rounds" if a.is_paired else "medians"
        rows.append(
            f"| {a.tokens:,} | {a.arm} − {a.reference} | {1000 * v.median:+.1f} | {1000 * v.low:+.1f} … "
            f"{1000 * v.high:+.1f} | {a.ratio:.2f}× | {how} | {bar(v.median, greatest)} |"
        )
    return table("prompt tokens | difference | median ms | spread ms | ratio | from | ", rows) + _quotients(found)


def _quotients(found: Sequence[s.Added]) -> list[str]:
    own = {(a.tokens, a.arm): a for a in found if a.reference in (s.OURS_PREFILLER, s.PULL_PREFILLER)}
    texts: list[str] = []
    for tokens in sorted({tokens for tokens, _ in own}):
        ours, pull = own.get((tokens, s.OURS)), own.get((tokens, s.PULL))
        if ours is not None and pull is not None:
            texts.append(f"{tokens:,} tokens: {ratios.text(ratios.added(ours, pull))}")
    head = "Added by ours ÷ added by NixlConnector, each against its own prefiller, 95 % interval (bootstrap): "
    return [head + "; ".join(texts) + "."] if texts else []


def _gaps(records: Sequence[s.Record]) -> list[str]:
    found = s.gaps(records)
    greatest = max((g.longest.median for g in found), default=0.0)
    rows: list[str] = []
    for g in found:
        wait = g.prompt_first_token_s
        waited = f"{wait.median:.2f} ({wait.low:.2f} … {wait.high:.2f})" if wait else "–"
        rows.append(
            f"| {g.arm} | {'nothing else' if g.kind == 'quiet' else 'prompts arriving'} | {_ms(g.longest)} | "
            f"{_ms(g.p99)} | {_ms(g.median)} | {100 * g.stalled_share.median:.0f} % "
            f"({100 * g.stalled_share.low:.0f} … {100 * g.stalled_share.high:.0f}) | {waited} | {g.longest.n} | "
            f"{bar(g.longest.median, greatest)} |"
        )
    head = "arm | load | longest gap ms | p99 gap ms | median gap ms | of its time in gaps > 100 ms"
    return table(f"{head} | prompts' first token s | answers | (longest gap)", rows)


def first_token_parts(records: Sequence[s.Record]) -> list[str]:
    """A table for each prompt length; the interval is that of the median."""
    tables: list[str] = []
    for tokens in sorted({r["tokens"] for r in records if r["kind"] == "parts"}):
        rows: list[str] = []
        for p in costs.parts(r for r in records if r["kind"] == "parts" and r["tokens"] == tokens):
            interval = "–" if p.interval is None else f"{p.interval[0]:,.2f} … {p.interval[1]:,.2f}"
            v = p.ms
            rows.append(f"| {p.what} | {v.median:,.2f} | {v.low:,.2f} … {v.high:,.2f} | {interval} | {v.n} |")
        tables += table(f"{tokens:,} tokens | median ms | spread ms | 95 % interval of the median | rounds", rows)
    return tables


def _gpu(records: Iterable[s.Record]) -> list[str]:
    """Each figure as it was recorded; without a GPU those that need one are there with the reason."""
    hidden = ("kind", "at", "what", "skipped")
    rows: list[str] = []
    for r in (r for r in records if r["kind"] == "gpu"):
        values = "; ".join(f"{key} {_plain(value)}" for key, value in r.items() if key not in hidden)
        rows.append(f"| {r['what']} | {values if 'skipped' not in r else 'skipped: ' + r['skipped']} |")
    return table("figure | value: median, least, greatest", rows)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _idle(records: Sequence[s.Record]) -> list[str]:
    cells = s.idle(records)
    greatest = max((v.median for v in cells.values()), default=0.0)
    rows = [
        f"| {arm} | {v.median:.3f} | {v.low:.3f} … {v.high:.3f} | {v.n} | {bar(v.median, greatest)} |"
        for arm, v in cells.items()
    ]
    return table("server | cores, median | spread | windows of 10 s | ", rows)


def _growth(records: Sequence[s.Record]) -> list[str]:
    """One table for each kind of unit: its sizes are the columns."""
    found = costs.growths(records)
    tables: list[str] = []
    for unit in dict.fromkeys(g.unit for g in found):
        of_unit = [g for g in found if g.unit == unit]
        sizes = sorted({size for g in of_unit for size in g.cells})
        rows = [
            f"| {g.what}, {g.measure} for each | "
            + " | ".join(f"{g.cells[size].median:,.0f}" if size in g.cells else "–" for size in sizes)
            + f" | {g.ratio:.2f} |"
            for g in of_unit
        ]
        tables += table(" | ".join([f"{unit}s", *(f"{size:,}" for size in sizes), "last ÷ first"]), rows)
    return tables


def _micro(records: Iterable[s.Record]) -> list[str]:
    rows = [
        f"| {r['what']} | {r['median_ns']:,.0f} | {r['low_ns']:,.0f} … {r['high_ns']:,.0f} | {r['n']} |"
        for r in records
        if r["kind"] == "micro"
    ]
    return table("operation | median ns | spread ns | n", rows)


def _attempts(records: Iterable[s.Record]) -> list[str]:
    rows = [f"| {r['what']} | {r['outcome']} | {r['s']:.1f} |" for r in records if r["kind"] == "attempt"]
    return table("attempt | outcome | seconds", rows)


def _ms(v: s.Spread) -> str:
    return f"{v.median:.1f} ({v.low:.1f} … {v.high:.1f})"


def table(head: str, rows: Sequence[str]) -> list[str]:
    """Markdown, empty without rows."""
    if not rows:
        return []
    rule = "|" + "---|" * (head.count("|") + 1)
    return ["\n".join([f"| {head} |", rule, *rows])]
