"""The decoder gives a transfer up, in a real vLLM scheduler: fences, deadlines, quarantine; every page comes back."""

import pytest
from scheduler_rig import BLOCK, PAGES, PROMPT, MakeRig, Rig, give_up, hold
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from vllm_pd_connector.control.fence_client import MARGIN_S
from vllm_pd_connector.lifecycle.decode_request import RECLAIM_S, DecodeEvent
from vllm_pd_connector.lifecycle.prefiller import PrefillerState


def test_the_pages_of_an_aborted_request_stay_pinned_until_its_senders_are_quiet(rig: Rig) -> None:
    before = rig.free_blocks
    request, transfer = hold(rig)
    pages = set(rig.dispatcher.dispatched[0].reservation.blocks[0])
    rig.abort(request)
    give_up(rig, request, transfer, failed=False)
    assert request.request_id not in rig.scheduler.requests
    assert before - rig.free_blocks == PAGES  # law 1
    assert rig.scheduler.has_requests()
    others = [rig.add(BLOCK, seed=i) for i in range(1, 50)]
    rig.step()
    for other in others:
        if other.status is RequestStatus.RUNNING:
            assert not pages & set(rig.scheduler.kv_cache_manager.get_block_ids(other.request_id)[0])
    rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.run_until_done(limit=200)
    assert rig.free_blocks == before
    assert (rig.counters["aborted"], rig.counters["fences_lifted"]) == (1, 1)


def test_the_workers_forget_a_fenced_transfer_only_when_it_is_lifted(rig: Rig) -> None:
    request, transfer = hold(rig)
    rig.abort(request)
    give_up(rig, request, transfer, failed=False)
    assert rig.step().orders.forgets == []
    rig.dispatcher.answer_fence(transfer, is_quiet=True)
    assert rig.step().orders.forgets == [transfer]
    assert rig.step().orders.forgets == []


def test_a_failed_prefill_is_recomputed_in_other_pages(rig: Rig) -> None:
    before = rig.free_blocks
    request, transfer = hold(rig)
    fenced = set(rig.dispatcher.dispatched[0].reservation.blocks[0])
    rig.dispatcher.report(transfer, DecodeEvent.FAILED, "connection reset")
    give_up(rig, request, transfer)
    step = rig.schedule()
    assert step.tokens == {request.request_id: PROMPT}
    assert not fenced & set(rig.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])  # law 1
    rig.complete(step)
    rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.run_until_done()
    assert rig.free_blocks == before
    assert len(rig.dispatcher.dispatched) == 1
    assert rig.outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_dispatch_nobody_took_is_recomputed_without_a_fence(rig: Rig) -> None:
    before = rig.free_blocks
    request, transfer = hold(rig)
    rig.dispatcher.report(transfer, DecodeEvent.NEVER_SENT, "HTTP 503")
    step = rig.schedule()
    assert [h.failed for h in step.orders.hand_backs] == [True]
    rig.obey(step)
    assert rig.dispatcher.fenced == []
    assert rig.step().tokens == {request.request_id: PROMPT}
    rig.run_until_done()
    assert rig.free_blocks == before


def test_a_failure_seen_by_a_worker_gives_the_transfer_up(rig: Rig) -> None:
    request, transfer = hold(rig)
    rig.step(failures={transfer: "page differs"})
    give_up(rig, request, transfer)
    assert rig.step().tokens == {request.request_id: PROMPT}


@pytest.mark.parametrize(("waited", "is_over"), [(119.9, False), (120.1, True)])
def test_a_prefill_is_given_up_at_its_deadline(rig: Rig, waited: float, is_over: bool) -> None:
    request, transfer = hold(rig)
    rig.clock.advance(waited)
    if is_over:
        give_up(rig, request, transfer)  # law 8
    else:
        assert rig.step().orders.hand_backs == []
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.mark.parametrize(("waited", "is_over"), [(9.9, False), (10.1, True)])
def test_the_last_pages_get_settle_s_after_the_answer(rig: Rig, waited: float, is_over: bool) -> None:
    request, transfer = hold(rig)
    rig.dispatcher.report(transfer, DecodeEvent.ANSWERED)
    rig.step()
    rig.clock.advance(waited)
    if is_over:
        give_up(rig, request, transfer)
    else:
        assert rig.step().orders.hand_backs == []


def test_a_request_its_workers_never_hand_back_is_complained_of(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    _, transfer = hold(rig)
    rig.dispatcher.report(transfer, DecodeEvent.FAILED)
    rig.step()
    rig.clock.advance(RECLAIM_S + 0.1)
    with caplog.at_level("ERROR", logger="vllm_pd_connector"):
        rig.step()
    assert "law=7" in caplog.text


@pytest.mark.parametrize("event", [DecodeEvent.ANSWERED, DecodeEvent.FAILED, DecodeEvent.NEVER_SENT])
def test_what_comes_after_the_release_changes_nothing(rig: Rig, event: DecodeEvent) -> None:
    before = rig.free_blocks
    request, transfer = hold(rig)
    rig.step(received={request.request_id})
    rig.dispatcher.report(transfer, event)
    rig.dispatcher.report(transfer, event)
    rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.step(failures={transfer: "late"})
    step = rig.schedule()
    assert not step.orders.hand_backs
    rig.complete(step)
    rig.run_until_done()
    assert rig.free_blocks == before
    assert rig.dispatcher.fenced == []


def test_pages_that_all_arrive_as_the_transfer_is_given_up_are_taken(rig: Rig) -> None:
    before = rig.free_blocks
    request, transfer = hold(rig)
    rig.dispatcher.report(transfer, DecodeEvent.FAILED, "connection reset after the last page")
    step = rig.schedule()
    assert step.orders.hand_backs
    rig.complete(step, received={request.request_id})
    assert rig.step().tokens == {request.request_id: 1}
    rig.run_until_nothing_but_fences()
    assert before - rig.free_blocks == PAGES
    rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.run_until_done()
    assert rig.free_blocks == before


def test_on_failure_error_finishes_the_request_with_an_error(make: MakeRig) -> None:
    rig = make(on_failure="error")
    before = rig.free_blocks
    request, transfer = hold(rig)
    rig.dispatcher.report(transfer, DecodeEvent.FAILED, "refused")
    give_up(rig, request, transfer)
    assert [rig.step().tokens for _ in range(2)] == [{}, {}]
    assert [o.finish_reason for o in rig.outputs] == [FinishReason.ERROR]
    assert before - rig.free_blocks == PAGES
    rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.run_until_done()
    assert rig.free_blocks == before


def test_prefillers_that_do_not_fit_fail_a_request_with_the_fields_if_errors_are_wanted(
    make: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(on_failure="error", prefillers=["http://a:1", "http://b:1"])
    rig.dispatcher.states["http://a:1"] = PrefillerState.REFUSED
    rig.dispatcher.complaints["http://a:1"] = "dtype: here torch.bfloat16, there torch.float32"
    hold(rig)  # the other one fits
    rig.dispatcher.states["http://b:1"] = PrefillerState.LOST
    local = rig.add(PROMPT, seed=1)
    assert rig.step().tokens == {local.request_id: PROMPT}  # it may come back: nobody is to blame
    rig.dispatcher.states["http://b:1"] = PrefillerState.REFUSED
    rig.dispatcher.complaints["http://b:1"] = "block_size: here 32, there 48"
    refused = rig.add(PROMPT, seed=2)
    rig.step()
    rig.step()
    reasons = {o.request_id: o.finish_reason for o in rig.outputs if o.finish_reason is not None}
    assert reasons.get(refused.request_id) is FinishReason.ERROR
    for field in ("dtype: here torch.bfloat16, there torch.float32", "block_size: here 32, there 48"):
        assert field in caplog.text


def abandon(rig: Rig, *, is_dead: bool = False) -> str:
    """The client leaves while its prefiller does not answer the fence; the transfer whose pages are left."""
    request, transfer = hold(rig)
    rig.abort(request)
    give_up(rig, request, transfer, failed=False)
    rig.dispatcher.answer_fence(transfer, is_quiet=False, is_dead=is_dead)
    rig.step()
    return transfer


@pytest.mark.parametrize(
    ("is_dead", "pinned_s"), [(True, 40.0), (False, 1120.0)], ids=["quarantine_s", "lease and unreachable_s"]
)
def test_pages_of_a_prefiller_that_does_not_answer_are_waited_out(rig: Rig, is_dead: bool, pinned_s: float) -> None:
    before = rig.free_blocks
    abandon(rig, is_dead=is_dead)
    rig.clock.advance(pinned_s - 0.1)
    rig.step()
    assert before - rig.free_blocks == PAGES  # law 1
    rig.clock.advance(0.2)
    rig.step()
    assert rig.free_blocks == before
    rig.run_until_done()
    assert rig.counters["fences_expired"] == 1


def test_a_prefiller_that_answers_late_gives_the_pages_back(rig: Rig) -> None:
    before = rig.free_blocks
    transfer = abandon(rig)
    rig.clock.advance(900.0)
    rig.step()
    assert before - rig.free_blocks == PAGES  # law 1: it may be standing still with a write in flight
    assert transfer not in rig.dispatcher.finished  # it is asked again meanwhile
    rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.step()
    assert rig.free_blocks == before
    assert transfer in rig.dispatcher.finished
    assert rig.counters["fences_lifted"] == 1


def test_a_prefiller_found_dead_late_is_waited_out_by_the_quarantine_alone(rig: Rig) -> None:
    before = rig.free_blocks
    transfer = abandon(rig)
    rig.dispatcher.answer_fence(transfer, is_quiet=False, is_dead=True)
    rig.step()
    rig.clock.advance(39.9)
    rig.step()
    assert before - rig.free_blocks == PAGES  # law 1
    rig.clock.advance(0.2)
    rig.step()
    assert rig.free_blocks == before


def test_a_dispatcher_that_never_answers_a_fence_does_not_keep_the_pages(rig: Rig) -> None:
    before = rig.free_blocks
    request, transfer = hold(rig)
    rig.abort(request)
    give_up(rig, request, transfer, failed=False)
    rig.clock.advance(5.0 + MARGIN_S + 0.1)
    rig.step()
    assert before - rig.free_blocks == PAGES
    rig.clock.advance(1120.0)
    rig.run_until_done()
    assert rig.free_blocks == before
