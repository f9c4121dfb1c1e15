"""What a decoder rank makes of notes: early, double, late, excessive, damaged, false."""

from typing import Any

import pytest
from worker_rig import NUM_LAYERS, UNITS_PER_PAGE, A, B, Cluster, deliver

from vllm_pd_connector.engine.digests import MAX_KINDS
from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.testing.shapes import BLOCK_TOKENS
from vllm_pd_connector.transport.scripted import ScriptedFault
from vllm_pd_connector.wire.messages import FailureNote, WriteNote

PAGES = 2 * NUM_LAYERS
ALL = PAGES * UNITS_PER_PAGE


def note(seq: int, units: int, **more: Any) -> WriteNote:
    return WriteNote(transfer_id=A, sender=0, seq=seq, units=units, pages=1, **more)


def test_pages_that_came_before_their_request_was_known_count() -> None:
    cluster = Cluster()
    deliver(cluster, note(0, ALL))
    cluster.settle()
    cluster.expect()
    assert list(cluster.d.receiver.finished) == ["req-a"]


def test_a_failure_that_came_before_its_request_was_known_spoils_it() -> None:
    cluster = Cluster()
    deliver(cluster, FailureNote(transfer_id=A, sender=0, reason="lost"))
    deliver(cluster, note(0, ALL))
    cluster.settle()
    cluster.expect()
    assert list(cluster.d.receiver.failures) == [(A, "prefiller rank 0: lost")]
    assert not cluster.d.receiver.finished


def test_a_note_delivered_twice_counts_once() -> None:
    cluster = Cluster()
    cluster.expect()
    for seq in (0, 0, 0):
        deliver(cluster, note(seq, ALL // 2))
    cluster.settle()
    assert not cluster.d.receiver.finished  # law 6
    assert cluster.d.tally.take()["notes_duplicate"] == 2


def test_notes_of_a_transfer_that_is_over_are_counted_and_dropped() -> None:
    cluster = Cluster()
    cluster.expect()
    cluster.d.receiver.forget(A)
    deliver(cluster, note(0, ALL))
    cluster.settle()
    assert not cluster.d.receiver.finished
    assert not cluster.d.receiver.is_busy
    assert cluster.d.tally.take()["notes_late"] == 1


def test_more_pages_than_were_reserved_spoil_the_transfer() -> None:
    cluster = Cluster()
    cluster.expect()
    deliver(cluster, note(0, ALL + 1))
    cluster.settle()
    assert not cluster.d.receiver.finished
    assert len(cluster.d.receiver.failures) == 1


def test_more_pages_than_were_reserved_spoil_the_transfer_also_when_they_came_early() -> None:
    cluster = Cluster()
    deliver(cluster, note(0, ALL + 1))
    cluster.settle()
    cluster.expect()
    assert not cluster.d.receiver.finished
    assert len(cluster.d.receiver.failures) == 1


def test_a_failure_of_a_transfer_that_is_over_is_counted_as_late() -> None:
    cluster = Cluster()
    cluster.expect()
    cluster.d.receiver.forget(A)
    deliver(cluster, FailureNote(transfer_id=A, sender=0, reason="lost"))
    cluster.settle()
    assert cluster.d.tally.take().get("notes_late") == 1  # law 6


def test_frames_that_are_no_notes_cost_a_counter() -> None:
    cluster = Cluster()
    cluster.expect()
    for frame in (b"", b"\xff", b"\x93\x01\x02\x03", bytes(1000)):
        deliver(cluster, frame)
    deliver(cluster, note(0, ALL))
    cluster.settle()
    assert cluster.d.tally.take()["notes_refused"] == 4  # law 12
    assert list(cluster.d.receiver.finished) == ["req-a"]


def test_a_transfer_is_spoiled_once_however_often_it_fails() -> None:
    cluster = Cluster()
    cluster.expect()
    for reason in ("one", "two"):
        deliver(cluster, FailureNote(transfer_id=A, sender=0, reason=reason))
    cluster.settle()
    assert len(cluster.d.receiver.failures) == 1


def test_digests_that_match_let_the_request_run() -> None:
    cluster = Cluster(verify=True)
    cluster.expect()
    cluster.begin()
    cluster.start_step((A, [1, 2], [5, 6]))[0].finish()
    cluster.settle()
    assert list(cluster.d.receiver.finished) == ["req-a"]
    assert cluster.d.tally.take()["pages_verified"] == PAGES


def test_a_page_with_other_bytes_spoils_the_transfer() -> None:
    cluster = Cluster(verify=True, faults=[ScriptedFault("wrong_page", 1)])
    cluster.expect()
    cluster.begin()
    (signal,) = cluster.start_step((A, [1, 2], [5, 6]))
    signal.bump(0)
    cluster.settle()
    signal.finish()
    cluster.settle()
    assert "differs" in cluster.d.receiver.failures[0][1]
    assert not cluster.d.receiver.finished
    assert cluster.d.tally.take()["pages_mismatched"] == 1


def first_page() -> WriteNote:
    """A step that was one page long has arrived."""
    return note(0, ALL // 2, start=0, stop=BLOCK_TOKENS)


def second_page() -> WriteNote:
    return note(1, ALL // 2, start=BLOCK_TOKENS, stop=2 * BLOCK_TOKENS)


def handed_back(cluster: Cluster) -> list[tuple[str, int]]:
    """What the rank says of a transfer that is given up now."""
    cluster.settle()
    cluster.hand_back()
    assert list(cluster.d.receiver.finished) == ["req-a"]  # law 7
    return list(cluster.d.receiver.whole)


def test_a_rank_that_hands_a_request_back_says_how_far_its_pages_had_come() -> None:
    cluster = Cluster()
    cluster.expect()
    deliver(cluster, first_page())
    deliver(cluster, first_page())
    assert handed_back(cluster) == [(A, BLOCK_TOKENS)]
    assert list(cluster.d.receiver.failed) == ["req-a"]


def test_pages_behind_one_that_is_missing_do_not_count() -> None:
    cluster = Cluster()
    cluster.expect()
    deliver(cluster, second_page())
    assert handed_back(cluster) == [(A, 0)]


def test_a_rank_that_has_everything_says_so_although_it_has_reported_the_request() -> None:
    cluster = Cluster()
    cluster.expect()
    deliver(cluster, second_page())
    deliver(cluster, first_page())
    assert handed_back(cluster) == [(A, 2 * BLOCK_TOKENS)]
    assert not cluster.d.receiver.failed


def test_nothing_is_said_of_a_request_whose_client_left() -> None:
    cluster = Cluster()
    cluster.expect()
    deliver(cluster, first_page())
    cluster.settle()
    cluster.hand_back(failed=False)
    assert not cluster.d.receiver.whole


def test_what_arrives_after_a_failure_is_not_kept() -> None:
    """The source of a write in flight may have been overwritten since."""
    cluster = Cluster()
    cluster.expect()
    deliver(cluster, first_page())
    cluster.settle()
    deliver(cluster, FailureNote(transfer_id=A, sender=0, reason="its pages were preempted"))
    deliver(cluster, second_page())
    assert handed_back(cluster) == [(A, BLOCK_TOKENS)]


def test_nothing_is_kept_of_a_transfer_that_failed_before_it_was_known() -> None:
    cluster = Cluster()
    deliver(cluster, FailureNote(transfer_id=A, sender=0, reason="lost"))
    deliver(cluster, first_page())
    cluster.settle()
    cluster.expect()
    assert handed_back(cluster) == [(A, 0)]


@pytest.mark.parametrize("is_failed_before", [False, True])
def test_nothing_is_kept_of_a_transfer_with_a_wrong_page(is_failed_before: bool) -> None:
    cluster = Cluster(verify=True)
    cluster.expect()
    deliver(cluster, first_page())
    if is_failed_before:
        deliver(cluster, FailureNote(transfer_id=A, sender=0, reason="lost"))
    deliver(cluster, note(1, 1, digests=bytes(8), layers=[0], blocks=[1], spots=[0], pieces=[[(0, 32)]]))
    assert handed_back(cluster) == [(A, 0)]


def test_nothing_is_kept_of_a_transfer_with_more_pages_than_were_reserved() -> None:
    cluster = Cluster()
    cluster.expect()
    deliver(cluster, first_page())
    deliver(cluster, note(1, ALL))
    assert handed_back(cluster) == [(A, 0)]


def test_a_prefiller_of_an_earlier_release_names_no_steps() -> None:
    cluster = Cluster()
    cluster.expect()
    deliver(cluster, note(0, ALL // 2))
    assert handed_back(cluster) == [(A, 0)]


GOOD = {"digests": bytes(8), "layers": [0], "blocks": [1], "spots": [0], "pieces": [[(0, 32)]]}


@pytest.mark.parametrize(
    "change",
    [
        {"layers": [NUM_LAYERS]},
        {"blocks": [14]},
        {"spots": [1]},
        {"pieces": []},
        {"pieces": [[(0, 33)]]},
        {"pieces": [[(32, 1)]]},
        {"digests": bytes(9)},
        {"digests": bytes(16)},
        {"layers": []},
        {"pages": 2},
        {"pieces": [[(0, 8), (4, 8)]]},
        {"pieces": [[(8, 8), (0, 8)]]},
        {"pieces": [[(2 * i, 1) for i in range(BLOCK_TOKENS + 1)]]},
        {"pieces": [[]]},
        {"pieces": [[(0, 32)]] * (MAX_KINDS + 1)},
        {"pages": 2, "digests": bytes(16), "layers": [0, 0], "blocks": [1, 1], "spots": [0, 0]},
        {
            "pages": BLOCK_TOKENS + 1,
            "digests": bytes(8 * (BLOCK_TOKENS + 1)),
            "layers": [0] * (BLOCK_TOKENS + 1),
            "blocks": [1] * (BLOCK_TOKENS + 1),
            "spots": list(range(BLOCK_TOKENS + 1)),
            "pieces": [[(i, 1)] for i in range(BLOCK_TOKENS + 1)],
        },
    ],
    ids=lambda change: str(change)[:60],
)
def test_digests_of_what_no_sender_has_spoil_the_transfer_and_no_page_is_read(change: dict[str, Any]) -> None:
    """82 KB of notes that named one page 4,000 times kept the messenger for eight seconds (law 12)."""
    cluster = Cluster(verify=True)
    cluster.d.transport.read_page = None  # type: ignore[assignment, method-assign]
    cluster.expect()
    deliver(cluster, WriteNote(transfer_id=A, sender=0, seq=0, units=ALL, **{"pages": 1, **GOOD, **change}))
    cluster.settle()
    assert "digests" in cluster.d.receiver.failures[0][1]
    assert not cluster.d.receiver.finished


@pytest.mark.parametrize("error", [UnsupportedEngine("device memory"), RuntimeError("something else")], ids=str)
def test_a_page_that_cannot_be_read_costs_its_own_note_only(error: Exception) -> None:
    cluster = Cluster(verify=True)
    cluster.expect(A)
    cluster.expect(B)

    def unreadable(layer: int, block: int) -> bytes:
        raise error

    cluster.d.transport.read_page = unreadable  # type: ignore[method-assign]
    deliver(cluster, note(0, ALL, **GOOD))
    deliver(cluster, WriteNote(transfer_id=B, sender=0, seq=0, units=ALL, pages=1))
    cluster.d.turn(2)
    assert list(cluster.d.receiver.finished) == ["req-b"]
    expected = [(A, "device memory")] if isinstance(error, UnsupportedEngine) else []  # else the deadline ends it
    assert list(cluster.d.receiver.failures) == expected


def test_a_late_note_is_not_compared_with_a_page_that_has_a_new_owner() -> None:
    cluster = Cluster(verify=True)
    cluster.expect()
    deliver(cluster, note(0, ALL, **GOOD))
    cluster.d.receiver.forget(A)
    cluster.settle()
    counts = cluster.d.tally.take()
    assert (counts.get("notes_late"), counts.get("pages_mismatched")) == (1, None)


def test_a_duplicate_of_a_note_is_not_compared_again() -> None:
    cluster = Cluster(verify=True)
    cluster.expect()
    deliver(cluster, note(0, 1))
    deliver(cluster, note(0, 1, **GOOD))
    deliver(cluster, note(1, ALL - 1))
    cluster.settle()
    assert list(cluster.d.receiver.finished) == ["req-a"]
    assert cluster.d.tally.take()["notes_duplicate"] == 1


def test_more_pages_than_were_reserved_are_not_compared() -> None:
    cluster = Cluster(verify=True)
    cluster.d.transport.read_page = None  # type: ignore[assignment, method-assign]
    cluster.expect()
    deliver(cluster, note(0, ALL + 1, **GOOD))
    cluster.settle()
    assert "more pages" in cluster.d.receiver.failures[0][1]


def test_a_decoder_without_verify_pages_looks_at_no_digest() -> None:
    cluster = Cluster()
    cluster.d.transport.read_page = None  # type: ignore[assignment, method-assign]
    cluster.expect()
    deliver(cluster, note(0, ALL, **GOOD))
    cluster.settle()
    assert list(cluster.d.receiver.finished) == ["req-a"]
    assert "pages_verified" not in cluster.d.tally.take()
