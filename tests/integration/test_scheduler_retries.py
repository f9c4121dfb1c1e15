"""A second prefiller after the first has failed, in a real vLLM scheduler: other pages, one deadline for all."""

import pytest
from scheduler_rig import PAGES, PROMPT, MakeRig, Rig, give_up, hold
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from vllm_pd_connector.control.dispatcher import Dispatch
from vllm_pd_connector.lifecycle.decode_request import DecodeEvent
from vllm_pd_connector.lifecycle.prefiller import PrefillerState

POOL = ["http://a:8100", "http://b:8100", "http://c:8100"]


@pytest.fixture
def make(make: MakeRig) -> MakeRig:
    return lambda **extra: make(**{"prefillers": POOL, **extra})


def fail(rig: Rig, order: Dispatch, reason: str = "connection reset", url: str | None = None) -> None:
    """The prefiller that got an order fails it, and the request is taken back."""
    transfer = order.reservation.transfer_id
    rig.dispatcher.report(transfer, DecodeEvent.FAILED, reason, url=order.urls[0] if url is None else url)
    rig.obey(rig.schedule())
    assert rig.dispatcher.fenced[-1] == transfer  # law 1


def test_another_prefiller_writes_into_other_pages_under_a_fresh_id(rig: Rig) -> None:
    before = rig.free_blocks
    request, first_id = hold(rig)
    (first,) = rig.dispatcher.dispatched
    fail(rig, first)
    step = rig.step()
    assert step.tokens == {}
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    second = rig.dispatcher.dispatched[1]
    assert second.reservation.transfer_id != first_id  # law 11
    assert not set(second.reservation.blocks[0]) & set(first.reservation.blocks[0])  # law 1
    assert second.body["prompt"] == first.body["prompt"]
    assert first.urls[0] not in second.urls
    assert [e.transfer_id for e in step.orders.expects] == [second.reservation.transfer_id]
    assert before - rig.free_blocks == 2 * PAGES
    rig.dispatcher.answer_fence(first_id, is_quiet=True)
    rig.step(received={request.request_id})
    assert rig.step().tokens == {request.request_id: 1}
    rig.run_until_done()
    assert rig.free_blocks == before
    assert [rig.counters[name] for name in ("dispatched", "retried", "failed", "released")] == [1, 1, 1, 1]


def test_what_is_late_from_the_first_attempt_does_not_touch_the_second(rig: Rig) -> None:
    before = rig.free_blocks
    request, first_id = hold(rig)
    fail(rig, rig.dispatcher.dispatched[0])
    rig.step()
    for event in (DecodeEvent.ANSWERED, DecodeEvent.FAILED, DecodeEvent.NEVER_SENT):
        rig.dispatcher.report(first_id, event)
    rig.step(failures={first_id: "late"})
    assert rig.step().orders.hand_backs == []
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    rig.dispatcher.answer_fence(first_id, is_quiet=True)
    rig.step(received={request.request_id})
    rig.run_until_done()
    assert rig.free_blocks == before


@pytest.mark.parametrize(("max_attempts", "asked"), [(1, 1), (2, 2), (3, 3), (4, 3)])
def test_each_prefiller_is_tried_once_and_no_more_than_allowed(make: MakeRig, max_attempts: int, asked: int) -> None:
    rig = make(max_attempts=max_attempts)
    before = rig.free_blocks
    request, _ = hold(rig)
    for number in range(asked):
        assert len(rig.dispatcher.dispatched) == number + 1
        fail(rig, rig.dispatcher.dispatched[number])
        step = rig.step()
    assert step.tokens == {request.request_id: PROMPT}  # then it is prefilled here
    assert len({order.urls[0] for order in rig.dispatcher.dispatched}) == asked
    for transfer in rig.dispatcher.fenced:
        rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.run_until_done()
    assert rig.free_blocks == before


def test_all_attempts_share_one_deadline(rig: Rig) -> None:
    request, _ = hold(rig)
    rig.clock.advance(100.0)
    fail(rig, rig.dispatcher.dispatched[0])
    rig.step()
    second = rig.dispatcher.dispatched[1].reservation
    assert second.lease_s == pytest.approx(20.0)
    rig.clock.advance(20.1)
    step = rig.schedule()
    assert [h.transfer_id for h in step.orders.hand_backs] == [second.transfer_id]  # law 8
    rig.obey(step)
    assert rig.step().tokens == {request.request_id: PROMPT}


def test_there_is_no_retry_without_time_for_it(rig: Rig) -> None:
    request, _ = hold(rig)
    rig.clock.advance(119.5)
    fail(rig, rig.dispatcher.dispatched[0])
    assert rig.step().tokens == {request.request_id: PROMPT}


def test_the_silence_of_a_second_attempt_counts_its_own_lease(rig: Rig) -> None:
    before = rig.free_blocks
    request, first_id = hold(rig)
    rig.clock.advance(100.0)
    fail(rig, rig.dispatcher.dispatched[0])
    rig.step()
    rig.dispatcher.answer_fence(first_id, is_quiet=True)
    second_id = rig.dispatcher.dispatched[1].reservation.transfer_id
    rig.abort(request)
    rig.obey(rig.schedule())
    rig.dispatcher.answer_fence(second_id, is_quiet=False)
    rig.step()
    rig.clock.advance(1019.9)  # 20 of the lease and unreachable_s
    rig.step()
    assert before - rig.free_blocks == PAGES  # law 1
    rig.clock.advance(0.2)
    rig.step()
    assert rig.free_blocks == before


@pytest.mark.parametrize("state", [PrefillerState.LOST, PrefillerState.REFUSED, PrefillerState.UNKNOWN])
def test_without_another_usable_prefiller_it_is_prefilled_here(rig: Rig, state: PrefillerState) -> None:
    request, _ = hold(rig)
    first = rig.dispatcher.dispatched[0]
    for url in set(POOL) - {first.urls[0]}:
        rig.dispatcher.states[url] = state
    fail(rig, first)
    assert rig.step().tokens == {request.request_id: PROMPT}


def test_a_dispatch_nobody_took_is_not_retried(rig: Rig) -> None:
    request, transfer = hold(rig)
    rig.dispatcher.report(transfer, DecodeEvent.NEVER_SENT, "HTTP 503")
    rig.obey(rig.schedule())
    assert rig.step().tokens == {request.request_id: PROMPT}


def test_the_prefiller_that_failed_is_the_one_that_had_taken_it(rig: Rig) -> None:
    """The first of the list was busy, so the second took it; it is not asked again, the first may be."""
    hold(rig)
    order = rig.dispatcher.dispatched[0]
    fail(rig, order, url=order.urls[1])
    rig.step()
    assert order.urls[1] not in rig.dispatcher.dispatched[1].urls
    assert order.urls[0] in rig.dispatcher.dispatched[1].urls


def test_the_error_policy_has_its_say_when_no_prefiller_is_left(make: MakeRig) -> None:
    rig = make(on_failure="error")
    before = rig.free_blocks
    request, _ = hold(rig)
    for number in range(2):
        fail(rig, rig.dispatcher.dispatched[number], f"failure {number}")
        assert rig.step().tokens == {}
    rig.step()
    assert [(o.request_id, o.finish_reason) for o in rig.outputs] == [(request.request_id, FinishReason.ERROR)]
    for transfer in rig.dispatcher.fenced:
        rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.run_until_done()
    assert rig.free_blocks == before


def test_a_client_that_leaves_between_two_attempts_costs_no_second_one(rig: Rig) -> None:
    before = rig.free_blocks
    request, first_id = hold(rig)
    fail(rig, rig.dispatcher.dispatched[0])
    rig.abort(request)
    rig.dispatcher.answer_fence(first_id, is_quiet=True)
    rig.run_until_done()
    assert len(rig.dispatcher.dispatched) == 1
    assert rig.free_blocks == before


def test_a_failure_without_a_second_attempt_is_given_up_as_before(make: MakeRig) -> None:
    rig = make(max_attempts=1)
    request, transfer = hold(rig)
    rig.dispatcher.report(transfer, DecodeEvent.FAILED, "refused")
    give_up(rig, request, transfer)
    assert rig.step().tokens == {request.request_id: PROMPT}
