"""What had arrived of a failed attempt, in a real vLLM scheduler: what follows begins behind it."""

import pytest
from scheduler_rig import BLOCK, LAYERS, PAGES, PROMPT, MakeRig, Rig, hold
from vllm.v1.request import Request, RequestStatus

from vllm_pd_connector.engine.step import WorkerReport
from vllm_pd_connector.lifecycle.decode_request import DecodeEvent
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.testing.shapes import some_shape

POOL = ["http://a:8100", "http://b:8100"]
LAST = PROMPT - 1
"""Token up to which a prefiller writes."""


@pytest.fixture
def make(make: MakeRig) -> MakeRig:
    return lambda **extra: make(**{"prefillers": POOL, **extra})


def break_off(rig: Rig, transfer: str, *stops: int) -> None:
    """The prefiller fails; each rank hands the request back and says how far its pages had come."""
    rig.dispatcher.report(transfer, DecodeEvent.FAILED, "connection reset")
    rig.obey(rig.schedule(), whole={transfer: list(stops)})


def wanted(rig: Rig) -> list[int]:
    return rig.dispatcher.dispatched[-1].reservation.blocks[0]


def num_pinned(rig: Rig, blocks: list[int]) -> int:
    return sum(rig.scheduler.kv_cache_manager.block_pool.blocks[block].ref_cnt > 0 for block in blocks)


def end(rig: Rig, before: int) -> None:
    """Everything is done and no page is missing."""
    for transfer in rig.dispatcher.fenced:
        rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.run_until_done()
    assert rig.free_blocks == before


def test_the_next_attempt_asks_for_the_rest_only(rig: Rig) -> None:
    before = rig.free_blocks
    request, first_id = hold(rig)
    first = wanted(rig)
    break_off(rig, first_id, 4 * BLOCK)
    step = rig.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    second = rig.dispatcher.dispatched[1].reservation
    assert second.local_tokens == 4 * BLOCK
    assert step.orders.expects[0].spans == (Span(4 * BLOCK, LAST),)
    assert not set(second.blocks[0]) & set(first)  # laws 1 and 3
    assert rig.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0] == first[:4] + second.blocks[0]
    assert before - rig.free_blocks == PAGES + (PAGES - 4)  # the pages that were kept are not fenced as well
    rig.step(received={request.request_id})
    assert rig.step().tokens == {request.request_id: 1}
    assert rig.counters["tokens_kept"] == 4 * BLOCK
    end(rig, before)


def test_a_prefill_here_computes_the_rest_only(make: MakeRig) -> None:
    rig = make(max_attempts=1)
    before = rig.free_blocks
    request, transfer = hold(rig)
    break_off(rig, transfer, 5 * BLOCK)
    assert rig.step().tokens == {request.request_id: PROMPT - 5 * BLOCK}
    end(rig, before)


def test_pages_that_may_still_be_written_stay_fenced(make: MakeRig) -> None:
    rig = make(max_attempts=1)
    before = rig.free_blocks
    _, transfer = hold(rig, max_tokens=1)
    pages = wanted(rig)
    break_off(rig, transfer, 4 * BLOCK)
    rig.run_until_nothing_but_fences()
    assert [num_pinned(rig, pages[:4]), num_pinned(rig, pages[4:])] == [0, PAGES - 4]  # law 1
    end(rig, before)


@pytest.mark.parametrize(("stop", "pages"), [(0, 0), (1, 0), (BLOCK - 1, 0), (BLOCK, 1), (3 * BLOCK + 7, 3), (LAST, 6)])
def test_only_full_pages_are_kept(make: MakeRig, stop: int, pages: int) -> None:
    rig = make(max_attempts=1)
    request, transfer = hold(rig)
    break_off(rig, transfer, stop)
    assert rig.step().tokens == {request.request_id: PROMPT - pages * BLOCK}
    assert rig.counters["tokens_kept"] == pages * BLOCK


@pytest.mark.parametrize(
    ("stops", "pages"), [((64, 96), 4), ((96, 64), 4), ((0, 96), 0), ((96,), 0), ((), 0), ((96, 96), 6)]
)
def test_the_rank_that_has_least_decides(make: MakeRig, stops: tuple[int, ...], pages: int) -> None:
    rig = make(max_attempts=1, num_ranks=2)
    request, transfer = hold(rig)
    break_off(rig, transfer, *stops)
    assert rig.step().tokens == {request.request_id: PROMPT - pages * BLOCK}


def test_ranks_may_answer_in_different_steps(make: MakeRig) -> None:
    rig = make(max_attempts=1, num_ranks=2)
    request, transfer = hold(rig)
    rig.dispatcher.report(transfer, DecodeEvent.FAILED, "connection reset")
    rig.complete(rig.schedule(), whole={transfer: [6 * BLOCK]})
    rig.complete(
        rig.schedule(),
        whole={transfer: [2 * BLOCK]},
        received={request.request_id},
        failed={request.request_id},
    )
    assert rig.step().tokens == {request.request_id: PROMPT - 2 * BLOCK}


def cache(rig: Rig, num_tokens: int) -> None:
    """The decoder has this much of the prompt already."""
    rig.add(num_tokens, max_tokens=1)
    rig.run_until_done()


def test_what_is_kept_follows_what_was_there(make: MakeRig) -> None:
    rig = make(max_attempts=1, min_remote_tokens=3 * BLOCK)
    cache(rig, 2 * BLOCK)
    before = rig.free_blocks
    request, transfer = hold(rig)
    assert rig.dispatcher.dispatched[0].reservation.local_tokens == 2 * BLOCK
    break_off(rig, transfer, 5 * BLOCK)
    assert rig.step().tokens == {request.request_id: PROMPT - 5 * BLOCK}
    assert rig.counters["tokens_kept"] == 3 * BLOCK
    end(rig, before)


def test_nothing_arrived_behind_what_was_there(make: MakeRig) -> None:
    rig = make(max_attempts=1, min_remote_tokens=3 * BLOCK)
    cache(rig, 2 * BLOCK)
    request, transfer = hold(rig)
    break_off(rig, transfer, 2 * BLOCK)
    assert rig.step().tokens == {request.request_id: PROMPT - 2 * BLOCK}
    assert rig.counters["tokens_kept"] == 0


def test_each_attempt_keeps_what_it_adds(make: MakeRig) -> None:
    rig = make(max_attempts=2)
    before = rig.free_blocks
    request, first_id = hold(rig)
    break_off(rig, first_id, 2 * BLOCK)
    (expect,) = rig.step().orders.expects
    break_off(rig, expect.transfer_id, 5 * BLOCK)
    assert rig.step().tokens == {request.request_id: PROMPT - 5 * BLOCK}
    assert rig.counters["tokens_kept"] == 5 * BLOCK
    end(rig, before)


def cached_tokens(rig: Rig, request: Request) -> int:
    """What the client reads in `usage.prompt_tokens_details.cached_tokens`."""
    stats = next(o.prefill_stats for o in rig.outputs if o.request_id == request.request_id and o.prefill_stats)
    return stats.num_cached_tokens


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_tokens_computed_for_this_request_are_not_reported_as_cached(make: MakeRig, max_attempts: int) -> None:
    rig = make(max_attempts=max_attempts, prefillers=[*POOL, "http://c:8100"], min_remote_tokens=3 * BLOCK)
    cache(rig, BLOCK)
    request, transfer = hold(rig)
    for number in range(2, 2 + max_attempts):
        break_off(rig, transfer, number * BLOCK)
        step = rig.step()
        transfer = step.orders.expects[0].transfer_id if step.orders.expects else ""
    if transfer:
        rig.step(received={request.request_id})
    for transfer in rig.dispatcher.fenced:
        rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.run_until_done()
    assert cached_tokens(rig, request) == BLOCK


def test_tokens_kept_for_a_request_that_then_arrived_are_not_reported_as_cached(make: MakeRig) -> None:
    rig = make(min_remote_tokens=3 * BLOCK)
    cache(rig, 3 * BLOCK)
    request, transfer = hold(rig, 2 * PROMPT)
    break_off(rig, transfer, 4 * BLOCK)
    assert len(rig.step().orders.expects) == 1
    rig.step(received={request.request_id})
    rig.step()
    assert cached_tokens(rig, request) == 3 * BLOCK


def test_another_request_finds_what_was_kept(make: MakeRig) -> None:
    rig = make(max_attempts=1, min_remote_tokens=PROMPT - 1)
    request, transfer = hold(rig)
    break_off(rig, transfer, 4 * BLOCK)
    rig.abort(request)
    other, salted = rig.add(PROMPT), rig.add(PROMPT, salt="tenant")
    step = rig.step()
    assert step.tokens[other.request_id] == PROMPT - 4 * BLOCK
    assert salted.request_id not in step.tokens  # it is dispatched whole
    assert rig.dispatcher.dispatched[-1].reservation.local_tokens == 0


def test_without_prefix_caching_nothing_is_kept(make: MakeRig) -> None:
    rig = make(max_attempts=1, prefix_caching=False)
    before = rig.free_blocks
    request, transfer = hold(rig)
    pages = wanted(rig)
    break_off(rig, transfer, 4 * BLOCK)
    assert num_pinned(rig, pages) == PAGES
    assert rig.step().tokens == {request.request_id: PROMPT}
    assert rig.counters["tokens_kept"] == 0
    end(rig, before)


def test_with_a_window_group_nothing_is_kept(make: MakeRig) -> None:
    shape = some_shape(block_size=BLOCK, layers=" ".join(f"{name}@{i}" for i, name in enumerate(LAYERS)))
    rig = make(max_attempts=1, window=20, shape=shape)
    request, transfer = hold(rig)
    break_off(rig, transfer, LAST)
    assert rig.step().tokens == {request.request_id: PROMPT}
    assert rig.counters["tokens_kept"] == 0


def test_a_fence_that_was_lifted_before_keeps_no_page(make: MakeRig) -> None:
    rig = make(max_attempts=1)
    before = rig.free_blocks
    request, transfer = hold(rig)
    rig.dispatcher.report(transfer, DecodeEvent.FAILED, "connection reset")
    rig.step()
    rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.step()
    assert rig.counters["fences_lifted"] == 1
    rig.step(whole={transfer: [4 * BLOCK]}, received={request.request_id}, failed={request.request_id})
    assert rig.step().tokens == {request.request_id: PROMPT - 4 * BLOCK}
    end(rig, before)


def test_a_client_that_leaves_meanwhile_leaks_nothing(rig: Rig) -> None:
    before = rig.free_blocks
    request, transfer = hold(rig)
    rig.dispatcher.report(transfer, DecodeEvent.FAILED, "connection reset")
    step = rig.schedule()
    rig.abort(request)
    rig.obey(step, whole={transfer: [4 * BLOCK]})
    end(rig, before)


def test_reports_of_ranks_are_merged_rank_by_rank() -> None:
    first = WorkerReport(failures={"a": "lost"}, whole={"a": [64], "b": [16]})
    merged = first.aggregate(WorkerReport(failures={"c": "late"}, whole={"a": [32], "c": [0]}))
    assert merged == WorkerReport({"a": "lost", "c": "late"}, {"a": [64, 32], "b": [16], "c": [0]})


def test_reports_of_transfers_that_are_over_are_passed_over(rig: Rig) -> None:
    request, transfer = hold(rig)
    rig.step(received={request.request_id})
    rig.step(whole={transfer: [64], "f" * 32: [64]})
    rig.run_until_done()
    assert rig.counters["tokens_kept"] == 0
