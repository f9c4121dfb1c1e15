"""Fuzz every target in turn: scripts/fuzz --minutes N [--seed N] [--only TARGET] [--case N]."""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import random
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack

from fuzz.targets import Target, targets

SLICE_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one target")
    parser.add_argument("--case", type=int, help="start at this case, to see a failure again")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    faulthandler.enable()
    with ExitStack() as stack:
        chosen = {name: target for name, target in targets(stack).items() if args.only in (None, name)}
        return _fuzz(chosen, args.minutes, args.seed, args.case or 0)


def _fuzz(chosen: dict[str, Target], minutes: float, seed: int, first_case: int) -> int:
    counts: Counter[str] = Counter(dict.fromkeys(chosen, first_case))
    started = time.monotonic()
    while time.monotonic() - started < minutes * 60:
        for name, target in chosen.items():
            if not _slice(name, target, seed, counts):
                return 1
    took = time.monotonic() - started
    print(json.dumps({"seed": seed, "took_s": round(took), "cases": sum(counts.values()), "by_target": counts}))
    return 0


def _slice(name: str, target: Target, seed: int, counts: Counter[str]) -> bool:
    """A second of one target; False after a failure, which is printed."""
    end = time.monotonic() + SLICE_S
    if counts[name] % 1000 < 100:
        print(f"{name} {counts[name]}", file=sys.stderr, flush=True)  # what a crash of the interpreter leaves behind
    while time.monotonic() < end:
        case = counts[name]
        try:
            target(random.Random(f"{seed}:{name}:{case}"))
        except Exception:  # noqa: BLE001 (whatever it is, it is what we look for)
            traceback.print_exc()
            print(f"failed: scripts/fuzz --seed {seed} --only {name} --case {max(0, case - 600)}", file=sys.stderr)
            return False
        counts[name] += 1
    return True


if __name__ == "__main__":
    sys.exit(main())
