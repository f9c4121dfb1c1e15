"""`python -m benchmarks.timeline DIR`: where the time of our transfers goes, from the connector's timelines.

Each interval is the median over transfers of one prompt length, with least and greatest. All times are of one host.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.summary import Spread, spread

Moments = dict[str, tuple[int, int]]
"""First and last time of each moment of one transfer, in nanoseconds."""

INTERVALS = (
    ("reserved → dispatched (to the dispatcher's thread)", "reserved", "dispatched"),
    ("dispatched → received (HTTP, prefiller's API server)", "dispatched", "received"),
    ("received → first chunk scheduled", "received", "chunk_scheduled"),
    ("first chunk scheduled → last layer computed", "chunk_scheduled", "-layer_computed"),
    ("last layer computed → last write posted", "-layer_computed", "-write_posted"),
    ("last write posted → last note arrived", "-write_posted", "-note_arrived"),
    ("last note arrived → complete", "-note_arrived", "-complete"),
    ("complete → released (decoder's next step)", "-complete", "-released"),
    ("reserved → released", "reserved", "-released"),
    ("last layer computed → answered (HTTP reply)", "-layer_computed", "-answered"),
)
"""What, from, to. A moment with "-" is its last occurrence, one without its first."""


def collect(lines: Iterable[str]) -> dict[str, tuple[int, Moments]]:
    """Prompt tokens and moments of each transfer that has them."""
    moments: dict[str, Moments] = {}
    tokens: dict[str, int] = {}
    for line in lines:
        event: dict[str, Any] = json.loads(line)
        transfer, moment, at = event["transfer"], event["moment"], event["at_ns"]
        first, last = moments.setdefault(transfer, {}).get(moment, (at, at))
        moments[transfer][moment] = (min(first, at), max(last, at))
        if moment == "reserved":
            tokens[transfer] = event["tokens"]
    return {transfer: (tokens[transfer], moments[transfer]) for transfer in tokens}


def intervals(transfers: Mapping[str, tuple[int, Moments]]) -> dict[int, dict[str, Spread]]:
    """Milliseconds of each interval by prompt tokens."""
    samples: dict[int, dict[str, list[float]]] = {}
    for tokens, moments in transfers.values():
        for what, start, end in INTERVALS:
            if start.lstrip("-") in moments and end.lstrip("-") in moments:
                span = _at(moments, end) - _at(moments, start)
                samples.setdefault(tokens, {}).setdefault(what, []).append(span / 1e6)
    return {tokens: {what: spread(values) for what, values in rows.items()} for tokens, rows in sorted(samples.items())}


def _at(moments: Moments, name: str) -> int:
    return moments[name.lstrip("-")][name.startswith("-")]


def main() -> int:
    files = sorted(Path(sys.argv[1]).glob("*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    for tokens, rows in intervals(collect(lines)).items():
        print(f"\n{tokens} tokens from the prefiller, {max(v.n for v in rows.values())} transfers, ms")
        for what, v in rows.items():
            print(f"  {v.median:9.2f}  ({v.low:.2f} … {v.high:.2f})  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
