"""The decoder's scheduler half inside a real vLLM scheduler: hold, release, give up, fence; every page comes back."""

import inspect
from typing import Any

import pytest
from scheduler_rig import BLOCK, PAGES, PREFILLER, PROMPT, MakeRig, Rig, hold
from vllm.v1.engine import FinishReason

from vllm_pd_connector.control.dispatcher import Dispatcher
from vllm_pd_connector.lifecycle.prefiller import PrefillerState
from vllm_pd_connector.testing.fake_dispatcher import FakeDispatcher


def test_the_fake_dispatcher_has_the_real_ones_methods() -> None:
    def public(kind: type) -> dict[str, Any]:
        return {n: inspect.signature(f) for n, f in vars(kind).items() if inspect.isfunction(f) and n[0] != "_"}

    fake = public(FakeDispatcher)
    assert {name: fake.get(name) for name in public(Dispatcher)} == public(Dispatcher)
    assert set(fake) - set(public(Dispatcher)) == {"report", "answer_fence"}


def test_a_request_is_held_and_runs_its_last_token_when_all_pages_arrived(rig: Rig) -> None:
    before = rig.free_blocks
    request, transfer = hold(rig)
    (order,) = rig.dispatcher.dispatched
    assert order.body["prompt"] == list(request.prompt_token_ids or ())[:-1]
    assert (order.reservation.local_tokens, [len(group) for group in order.reservation.blocks]) == (0, [PAGES])
    assert before - rig.free_blocks == PAGES
    rig.step(received={request.request_id})
    step = rig.schedule()
    assert step.tokens == {request.request_id: 1}
    assert step.orders.forgets == [transfer]
    assert rig.dispatcher.finished == [transfer]
    rig.complete(step)
    rig.run_until_done()
    assert rig.free_blocks == before
    assert rig.counters["released"] == rig.counters["dispatched"] == 1
    assert rig.outputs[-1].finish_reason is FinishReason.LENGTH


def test_transfer_ids_are_fresh_for_the_same_prompt(rig: Rig) -> None:
    ids = {hold(rig)[1] for _ in range(3)}
    assert len(ids) == 3
    assert not any(request_id in transfer for transfer in ids for request_id in rig.scheduler.requests)


@pytest.mark.parametrize(("num_tokens", "is_held"), [(BLOCK, False), (BLOCK + 1, True), (1, False)])
def test_a_prompt_below_the_threshold_is_prefilled_here(rig: Rig, num_tokens: int, is_held: bool) -> None:
    request = rig.add(num_tokens)
    step = rig.step()
    assert step.tokens == ({} if is_held else {request.request_id: num_tokens})
    assert len(rig.dispatcher.dispatched) == is_held


@pytest.mark.parametrize("state", [PrefillerState.UNKNOWN, PrefillerState.LOST, PrefillerState.REFUSED])
def test_without_a_usable_prefiller_prompts_are_prefilled_here(rig: Rig, state: PrefillerState) -> None:
    rig.dispatcher.states[PREFILLER] = state
    request = rig.add(PROMPT)
    assert rig.step().tokens == {request.request_id: PROMPT}
    rig.run_until_done()
    assert rig.counters["prefilled_locally"] == 1
    assert not rig.dispatcher.dispatched


def test_pages_shared_by_a_prefix_hit_are_never_reserved(rig: Rig) -> None:
    first, _ = hold(rig)
    rig.step(received={first.request_id})
    rig.step()
    second, _ = hold(rig, PROMPT + 2 * BLOCK)
    shared = set(rig.scheduler.kv_cache_manager.get_block_ids(first.request_id)[0])
    reservation = rig.dispatcher.dispatched[1].reservation
    assert reservation.local_tokens == 6 * BLOCK
    (blocks,) = reservation.blocks
    assert len(blocks) == 3
    assert not shared & set(blocks)  # law 3
    assert rig.scheduler.kv_cache_manager.get_block_ids(second.request_id)[0][6:] == blocks


def test_a_preempted_request_is_not_dispatched_again(rig: Rig) -> None:
    before = rig.free_blocks
    request, _ = hold(rig)
    rig.step(received={request.request_id})
    rig.step()
    assert request.num_output_tokens == 1
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.num_preemptions == 1
    assert rig.step().tokens == {request.request_id: PROMPT + 1}
    rig.run_until_done()
    assert len(rig.dispatcher.dispatched) == 1
    assert rig.free_blocks == before


@pytest.mark.parametrize(
    "params",
    [
        {"prefiller": 5},
        {"prefiller": "http://stranger:1"},
        {"prefiller": [[]]},
        {"pd_other": [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]},
        "boom",
        [7],
    ],
    ids=["not text", "not in the pool", "a list", "nested too deep", "no object", "no object but a list"],
)
def test_invalid_parameters_finish_that_request_alone_with_an_error(rig: Rig, params: Any) -> None:
    before = rig.free_blocks
    bad, good = rig.add(PROMPT, params=params), rig.add(BLOCK, seed=1)
    rig.run_until_done()
    reasons = {o.request_id: o.finish_reason for o in rig.outputs if o.finish_reason is not None}
    assert reasons == {bad.request_id: FinishReason.ERROR, good.request_id: FinishReason.LENGTH}  # law 12
    assert not rig.dispatcher.dispatched
    assert rig.free_blocks == before
    assert rig.counters["refused_params"] == 1


def test_the_wanted_prefiller_is_tried_first(make: MakeRig) -> None:
    urls = ["http://a:1", "http://b:1", "http://c:1"]
    rig = make(prefillers=urls)
    for url in urls:
        hold(rig, params={"prefiller": f"{url}/"}, seed=ord(url[7]))
        assert rig.dispatcher.dispatched[-1].urls[0] == url


def test_shutdown_closes_the_dispatcher(rig: Rig) -> None:
    assert rig.dispatcher.is_started
    rig.half.shutdown()
    assert rig.dispatcher.is_closed
