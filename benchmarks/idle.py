"""CPU that servers use while nobody asks them anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from benchmarks.machine import ForeignCpu, load_average
from benchmarks.records import RecordFile
from vllm_pd_connector.testing.process_group import cpu_seconds

QUIET_S = 5.0
WINDOW_S = 10.0


def measure(
    records: RecordFile, session: str, servers: Mapping[str, int], ask_all: Callable[[], None], *, windows: int
) -> None:
    """Fraction of a core for each server over windows of ten seconds, after a request to each and five quiet seconds.

    Args:
        servers: process id of each server, the leader of its session, by arm.
        ask_all: one request to every server.
    """
    ask_all()
    time.sleep(QUIET_S)
    for rep in range(windows):
        foreign, start = ForeignCpu(list(servers.values())), time.monotonic()
        before = {arm: cpu_seconds([pid]) for arm, pid in servers.items()}
        time.sleep(WINDOW_S)
        elapsed = time.monotonic() - start
        used = {arm: (cpu_seconds([pid]) - before[arm]) / elapsed for arm, pid in servers.items()}
        cores = foreign.cores()
        for arm, fraction in used.items():
            records.add(
                "idle",
                session=session,
                arm=arm,
                rep=rep,
                cores=round(fraction, 4),
                load=round(load_average(), 2),
                foreign_cores=round(cores, 3),
                disturbed=False,  # CPU time of a process does not depend on what others do
            )
        print(f"  idle cores: {', '.join(f'{arm} {fraction:.3f}' for arm, fraction in used.items())}", flush=True)
