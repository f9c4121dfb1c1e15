"""A split server gives the tokens and logprobs of an ordinary one, and its pages are the prefiller's, byte by byte."""

from functools import partial

import pytest
from server_tier.ask import Score, ask, at_once
from server_tier.fixtures import SUMMARY, Pair
from server_tier.probe import Since, vllm_metric, wait_quiet
from server_tier.prompts import BFLOAT16, RANDOM, SMOLLM, names
from server_tier.reference import Reference

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

BLOCK = 32


def remote_tokens(prompt: list[int], *, is_cached: bool = False) -> int:
    """What a decoder leaves to the prefiller; `is_cached`: its own prefix cache holds the prompt's whole pages."""
    most = len(prompt) - 1
    return most % BLOCK if is_cached else most


def check_transfers(pair: Pair, since: Since, num_remote: int) -> None:
    """Every request that should have been remote was, every page is the prefiller's, nothing is kept."""
    wait_quiet(pair.decoder, pair.prefiller)
    dispatched, released, failed = since("dispatched", "released", "failed")
    assert (dispatched, released, failed) == (num_remote, num_remote, 0)
    arrived, verified, mismatched = since("pages_arrived", "pages_verified", "pages_mismatched")
    assert (verified, mismatched) == (arrived, 0)
    assert arrived > 0 or not num_remote
    assert since("notes_late", "notes_refused", "notes_duplicate") == [0, 0, 0]


@pytest.mark.parametrize("is_cached", [False, True], ids=["first", "again"])
def test_each_prompt_alone(main_pair: Pair, random_reference: Reference, score: Score, is_cached: bool) -> None:
    since = Since(main_pair.decoder)
    for name in names("alone"):
        score.compare(name, ask(main_pair.decoder.url, RANDOM[name]), random_reference.answers[name])
    remote = sum(remote_tokens(RANDOM[name], is_cached=is_cached) > 0 for name in names("alone"))
    check_transfers(main_pair, since, remote)
    score.check()


def test_sixteen_at_once(main_pair: Pair, random_reference: Reference, score: Score) -> None:
    since = Since(main_pair.decoder)
    kinds = names("once")
    answers = at_once([partial(ask, main_pair.decoder.url, RANDOM[name]) for name in kinds])
    for name, answer in zip(kinds, answers, strict=True):
        score.compare(name, answer, random_reference.answers[name])
    check_transfers(main_pair, since, sum(remote_tokens(RANDOM[name]) > 0 for name in kinds))
    score.check()


def test_shared_prefixes(main_pair: Pair, random_reference: Reference, score: Score) -> None:
    """After the first prompt the decoder holds the prefix itself: only the tails are remote."""
    since = Since(main_pair.decoder)
    for name in names("prefix"):
        score.compare(name, ask(main_pair.decoder.url, RANDOM[name]), random_reference.answers[name])
    # 512 tokens of prefix are held by then; a tail of one token leaves nothing but the last token.
    check_transfers(main_pair, since, 4)
    score.check()


def test_prefix_hits_on_the_prefiller(main_pair: Pair, random_reference: Reference, score: Score) -> None:
    """Pages the prefiller has in its cache are sent too, although it does not compute them."""
    since = Since(main_pair.decoder)
    for name in names("warm"):
        ask(main_pair.prefiller.url, RANDOM[name])
        before = vllm_metric(main_pair.prefiller, "vllm:prefix_cache_hits_total")
        score.compare(name, ask(main_pair.decoder.url, RANDOM[name]), random_reference.answers[name])
        assert (
            vllm_metric(main_pair.prefiller, "vllm:prefix_cache_hits_total") - before >= len(RANDOM[name]) - 2 * BLOCK
        )
    check_transfers(main_pair, since, len(names("warm")))
    score.check()


def test_tensor_parallel_2(tp2_pair: Pair, random_reference: Reference, score: Score) -> None:
    since = Since(tp2_pair.decoder)
    for name in names("alone"):
        score.compare(name, ask(tp2_pair.decoder.url, RANDOM[name]), random_reference.answers[name])
    kinds = names("once")
    answers = at_once([partial(ask, tp2_pair.decoder.url, RANDOM[name]) for name in kinds])
    for name, answer in zip(kinds, answers, strict=True):
        score.compare(name, answer, random_reference.answers[name])
    asked = [*names("alone"), *kinds]
    check_transfers(tp2_pair, since, sum(remote_tokens(RANDOM[name]) > 0 for name in asked))
    score.check()


def test_smollm2(smollm_pair: Pair, smollm_reference: Reference, score: Score) -> None:
    """In float32, where rounding leaves no room for luck."""
    since = Since(smollm_pair.decoder)
    for name in names("alone", SMOLLM):
        score.compare(name, ask(smollm_pair.decoder.url, SMOLLM[name]), smollm_reference.answers[name])
    kinds = names("once", SMOLLM)
    answers = at_once([partial(ask, smollm_pair.decoder.url, SMOLLM[name]) for name in kinds])
    for name, answer in zip(kinds, answers, strict=True):
        score.compare(name, answer, smollm_reference.answers[name])
    asked = [*names("alone", SMOLLM), *kinds]
    check_transfers(smollm_pair, since, sum(remote_tokens(SMOLLM[name]) > 0 for name in asked))
    score.check()


def test_smollm2_bf16(bf16_pair: Pair, bf16_reference: Reference, bf16_score: Score) -> None:
    """As the model is meant to run."""
    since = Since(bf16_pair.decoder)
    itself = Score(bf16_score.tie_gap, bf16_score.tolerance)
    for name, answer in bf16_reference.again.items():
        itself.compare(name, answer, bf16_reference.answers[name])
    SUMMARY.append(f"an ordinary server in bf16 against itself with prefix hits: {itself}")
    for name in names("alone", BFLOAT16):
        bf16_score.compare(name, ask(bf16_pair.decoder.url, BFLOAT16[name]), bf16_reference.answers[name])
    kinds = names("once", BFLOAT16)
    answers = at_once([partial(ask, bf16_pair.decoder.url, BFLOAT16[name]) for name in kinds])
    for name, answer in zip(kinds, answers, strict=True):
        bf16_score.compare(name, answer, bf16_reference.answers[name])
    check_transfers(bf16_pair, since, len(names("alone", BFLOAT16)) - 1 + len(kinds))
    bf16_score.check()
