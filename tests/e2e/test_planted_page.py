"""The comparisons see a wrong page: without digests the answers differ, with digests the transfer is failed."""

import pytest
from server_tier.ask import Score, ask, fresh_salt
from server_tier.fixtures import FLOAT32_TIE, FLOAT32_TOLERANCE, SUMMARY
from server_tier.probe import Since, wait_quiet
from server_tier.prompts import RANDOM, names
from server_tier.reference import Reference

from vllm_pd_connector.testing.servers import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


def test_a_wrong_page_changes_the_answer(faulty_servers: list[Server], random_reference: Reference) -> None:
    wrong, *_, decoder = faulty_servers
    since = Since(decoder)
    kinds = names("small")
    seen, seen_in_tokens = 0, 0
    for name in kinds:
        score = Score(FLOAT32_TIE, FLOAT32_TOLERANCE)
        pool = {"prefiller": wrong.url}
        answer = ask(decoder.url, RANDOM[name], kv_transfer_params=pool, cache_salt=fresh_salt())
        score.compare(name, answer, random_reference.answers[name])
        seen += bool(score.complaints)
        seen_in_tokens += answer.ids != random_reference.answers[name].ids
    SUMMARY.append(f"planted wrong page: seen in {seen} of {len(kinds)} answers, {seen_in_tokens} by tokens alone")
    assert seen == len(kinds)
    assert since("released", "pages_mismatched") == [len(kinds), 0]
    wait_quiet(*faulty_servers)


def test_a_wrong_page_fails_a_verified_transfer(
    faulty_servers: list[Server], random_reference: Reference, score: Score
) -> None:
    _, checked, _, decoder = faulty_servers
    since = Since(decoder)
    name = names("small")[-1]
    pool = {"prefiller": checked.url}
    answer = ask(decoder.url, RANDOM[name], kv_transfer_params=pool, cache_salt=fresh_salt())
    score.compare(name, answer, random_reference.answers[name])
    dispatched, released, failed, mismatched = since("dispatched", "released", "failed", "pages_mismatched")
    assert (dispatched, released, failed) == (1, 0, 1)
    assert mismatched > 0
    assert "differs from the prefiller's" in decoder.log_text()
    wait_quiet(*faulty_servers)
    score.check()
