"""Where the time of single transfers goes, from the connector's timelines of pairs that are up at the same time.

One pair writes layer by layer, as it does by default; the prefiller of the other one is told to wait for so many bytes
that nothing goes out before the last layer. Prompts are computed in one step on both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.client import random_prompt
from benchmarks.machine import MAX_FOREIGN_CORES, ForeignCpu, wait_calm
from benchmarks.records import RecordFile
from benchmarks.ttft import SETTLE_S, Ask

PROMPT_TOKENS = (200, 8000)
ONE_STEP = ("--max-num-batched-tokens", "8192")
NO_LAYERS = {"min_write_bytes": 1 << 50}
"""Nothing wakes the writer before the end of the step."""


def measure(
    records: RecordFile,
    arms: Mapping[str, tuple[Ask, Path]],
    leaders: Sequence[int],
    *,
    lengths: Sequence[int],
    reps: int,
) -> None:
    """Each arm in turn for each length, after one to warm up; then a record of every transfer's moments.

    Args:
        arms: how to ask the pair, and the directory of its timelines.
    """
    disturbed: dict[tuple[str, int], list[bool]] = {}
    for rep in range(-1, reps):
        for length in lengths:
            for name, (ask, _) in list(arms.items())[:: 1 if rep % 2 else -1]:
                time.sleep(SETTLE_S)
                wait_calm(leaders)
                foreign = ForeignCpu(leaders)
                ask(random_prompt(length, "transfer", name, rep))
                disturbed.setdefault((name, length), []).append(foreign.cores() > MAX_FOREIGN_CORES)
    for name, (_, directory) in arms.items():
        found = collect(line for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines())
        for length in lengths:
            moments = [m for tokens, m in found if tokens == length - 1]
            flags = disturbed[name, length]
            if len(moments) != len(flags):
                raise RuntimeError(f"{len(moments)} transfers for {len(flags)} requests of {length} tokens: {name}")
            for rep, (events, was_disturbed) in enumerate(zip(moments[1:], flags[1:], strict=True)):
                records.add("transfer", arm=name, tokens=length, rep=rep, disturbed=was_disturbed, moments=events)
    print(f"  transfers: {len(arms)} x {len(lengths)} x {reps}", flush=True)


def collect(lines: Iterable[str]) -> list[tuple[int, list[dict[str, Any]]]]:
    """(tokens, moments) of every transfer, by its beginning; times count from there."""
    transfers: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        event: dict[str, Any] = json.loads(line)
        transfers.setdefault(event.pop("transfer"), []).append(event)
    found: list[tuple[int, int, list[dict[str, Any]]]] = []
    for events in transfers.values():
        events.sort(key=lambda event: event["at_ns"])
        begun = next((event for event in events if event["moment"] == "reserved"), None)
        if begun is not None:
            kept = ("moment", "at_ns", "layers", "layer", "seq", "bytes")
            relative = [
                {**{key: event[key] for key in kept if key in event}, "at_ns": event["at_ns"] - begun["at_ns"]}
                for event in events
            ]
            found.append((begun["at_ns"], begun["tokens"], relative))
    return [(tokens, events) for _, tokens, events in sorted(found, key=lambda item: item[0])]
