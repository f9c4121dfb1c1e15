"""Every table: waiting states have a deadline, every state reaches an end, and an illegal event changes nothing."""

from enum import Enum
from typing import Any

import pytest

from vllm_pd_connector.errors import InvariantBroken
from vllm_pd_connector.lifecycle.decode_request import DECODE_TABLE, DecodeCommand, DecodeEvent, DecodeState
from vllm_pd_connector.lifecycle.fence import FENCE_TABLE, FenceCommand, FenceEvent, FenceState, silence_end
from vllm_pd_connector.lifecycle.outgoing import OUTGOING_TABLE, OutgoingCommand, OutgoingEvent, OutgoingState
from vllm_pd_connector.lifecycle.prefiller import (
    PREFILLER_TABLE,
    Candidate,
    PrefillerEvent,
    PrefillerState,
    all_full,
    choose,
)
from vllm_pd_connector.lifecycle.table import step

TABLES: list[tuple[Any, type[Enum], type[Enum], set[Any]]] = [
    (DECODE_TABLE, DecodeState, DecodeEvent, {DecodeState.RELEASED}),
    (FENCE_TABLE, FenceState, FenceEvent, {FenceState.LIFTED}),
    (OUTGOING_TABLE, OutgoingState, OutgoingEvent, {OutgoingState.QUIET}),
    (PREFILLER_TABLE, PrefillerState, PrefillerEvent, set(PrefillerState)),
]
ALL_TABLES = pytest.mark.parametrize(
    ("table", "states", "events", "ends"), TABLES, ids=["decode", "fence", "outgoing", "prefiller"]
)


@ALL_TABLES
def test_every_state_is_in_its_table(table: Any, states: Any, events: Any, ends: Any) -> None:
    assert set(table) == set(states)
    assert {target for edges in table.values() for target, _ in edges.values()} <= set(states)


@ALL_TABLES
def test_every_state_reaches_an_end(table: Any, states: Any, events: Any, ends: set[Any]) -> None:
    for start in states:
        reached = {start}
        while grown := {t for s in reached for t, _ in table[s].values()} - reached:
            reached |= grown
        assert reached & ends, f"{start} never ends"


@ALL_TABLES
def test_an_end_is_never_left(table: Any, states: Any, events: Any, ends: set[Any]) -> None:
    for end in ends:
        assert {target for target, _ in table[end].values()} <= ends


@ALL_TABLES
def test_an_unknown_event_raises_and_names_both(table: Any, states: Any, events: Any, ends: Any) -> None:
    for state in states:
        for event in set(events) - set(table[state]):
            before = {s: dict(edges) for s, edges in table.items()}
            with pytest.raises(InvariantBroken, match=f"{state.name} does not know {event.name}"):
                step(table, state, event)
            assert {s: dict(edges) for s, edges in table.items()} == before


@pytest.mark.parametrize("state", set(DecodeState) - {DecodeState.RELEASED})
def test_every_waiting_decode_state_has_a_deadline_that_moves_on_or_is_armed_again(state: DecodeState) -> None:
    target, commands = step(DECODE_TABLE, state, DecodeEvent.DEADLINE)
    assert target is not state or DecodeCommand.ARM_RECLAIM in commands  # law 8


@pytest.mark.parametrize("state", [DecodeState.DISPATCHED, DecodeState.SETTLING])
@pytest.mark.parametrize("event", [DecodeEvent.FAILED, DecodeEvent.DEADLINE, DecodeEvent.ABORTED])
def test_giving_up_fences_the_pages_before_the_request_is_handed_back(state: DecodeState, event: DecodeEvent) -> None:
    target, commands = step(DECODE_TABLE, state, event)
    assert target is DecodeState.RECLAIMING
    hand_back = DecodeCommand.REPORT_LEFT if event is DecodeEvent.ABORTED else DecodeCommand.REPORT_FAILED
    assert commands.index(DecodeCommand.FENCE) < commands.index(hand_back)  # law 1
    assert DecodeCommand.ARM_RECLAIM in commands


def test_a_dispatch_nobody_took_needs_no_fence() -> None:
    _, commands = step(DECODE_TABLE, DecodeState.DISPATCHED, DecodeEvent.NEVER_SENT)
    assert DecodeCommand.FENCE not in commands


@pytest.mark.parametrize("event", set(DecodeEvent) - {DecodeEvent.ARRIVED, DecodeEvent.HANDED_BACK})
def test_nothing_is_given_up_twice(event: DecodeEvent) -> None:
    target, commands = step(DECODE_TABLE, DecodeState.RECLAIMING, event)
    assert target is DecodeState.RECLAIMING
    assert not {DecodeCommand.FENCE, DecodeCommand.REPORT_FAILED, DecodeCommand.REPORT_LEFT} & set(commands)


def test_pages_are_unpinned_exactly_when_a_fence_is_lifted() -> None:
    for state, edges in FENCE_TABLE.items():
        for target, commands in edges.values():
            is_lifted_now = target is FenceState.LIFTED and state is not FenceState.LIFTED
            assert (FenceCommand.UNPIN in commands) == is_lifted_now


def test_an_unreachable_sender_is_waited_out_not_trusted() -> None:
    for event in (FenceEvent.UNREACHABLE, FenceEvent.DEADLINE):
        assert step(FENCE_TABLE, FenceState.ASKING, event) == (FenceState.SILENT, (FenceCommand.ARM_SILENCE,))


def test_silence_is_not_prolonged_by_more_silence() -> None:
    assert step(FENCE_TABLE, FenceState.SILENT, FenceEvent.UNREACHABLE) == (FenceState.SILENT, ())


@pytest.mark.parametrize("state", [FenceState.ASKING, FenceState.SILENT])
def test_what_a_dead_sender_had_on_the_wire_is_waited_out(state: FenceState) -> None:
    assert step(FENCE_TABLE, state, FenceEvent.GONE) == (FenceState.QUARANTINED, (FenceCommand.ARM_QUARANTINE,))


def test_a_cancelled_transfer_never_opens_again() -> None:
    for event in OutgoingEvent:
        assert step(OUTGOING_TABLE, OutgoingState.CANCELLED, event)[0] in (OutgoingState.CANCELLED, OutgoingState.QUIET)


@pytest.mark.parametrize("state", [OutgoingState.OPEN, OutgoingState.CLOSING])
def test_a_cancel_drops_what_is_not_posted(state: OutgoingState) -> None:
    assert step(OUTGOING_TABLE, state, OutgoingEvent.CANCEL)[1] == (OutgoingCommand.DROP_UNPOSTED,)


@pytest.mark.parametrize(
    ("now", "end"), [(100.0, 140.0), (200.0, 210.0)], ids=["may write until its lease ends", "its lease is over"]
)
def test_silence_end(now: float, end: float) -> None:
    assert silence_end(now=now, closed_at=10.0, lease_s=120.0, unreachable_s=10.0) == end


def pool(*outstanding: int, state: PrefillerState = PrefillerState.USABLE) -> list[Candidate]:
    return [Candidate(f"http://p{i}", state, load) for i, load in enumerate(outstanding)]


def test_the_least_loaded_prefiller_is_tried_first() -> None:
    assert choose(pool(2, 0, 1), None, turn=0) == ["http://p1", "http://p2", "http://p0"]


def test_a_full_prefiller_is_tried_last_even_if_it_is_wanted() -> None:
    full, free = (
        Candidate("http://f", PrefillerState.USABLE, 2, is_full=True),
        Candidate("http://u", PrefillerState.USABLE, 9),
    )
    assert choose([full, free], "http://f", turn=0) == ["http://u", "http://f"]
    assert not all_full([full, free], [])
    assert all_full([full, free], ["http://u"])
    assert all_full([full, Candidate("http://l", PrefillerState.LOST, 0)], [])


def test_the_wanted_prefiller_is_tried_first_whatever_its_load() -> None:
    assert choose(pool(0, 9, 1), "http://p1", turn=0) == ["http://p1", "http://p0", "http://p2"]


def test_equally_loaded_prefillers_take_turns() -> None:
    assert [choose(pool(0, 0, 0), None, turn=turn)[0] for turn in range(4)] == [
        "http://p0",
        "http://p1",
        "http://p2",
        "http://p0",
    ]


@pytest.mark.parametrize("state", [PrefillerState.UNKNOWN, PrefillerState.LOST, PrefillerState.REFUSED])
def test_only_usable_prefillers_are_chosen(state: PrefillerState) -> None:
    assert choose(pool(0, state=state), "http://p0", turn=3) == []
    usable = Candidate("http://u", PrefillerState.USABLE, 5)
    assert choose([*pool(0, state=state), usable], "http://p0", turn=1) == ["http://u"]
