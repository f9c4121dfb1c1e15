"""Asks an OpenAI-style server and keeps everything that can be compared: token ids, log-probabilities, times."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm_pd_connector.demo.prompts import Question
from vllm_pd_connector.errors import PDConnectorError

TIMEOUT_S = 120.0
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
LOGPROBS: dict[str, dict[str, Any]] = {"completion": {"logprobs": 2}, "chat": {"logprobs": True, "top_logprobs": 2}}


class AskFailed(PDConnectorError):
    """A server refused a request of the demo or broke off."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came back.

    Attributes:
        request_id: the server's.
        top: for each token the two likeliest texts with their log-probabilities.
        sent_ns: this host's monotonic clock when the request was sent.
        first_ns: when the first token arrived.
    """

    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)
    prompt_tokens: int = 0
    sent_ns: int = 0
    first_ns: int = 0

    @property
    def first_token_s(self) -> float:
        return (self.first_ns - self.sent_ns) / 1e9


def ask(url: str, model: str, question: Question, on_text: Callable[[str], None] = lambda _text: None) -> Answer:
    """One streamed, greedy request.

    Raises:
        AskFailed: anything but a complete answer.
    """
    body = {
        "model": model,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **LOGPROBS[question.kind],
        **question.body,
    }
    request = urllib.request.Request(
        url + PATHS[question.kind], json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = Answer(sent_ns=time.monotonic_ns())
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            for event in _events(response):
                _take(answer, event, on_text)
    except urllib.error.HTTPError as error:
        raise AskFailed(f"{url}: HTTP {error.code}: {error.read().decode(errors='replace')[:500]}") from None
    except OSError as error:
        raise AskFailed(f"{url}: {error}") from None
    if not answer.token_ids:
        raise AskFailed(f"{url}: the answer to {question.title!r} holds no token")
    return answer


def _events(response: Any) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.strip().removeprefix(b"data: ")
        if not data:
            continue
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise AskFailed(f"the answer broke off: {event['error']}")
        yield event


def _take(answer: Answer, event: dict[str, Any], on_text: Callable[[str], None]) -> None:
    answer.request_id = answer.request_id or event.get("id", "")
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or []
        if ids and not answer.first_ns:
            answer.first_ns = time.monotonic_ns()
        answer.token_ids += ids
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        answer.text += text
        on_text(text)
        _take_logprobs(answer, choice.get("logprobs") or {})


def _take_logprobs(answer: Answer, logprobs: dict[str, Any]) -> None:
    if content := logprobs.get("content"):  # chat
        for token in content:
            answer.logprobs.append(token["logprob"])
            answer.top.append({other["token"]: other["logprob"] for other in token["top_logprobs"]})
    elif logprobs.get("token_logprobs"):  # completion
        answer.logprobs += logprobs["token_logprobs"]
        answer.top += logprobs["top_logprobs"]
