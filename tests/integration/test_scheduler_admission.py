"""Held requests take only their share of the decoder's pages, and one that finds no room blocks nobody behind it."""

import pytest
from scheduler_rig import BLOCK, PAGES, PREFILLER, PROMPT, MakeRig, Rig, hold
from vllm.v1.request import RequestStatus

from vllm_pd_connector.lifecycle.prefiller import PrefillerState

SHARE = {"num_blocks": 48, "max_held_share": 0.5, "short_prompt_tokens": 0, "min_remote_tokens": 1}
MOST = 23
"""Half of 47 usable blocks: three requests of `PAGES` and two pages more."""


@pytest.fixture
def rig(make: MakeRig) -> Rig:
    return make(**SHARE)


def held_pages(rig: Rig) -> int:
    half = rig.half._decode
    assert half is not None
    return half.gauges()["held_pages"]


def fill(rig: Rig) -> list[str]:
    """Three held requests; the ids of their transfers."""
    return [hold(rig, seed=seed)[1] for seed in range(3)]


def test_no_more_than_the_share_is_held_and_those_behind_pass(rig: Rig) -> None:
    fill(rig)
    late, small, tiny = rig.add(PROMPT, seed=7), rig.add(2 * BLOCK + 1, seed=8), rig.add(1, seed=9)
    step = rig.step()
    assert held_pages(rig) == MOST
    assert late.status is RequestStatus.WAITING
    assert small.status is RequestStatus.WAITING_FOR_REMOTE_KVS  # it came later and fits
    assert step.tokens == {tiny.request_id: 1}  # local work goes on
    assert rig.counters["waited"] == 1


def test_it_is_held_as_soon_as_there_is_room(rig: Rig) -> None:
    fill(rig)
    late = rig.add(PROMPT, seed=7)
    rig.step()
    assert late.status is RequestStatus.WAITING
    rig.step(received={"r1"})
    rig.step()
    assert late.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert held_pages(rig) <= MOST


@pytest.mark.parametrize(("waited", "is_over"), [(1.9, False), (2.1, True)])
def test_the_wait_is_bounded(rig: Rig, waited: float, is_over: bool) -> None:
    fill(rig)
    late = rig.add(PROMPT, seed=7)
    rig.step()
    rig.clock.advance(waited)
    assert rig.step().tokens == ({late.request_id: PROMPT} if is_over else {})  # law 8


def test_a_short_prompt_does_not_wait(make: MakeRig) -> None:
    rig = make(**{**SHARE, "short_prompt_tokens": PROMPT})
    fill(rig)
    late = rig.add(PROMPT, seed=7)
    assert rig.step().tokens == {late.request_id: PROMPT}
    assert rig.counters["prefilled_locally"] == 1


def test_what_can_never_fit_does_not_wait_for_it(rig: Rig) -> None:
    request = rig.add(BLOCK * (MOST + 1) + 2)
    assert rig.step().tokens == {request.request_id: BLOCK * (MOST + 1) + 2}


class TestFullPrefillers:
    """`max_outstanding_per_prefiller` is reached everywhere: a request waits without pages."""

    def test_it_waits_without_pages_and_those_behind_pass(self, rig: Rig) -> None:
        rig.dispatcher.full = {PREFILLER}
        late, tiny = rig.add(PROMPT, seed=7), rig.add(1, seed=9)
        step = rig.step()
        assert late.status is RequestStatus.WAITING
        assert step.tokens == {tiny.request_id: 1}
        assert held_pages(rig) == 0
        rig.dispatcher.full = set()
        rig.step()
        assert late.status is RequestStatus.WAITING_FOR_REMOTE_KVS

    @pytest.mark.parametrize(("waited", "is_over"), [(1.9, False), (2.1, True)])
    def test_the_wait_is_bounded(self, rig: Rig, waited: float, is_over: bool) -> None:
        rig.dispatcher.full = {PREFILLER}
        late = rig.add(PROMPT, seed=7)
        rig.step()
        rig.clock.advance(waited)
        assert rig.step().tokens == ({late.request_id: PROMPT} if is_over else {})  # law 8

    def test_a_short_prompt_does_not_wait(self, make: MakeRig) -> None:
        rig = make(**{**SHARE, "short_prompt_tokens": PROMPT})
        rig.dispatcher.full = {PREFILLER}
        late = rig.add(PROMPT, seed=7)
        assert rig.step().tokens == {late.request_id: PROMPT}


def test_fenced_pages_count_too(rig: Rig) -> None:
    before = rig.free_blocks
    transfers = fill(rig)
    rig.abort(rig.scheduler.requests["r1"])
    rig.obey(rig.schedule())
    late = rig.add(PROMPT, seed=7)
    rig.step()
    assert held_pages(rig) == 2 * PAGES
    assert late.status is RequestStatus.WAITING  # the pages of the first are not back yet
    rig.dispatcher.answer_fence(transfers[0], is_quiet=True)
    rig.step()
    rig.step()
    assert late.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    rig.step(received={"r2", "r3", late.request_id})
    rig.run_until_done()
    assert rig.free_blocks == before


def test_pages_that_are_not_free_are_not_waited_for_at_the_head_of_the_queue(make: MakeRig) -> None:
    """vLLM stops its scan at the first request whose pages it cannot allocate; a held one would block those behind."""
    rig = make(**{**SHARE, "max_held_share": 1.0})
    rig.dispatcher.states[PREFILLER] = PrefillerState.LOST
    runs = rig.add(BLOCK * 40, seed=1, max_tokens=64)
    rig.step()
    assert runs.status is RequestStatus.RUNNING
    rig.dispatcher.states[PREFILLER] = PrefillerState.USABLE
    late, small = rig.add(BLOCK * 20, seed=2), rig.add(BLOCK * 2 + 1, seed=3)
    rig.step()
    assert late.status is RequestStatus.WAITING
    assert small.status is RequestStatus.WAITING_FOR_REMOTE_KVS
