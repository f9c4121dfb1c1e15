"""Every row of the table of shapes: tokens and logprobs of one ordinary server, and bytes that are the prefiller's.

Each row prints what it compared and what it moved. vLLM 0.32's MLA on a CPU is not exact: in float32 the logprobs of
one ordinary server differ by 0.2 to 1.5 between a prefill and a decode step of the same tokens, and between one rank
and two. What can be compared all the same is exact: the model has one layer, so that its KV comes from embeddings alone
and is the same on any number of ranks; prompts are continued by the first token of the reference's answer, which it has
computed in a decode step, as a decoder does; the reference has as many ranks as the decoder; and prompts are asked one
by one, since an ordinary server answers four at once otherwise than one by one.
"""

from dataclasses import replace
from functools import partial

import pytest
from server_tier.ask import Answer, Score, ask, at_once, fresh_salt, until
from server_tier.fixtures import FLOAT32_TIE, FLOAT32_TOLERANCE, SUMMARY, note_score
from server_tier.probe import Since, failures, wait_quiet
from server_tier.prompts import RANDOM, names
from server_tier.reference import Reference
from server_tier.shape_sets import LLAMA, ROWS, Row
from server_tier.stage import Stage

from vllm_pd_connector.testing.servers import Server

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(900)]


MAX_TOKENS = 16


def question(row: Row, answers: dict[str, Answer], name: str) -> tuple[list[int], Answer]:
    """A prompt, and the answer to it."""
    prompt, answer = RANDOM[name], answers[name]
    first = 1 if row.is_continued else 0
    stop = first + MAX_TOKENS
    return [*prompt, *answer.ids[:first]], replace(answer, ids=answer.ids[first:stop], top=answer.top[first:stop])


def knows(decoder: Server, number: int) -> None:
    """Wait until a decoder has greeted so many prefillers."""
    until(lambda: decoder.count_log("event=prefiller_greeted") >= number, 60, f"{decoder.name} greeted {number}")


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_shapes(request: pytest.FixtureRequest, stage: Stage, references: dict[str, Reference], row: Row) -> None:
    servers = stage.use(row.servers)
    decoder, prefiller = servers[row.decoder], servers[row.prefiller]
    knows(decoder, row.greetings)
    score = Score(FLOAT32_TIE, FLOAT32_TOLERANCE)
    arrived, written = Since(decoder), Since(prefiller)
    asked = {name: question(row, references[row.reference].answers, name) for name in (*names("shape"), *names("four"))}
    call = partial(ask, decoder.url, kv_transfer_params={"prefiller": prefiller.url}, max_tokens=MAX_TOKENS)
    for name in names("shape"):
        prompt, want = asked[name]
        score.compare(name, call(prompt, cache_salt=fresh_salt()), want)
    together = [partial(call, asked[name][0], cache_salt=fresh_salt()) for name in names("four")]
    got = [one() for one in together] if row.is_continued else at_once(together)
    for name, answer in zip(names("four"), got, strict=True):
        score.compare(name, answer, asked[name][1])
    wait_quiet(*servers)
    moved = [prompt for prompt, _ in asked.values()]
    computed = sum(row.cache.bytes_for(len(p), granule=row.granule, copies=row.copies) for p in moved)
    bytes_moved, pages, descriptors = written("bytes_written", "pages_written", "descriptors_written")
    SUMMARY.append(
        f"{request.node.callspec.id}: {score}; {bytes_moved:,} B moved, {computed:,} B computed; "
        f"{descriptors / max(1, pages):.3g} descriptors for each of {pages:,} pages"
    )
    note_score(score)
    assert arrived("dispatched", "released", "failed") == [len(moved), len(moved), 0], failures(decoder)
    seen, verified, mismatched = arrived("pages_arrived", "pages_verified", "pages_mismatched")
    assert (seen, verified, mismatched) == (pages, 0 if row.is_native else pages, 0)
    assert prefiller.count_log("event=native_posting_on") == row.is_native
    if row.has_second_runner:
        assert all(server.count_log("Using V2 Model Runner") for server in servers)
        assert prefiller.metrics().get("layers_unannounced", 0) == 0
    assert bytes_moved == computed
    score.check()


def test_data_parallel_decoder(dp_servers: list[Server], random_reference: Reference, score: Score) -> None:
    """Each rank is an engine of its own: it greets, dispatches, and gets its pages itself."""
    prefiller, decoder = dp_servers
    knows(decoder, 2)
    written = Since(prefiller)
    for rank in ("0", "1"):
        for prompt in names("shape"):
            headers = {"X-data-parallel-rank": rank}
            answer = ask(decoder.url, RANDOM[prompt], cache_salt=fresh_salt(), headers=headers)
            score.compare(f"{prompt} on rank {rank}", answer, random_reference.answers[prompt])
    lines = [line for line in decoder.log_text().splitlines() if "event=prefiller_greeted" in line]
    assert any("DP0" in line for line in lines)
    assert any("DP1" in line for line in lines)
    wait_quiet(prefiller)
    moved = [RANDOM[prompt] for prompt in names("shape")] * 2
    computed = sum(LLAMA.bytes_for(len(prompt), granule=32, copies=1) for prompt in moved)
    bytes_moved, pages, descriptors = written("bytes_written", "pages_written", "descriptors_written")
    SUMMARY.append(
        f"DP 2 decoder: {score}; {bytes_moved:,} B moved, {computed:,} B computed; "
        f"{descriptors / pages:.3g} descriptors for each of {pages:,} pages"
    )
    assert bytes_moved == computed
    until(lambda: decoder.metrics().get("released", 0) >= len(moved), 10, "both ranks publish what they released")
    assert decoder.metrics()["pages_mismatched"] == 0
    score.check()
