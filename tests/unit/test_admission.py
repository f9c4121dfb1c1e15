"""Who goes to a prefiller, who waits, who is prefilled here: never over the share, never waiting for what cannot be."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.lifecycle.admission import RETRY_NEEDS_S, Admission, Course, admit

pages = st.integers(1, 1000)
counts = st.integers(0, 1000)


@given(pages, counts, counts, counts, st.booleans(), st.booleans(), st.booleans())
def test_nothing_is_admitted_over_the_share_or_into_pages_that_are_not_free(
    num_pages: int,
    num_free: int,
    num_pinned: int,
    max_pinned: int,
    must_wait: bool,
    is_short: bool,
    has_waited: bool,
) -> None:
    verdict = admit(
        num_pages=num_pages,
        num_free=num_free,
        num_pinned=num_pinned,
        max_pinned=max_pinned,
        must_wait=must_wait,
        is_short=is_short,
        has_waited=has_waited,
    )
    fits = not must_wait and num_pinned + num_pages <= max_pinned and num_pages <= num_free
    assert (verdict is Admission.REMOTE) == fits
    if verdict is Admission.LATER:
        assert num_pages <= max_pinned, "it would wait for what cannot be"
        assert not is_short
        assert not has_waited  # law 8


def test_a_course_ends_with_its_time_its_attempts_or_a_local_prefill() -> None:
    assert Course().may_retry(0.0, 1)
    assert Course(ends_at=10.0, tried=["a"]).may_retry(10.0 - RETRY_NEEDS_S, 2)
    assert not Course(ends_at=10.0, tried=["a"]).may_retry(10.1 - RETRY_NEEDS_S, 2)
    assert not Course(ends_at=10.0, tried=["a", "b"]).may_retry(0.0, 2)
    assert not Course(is_over=True).may_retry(0.0, 2)
