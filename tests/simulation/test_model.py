"""The protocol of one reservation over all its interleavings, and that a wrong row of a table is seen."""

from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import model
import pytest

from vllm_pd_connector.lifecycle import fence
from vllm_pd_connector.lifecycle.decode_request import DECODE_TABLE, DecodeCommand, DecodeEvent, DecodeState
from vllm_pd_connector.lifecycle.fence import FENCE_TABLE, FenceCommand, FenceEvent, FenceState
from vllm_pd_connector.lifecycle.outgoing import OUTGOING_TABLE, OutgoingEvent, OutgoingState


@pytest.mark.timeout(180)
def test_no_write_lands_in_foreign_pages_and_every_reservation_ends() -> None:
    found = model.explore()
    assert found.states > 10_000
    assert found.ends > 100


def _decode_row(state: DecodeState, event: DecodeEvent, target: DecodeState, *commands: DecodeCommand) -> object:
    return patch.dict(DECODE_TABLE, {state: {**DECODE_TABLE[state], event: (target, commands)}})


def _fence_row(state: FenceState, event: FenceEvent, target: FenceState, *commands: FenceCommand) -> object:
    return patch.dict(FENCE_TABLE, {state: {**FENCE_TABLE[state], event: (target, commands)}})


def _outgoing_row(state: OutgoingState, event: OutgoingEvent, target: OutgoingState) -> object:
    return patch.dict(OUTGOING_TABLE, {state: {**OUTGOING_TABLE[state], event: (target, ())}})


_D, _F, _O = DecodeState, FenceState, OutgoingState

MUTANTS: dict[str, tuple[str, Callable[[], object]]] = {
    "a deadline gives the pages up without a fence": (
        "may land",
        lambda: _decode_row(
            _D.DISPATCHED,
            DecodeEvent.DEADLINE,
            _D.RECLAIMING,
            DecodeCommand.CLOSE_DISPATCH,
            DecodeCommand.REPORT_FAILED,
            DecodeCommand.ARM_RECLAIM,
        ),
    ),
    "a client that leaves takes the pages with it": (
        "may land",
        lambda: _decode_row(
            _D.SETTLING, DecodeEvent.ABORTED, _D.RECLAIMING, DecodeCommand.REPORT_LEFT, DecodeCommand.ARM_RECLAIM
        ),
    ),
    "a sender that cannot be reached counts as quiet": (
        "may land",
        lambda: _fence_row(_F.ASKING, FenceEvent.UNREACHABLE, _F.LIFTED, FenceCommand.UNPIN),
    ),
    "a fence that is not answered is lifted": (
        "may land",
        lambda: _fence_row(_F.ASKING, FenceEvent.DEADLINE, _F.LIFTED, FenceCommand.UNPIN),
    ),
    "a silent sender is waited for no longer than its lease": (
        "may land",
        lambda: patch.object(fence, "silence_end", lambda *, closed_at, lease_s, **_: closed_at + lease_s),
    ),
    "the wait for a silent sender does not begin with the end of its lease": (
        "may land",
        lambda: patch.object(fence, "silence_end", lambda *, now, unreachable_s, **_: now + unreachable_s),
    ),
    "a silent sender is waited for no longer than a dead one, after its lease": (
        "may land",
        lambda: patch.object(model, "UNREACHABLE_S", model.QUARANTINE_S),
    ),
    "what a dead sender had on the wire is not waited out": (
        "may land",
        lambda: _fence_row(_F.ASKING, FenceEvent.GONE, _F.LIFTED, FenceCommand.UNPIN),
    ),
    "a silent sender that is found dead counts as quiet": (
        "may land",
        lambda: _fence_row(_F.SILENT, FenceEvent.GONE, _F.LIFTED, FenceCommand.UNPIN),
    ),
    "a cancelled transfer goes on posting": (
        "may land",
        lambda: _outgoing_row(_O.OPEN, OutgoingEvent.CANCEL, _O.OPEN),
    ),
    "a request that settles waits for ever": (
        "time may pass for ever",
        lambda: _decode_row(_D.SETTLING, DecodeEvent.DEADLINE, _D.SETTLING),
    ),
    "more silence prolongs the wait": (
        "time may pass for ever",
        lambda: _fence_row(_F.SILENT, FenceEvent.DEADLINE, _F.SILENT, FenceCommand.ARM_SILENCE),
    ),
    "a quarantine begins again when it is over": (
        "can never end",
        lambda: _fence_row(_F.QUARANTINED, FenceEvent.DEADLINE, _F.QUARANTINED, FenceCommand.ARM_QUARANTINE),
    ),
    "a request that was given up is not handed back": (
        "can never end",
        lambda: _decode_row(
            _D.DISPATCHED, DecodeEvent.FAILED, _D.RECLAIMING, DecodeCommand.FENCE, DecodeCommand.CLOSE_DISPATCH
        ),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_row_is_found(name: str) -> None:
    text, mutate = MUTANTS[name]
    with ExitStack() as stack:
        stack.enter_context(patch.object(model, "UNITS", 1))  # enough for them, and a tenth of the states
        stack.enter_context(mutate())  # type: ignore[arg-type]
        with pytest.raises(model.Broken, match=text):
            model.explore()
