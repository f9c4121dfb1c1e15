"""What must hold after every fault: nothing kept, nothing busy, the next answers right, no client without an answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from server_tier.ask import Answer, at_once, until
from server_tier.probe import held, idle_cores

from fault_run.clients import SMALL, Tally
from vllm_pd_connector.testing.servers import Server

QUIET_S = 60.0
"""The longest that pages may be kept: the rest of a lease and a quarantine."""

MAX_IDLE_CORES = 0.15
IDLE_S = 4.0
NEXT_AT_ONCE = 5


@dataclass(slots=True)
class Outcome:
    """One fault and what came of it.

    Attributes:
        fault: what was done.
        clients: requests that were on their way, or came meanwhile.
        answers: how many were answered.
        errors: how many got an error instead.
        wrong: answers that differ from the reference's.
        longest_wait_s: of any client.
        limit_s: that it may wait.
        quiet_after_s: from the last client's end until no server kept a page for anybody.
        next_right: of the next requests, answered as the reference did.
        next_asked: how many those were.
        idle_cores: of the busiest server while nobody asked.
        complaints: what did not hold; empty is good.
        more: figures of this fault alone.
    """

    fault: str
    clients: int = 0
    answers: int = 0
    errors: int = 0
    wrong: int = 0
    longest_wait_s: float = 0.0
    limit_s: float = 0.0
    quiet_after_s: float = 0.0
    next_right: int = 0
    next_asked: int = 0
    idle_cores: float = 0.0
    complaints: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def count(self, tally: Tally, limit_s: float, *, may_fail: bool = False) -> None:
        """Take the clients of the fault into account; `may_fail`: an error is an acceptable end for them."""
        self.clients += tally.answers + len(tally.errors)
        self.answers += tally.answers
        self.errors += len(tally.errors)
        self.wrong += len(tally.wrong)
        self.longest_wait_s = max(self.longest_wait_s, tally.longest_s)
        self.limit_s = limit_s
        self.complaints += tally.wrong
        if not may_fail:
            self.complaints += tally.errors
        if tally.longest_s > limit_s:
            self.complaints.append(f"a client waited {tally.longest_s:.1f} s")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def check(outcome: Outcome, decoder: Server, others: Sequence[Server], want: dict[str, Answer], limit_s: float) -> None:
    """The checks that follow every fault."""
    started = time.monotonic()
    servers = [decoder, *others]
    try:
        for server in servers:
            until(lambda s=server: not held(s), QUIET_S, f"{server.name} keeps nothing")
    except AssertionError as error:
        outcome.complaints.append(f"{error}: {[held(server) for server in servers]}")
    outcome.quiet_after_s = time.monotonic() - started
    tally = Tally()
    calls = [lambda name=name: tally.ask(decoder.url, name, want[name], limit_s) for name in SMALL]
    for start in range(0, len(calls), NEXT_AT_ONCE):
        at_once(calls[start : start + NEXT_AT_ONCE])
    outcome.next_asked, outcome.next_right = len(calls), tally.answers - len(tally.wrong)
    outcome.complaints += tally.errors + tally.wrong
    outcome.idle_cores = max(idle_cores(server, IDLE_S) for server in servers)
    if outcome.idle_cores > MAX_IDLE_CORES:
        outcome.complaints.append(f"an idle server uses {outcome.idle_cores:.2f} cores")
    left = {server.name: held(server) for server in servers if held(server)}
    if left:
        outcome.complaints.append(f"kept at the end: {left}")
