"""`python -m benchmarks`: start servers, measure, write raw records and a summary.

A set of servers that fails is recorded and the others go on; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import report
from benchmarks.machine import Patience, commit, fingerprint
from benchmarks.records import RecordFile, read_records
from benchmarks.sessions import DEFAULT, SESSIONS, Plan, results_directory
from benchmarks.summary import failed_sessions
from vllm_pd_connector.testing.models import random_llama
from vllm_pd_connector.testing.process_group import exit_on_signal
from vllm_pd_connector.testing.servers import start_all

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "benchmarks.md"
KINDS = ("ttft", "interference", "idle", "transfer", "profile", "micro", "hook", "writes", "gpu")
PARTS_OF_MICRO = ("hook", "writes")
SESSION_S = 900
START_S = 180.0
MICRO_S = 600
HOOK_ROUNDS = "5"
QUICK_PATIENCE_S = 1.0
QUICK: dict[str, Any] = {
    "lengths": (200, 1000),
    "reps": 2,
    "ours_s": 60.0,
    "peers_s": 60.0,
    "answers": 1,
    "answer_tokens": 400,
    "windows": 1,
    "transfer_lengths": (200, 1000),
    "transfers": 2,
    "profile_s": 5,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few, short prompts: does it work at all")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--sessions", default=",".join(DEFAULT), help=f"server sets to use, of {', '.join(SESSIONS)}")
    parser.add_argument("--budget", type=float, metavar="S", help="seconds of first-token times for each server set")
    parser.add_argument("--results", type=Path, help="results directory to add to (default: a new one)")
    parser.add_argument("--lock", type=Path, help="file to lock exclusively while servers of a set are up")
    parser.add_argument("--timeline", type=Path, help="directory for our connector's timelines; they cost time")
    parser.add_argument("--summarise", action="store_true", help="only write the summary of --results again")
    parser.add_argument("--docs", action="store_true", help="put the table of bars into docs/benchmarks.md as well")
    args = parser.parse_args()

    directory = args.results or results_directory(ROOT, commit(ROOT))
    records = RecordFile(directory)
    if not args.summarise:
        extra = {"timeline_dir": str(args.timeline)} if args.timeline else {}
        quick = dict(QUICK) if args.quick else {}
        if args.budget:
            quick |= {"ours_s": args.budget, "peers_s": args.budget}
        Patience.seconds = QUICK_PATIENCE_S if args.quick else Patience.seconds
        plan = Plan(records=records, model=str(random_llama()), only=args.only, ours_extra=extra, **quick)
        for name in args.sessions.split(","):
            if args.only is None or args.only in SESSIONS[name].serves:
                with _locked(args.lock), _recorded(name, records):
                    _run(name, plan, directory)
        for name, command in _processes(records, is_quick=args.quick).items():
            if args.only == name or (args.only is None and name not in PARTS_OF_MICRO):
                with _locked(args.lock), _recorded(name, records):
                    _run_process(command)
    found = read_records(records.path)
    text = report.markdown(found)
    (directory / "summary.md").write_text(text)
    (directory / "summary.json").write_text(json.dumps(report.figures(found), indent=1) + "\n")
    if args.docs:
        source = directory.resolve().relative_to(ROOT).as_posix()
        DOCS.write_text(report.page(DOCS.read_text(), found, source))
    print(f"\n{text}\n{directory}")
    return 1 if failed_sessions(found) else 0


def _run(name: str, plan: Plan, directory: Path) -> None:
    session = SESSIONS[name]
    with (
        _limited(SESSION_S),
        start_all(
            session.specs(plan), START_S, log_dir=Path(tempfile.gettempdir(), "pd-bench", directory.name, name)
        ) as servers,
    ):
        session.run(plan, servers)


def _processes(records: RecordFile, *, is_quick: bool) -> dict[str, list[str]]:
    """What is measured without servers, by its name in `--only`: modules and their arguments."""
    raw, quick = str(records.path), ["--quick"] if is_quick else []
    return {
        "micro": ["benchmarks.micro", raw, *quick],
        "hook": ["benchmarks.micro", raw, "--only", "hook", "--rounds", "1" if is_quick else HOOK_ROUNDS],
        "writes": ["benchmarks.micro", raw, "--only", "writes"],
        "gpu": ["benchmarks.gpu", str(records.path.parent)],
    }


def _run_process(module: Sequence[str]) -> None:
    """In processes of their own, which import vLLM or torch; all of them are gone afterwards."""
    command = [sys.executable, "-m", *module]
    with exit_on_signal():
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            status = process.wait(MICRO_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status:
        raise subprocess.CalledProcessError(status, command)


@contextmanager
def _recorded(name: str, records: RecordFile) -> Iterator[None]:
    """Record what the machine is and how a set of servers ended; its failure must not cost the figures of others."""
    print(f"{name}: starting", flush=True)
    records.add("machine", servers=name, **fingerprint(ROOT))  # now: others may commit while we wait
    begun, failure = time.monotonic(), ""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it was, it is in the table, and the exit status is 1
        traceback.print_exc()
        failure = (str(error).strip().splitlines() or [""])[0]
        failure = f"failed: {type(error).__name__}: {failure}"[:300]
    seconds = time.monotonic() - begun
    records.add("session", servers=name, failure=failure, s=round(seconds, 1))
    print(f"{name}: {failure or 'complete'} after {seconds:.0f} s", flush=True)


@contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """TimeoutError within after so many seconds."""

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"a set of servers was up for {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
