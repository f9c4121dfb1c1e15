"""Pauses before a busy prefiller is asked again: growing, bounded, spread, and never shorter than it asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.lifecycle.backoff import FIRST_PAUSE_S, LONGEST_PAUSE_S, pause_s

dice = st.floats(0, 1)


@given(st.integers(0, 10_000), dice)
def test_pauses_are_bounded(attempt: int, thrown: float) -> None:
    assert FIRST_PAUSE_S / 2 <= pause_s(attempt, retry_after_s=None, dice=thrown) <= LONGEST_PAUSE_S


def test_pauses_double_up_to_the_longest() -> None:
    pauses = [pause_s(attempt, retry_after_s=None, dice=1.0) for attempt in range(7)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])


@given(st.integers(0, 10), st.floats(0, 3600), dice)
def test_what_the_prefiller_asked_for_is_kept(attempt: int, retry_after_s: float, thrown: float) -> None:
    assert retry_after_s <= pause_s(attempt, retry_after_s=retry_after_s, dice=thrown) <= retry_after_s * 1.1 + 1e-9


def test_two_decoders_do_not_come_back_together() -> None:
    assert pause_s(3, retry_after_s=None, dice=0.1) != pause_s(3, retry_after_s=None, dice=0.9)
    assert pause_s(3, retry_after_s=5.0, dice=0.1) != pause_s(3, retry_after_s=5.0, dice=0.9)
