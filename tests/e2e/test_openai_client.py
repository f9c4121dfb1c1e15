"""The `openai` client as it is, against a decoder: every answer is the one an ordinary server gives."""

import pytest
from server_tier.chats import CASES, LONG_TEXT, client_of, model_of, user
from server_tier.fixtures import Pair
from server_tier.probe import Since, wait_quiet
from server_tier.reference import Reference

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

NUM_DISPATCHES = {"two_samples": 2}
"""Requests that a case makes of the prefiller, where it is not one."""


@pytest.mark.parametrize("name", CASES)
def test_same_answer_as_an_ordinary_server(smollm_pair: Pair, smollm_reference: Reference, name: str) -> None:
    since = Since(smollm_pair.decoder)
    client = client_of(smollm_pair.decoder.url)
    assert CASES[name](client, model_of(client)) == smollm_reference.chats[name]
    dispatched, released, failed = since("dispatched", "released", "failed")
    # Prompts that begin alike leave the decoder less to fetch, but never nothing.
    assert (dispatched, released, failed) == (NUM_DISPATCHES.get(name, 1),) * 2 + (0,)
    wait_quiet(smollm_pair.decoder, smollm_pair.prefiller)


def test_a_stream_is_cancelled_in_the_middle(smollm_pair: Pair, smollm_reference: Reference) -> None:
    client = client_of(smollm_pair.decoder.url)
    model = model_of(client)
    stream = client.chat.completions.create(
        model=model,
        messages=user(LONG_TEXT + "Tell a long story."),
        max_tokens=400,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for number, _ in enumerate(stream):
        if number == 3:
            stream.close()
            break
    wait_quiet(smollm_pair.decoder, smollm_pair.prefiller)
    assert CASES["json_schema"](client, model) == smollm_reference.chats["json_schema"]


def test_cached_tokens_are_those_of_the_decoder(smollm_pair: Pair) -> None:
    """Tokens a prefiller computed were not cached; a second time they are, but for the last page."""
    client = client_of(smollm_pair.decoder.url)
    model = model_of(client)
    since = Since(smollm_pair.decoder)

    def cached_tokens(salt: str) -> tuple[int, int]:
        usage = client.completions.create(
            model=model, prompt=LONG_TEXT, max_tokens=4, temperature=0, extra_body={"cache_salt": salt}
        ).usage
        assert usage is not None
        details = usage.prompt_tokens_details
        return usage.prompt_tokens, (details.cached_tokens or 0) if details else 0

    num_tokens, first = cached_tokens("cached")
    assert (first, since("released")) == (0, [1])
    _, second = cached_tokens("cached")
    assert second == (num_tokens - 1) // 32 * 32
