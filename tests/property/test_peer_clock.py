"""Law 10: what we think a peer's clock reads is never more than it does, so a lease never ends too late."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.lifecycle.peer_clock import DRIFT, PeerClock


@given(
    start=st.floats(-1e6, 1e6),
    rate=st.floats(1 - DRIFT, 1 + DRIFT),
    travel_s=st.floats(0, 1e4),
    age_s=st.floats(0, 1e6),
)
def test_a_peers_clock_reads_at_least_what_we_say(start: float, rate: float, travel_s: float, age_s: float) -> None:
    sent_at = 500.0
    heard_at = sent_at + travel_s
    when = heard_at + age_s
    truth = start + (when - sent_at) * rate
    bound = PeerClock(start, heard_at).at_least(when)
    assert bound <= truth + 1e-6
    assert truth - bound <= travel_s * rate + 2 * DRIFT * age_s + 1e-6  # and not much less
