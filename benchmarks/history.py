"""`python -m benchmarks.history [--docs]`: added first-token time ÷ NixlConnector's, in every run on record.

Reads the raw records of all of `benchmarks/results`. The last line pools the rounds of the runs that went to the same
longest prompt as the last one; rounds stay within their runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import ratios
from benchmarks import summary as s
from benchmarks.records import RAW, read_records
from benchmarks.report import replace_between, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
POOL = "the runs to {tokens:,} tokens, pooled"

Ratios = dict[int, tuple[ratios.Ratio, int, int]]
"""By prompt tokens: the quotient, our rounds, theirs."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history", description=__doc__)
    parser.add_argument(
        "--docs", action="store_true", help="put the table into docs/benchmarks.md, and its last line into README.md"
    )
    args = parser.parse_args()
    runs = {path.parent.name: read_records(path) for path in sorted(RESULTS.glob(f"*/{RAW}"), key=_begun)}
    rows = rows_of(runs)
    print(markdown(rows))
    if args.docs:
        for page, shown in ((PAGE, rows), (README, dict(list(rows.items())[-1:]))):
            page.write_text(replace_between(page.read_text(), "history", markdown(shown)))


def rows_of(runs: Mapping[str, Sequence[s.Record]]) -> dict[str, Ratios]:
    """One for each run that measured both, in the order given, and the pooled one."""
    rows = {name: found for name, records in runs.items() if (found := quotients(records))}
    if not rows:
        return {}
    longest = max(list(rows.values())[-1])
    alike = [name for name, found in rows.items() if max(found) == longest]
    if len(alike) > 1:
        rows[POOL.format(tokens=longest)] = quotients(pooled({name: runs[name] for name in alike}))
    return rows


def markdown(rows: Mapping[str, Ratios]) -> str:
    """As a table; nothing of nothing."""
    if not rows:
        return ""
    lengths = sorted({tokens for found in rows.values() for tokens in found})
    head = " | ".join(["run", *(f"{tokens:,} tokens" for tokens in lengths)])
    cells = [[name, *(_cell(found, tokens) for tokens in lengths)] for name, found in rows.items()]
    return "\n".join(table(head, [f"| {' | '.join(row)} |" for row in cells]))


def quotients(records: Sequence[s.Record]) -> Ratios:
    """Of each length that both pairs were measured at."""
    theirs = {a.tokens: a for a in s.added(records, s.PULL, s.PULL_PREFILLER)}
    return {
        ours.tokens: (ratios.added(ours, other), ours.seconds.n, other.seconds.n)
        for ours in s.added(records, s.OURS, s.OURS_PREFILLER)
        if (other := theirs.get(ours.tokens)) is not None
    }


def pooled(runs: Mapping[str, Sequence[s.Record]]) -> list[s.Record]:
    """First-token records of several runs; what was left out of a run as disturbed is left out here."""
    return [
        {**r, "session": f"{name} {r['session']}", "disturbed": False}
        for name, records in runs.items()
        for r in s.usable(records, "ttft")
    ]


def _cell(found: Ratios, tokens: int) -> str:
    if tokens not in found:
        return "–"
    ratio, ours, theirs = found[tokens]
    return f"{ratios.text(ratio)}, n={ours}/{theirs}"


def _begun(path: Path) -> str:
    """When a run began: its first machine's time, or nothing where none was recorded."""
    return min((str(r["started"]) for r in read_records(path) if r["kind"] == "machine"), default="")


if __name__ == "__main__":
    main()
