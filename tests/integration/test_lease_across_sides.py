"""One reservation, both sides, one clock: the decoder must not reuse pages while the prefiller may still write."""

from pathlib import Path

import msgspec
import pytest
from scheduler_rig import PAGES, PROMPT, give_up, hold, make_rig
from test_scheduler_prefiller import dispatch, greet

from vllm_pd_connector.lifecycle.decode_request import DecodeEvent
from vllm_pd_connector.lifecycle.peer_clock import PeerClock


def test_pages_are_not_written_by_a_prefiller_that_reads_the_dispatch_when_they_may_be_reused(tmp_path: Path) -> None:
    """It lay in the socket of a stalled prefiller, and the close is still on its way when it is read (law 1)."""
    decoder = make_rig(tmp_path)
    prefiller = make_rig(tmp_path, role="kv_producer")
    before = decoder.free_blocks
    request, transfer = hold(decoder)
    order = decoder.dispatcher.dispatched[0]
    generation = greet(prefiller).generation
    reading = PeerClock(prefiller.clock.now - 3e4, decoder.clock.now)
    prefiller.clock.now -= 3e4
    reservation = msgspec.structs.replace(
        order.reservation, prefiller_generation=generation, expires_at=reading.at_least(order.ends_at)
    )
    decoder.dispatcher.report(transfer, DecodeEvent.FAILED, "connection reset")
    give_up(decoder, request, transfer)
    decoder.dispatcher.answer_fence(transfer, is_quiet=False, is_dead=False)
    decoder.run_until_nothing_but_fences()
    while decoder.free_blocks < before:
        decoder.clock.advance(1.0)
        prefiller.clock.advance(1.0)
        decoder.step()
    dispatch(prefiller, reservation, PROMPT - 1)
    assert prefiller.schedule().orders.begins == []


@pytest.mark.parametrize("delay_s", [0.0, 30.0], ids=["taken at once", "taken late"])
def test_pages_are_reused_only_after_the_lease_of_a_writer_that_cannot_be_reached(
    tmp_path: Path, delay_s: float
) -> None:
    """The dispatch waits in a stalled prefiller (or for others to be tried first); then the network breaks (law 1)."""
    decoder = make_rig(tmp_path)
    prefiller = make_rig(tmp_path, role="kv_producer")
    before = decoder.free_blocks
    request, transfer = hold(decoder)
    reservation = msgspec.structs.replace(
        decoder.dispatcher.dispatched[0].reservation, prefiller_generation=greet(prefiller).generation
    )
    decoder.clock.advance(delay_s)
    dispatch(prefiller, reservation, PROMPT - 1)
    lease_end = decoder.clock.now + prefiller.schedule().orders.begins[0].lease_s
    decoder.clock.advance(1.0)
    decoder.dispatcher.report(transfer, DecodeEvent.FAILED, "connection reset")
    give_up(decoder, request, transfer)
    decoder.dispatcher.answer_fence(transfer, is_quiet=False, is_dead=False)
    decoder.run_until_nothing_but_fences()
    assert before - decoder.free_blocks == PAGES
    while decoder.free_blocks < before:
        decoder.clock.advance(1.0)
        decoder.step()
    assert decoder.clock.now > lease_end
