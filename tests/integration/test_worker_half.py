"""Writers and receivers of real ranks over memory: posting by layer, fences, leases, failures, single reports."""

import time
from typing import Any

import pytest
from worker_rig import LEASE_S, NUM_LAYERS, PAGE_BYTES, UNITS_PER_PAGE, A, B, Cluster

from vllm_pd_connector.engine import writer
from vllm_pd_connector.engine.posting import STUCK_S
from vllm_pd_connector.plan import grain
from vllm_pd_connector.plan.write import BoundWrite
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.scripted import HANG_S, ScriptedFault, ScriptedTransport
from vllm_pd_connector.wire.messages import Quiet


@pytest.fixture(autouse=True, params=["the messenger posts", "writes are armed"])
def _who_posts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every law holds whoever posts."""
    monkeypatch.setattr(Cluster, "is_arming", request.param == "writes are armed")


class TestPosting:
    def test_a_layer_lands_before_the_next_one_is_computed(self) -> None:
        cluster = Cluster(polls_per_write=0)
        cluster.expect()
        cluster.begin()
        (signal,) = cluster.start_step((A, [1, 2], [5, 6]))
        for layer in range(NUM_LAYERS):
            assert not cluster.has_landed(layer, 1, 5)
            signal.bump(layer)
            cluster.p.turn()
            assert cluster.has_landed(layer, 1, 5)
            assert cluster.has_landed(layer, 2, 6)
            cluster.d.turn()
            assert list(cluster.d.receiver.finished) == (["req-a"] if layer == NUM_LAYERS - 1 else [])

    def test_layers_of_a_portion_travel_together_once_the_last_is_ready(self) -> None:
        cluster = Cluster(layers_per_write=2)  # portions of 2 and 1
        cluster.begin()
        (signal,) = cluster.start_step((A, [1], [5]))
        signal.bump(0)
        cluster.settle()
        assert cluster.is_blank()
        signal.bump(1)
        cluster.settle()
        assert [cluster.has_landed(layer, 1, 5) for layer in range(NUM_LAYERS)] == [True, True, False]
        assert cluster.p.tally.take()["writes"] == (2 if cluster.is_arming else 1)  # armed are all at once
        signal.bump(2)
        cluster.settle()
        assert cluster.has_landed(2, 1, 5)

    def test_writes_are_ready_to_be_posted_before_their_layers_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writer, "AHEAD", 2)
        prepared: list[bytes] = []

        class Watched(ScriptedTransport):
            def prepare_write(self, lane: Any, write: BoundWrite, note: bytes) -> Any:
                prepared.append(note)
                return super().prepare_write(lane, write, note)

        cluster = Cluster(wrap=lambda inner: Watched(inner, []))
        cluster.begin()
        (signal,) = cluster.start_step((A, [1], [5]))
        assert len(prepared) == (NUM_LAYERS if cluster.is_arming else 2)
        signal.bump(0)
        cluster.p.turn()
        assert len(prepared) == NUM_LAYERS
        signal.finish()
        cluster.settle()
        assert len(prepared) == NUM_LAYERS  # none is made twice
        assert cluster.has_landed(NUM_LAYERS - 1, 1, 5)

    def test_what_writes_and_layers_have_taken_is_learnt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cluster = Cluster(polls_per_write=3)
        cluster.begin()
        lines = (cluster.p.grain.posting, cluster.p.grain.layer)
        before = [line.line for line in lines]
        monkeypatch.setattr(grain, "SMALL", 1)  # every size tells of the wire
        rate = cluster.p.grain.wire.per_unit
        (signal,) = cluster.start_step((A, [1], [5]))
        for layer in range(NUM_LAYERS):
            signal.bump(layer)
            time.sleep(0.003)
        for _ in range(6):
            cluster.clock.advance(0.05)
            cluster.p.turn()
        assert all(line.line != old for line, old in zip(lines, before, strict=True))
        assert cluster.p.grain.layer.at(PAGE_BYTES) > 2e-3
        assert cluster.p.grain.wire.per_unit > rate  # 50 ms for a page

    def test_what_no_hook_announced_goes_out_at_the_end_of_the_step(self) -> None:
        cluster = Cluster()
        cluster.expect()
        cluster.begin()
        (signal,) = cluster.start_step((A, [1, 2], [5, 6]))
        signal.bump(1)
        signal.finish()
        cluster.settle()
        assert all(cluster.has_landed(layer, 1, 5) for layer in range(NUM_LAYERS))
        assert list(cluster.d.receiver.finished) == ["req-a"]

    def test_several_transfers_share_a_step_and_chunks_follow_each_other(self) -> None:
        cluster = Cluster()
        for transfer, blocks in ((A, [5, 6]), (B, [7])):
            cluster.expect(transfer, len(blocks))
            cluster.begin(transfer, blocks)
        (first,) = cluster.start_step((A, [1], [5]), (B, [3], [7]))
        (second,) = cluster.start_step((A, [2], [6]))
        second.finish()
        first.finish()
        cluster.settle()
        assert sorted(cluster.d.receiver.finished) == ["req-a", "req-b"]
        assert cluster.has_landed(2, 1, 5)
        assert cluster.has_landed(2, 2, 6)
        assert cluster.has_landed(2, 3, 7)
        untouched = set(range(cluster.d.kv.table.num_blocks)) - {5, 6, 7}
        assert not any(cluster.d.kv.page(la, b).any() for la in range(NUM_LAYERS) for b in untouched)  # law 3

    def test_each_rank_writes_to_its_own_partner_and_reports_once(self) -> None:
        cluster = Cluster(tp=2)
        cluster.expect()
        cluster.begin()
        fast, slow = cluster.start_step((A, [1, 2], [5, 6]))
        fast.finish()
        cluster.settle()
        assert [list(d.receiver.finished) for d in cluster.decoders] == [["req-a"], []]
        slow.finish()
        cluster.settle()
        assert [list(d.receiver.finished) for d in cluster.decoders] == [["req-a"], ["req-a"]]  # law 7
        assert all(cluster.has_landed(0, 1, 5, rank) for rank in range(2))

    def test_a_block_outside_the_decoders_pool_fails_the_transfer_unposted(self) -> None:
        cluster = Cluster()
        cluster.begin()
        (signal,) = cluster.start_step((A, [1], [14]))
        signal.finish()
        cluster.settle()
        assert [transfer for transfer, _ in cluster.p.writer.failures] == [A]  # law 3
        assert cluster.is_blank()

    def test_a_decoder_that_cannot_be_reached_fails_the_transfer_and_still_closes(self) -> None:
        cluster = Cluster()
        cluster.d.transport.close()
        cluster.begin()
        cluster.start_step((A, [1], [5]))[0].finish()
        cluster.close()
        cluster.settle()
        assert len(cluster.p.writer.failures) == 1
        assert list(cluster.p.writer.sent) == ["req-a"]
        standing = cluster.p.writer.standing(A)  # the only way the decoder learns of it
        assert standing.is_over
        assert "cannot be reached" in standing.error

    def test_a_transfer_stands_open_until_its_last_write_is_over(self) -> None:
        cluster = Cluster(polls_per_write=3)
        cluster.begin()
        cluster.start_step((A, [1], [5]))[0].finish()
        cluster.close()
        cluster.p.turn()
        assert not cluster.p.writer.standing(A).is_over
        cluster.settle()
        assert (cluster.p.writer.standing(A).is_over, cluster.p.writer.standing(A).error) == (True, "")


class TestStopping:
    def test_prepared_writes_wait_by_themselves_and_are_looked_at_once_they_are_withdrawn(self) -> None:
        """The bell rings for layers and for what a native thread ends, not for what is withdrawn."""
        cluster = Cluster()
        cluster.begin()
        cluster.start_step((A, [1], [5]))
        assert not cluster.p.writer.is_busy  # law 15: nothing to poll while a layer computes
        quiet: list[Quiet] = []
        cluster.p.writer.fence(A, quiet.append)
        assert cluster.p.writer.is_busy
        cluster.p.turn()
        assert quiet == [Quiet(A, 0)]
        assert not cluster.p.writer.is_busy

    def test_a_fence_before_the_transfer_begins_is_quiet_at_once_and_refuses_it(self) -> None:
        cluster = Cluster()
        quiet: list[Quiet] = []
        cluster.p.writer.fence(A, quiet.append)
        assert quiet == [Quiet(A, 0)]
        cluster.begin()
        cluster.start_step((A, [1], [5]))[0].finish()
        cluster.close()
        cluster.settle()
        assert cluster.is_blank()  # law 1
        assert list(cluster.p.writer.sent) == ["req-a"]

    def test_a_fence_is_answered_only_when_nothing_is_in_flight(self) -> None:
        cluster = Cluster(polls_per_write=3)
        cluster.begin()
        (signal,) = cluster.start_step((A, [1, 2], [5, 6]))
        signal.bump(0)
        cluster.p.turn()
        quiet: list[Quiet] = []
        cluster.p.writer.fence(A, quiet.append)
        signal.finish()
        while not quiet:
            assert not cluster.has_landed(0, 1, 5)  # still in flight: law 2
            cluster.p.turn()
        assert cluster.has_landed(0, 1, 5)
        assert quiet == [Quiet(A, 2 * UNITS_PER_PAGE)]
        cluster.settle()
        assert not cluster.has_landed(1, 1, 5)
        assert quiet == [Quiet(A, 2 * UNITS_PER_PAGE)]

    def test_every_fence_is_answered_once(self) -> None:
        cluster = Cluster(polls_per_write=2)
        cluster.begin()
        cluster.start_step((A, [1], [5]))[0].finish()
        cluster.p.turn()
        quiet: list[str] = []
        cluster.p.writer.fence(A, lambda _: quiet.append("first"))
        cluster.p.writer.fence(A, lambda _: quiet.append("second"))
        cluster.settle()
        cluster.p.writer.fence(A, lambda _: quiet.append("third"))
        cluster.close()
        cluster.settle()
        assert quiet == ["first", "second", "third"]

    def test_a_lease_that_runs_out_stops_the_transfer_and_tells_the_decoder(self) -> None:
        cluster = Cluster()
        cluster.expect()
        cluster.begin()
        (signal,) = cluster.start_step((A, [1, 2], [5, 6]))
        cluster.clock.advance(LEASE_S + 0.1)
        cluster.settle()
        signal.finish()
        cluster.settle()
        assert cluster.is_blank()
        assert "lease" in cluster.d.receiver.failures[0][1]  # law 8
        assert not cluster.d.receiver.finished

    def test_nothing_is_posted_after_the_lease_even_if_the_messenger_slept_through_its_end(self) -> None:
        """A prefill may wait for pages longer than its lease, while the idle messenger sleeps without a time-out."""
        cluster = Cluster(polls_per_write=0)
        cluster.begin()
        cluster.p.turn()
        cluster.clock.advance(LEASE_S + 0.1)
        (signal,) = cluster.start_step((A, [1], [5]))
        signal.finish()
        cluster.p.turn()
        assert cluster.is_blank()  # law 1: an unreachable decoder has reused the pages by now

    def test_a_fence_is_answered_when_the_transport_ends_a_write_that_hangs(self) -> None:
        cluster = Cluster(faults=[ScriptedFault("hang", 0)], layers_per_write=NUM_LAYERS)
        cluster.begin()
        cluster.start_step((A, [1], [5]))[0].finish()
        cluster.settle()
        quiet: list[Quiet] = []
        cluster.p.writer.fence(A, quiet.append)
        cluster.settle()
        assert quiet == []
        cluster.clock.advance(HANG_S + 0.1)
        cluster.settle()
        assert quiet == [Quiet(A, 0, is_clean=False)]

    def test_silence_is_not_clean_either_when_the_fence_comes_after_the_transfer_was_dropped(self) -> None:
        cluster = Cluster(faults=[ScriptedFault("fail", 0)])
        cluster.begin()
        cluster.start_step((A, [1], [5]))[0].finish()
        cluster.settle()
        cluster.close(cancel=True)
        cluster.settle()
        assert list(cluster.p.writer.sent) == ["req-a"]
        quiet: list[Quiet] = []
        cluster.p.writer.fence(A, quiet.append)
        assert quiet == [Quiet(A, 0, is_clean=False)]  # law 1

    def test_silence_after_a_failed_write_is_not_clean(self) -> None:
        """What it had on the wire may still land, so the decoder must not reuse the pages at once (law 1)."""
        cluster = Cluster(faults=[ScriptedFault("fail", 1)])
        cluster.begin()
        cluster.start_step((A, [1], [5]))[0].bump(0)
        cluster.settle()
        cluster.start_step((A, [2], [6]))[0].finish()
        cluster.settle()
        quiet: list[Quiet] = []
        cluster.p.writer.fence(A, quiet.append)
        cluster.settle()
        assert quiet == [Quiet(A, NUM_LAYERS * UNITS_PER_PAGE, is_clean=False)]  # all but one of two steps' writes

    def test_a_write_whose_handle_cannot_be_released_keeps_the_pages(self) -> None:
        stubborn: list[Stubborn] = []

        def wrap(transport: Transport) -> Transport:
            stubborn.append(Stubborn(transport))
            return stubborn[0]

        cluster = Cluster(wrap=wrap, layers_per_write=NUM_LAYERS)
        cluster.begin()
        cluster.start_step((A, [1], [5]))[0].finish()
        cluster.close()
        cluster.settle()
        assert not cluster.p.writer.sent  # law 2
        assert "writes_stuck" not in cluster.p.tally.take()
        cluster.clock.advance(STUCK_S + 0.1)
        cluster.settle()
        assert not cluster.p.writer.sent
        assert cluster.p.tally.take()["writes_stuck"] == 1  # it is said once
        stubborn[0].may_release = True
        cluster.settle()
        assert list(cluster.p.writer.sent) == ["req-a"]

    def test_a_drain_calls_back_when_preempted_pages_are_read_no_more(self) -> None:
        cluster = Cluster(polls_per_write=3)
        cluster.begin()
        cluster.begin(B, [7])
        (signal,) = cluster.start_step((A, [1], [5]), (B, [3], [7]))
        signal.finish()
        drained: list[bool] = []
        cluster.p.writer.drain([A], lambda: drained.append(cluster.has_landed(NUM_LAYERS - 1, 1, 5)))
        cluster.p.turn()
        assert drained == []
        cluster.settle()
        assert drained == [True]

    def test_an_abandoned_transfer_posts_nothing_more_and_says_so(self) -> None:
        cluster = Cluster()
        cluster.expect()
        cluster.begin()
        (signal,) = cluster.start_step((A, [1, 2], [5, 6]))
        cluster.p.writer.abandon([A, B], "preempted")
        signal.finish()
        cluster.settle()
        assert cluster.is_blank()
        assert list(cluster.d.receiver.failures) == [(A, "prefiller rank 0: preempted")]


class Stubborn(ScriptedTransport):
    """Handles cannot be given back until the test says so."""

    may_release = False

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner, [])

    def release(self, handle: object) -> bool:
        return self.may_release and super().release(handle)


class TestReports:
    def test_a_failed_write_is_reported_on_both_sides_and_the_rest_is_not_sent(self) -> None:
        cluster = Cluster(faults=[ScriptedFault("fail", 0)])
        cluster.expect()
        cluster.begin()
        (signal,) = cluster.start_step((A, [1, 2], [5, 6]))
        signal.bump(0)
        cluster.settle()
        signal.finish()
        cluster.settle()
        assert [t for t, _ in cluster.p.writer.failures] == [A]
        assert [t for t, _ in cluster.d.receiver.failures] == [A]
        assert cluster.is_blank()
        assert cluster.p.tally.take()["write_failures"] == 1

    @pytest.mark.parametrize("cancel", [False, True])
    @pytest.mark.parametrize("is_fenced", [False, True])
    def test_a_close_is_reported_exactly_once_when_quiet(self, cancel: bool, is_fenced: bool) -> None:
        cluster = Cluster(tp=2, polls_per_write=2)
        cluster.begin()
        for signal in cluster.start_step((A, [1], [5])):
            signal.finish()
        for rank in cluster.prefillers:
            rank.turn()
        if is_fenced:
            cluster.p.writer.fence(A, lambda _: None)
        cluster.close(cancel=cancel)
        assert not cluster.p.writer.sent
        cluster.settle(30)
        assert [list(rank.writer.sent) for rank in cluster.prefillers] == [["req-a"], ["req-a"]]  # law 7

    def test_a_close_of_an_unknown_transfer_is_reported_too(self) -> None:
        cluster = Cluster()
        cluster.close(cancel=True)
        cluster.close(B, cancel=True, report=False)
        cluster.settle()
        assert list(cluster.p.writer.sent) == ["req-a"]

    def test_a_request_is_handed_back_once_by_each_rank_even_if_its_pages_came(self) -> None:
        cluster = Cluster(tp=2)
        cluster.expect()
        cluster.begin()
        fast, _ = cluster.start_step((A, [1, 2], [5, 6]))
        fast.finish()
        cluster.settle()
        cluster.hand_back()
        cluster.hand_back()
        cluster.settle()
        assert [list(d.receiver.finished) for d in cluster.decoders] == [["req-a"], ["req-a"]]  # law 7
        assert [list(d.receiver.failed) for d in cluster.decoders] == [[], ["req-a"]]

    def test_pages_that_complete_after_the_hand_back_are_not_reported_again(self) -> None:
        cluster = Cluster()
        cluster.expect()
        cluster.begin()
        (signal,) = cluster.start_step((A, [1, 2], [5, 6]))
        cluster.hand_back(failed=False)
        signal.finish()
        cluster.settle()
        assert list(cluster.d.receiver.finished) == ["req-a"]
        assert not cluster.d.receiver.failed
