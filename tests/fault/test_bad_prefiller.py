"""A prefiller that answers wrongly, or whose writes go wrong, costs its requests time and never their answer."""

import os
import signal
from collections.abc import Iterator

import pytest
from server_tier.ask import Score, ask, body_of, fresh_salt, post, until
from server_tier.fake_prefiller import FakePrefiller, Reply, fake_prefiller, greet, part
from server_tier.probe import Since, wait_quiet
from server_tier.prompts import RANDOM, names
from server_tier.reference import Reference
from server_tier.stage import fake_port

from vllm_pd_connector.testing.servers import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

SMALL = names("small")[1]
SLACK_S = 8.0
"""A local prefill of a small prompt and the steps around it, on a busy core."""

WRONG_HELLOS = {
    "not JSON": Reply(200, b"<html>welcome</html>"),
    "JSON null": Reply.json(None),
    "an ordinary vLLM": Reply.json({"choices": [{"text": "x"}], "kv_transfer_params": None}),
    "a malformed greeting": Reply.params({"hello": {"engine": 7}}),
    "greeting of wrong type": Reply.params([[[]]]),
    "not found": Reply.json({"error": "not found"}, 404),
    "broken": Reply(500, b"\xff\xfe"),
    "silent": Reply(0, b""),
}
FAILED_DISPATCHES = {
    "bad request": Reply.json({"error": {"message": "no"}}, 400),
    "unauthorised": Reply.json({"error": "who are you"}, 401),
    "broken": Reply(500, b"\x00\xff"),
    "not JSON": Reply(200, b"{{{"),
    "JSON list": Reply.json([1, 2]),
    "no reply": Reply.json({"choices": [], "kv_transfer_params": {}}),
    "reply of wrong type": Reply.params({"pages": "many"}),
    "no pages": Reply.params({"pages": 0}),
    "an error": Reply.params({"error": "out of pages"}),
    "closed": Reply(0, b""),
}


@pytest.fixture
def fake(both_servers: list[Server]) -> Iterator[FakePrefiller]:
    with fake_prefiller(fake_port(), both_servers[0].url) as fake:
        yield fake


def test_wrong_greetings(
    fake: FakePrefiller, both_servers: list[Server], random_reference: Reference, score: Score
) -> None:
    """It is never used; the other prefiller of the pool is, whatever the router wished."""
    decoder = both_servers[1]
    fake.on_hello = fake.on_dispatch = Reply(0, b"")
    part(fake, decoder)
    since, num_dispatches = Since(decoder), fake.num_dispatches
    for kind, hello in WRONG_HELLOS.items():
        fake.on_hello, seen = hello, fake.num_hellos
        until(lambda seen=seen: fake.num_hellos > seen + 2, 30, f"greeted twice: {kind}")
    answer = ask(decoder.url, RANDOM[SMALL], kv_transfer_params={"prefiller": fake.url}, cache_salt=fresh_salt())
    score.compare(SMALL, answer, random_reference.answers[SMALL])
    assert fake.num_dispatches == num_dispatches
    assert since("dispatched", "released", "failed") == [1, 1, 0]
    score.check()


@pytest.mark.parametrize("kind", FAILED_DISPATCHES)
def test_refused_dispatch_is_prefilled_locally(
    fake: FakePrefiller, both_servers: list[Server], random_reference: Reference, score: Score, kind: str
) -> None:
    decoder = both_servers[1]
    greet(fake, decoder)
    since = Since(decoder)
    fake.on_dispatch = FAILED_DISPATCHES[kind]
    answer = ask(decoder.url, RANDOM[SMALL], kv_transfer_params={"prefiller": fake.url}, cache_salt=fresh_salt())
    score.compare(SMALL, answer, random_reference.answers[SMALL])
    assert fake.num_dispatches == 1
    assert since("dispatched", "released", "failed") == [1, 0, 1]
    assert answer.elapsed_s < SLACK_S
    wait_quiet(decoder)
    score.check()


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_prefiller_is_passed_over(
    fake: FakePrefiller, both_servers: list[Server], random_reference: Reference, score: Score, status: int
) -> None:
    decoder = both_servers[1]
    greet(fake, decoder)
    since = Since(decoder)
    fake.on_dispatch = Reply(status, b"")
    answer = ask(decoder.url, RANDOM[SMALL], kv_transfer_params={"prefiller": fake.url}, cache_salt=fresh_salt())
    score.compare(SMALL, answer, random_reference.answers[SMALL])
    assert fake.num_dispatches == 1
    assert since("dispatched", "released", "failed") == [1, 1, 0]
    score.check()


def test_pages_that_were_promised_and_never_come(
    fake: FakePrefiller, both_servers: list[Server], random_reference: Reference, score: Score
) -> None:
    decoder = both_servers[1]
    greet(fake, decoder)
    since = Since(decoder)
    fake.on_dispatch = Reply.params({"pages": 5})
    answer = ask(decoder.url, RANDOM[SMALL], kv_transfer_params={"prefiller": fake.url}, cache_salt=fresh_salt())
    score.compare(SMALL, answer, random_reference.answers[SMALL])
    assert since("released", "failed") == [0, 1]
    assert 3 <= answer.elapsed_s < 3 + SLACK_S  # settle_s
    wait_quiet(decoder)
    score.check()


def test_failure_is_an_error_where_the_operator_wants_one(fake: FakePrefiller, both_servers: list[Server]) -> None:
    decoder = both_servers[0]
    greet(fake, decoder)
    fake.on_dispatch = FAILED_DISPATCHES["bad request"]
    more = {"kv_transfer_params": {"prefiller": fake.url}, "cache_salt": fresh_salt()}
    status, answer = post(decoder.url, body_of(RANDOM[SMALL], **more))
    assert status == 500, answer
    wait_quiet(decoder)


def test_writes_that_fail_or_never_end(faulty_servers: list[Server], random_reference: Reference, score: Score) -> None:
    """The first write of this prefiller fails, all later ones hang."""
    _, _, stuck, decoder = faulty_servers
    for limit_s in (SLACK_S, 3 + SLACK_S, 3 + SLACK_S):  # settle_s when nothing says that it failed
        since = Since(decoder)
        pool = {"prefiller": stuck.url}
        answer = ask(decoder.url, RANDOM[SMALL], kv_transfer_params=pool, cache_salt=fresh_salt())
        score.compare(SMALL, answer, random_reference.answers[SMALL])
        assert since("released", "failed") == [0, 1]
        assert answer.elapsed_s < limit_s
    wait_quiet(decoder, stuck, deadline_s=40)
    score.check()


def test_writes_that_get_lost(faulty_servers: list[Server], random_reference: Reference, score: Score) -> None:
    _, checked, _, decoder = faulty_servers
    since = Since(decoder)
    pool = {"prefiller": checked.url}
    answer = ask(decoder.url, RANDOM[SMALL], kv_transfer_params=pool, cache_salt=fresh_salt())
    score.compare(SMALL, answer, random_reference.answers[SMALL])
    assert since("released", "failed") == [0, 1]
    assert answer.elapsed_s < 3 + SLACK_S  # settle_s
    wait_quiet(decoder, checked, deadline_s=40)
    score.check()


def test_a_prefiller_that_stands_still(faulty_servers: list[Server], random_reference: Reference, score: Score) -> None:
    """SIGSTOP: its connections stay open and nothing answers; the request's deadline is what ends the wait.

    It wakes when the decoder has long taken its pages back, and must not write into them any more (law 1).
    """
    wrong, *_, decoder = faulty_servers
    since, written = Since(decoder), Since(wrong)
    os.killpg(wrong.process.pid, signal.SIGSTOP)
    try:
        pool = {"prefiller": wrong.url}
        answer = ask(decoder.url, RANDOM[SMALL], kv_transfer_params=pool, cache_salt=fresh_salt())
        score.compare(SMALL, answer, random_reference.answers[SMALL])
        assert since("released", "failed") == [0, 1]
        assert 15 <= answer.elapsed_s < 15 + SLACK_S  # request_deadline_s
        wait_quiet(decoder, deadline_s=40)
    finally:
        os.killpg(wrong.process.pid, signal.SIGCONT)
    wait_quiet(wrong, decoder, deadline_s=40)
    assert written("pages_written") == [0]
    score.check()
