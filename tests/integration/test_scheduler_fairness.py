"""Order and fairness between requests whose pages come from elsewhere and those computed here, in vLLM's scheduler."""

from collections.abc import Callable
from typing import Any

import pytest
from scheduler_rig import BLOCK, MakeRig, Rig, hold
from vllm.v1.request import Request, RequestStatus

from vllm_pd_connector.lifecycle.prefiller import PrefillerState

SHORT = 3
BUSY_WAIT_S = 2.0


@pytest.fixture
def rig(make: MakeRig) -> Rig:
    return make(num_blocks=48, max_held_share=1.0, short_prompt_tokens=0, busy_wait_s=BUSY_WAIT_S)


def is_held(request: Request) -> bool:
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def prefill_here(rig: Rig, num_tokens: int, seed: int = 1, **kwargs: Any) -> Request:
    """A request whose prompt this engine computes; after the first of its steps."""
    (url,) = rig.dispatcher.states
    rig.dispatcher.states[url] = PrefillerState.LOST
    request = rig.add(num_tokens, seed=seed, **kwargs)
    assert request.request_id in rig.step().tokens
    rig.dispatcher.states[url] = PrefillerState.USABLE
    return request


def under_way(rig: Rig) -> Request:
    """vLLM keeps the blocks that prompts under way will still need, and more are free than the next one wants."""
    rig.scheduler.scheduler_config.long_prefill_token_threshold = BLOCK
    rig.add(SHORT, max_tokens=100)
    prefill_here(rig, 30 * BLOCK)
    return rig.add(20 * BLOCK, seed=2)


def to_the_last_block(rig: Rig) -> Request:
    """vLLM wants room for the last token as well, which a prefiller does not send."""
    prefill_here(rig, 26 * BLOCK, max_tokens=100)
    rig.step()
    return rig.add(rig.free_blocks * BLOCK + 1, seed=2)


def with_a_prefix(rig: Rig) -> Request:
    """A prefix hit on blocks that nobody uses takes them from the free ones too."""
    first = prefill_here(rig, 10 * BLOCK, max_tokens=1)
    assert first.is_finished()
    prefill_here(rig, 20 * BLOCK, seed=2, max_tokens=100)
    rig.step()
    return rig.add((rig.free_blocks + 4) * BLOCK, seed=1)


@pytest.mark.parametrize("refused", [under_way, to_the_last_block, with_a_prefix])
class TestRefused:
    """vLLM ends its scan of the queue at a request whose pages it does not allocate."""

    def test_local_requests_behind_it_pass(self, rig: Rig, refused: Callable[[Rig], Request]) -> None:
        late = refused(rig)
        waiting = [rig.add(SHORT, seed=seed) for seed in (3, 4)]
        steps = [rig.step(), rig.step()]
        assert not is_held(late)
        assert [any(request.request_id in step.tokens for step in steps) for request in waiting] == [True, True]

    def test_its_own_wait_is_bounded(self, rig: Rig, refused: Callable[[Rig], Request]) -> None:
        late = refused(rig)
        for _ in range(4):
            rig.step()
        assert not is_held(late)
        rig.clock.advance(BUSY_WAIT_S + 0.1)
        for request in rig.scheduler.running[:]:
            rig.abort(request)
        steps = [rig.step(), rig.step()]
        assert is_held(late) or any(late.request_id in step.tokens for step in steps)  # law 8

    def test_it_is_held_when_there_is_room(self, rig: Rig, refused: Callable[[Rig], Request]) -> None:
        late = refused(rig)
        rig.step()
        for request in rig.scheduler.running[:]:
            rig.abort(request)
        rig.step()
        rig.step()
        assert is_held(late)


def test_a_released_request_runs_before_local_ones_that_came_earlier(make: MakeRig) -> None:
    rig = make(min_remote_tokens=BLOCK, max_batched=BLOCK)
    held, _ = hold(rig, seed=1)
    local = [rig.add(BLOCK // 2, seed=seed, max_tokens=1) for seed in range(2, 10)]
    step = rig.step(received={held.request_id})
    assert len(step.tokens) == 2, "the budget of a step is two of them"
    step = rig.step()
    assert held.request_id in step.tokens
    assert local[-1].request_id not in step.tokens


def test_released_requests_run_in_the_order_in_which_they_came(rig: Rig) -> None:
    requests = [hold(rig, seed=seed)[0] for seed in range(4)]
    rig.step(received={request.request_id for request in reversed(requests)})
    assert list(rig.step().tokens) == [request.request_id for request in requests]


def test_a_held_request_waits_for_no_other(rig: Rig) -> None:
    first, second = hold(rig, seed=1)[0], hold(rig, seed=2)[0]
    rig.step(received={second.request_id})
    assert list(rig.step().tokens) == [second.request_id]
    assert is_held(first)


def test_room_goes_to_the_one_that_has_waited_longest(rig: Rig) -> None:
    held = [hold(rig, 14 * BLOCK, seed=seed)[0] for seed in range(3)]
    late = [rig.add(10 * BLOCK, seed=seed) for seed in (4, 5)]
    rig.step()
    assert not any(map(is_held, late))
    rig.abort(held[0])
    transfer = rig.dispatcher.dispatched[0].reservation.transfer_id
    rig.obey(rig.schedule())
    rig.dispatcher.answer_fence(transfer, is_quiet=True)
    rig.step()
    rig.step()
    assert [is_held(request) for request in late] == [True, False]


def test_small_requests_overtake_a_large_one_only_for_so_long(rig: Rig) -> None:
    """Each of them fits into the room that the large one lacks; after `busy_wait_s` it is the next one."""
    runs = prefill_here(rig, 30 * BLOCK, max_tokens=100)
    large = rig.add(25 * BLOCK, seed=2)
    for seed in (3, 4):
        small, _ = hold(rig, 4 * BLOCK, seed=seed)
        rig.step(received={small.request_id})
        assert small.request_id in rig.step().tokens
    assert large.status is RequestStatus.WAITING
    rig.clock.advance(BUSY_WAIT_S + 0.1)
    behind = rig.add(4 * BLOCK, seed=5)
    step = rig.step()
    assert behind.request_id not in step.tokens
    assert not is_held(behind)
    rig.abort(runs)
    (expect, *_) = rig.step().orders.expects
    assert expect.request_id == large.request_id
