"""Run faults against real servers: scripts/faults [SCENARIO ...] [--out DIRECTORY] [--seed N] [--kills N]."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from benchmarks.machine import fingerprint
from fault_run.cast import Cast, reference
from fault_run.checks import Outcome
from fault_run.report import write
from fault_run.scenarios import REPEATED, SCENARIOS

ROOT = Path(__file__).parent.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of: {', '.join(SCENARIOS)}; none: all")
    parser.add_argument("--out", type=Path, help="directory for faults.json and faults.md")
    parser.add_argument("--seed", type=int, default=0, help="decides when faults strike")
    parser.add_argument("--kills", type=int, default=REPEATED["kill-prefiller"], help="times kill-prefiller is done")
    args = parser.parse_args()
    unknown = set(args.scenarios) - SCENARIOS.keys()
    if unknown:
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(SCENARIOS)}")
    folder = Path(tempfile.mkdtemp(prefix="pd-faults-"))
    print(f"logs in {folder}", flush=True)
    started = time.monotonic()
    outcomes: list[Outcome] = []
    want = reference(folder)
    with Cast(folder, args=("--shutdown-timeout", "30")) as cast:
        for name in args.scenarios or SCENARIOS:
            for number in range(args.kills if name in REPEATED else 1):
                outcomes.append(_run(name, cast, want, random.Random(f"{args.seed} {name} {number}")))
            cast.wait_started()
    if args.out:
        write(args.out, outcomes, fingerprint(ROOT), time.monotonic() - started)
    bad = [o for o in outcomes if o.complaints]
    print(f"{len(outcomes)} faults, {len(bad)} with complaints, {time.monotonic() - started:.0f} s")
    return 1 if bad else 0


def _run(name: str, cast: Cast, want: dict, chance: random.Random) -> Outcome:
    started = time.monotonic()
    try:
        outcome = SCENARIOS[name](cast, want, chance)
    except (AssertionError, OSError) as error:
        outcome = Outcome(name, complaints=[f"{type(error).__name__}: {error}", traceback.format_exc(limit=4)])
    outcome.more["took_s"] = round(time.monotonic() - started, 1)
    print(json.dumps(outcome.as_dict()), flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
