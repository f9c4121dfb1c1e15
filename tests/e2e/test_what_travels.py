"""What a prefill depends on travels with the dispatch, and nothing else does."""

from functools import partial

import pytest
from server_tier.ask import Score, ask, at_once, body_of, post
from server_tier.fake_prefiller import FakePrefiller, fake_prefiller, greet
from server_tier.probe import Since, wait_quiet
from server_tier.prompts import RANDOM, names
from server_tier.reference import Reference
from server_tier.stage import ADAPTER, fake_port

from vllm_pd_connector.testing.servers import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


def test_an_adapter_is_used_on_the_prefiller(
    both_servers: list[Server], random_reference: Reference, score: Score
) -> None:
    """The third server has no prefiller: it is the reference. Pages of the base model are no use to the adapter."""
    decoder, prefiller, ordinary = both_servers
    since = Since(decoder)
    kinds = names("small")
    pool = {"prefiller": prefiller.url}
    for name in kinds:
        score.compare(name, ask(decoder.url, RANDOM[name], kv_transfer_params=pool), random_reference.answers[name])
    answers = at_once([partial(ask, ordinary.url, RANDOM[name], model=ADAPTER) for name in kinds])
    for name, wanted in zip(kinds, answers, strict=True):
        assert wanted.ids != random_reference.answers[name].ids
        score.compare(name, ask(decoder.url, RANDOM[name], model=ADAPTER, kv_transfer_params=pool), wanted)
    assert since("released", "failed") == [2 * len(kinds), 0]
    wait_quiet(decoder, prefiller)
    score.check()


def test_the_dispatch_says_what_it_must_and_no_more(both_servers: list[Server]) -> None:
    prompt = RANDOM[names("small")[1]]
    decoder = both_servers[1]
    with fake_prefiller(fake_port(), both_servers[0].url) as fake:
        greet(fake, decoder)
        body = _ask_for_much(prompt, fake)
        status, _ = post(decoder.url, body)
    assert status == 200
    sent = fake.last_dispatch
    assert sent.pop("kv_transfer_params").keys() == {"pd_reservation"}
    assert sent.pop("request_id").startswith("pd-")
    assert sent == {
        "model": ADAPTER,
        "prompt": prompt[:-1],
        "max_tokens": 1,
        "temperature": 0.0,
        "add_special_tokens": False,
        "cache_salt": "tenant",
        "priority": 7,
    }


def _ask_for_much(prompt: list[int], fake: FakePrefiller) -> dict[str, object]:
    """A request with parameters of every kind."""
    return body_of(
        prompt,
        model=ADAPTER,
        priority=7,
        cache_salt="tenant",
        kv_transfer_params={"prefiller": fake.url},
        n=1,
        seed=5,
        min_tokens=3,
        stop=["never"],
        presence_penalty=0.5,
        logit_bias={"7": 1.0},
        user="somebody",
    )
