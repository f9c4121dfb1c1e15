"""Every interleaving of one reservation: hold, write, cancel, fence, crash, restart, reuse.

`python tests/simulation/model.py` explores it and prints how much there was.

One decoder request of `UNITS` writes and one prefiller rank whose process may die once and be followed by another at
the same address. Whatever is in flight arrives in any order; notes and answers may be lost, notes may come twice; the
prefiller may be arbitrarily slow, and stand still once, for up to `STILL_S`. Transitions are those of the real tables;
counting is the real `CompletionTable`.

Time is in ticks, and passes only when nothing is due: a decoder's timers fire, its workers obey their orders, and the
transport keeps its bound: a posted write lands or fails within `WRITE_S`, not counting ticks in which its sender stands
still, and what is left of a failed one lands within `LATE_S` or never.

Safety: no write lands in pages that the transfer does not own any more; no request runs before its pages have arrived.
Liveness: from every state the reservation can end, and time cannot pass for ever without its ending.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

from vllm_pd_connector.ids import TransferId
from vllm_pd_connector.lifecycle import decode_request, fence, outgoing
from vllm_pd_connector.lifecycle.completion import Arrival, CompletionTable
from vllm_pd_connector.lifecycle.decode_request import DecodeCommand, DecodeEvent, DecodeState
from vllm_pd_connector.lifecycle.fence import FenceCommand, FenceEvent, FenceState
from vllm_pd_connector.lifecycle.outgoing import OutgoingCommand, OutgoingEvent, OutgoingState
from vllm_pd_connector.lifecycle.table import step

UNITS = 2
DEADLINE_S, SETTLE_S, FENCE_S, LEASE_S = 2, 1, 1, 2
WRITE_S, LATE_S = 1, 1
STILL_S = 2
QUARANTINE_S = WRITE_S + LATE_S
UNREACHABLE_S = STILL_S + WRITE_S + LATE_S
TRANSFER = TransferId("t")


class Write(NamedTuple):
    """A posted write; `left`: ticks in which the transport is done with it. Late: its sender knows no more of it."""

    seq: int
    left: int
    is_late: bool


class State(NamedTuple):
    """Everything that can differ between two moments.

    Decoder: `decode`, its deadline, `fence`, its deadline, ticks since the dispatch was closed; what vLLM does with the
    request (held, running, gone); the worker's order to hand back, its one report on its way, and the notes it has
    counted.
    Prefiller: whether the first process lives, for how long it stands still and whether it still may, and whether
    another one answers at its address; the transfer, the writes posted so far, ticks left of the lease, whether it was
    fenced, whether a write failed, whether a fence waits.
    In flight: dispatch, its close, reply, fence, answer, failure note, writes, notes.
    """

    decode: DecodeState = DecodeState.DISPATCHED
    timer: int | None = DEADLINE_S
    fence: FenceState | None = None
    fence_timer: int | None = None
    since_close: int = 0
    request: str = "held"
    hand_back: str = ""
    report: str = ""
    is_reported: bool = False
    counted: frozenset[int] = frozenset()
    is_forgotten: bool = False
    landed: frozenset[int] = frozenset()
    lives: bool = True
    still: int = 0
    may_stop: bool = True
    is_followed: bool = False
    out: OutgoingState | None = None
    posted: int = 0
    lease: int = 0
    is_fenced: bool = False
    is_uncertain: bool = False
    fence_waits: bool = False
    dispatch: str = "sent"
    close: bool = False
    reply: str = ""
    asked: bool = False
    answer: str = ""
    failure_note: bool = False
    writes: tuple[Write, ...] = ()
    notes: frozenset[int] = frozenset()

    @property
    def owns_pages(self) -> bool:
        """The transfer's pages are still its own: held for it, or pinned by its fence."""
        return self.request == "held" or self.fence not in (None, FenceState.LIFTED)

    @property
    def is_over(self) -> bool:
        """The reservation has ended on the decoder."""
        return self.decode is DecodeState.RELEASED and self.fence in (None, FenceState.LIFTED)


class Broken(Exception):
    """A law does not hold in a reachable state."""


Move = tuple[str, State]


def moves(s: State) -> Iterator[Move]:
    """Everything that can happen next."""
    yield from _decoder(s)
    yield from _prefiller(s)
    yield from _network(s)
    if _time_may_pass(s):
        yield "tick", _tick(s)


def plain(s: State) -> State:
    """The same state without what nothing depends on any more, so that fewer states are told apart."""
    if s.is_reported:
        s = s._replace(notes=frozenset(), counted=frozenset(), landed=frozenset())
    if s.out not in (OutgoingState.OPEN, OutgoingState.CLOSING):
        s = s._replace(lease=0)
    if s.decode is DecodeState.RELEASED:
        s = s._replace(reply="", failure_note=False)
    if s.fence in (None, FenceState.LIFTED):
        s = s._replace(answer="", since_close=0)
    if not s.lives:
        s = s._replace(still=0, may_stop=False)
    return s


def _decode_event(s: State, event: DecodeEvent) -> State:
    if s.decode is DecodeState.RELEASED:
        return s
    target, commands = step(decode_request.DECODE_TABLE, s.decode, event)
    s = s._replace(decode=target)
    for command in commands:
        match command:
            case DecodeCommand.ARM_SETTLE:
                s = s._replace(timer=SETTLE_S)
            case DecodeCommand.ARM_RECLAIM:
                s = s._replace(timer=DEADLINE_S)
            case DecodeCommand.CLOSE_DISPATCH:
                s = s._replace(close=s.dispatch == "sent" or s.out is not None)
            case DecodeCommand.FENCE:
                s = s._replace(fence=FenceState.ASKING, fence_timer=FENCE_S, asked=True, since_close=0)
            case DecodeCommand.REPORT_FAILED:
                s = s._replace(hand_back="failed")
            case DecodeCommand.REPORT_LEFT:
                s = s._replace(hand_back="left")
    if target is DecodeState.RELEASED:
        s = s._replace(timer=None, is_forgotten=s.fence is None)
    return s


def _fence_event(s: State, event: FenceEvent) -> State:
    assert s.fence is not None
    target, commands = step(fence.FENCE_TABLE, s.fence, event)
    s = s._replace(fence=target)
    for command in commands:
        if command is FenceCommand.ARM_SILENCE:
            end = fence.silence_end(now=0, closed_at=-s.since_close, lease_s=LEASE_S, unreachable_s=UNREACHABLE_S)
            s = s._replace(fence_timer=int(end))
        elif command is FenceCommand.ARM_QUARANTINE:
            s = s._replace(fence_timer=QUARANTINE_S)
        elif command is FenceCommand.UNPIN:
            s = s._replace(fence_timer=None, is_forgotten=s.is_forgotten or s.decode is DecodeState.RELEASED)
    return s


def _decoder(s: State) -> Iterator[Move]:
    if s.decode is not DecodeState.RELEASED and s.request == "held" and s.decode is not DecodeState.RECLAIMING:
        yield "the client leaves", _decode_event(s, DecodeEvent.ABORTED)
    if s.timer == 0:
        yield "deadline", _decode_event(s._replace(timer=None), DecodeEvent.DEADLINE)
    if s.fence is FenceState.ASKING:
        yield "no answer in time", _fence_event(s, FenceEvent.UNREACHABLE)
    if s.fence is FenceState.SILENT and not (s.asked or s.answer or s.fence_waits):
        yield "asks again", s._replace(asked=True)
    if s.fence_timer == 0:
        yield "the fence's deadline", _fence_event(s._replace(fence_timer=None), FenceEvent.DEADLINE)
    if s.hand_back:
        report = s.report if s.is_reported else s.hand_back
        yield "the worker hands back", s._replace(hand_back="", is_reported=True, report=report)
    if s.report:
        is_failed = s.report == "failed"
        back = is_failed or s.decode is DecodeState.RECLAIMING
        after = _decode_event(s, DecodeEvent.HANDED_BACK if back else DecodeEvent.ARRIVED)
        yield f"vLLM is told: {s.report}", after._replace(report="", request="running" if s.report == "ok" else "gone")


def _prefiller(s: State) -> Iterator[Move]:
    if s.lives and s.may_stop:
        yield "stands still", s._replace(still=STILL_S, may_stop=False)
    if s.still:
        yield "goes on", s._replace(still=0)
        yield "dies", _die(s)
        return
    if s.dispatch == "sent" and s.lives:
        born = OutgoingState.CANCELLED if s.is_fenced else OutgoingState.OPEN
        taken = s._replace(dispatch="taken", out=born, lease=LEASE_S)
        # What was closed before it was taken is read together with its close, and aborted before its first step.
        yield "takes the dispatch", _cancel(taken)._replace(close=False, dispatch="over") if s.close else taken
    if s.dispatch == "sent" and s.is_followed:
        yield "refuses the dispatch", s._replace(dispatch="over", reply="failed", close=False)
    if s.close and s.dispatch != "sent":
        yield "sees the close", (_cancel(s) if s.lives and s.out is not None else s)._replace(close=False)
    if s.lives and s.out is not None:
        yield from _writer(s)
    if s.asked and s.lives:
        fenced = s._replace(asked=False, is_fenced=True, fence_waits=True)
        yield "is fenced", _cancel(fenced) if s.out is not None else fenced
    if s.asked and s.is_followed:
        yield "another process refuses the fence", s._replace(asked=False, answer="refused")
    if s.asked and not s.lives:
        yield "nobody listens", s._replace(asked=False, answer="refused")
    if s.lives and s.fence_waits and (s.out is None or s.out is OutgoingState.QUIET):
        yield "says quiet", s._replace(fence_waits=False, answer="refused" if s.is_uncertain else "quiet")
    if s.lives:
        yield "dies", _die(s)
    if not s.lives and not s.is_followed:
        yield "another process starts", s._replace(is_followed=True)


def _writer(s: State) -> Iterator[Move]:
    may_post = s.out in (OutgoingState.OPEN, OutgoingState.CLOSING) and s.lease > 0
    if may_post and s.posted < UNITS:
        yield "posts", s._replace(posted=s.posted + 1, writes=_and(s.writes, Write(s.posted, WRITE_S, False)))
    if s.out is OutgoingState.OPEN and s.posted == UNITS:
        yield "finishes", _out_event(s, OutgoingEvent.CLOSE)._replace(reply=s.reply or "answered", dispatch="over")
    if s.out in (OutgoingState.OPEN, OutgoingState.CLOSING) and s.lease == 0 and s.posted < UNITS:
        yield "gives up: its lease is over", _cancel(s)._replace(failure_note=True)
    if s.out in (OutgoingState.CLOSING, OutgoingState.CANCELLED) and all(w.is_late for w in s.writes):
        yield "is drained", _out_event(s, OutgoingEvent.DRAINED)


def _network(s: State) -> Iterator[Move]:
    for write in s.writes:
        if s.still and not write.is_late:
            continue
        rest = tuple(w for w in s.writes if w != write)
        if not s.owns_pages:
            raise Broken(f"write {write.seq} may land in pages that are no longer the transfer's")
        landed = s._replace(writes=rest, landed=s.landed | {write.seq})
        if write.is_late:
            yield f"late write {write.seq} lands", landed
            yield f"late write {write.seq} is lost", s._replace(writes=rest)
            continue
        yield f"write {write.seq} lands", landed._replace(notes=s.notes | {write.seq})
        failed = _cancel(s._replace(writes=_and(rest, Write(write.seq, LATE_S, True)), is_uncertain=True))
        yield f"write {write.seq} fails", failed._replace(failure_note=s.lives and s.out is not None)
    for seq in s.notes:
        counted = _count(s, seq)
        yield f"note {seq} comes", counted._replace(notes=s.notes - {seq})
        yield f"note {seq} comes and will come again", counted
        yield f"note {seq} is lost", s._replace(notes=s.notes - {seq})
    if s.reply:
        event = DecodeEvent.ANSWERED if s.reply == "answered" else DecodeEvent.FAILED
        yield "the reply comes", _decode_event(s, event)._replace(reply="")
        yield "the reply is lost", s._replace(reply="")
    if s.failure_note:
        spoiled = s if s.is_reported else _decode_event(s, DecodeEvent.FAILED)
        yield "the failure note comes", spoiled._replace(failure_note=False)
        yield "the failure note is lost", s._replace(failure_note=False)
    if s.asked:
        yield "the fence is lost", s._replace(asked=False)
    if s.answer:
        if s.fence is not None:
            quiet = s.answer == "quiet"
            told = _fence_event(s, FenceEvent.QUIET if quiet else FenceEvent.GONE)
            yield f"the answer comes: {s.answer}", told._replace(answer="")
        yield "the answer is lost", s._replace(answer="")


def _count(s: State, seq: int) -> State:
    """What the receiver makes of a note, with the real table."""
    table = CompletionTable(max_parked=1)
    table.expect(TRANSFER, UNITS)
    for known in sorted(s.counted):
        table.arrive(TRANSFER, sender=0, seq=known, units=1)
    if s.is_forgotten:
        table.forget(TRANSFER)
    arrival = table.arrive(TRANSFER, sender=0, seq=seq, units=1)
    if arrival in (Arrival.COUNTED, Arrival.REACHED):
        s = s._replace(counted=s.counted | {seq})
    if arrival is Arrival.REACHED and not s.is_reported:
        if len(s.landed) < UNITS:
            raise Broken("the request is released before all its pages have arrived")
        s = s._replace(is_reported=True, report="ok")
    return s


def _out_event(s: State, event: OutgoingEvent) -> State:
    assert s.out is not None
    target, commands = step(outgoing.OUTGOING_TABLE, s.out, event)
    return s._replace(out=target, posted=UNITS if OutgoingCommand.DROP_UNPOSTED in commands else s.posted)


def _cancel(s: State) -> State:
    return _out_event(s, OutgoingEvent.CANCEL) if s.lives and s.out is not None else s


def _die(s: State) -> State:
    """What it posted may still land; its connection breaks, unless the decoder never hears of it."""
    late = tuple(sorted(Write(w.seq, LATE_S, True) for w in s.writes if not w.is_late))
    waits = s.dispatch == "taken" and not s.close
    return s._replace(
        lives=False,
        out=None,
        fence_waits=False,
        writes=tuple(sorted(late + tuple(w for w in s.writes if w.is_late))),
        reply=s.reply or ("failed" if waits else ""),
        dispatch="over" if s.dispatch == "taken" else s.dispatch,
    )


def _time_may_pass(s: State) -> bool:
    due = s.timer == 0 or s.fence_timer == 0 or s.hand_back or s.report
    return not due and all(write.left or _rests(s, write) for write in s.writes) and not (s.is_over and not s.writes)


def _tick(s: State) -> State:
    return s._replace(
        timer=None if s.timer is None else s.timer - 1,
        fence_timer=None if s.fence_timer is None else s.fence_timer - 1,
        since_close=min(LEASE_S, s.since_close + 1) if s.fence is not None else 0,
        lease=max(0, s.lease - 1),
        still=max(0, s.still - 1),
        writes=tuple(w if _rests(s, w) else w._replace(left=w.left - 1) for w in s.writes),
    )


def _rests(s: State, write: Write) -> bool:
    """Its sender has not handed it over, and stands still."""
    return bool(s.still) and not write.is_late


def _and(writes: tuple[Write, ...], write: Write) -> tuple[Write, ...]:
    return tuple(sorted((*writes, write)))


class Found(NamedTuple):
    """States and transitions explored; `ends`: states in which the reservation is over."""

    states: int
    transitions: int
    ends: int


class Graph:
    """States by number, in the order in which they were found, and the transitions between them."""

    def __init__(self, first: State) -> None:
        self.states = [first]
        self.came: list[tuple[int, str] | None] = [None]
        self.edges: list[list[int]] = []
        self.ticks: dict[int, int] = {}
        self._numbers = {first: 0}

    def grow(self) -> None:
        """Visit every reachable state.

        Raises:
            Broken: a write may land where it must not, or a request runs too early.
        """
        while len(self.edges) < len(self.states):
            here = len(self.edges)
            self.edges.append([])
            try:
                for label, after in moves(self.states[here]):
                    there = self._number(plain(after), here, label)
                    self.edges[here].append(there)
                    if label == "tick":
                        self.ticks[here] = there
            except Broken as broken:
                raise Broken(f"{broken}:{self.way(here)}") from None

    def way(self, state: int) -> str:
        """What led to a state, one thing a line."""
        labels: list[str] = []
        while (before := self.came[state]) is not None:
            state, label = before
            labels.append(f"\n  {label}")
        return "".join(reversed(labels))

    def _number(self, state: State, before: int, label: str) -> int:
        number = self._numbers.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self.came.append((before, label))
        return number


def explore() -> Found:
    """Visit every reachable state and look at all of them.

    Raises:
        Broken: a law does not hold; the text ends with the way there.
    """
    graph = Graph(State())
    graph.grow()
    ends = [number for number, state in enumerate(graph.states) if state.is_over]
    _check_that_all_can_end(graph, ends)
    _check_that_time_is_bounded(graph)
    return Found(len(graph.states), sum(map(len, graph.edges)), len(ends))


def _check_that_all_can_end(graph: Graph, ends: list[int]) -> None:
    back: list[list[int]] = [[] for _ in graph.states]
    for before, afters in enumerate(graph.edges):
        for after in afters:
            back[after].append(before)
    ending, queue = set(ends), deque(ends)
    while queue:
        for before in back[queue.popleft()]:
            if before not in ending:
                ending.add(before)
                queue.append(before)
    for number in range(len(graph.states)):
        if number not in ending:
            raise Broken(f"the reservation can never end:{graph.way(number)}")


def _check_that_time_is_bounded(graph: Graph) -> None:
    """No circle of states with an open reservation contains a tick: its life is bounded, whatever happens."""
    component = _components(graph)
    for before, after in graph.ticks.items():
        if component[before] == component[after] and not graph.states[before].is_over:
            raise Broken(f"time may pass for ever while the reservation is open:{graph.way(before)}")


def _components(graph: Graph) -> list[int]:
    """The strongly connected component of each state (Tarjan, without recursion)."""
    size = len(graph.states)
    index, low, component = [-1] * size, [0] * size, [-1] * size
    stack: list[int] = []
    order = count()
    for root in range(size):
        work = [(root, 0)] if index[root] < 0 else []
        while work:
            state, child = work.pop()
            if index[state] < 0:
                index[state] = low[state] = next(order)
                stack.append(state)
            for position in range(child, len(graph.edges[state])):
                after = graph.edges[state][position]
                if index[after] < 0:
                    work += [(state, position), (after, 0)]
                    break
                if component[after] < 0:
                    low[state] = min(low[state], low[after])
            else:
                if low[state] == index[state]:
                    while component[state] < 0:
                        component[stack.pop()] = state
    return component


def main(tell: Callable[[str], None] = print) -> int:
    """Explore and print."""
    started = time.monotonic()
    try:
        found = explore()
    except Broken as broken:
        tell(f"BROKEN: {broken}")
        return 1
    tell(
        f"{found.states} states, {found.transitions} transitions, {found.ends} with the reservation over, "
        f"{time.monotonic() - started:.1f} s: every law holds"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
