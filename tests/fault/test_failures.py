"""Clients that leave and servers that die: the next answer is right, nothing is kept, and no client waits for long."""

import http.client
import json
import time
from functools import partial

import pytest
from server_tier.ask import Score, ask, at_once, body_of, fresh_salt, until
from server_tier.fixtures import SUMMARY, Pair
from server_tier.probe import Since, wait_quiet
from server_tier.prompts import RANDOM, names
from server_tier.reference import Reference
from server_tier.stage import Stage

from vllm_pd_connector.testing.servers import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

SMALL = names("small")[2]
LONG = names("long")
LONG_ANSWER_TOKENS = 300
PAGES_OF_A_STEP = 512 // 32 * 8
"""Tokens of a step, in pages, in all layers."""


def leave(server: Server, after_s: float, *, num_pieces: int = 0) -> None:
    """Ask for a long prompt's answer and close the connection, after a time or after some streamed pieces."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    body = body_of(RANDOM[LONG[0]], max_tokens=LONG_ANSWER_TOKENS, stream=bool(num_pieces), cache_salt=fresh_salt())
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    if num_pieces:
        response = connection.getresponse()
        for _ in range(2 * num_pieces):  # each piece is followed by an empty line
            assert response.readline()
    time.sleep(after_s)  # the moment is the point
    connection.close()


def check_next(pair: Pair, reference: Reference, score: Score) -> None:
    """The next request is prefilled remotely and answered rightly."""
    since = Since(pair.decoder)
    score.compare(SMALL, ask(pair.decoder.url, RANDOM[SMALL], cache_salt=fresh_salt()), reference.answers[SMALL])
    assert since("dispatched", "released") == [1, 1]


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.3, 0.8, 1.5])
def test_client_leaves_while_held(main_pair: Pair, random_reference: Reference, score: Score, after_s: float) -> None:
    leave(main_pair.decoder, after_s)
    wait_quiet(main_pair.decoder, main_pair.prefiller)
    check_next(main_pair, random_reference, score)
    score.check()


def test_many_clients_leave_at_once(main_pair: Pair, random_reference: Reference, score: Score) -> None:
    since = Since(main_pair.decoder)
    at_once([partial(leave, main_pair.decoder, 0.2 * number) for number in range(8)])
    wait_quiet(main_pair.decoder, main_pair.prefiller)
    dispatched, released, aborted, failed = since("dispatched", "released", "aborted", "failed")
    assert dispatched == released + aborted
    assert aborted >= 4
    assert failed == 0
    check_next(main_pair, random_reference, score)
    score.check()


@pytest.mark.parametrize("num_pieces", [1, 20])
def test_client_leaves_while_it_is_answered(
    main_pair: Pair, random_reference: Reference, score: Score, num_pieces: int
) -> None:
    leave(main_pair.decoder, 0, num_pieces=num_pieces)
    wait_quiet(main_pair.decoder, main_pair.prefiller)
    check_next(main_pair, random_reference, score)
    score.check()


def test_killed_prefiller_in_mid_prompt(
    main_pair: Pair, random_reference: Reference, score: Score, stage: Stage
) -> None:
    """Right answers from the decoder, which computes only what had not arrived; pages back after the quarantine.

    The restarted prefiller is used again.
    """
    prefiller, decoder = main_pair.prefiller, main_pair.decoder
    since, written = Since(decoder), Since(prefiller)

    def kill_in_mid_prompt() -> None:
        since.until("dispatched", len(LONG))
        written.until("pages_written", 3 * PAGES_OF_A_STEP)
        prefiller.kill()

    def ask_long(name: str) -> None:
        answer = ask(decoder.url, RANDOM[name], cache_salt=fresh_salt())
        score.compare(name, answer, random_reference.answers[name])
        waits.append(answer.elapsed_s)

    waits: list[float] = []
    at_once([kill_in_mid_prompt, *(partial(ask_long, name) for name in LONG)])
    assert max(waits) < 60
    quiet_after = wait_quiet(decoder)
    failed, lifted, expired, kept = since("failed", "fences_lifted", "fences_expired", "tokens_kept")
    assert failed > 0
    assert kept >= 512
    assert lifted + expired >= failed
    SUMMARY.append(
        f"prefiller killed: longest wait {max(waits):.1f} s for {len(LONG)} x 6000 tokens, {failed} failed "
        f"over to the decoder with {kept:.0f} tokens kept, pages back {quiet_after:.1f} s after the last answer"
    )

    # Nobody listens now.
    score.compare(SMALL, ask(decoder.url, RANDOM[SMALL], cache_salt=fresh_salt()), random_reference.answers[SMALL])

    greeted = "event=prefiller_greeted"
    greetings = decoder.count_log(greeted)
    again = stage.put_back(prefiller)
    until(lambda: decoder.count_log(greeted) > greetings, 30, "the restarted prefiller is greeted")
    check_next(Pair(again, decoder), random_reference, score)
    score.check()


def test_killed_decoder(main_pair: Pair, random_reference: Reference, score: Score) -> None:
    """Its prefiller stops writing, gives its own pages back and serves others."""
    prefiller, decoder = main_pair.prefiller, main_pair.decoder
    written = Since(prefiller)

    def kill_in_mid_prompt() -> None:
        written.until("pages_written", 1)
        decoder.kill()

    def ask_long(name: str) -> None:
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(decoder.url, RANDOM[name], cache_salt=fresh_salt())

    at_once([kill_in_mid_prompt, *(partial(ask_long, name) for name in LONG)])
    quiet_after = wait_quiet(prefiller, deadline_s=30)
    SUMMARY.append(f"decoder killed: its prefiller was quiet {quiet_after:.1f} s later")
    score.compare(SMALL, ask(prefiller.url, RANDOM[SMALL], cache_salt=fresh_salt()), random_reference.answers[SMALL])
    score.check()
