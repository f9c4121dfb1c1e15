"""The demo's judgement, its prompts, and how it reads timelines and metrics."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_pd_connector.demo import prompts
from vllm_pd_connector.demo.client import Answer
from vllm_pd_connector.demo.moments import NoTimelineFound, read_moments
from vllm_pd_connector.demo.timeline_figure import exposed_ms
from vllm_pd_connector.demo.verdict import TIE_NATS, compare
from vllm_pd_connector.telemetry.counters import parse_metrics

MS = 1_000_000


def answer(*tokens: int, top: dict[str, float] | None = None) -> Answer:
    return Answer(
        token_ids=list(tokens),
        logprobs=[-0.5] * len(tokens),
        top=[top or {"a": -0.1, "b": -3.0}] * len(tokens),
    )


def test_equal_tokens_are_the_same() -> None:
    verdict = compare(answer(1, 2, 3), answer(1, 2, 3))
    assert (verdict.kind, verdict.num_equal) == ("same", 3)


@pytest.mark.parametrize("other", [answer(1, 9, 3), answer(1, 2), answer(1, 2, 3, 4), answer()])
def test_other_tokens_are_different(other: Answer) -> None:
    assert compare(other, answer(1, 2, 3)).kind == "different"


def test_only_the_same_two_close_candidates_are_a_tie() -> None:
    close = {"a": -0.7, "b": -0.7 - TIE_NATS / 2}
    assert compare(answer(1, 9, top=close), answer(1, 2, top=close)).kind == "tie"
    assert compare(answer(1, 9, top=close), answer(1, 2)).kind == "different"
    assert compare(answer(1, 9, top={"a": -0.7, "c": -0.7}), answer(1, 2, top=close)).kind == "different"


def test_documents_share_no_beginning() -> None:
    questions = [prompts.warm_up(), prompts.long_document(), *prompts.timed_documents()]
    firsts = {question.body["messages"][0]["content"].split()[0] for question in questions}
    assert len(firsts) == len(questions)


def lines(*moments: dict[str, Any]) -> str:
    return "".join(json.dumps({"transfer": "t", **moment}) + "\n" for moment in moments)


def test_moments_are_read_relative_to_the_client(tmp_path: Path) -> None:
    (tmp_path / "decoder.jsonl").write_text(
        lines(
            {"moment": "reserved", "at_ns": 12 * MS, "request": "chatcmpl-7-x", "pages": 2},
            {"moment": "released", "at_ns": 30 * MS},
            {"moment": "reserved", "at_ns": 99 * MS, "request": "other", "pages": 9, "transfer": "u"},
        )
    )
    (tmp_path / "prefiller.jsonl").write_text(
        lines(
            {"moment": "chunk_scheduled", "at_ns": 15 * MS, "pages": 2, "computed": 64},
            {"moment": "write_posted", "at_ns": 21 * MS, "layers": [0, 1]},  # on file before what it follows
            {"moment": "layer_computed", "at_ns": 18 * MS, "layer": 0},
            {"moment": "layer_computed", "at_ns": 20 * MS, "layer": 1},
            {"moment": "write_done", "at_ns": 24 * MS, "layers": [0, 1], "bytes": 100},
        )
    )
    moments = read_moments(tmp_path, "chatcmpl-7", sent_ns=10 * MS, first_token_ns=40 * MS)
    assert [(bar.layer, bar.start, bar.end) for bar in moments.computed] == [(0, 5.0, 8.0), (1, 8.0, 10.0)]
    assert [(bar.layer, bar.start, bar.end) for bar in moments.written] == [(0, 11.0, 14.0), (1, 11.0, 14.0)]
    assert moments.chunks == [(5.0, 64)]
    assert (moments.pages, moments.num_layers, moments.bytes_written) == (2, 2, 100)
    assert [what for _, what in moments.marks] == ["sent", "reserved", "released", "first token"]
    assert exposed_ms(moments) == 4.0


def test_a_request_that_was_not_transferred_has_no_timeline(tmp_path: Path) -> None:
    with pytest.raises(NoTimelineFound, match="no reservation"):
        read_moments(tmp_path, "x", sent_ns=0, first_token_ns=0)


def test_metrics_are_summed_over_labels() -> None:
    page = """
# TYPE vllm:pd_bytes_written counter
vllm:pd_bytes_written_total{engine="0",model_name="a b"} 1.5e+06
vllm:pd_bytes_written_total{engine="1",model_name="a b"} 2.0
vllm:pd_bytes_written_created{engine="0"} 1.7e+09
vllm:pd_held_requests{engine="0"} 3.0
vllm:num_requests_running{engine="0"} 8.0
"""
    assert parse_metrics(page) == {"bytes_written": 1_500_002.0, "held_requests": 3.0}
