"""`python -m benchmarks.parts`: what a first token of our pair consists of, beside its prefiller asked directly.

The pair's parts are read from the connector's timelines, from the client's request to its first token, all on this
host's clock. For both arms: what the prefiller's engine spent on the prompt, by vLLM's own counters, and whose CPU time
it was on the prefiller's core. Rounds are paired, another arm begins each time; a round that others disturbed is kept
in the raw records and left out of the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report, threads
from benchmarks.client import random_prompt, stream
from benchmarks.machine import ForeignCpu, commit, fingerprint, wait_calm
from benchmarks.records import RecordFile, read_records
from benchmarks.sessions import results_directory
from benchmarks.ttft import SETTLE_S, limit_cores
from vllm_pd_connector.testing.models import random_llama
from vllm_pd_connector.testing.process_group import session_members
from vllm_pd_connector.testing.servers import Server, ServerSpec, start_all

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "benchmarks.md"
START_S = 180.0
NUM_TOKENS = 2  # as the benchmarks' sessions ask for
FLUSH_S = 0.3  # the engine's last step writes its moments and counters after the answer
PREFILLER_CORE, DECODER_CORE = 0, 1
ENGINE = ("time_to_first_token", "request_queue_time", "request_prefill_time")
WHOLE = "asked → first token"
DISTURBED = "disturbed"

MOMENTS = (
    ("asked", 0),
    ("reserved", 0),
    ("dispatched", 0),
    ("received", 0),
    ("chunk_scheduled", 0),
    ("layer_computed", -1),
    ("write_posted", -1),
    ("note_arrived", -1),
    ("complete", -1),
    ("released", -1),
    ("first token", 0),
)
"""In order; the first or the last time that each of them was seen."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.parts", description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="after one to warm up")
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--results", type=Path, help="results directory to add to (default: a new one)")
    parser.add_argument("--summarise", action="store_true", help="only write the summary of --results again")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/benchmarks.md as well")
    args = parser.parse_args()
    records = RecordFile(args.results or results_directory(ROOT, commit(ROOT)))
    if not args.summarise:
        records.add("machine", servers="parts", **fingerprint(ROOT, "benchmarks.parts"))
        _measure(records, args.rounds, args.tokens)
    directory = records.path.parent
    found = read_records(records.path)
    (directory / "summary.md").write_text(report.markdown(found))
    lines = report.first_token_parts(found)
    print("\n".join(lines))
    if args.docs:
        source = directory.resolve().relative_to(ROOT).as_posix()
        link = f"Raw records: [`{source}`](../{source})"
        DOCS.write_text(report.replace_between(DOCS.read_text(), "parts", "\n\n".join([link, *lines])))


def _measure(records: RecordFile, rounds: int, tokens: int) -> None:
    folder = Path(tempfile.mkdtemp(prefix="pd-parts-"))
    extra = {"timeline_dir": str(folder)}
    specs = [
        ServerSpec(random_llama(), "prefiller", cores=[PREFILLER_CORE], extra=extra),
        ServerSpec(random_llama(), "decoder", cores=[DECODER_CORE], extra=extra),
    ]
    with start_all(specs, START_S) as (prefiller, decoder):
        for rep in range(-1, rounds):
            one = _round(prefiller, decoder, folder, tokens, rep)
            num_disturbed = one.pop(DISTURBED)
            if rep >= 0:
                ms = {what: round(value, 3) for what, value in one.items()}
                records.add("parts", tokens=tokens, rep=rep, disturbed=num_disturbed > 0, ms=ms)
            is_kept = rep >= 0 and not num_disturbed
            print(f"  round {rep}{'' if is_kept else ', left out'}: added {one['added']:.1f} ms", flush=True)


def _round(prefiller: Server, decoder: Server, folder: Path, tokens: int, rep: int) -> dict[str, float]:
    """Milliseconds of each part of both arms, asked once each; `DISTURBED` is the number of arms that were."""
    leaders = [prefiller.process.pid, decoder.process.pid]
    found: dict[str, float] = {DISTURBED: 0}
    for arm, server in [("direct", prefiller), ("pair", decoder)][:: 1 if rep % 2 else -1]:
        time.sleep(SETTLE_S)
        wait_calm(leaders)
        counted, foreign, before = _engine(prefiller), ForeignCpu(leaders), threads.snapshot()
        times = stream(server.url, str(random_llama()), random_prompt(tokens, "parts", arm, rep), NUM_TOKENS)
        after = threads.snapshot()
        found[DISTURBED] += foreign.cores() > limit_cores(times[-1] - times[0])
        time.sleep(FLUSH_S)
        found[f"{arm}: {WHOLE}"] = 1000 * (times[1] - times[0])
        for what, value in _engine(prefiller).items():
            found[f"{arm}: prefiller's engine, {what}"] = 1000 * (value - counted[what])
        used = threads.shares(before, after, session_members(prefiller.process.pid), PREFILLER_CORE)
        found |= {f"{arm}: CPU, {whose}": spent for whose, spent in used.items()}
        if arm == "pair":
            lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
            found |= parts(times[0] * 1e9, times[1] * 1e9, [json.loads(line) for line in lines])
    found["added"] = found[f"pair: {WHOLE}"] - found[f"direct: {WHOLE}"]
    return found


def parts(asked_ns: float, first_token_ns: float, events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds between the moments of the one transfer since `asked_ns`, and how long its writes were under way."""
    times: dict[str, list[float]] = {"asked": [asked_ns], "first token": [first_token_ns]}
    for event in events:
        if event["at_ns"] >= asked_ns:
            times.setdefault(event["moment"], []).append(event["at_ns"])
    at = [(name, sorted(times[name])[which]) for name, which in MOMENTS]
    found = {f"pair: {a} → {b}": (b_ns - a_ns) / 1e6 for (a, a_ns), (b, b_ns) in itertools.pairwise(at)}
    flights = zip(sorted(times["write_posted"]), sorted(times["write_done"]), strict=True)
    found["pair: writes under way"] = sum(end - begin for begin, end in flights) / 1e6
    return found


def _engine(server: Server) -> dict[str, float]:
    """Seconds that the server's engine has counted so far, by what it counts."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    return {
        what: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{what}_seconds_sum"))
        for what in ENGINE
    }


if __name__ == "__main__":
    main()
