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
from fault_run.clients import Want
from fault_run.report import write
from fault_run.scenarios import Scenario
from fault_run.stages import NAMES, REPEATED, STAGES

ROOT = Path(__file__).parent.parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/faults", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"of: {', '.join(NAMES)}; none: all")
    parser.add_argument("--out", type=Path, help="directory for faults.json and faults.md")
    parser.add_argument("--seed", type=int, default=0, help="decides when faults strike")
    parser.add_argument("--kills", type=int, default=REPEATED["kill-prefiller"], help="times kill-prefiller is done")
    args = parser.parse_args()
    chosen = args.scenarios or NAMES
    if unknown := set(chosen) - set(NAMES):
        parser.error(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    folder = Path(tempfile.mkdtemp(prefix="pd-faults-"))
    print(f"logs in {folder}", flush=True)
    started = time.monotonic()
    machine = {**fingerprint(ROOT), "command": f"scripts/faults {' '.join(args.scenarios)} --seed {args.seed}"}
    outcomes: list[Outcome] = []
    want = reference(folder)
    for stage, (open_stage, why_not, scenarios) in STAGES.items():
        mine = [name for name in scenarios if name in chosen]
        if not mine:
            continue
        if reason := why_not():
            print(f"left out: {', '.join(mine)} ({stage}): {reason}", flush=True)
            continue
        with open_stage(folder) as cast:
            for name in mine:
                for number in range(args.kills if name in REPEATED else 1):
                    chance = random.Random(f"{args.seed} {name} {number}")
                    outcomes.append(_run(name, scenarios[name], cast, want, chance))
                    if args.out:
                        write(args.out, outcomes, machine, time.monotonic() - started)
                cast.wait_started()
    bad = [o for o in outcomes if o.complaints]
    print(f"{len(outcomes)} faults, {len(bad)} with complaints, {time.monotonic() - started:.0f} s")
    return 1 if bad else 0


def _run(name: str, scenario: Scenario, cast: Cast, want: Want, chance: random.Random) -> Outcome:
    started = time.monotonic()
    try:
        outcome = scenario(cast, want, chance)
    except (AssertionError, OSError) as error:
        outcome = Outcome(name, complaints=[f"{type(error).__name__}: {error}", traceback.format_exc(limit=4)])
    outcome.more["took_s"] = round(time.monotonic() - started, 1)
    print(json.dumps(outcome.as_dict()), flush=True)
    return outcome


if __name__ == "__main__":
    sys.exit(main())
