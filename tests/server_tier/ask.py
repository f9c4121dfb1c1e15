"""One completion request, its answer, and the comparison of two answers. Standard library only."""

from __future__ import annotations

import itertools
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

TIMEOUT_S = 150.0
POLL_S = 0.1
TOP_LOGPROBS = 5

_salts = itertools.count()


@dataclass(frozen=True, slots=True)
class Answer:
    """`top[i]` holds the most likely token ids at output position i with their logprobs."""

    ids: tuple[int, ...]
    top: tuple[dict[int, float], ...]
    elapsed_s: float
    body: dict[str, Any]


@dataclass(slots=True)
class Score:
    """What one test compared. `near_ties`: answers that left the reference where its own two best tokens were closer
    than `tie_gap`; they are compared up to there and counted, never passed over."""

    tie_gap: float
    tolerance: float
    tokens: int = 0
    equal: int = 0
    near_ties: int = 0
    skipped: int = 0
    largest_difference: float = 0.0
    complaints: list[str] = field(default_factory=list)

    def compare(self, name: str, got: Answer, want: Answer) -> None:
        """Count one answer against the reference's."""
        first = next((i for i, (a, b) in enumerate(zip(got.ids, want.ids, strict=False)) if a != b), None)
        stop = len(want.ids) if first is None else first
        if len(got.ids) != len(want.ids):
            self.complaints.append(f"{name}: {len(got.ids)} tokens, the reference has {len(want.ids)}")
        if first is not None:
            best = sorted(want.top[first].values(), reverse=True)
            gap = best[0] - best[1]
            if gap < self.tie_gap:
                self.near_ties += 1
                self.skipped += len(want.ids) - stop
            else:
                self.complaints.append(
                    f"{name}: token {first} is {got.ids[first]}, not {want.ids[first]} (gap {gap:.3g})"
                )
                stop = len(want.ids)
        self.tokens += stop
        self.equal += sum(a == b for a, b in zip(got.ids[:stop], want.ids[:stop], strict=False))
        difference = logprob_difference(got, want, stop if first is None else first)
        self.largest_difference = max(self.largest_difference, difference)
        if difference > self.tolerance:
            self.complaints.append(f"{name}: logprobs differ by {difference:.3g}")

    def check(self) -> None:
        """Raises:
        AssertionError: an answer differed, or nothing was compared.
        """
        assert not self.complaints, "; ".join(self.complaints)
        assert self.tokens > 0

    def __str__(self) -> str:
        ties = f", {self.near_ties} near ties ({self.skipped} tokens after them not compared)" if self.near_ties else ""
        return (
            f"{self.tokens} tokens compared, {self.equal} equal{ties}; "
            f"largest logprob difference {self.largest_difference:.2g}"
        )


def logprob_difference(got: Answer, want: Answer, num_positions: int) -> float:
    """Largest difference over tokens that both answers list, at the first positions."""
    pairs = zip(got.top[:num_positions], want.top[:num_positions], strict=False)
    return max((abs(a[t] - b[t]) for a, b in pairs for t in a.keys() & b.keys()), default=0.0)


def fresh_salt() -> str:
    """A `cache_salt` no request has had: nothing of the prompt is found in a prefix cache."""
    return f"salt-{time.monotonic_ns()}-{next(_salts)}"


class Waits:
    """The longest that any client waited in this session."""

    longest_s: float = 0.0
    longest_name: str = "none"

    @classmethod
    def forget(cls) -> None:
        cls.longest_s, cls.longest_name = 0.0, "none"

    @classmethod
    def note(cls, name: str, elapsed_s: float) -> None:
        if elapsed_s > cls.longest_s:
            cls.longest_s, cls.longest_name = elapsed_s, name


def post(
    url: str, body: dict[str, Any], timeout_s: float = TIMEOUT_S, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    """HTTP status and decoded body of `POST /v1/completions`.

    Raises:
        OSError: no HTTP answer came.
    """
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json", **(headers or {})}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def body_of(prompt: Sequence[int], *, max_tokens: int = 16, **more: Any) -> dict[str, Any]:
    """A greedy completion request that says everything a comparison needs."""
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": TOP_LOGPROBS,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        **more,
    }


def ask(
    url: str,
    prompt: Sequence[int],
    *,
    timeout_s: float = TIMEOUT_S,
    headers: dict[str, str] | None = None,
    **more: Any,
) -> Answer:
    """One answer.

    Raises:
        AssertionError: the server answered with an error.
        OSError: it did not answer.
    """
    started = time.monotonic()
    status, answer = post(url, body_of(prompt, **more), timeout_s, headers)
    elapsed = time.monotonic() - started
    Waits.note(f"{len(prompt)} tokens", elapsed)
    assert status == 200, f"HTTP {status}: {answer}"
    choice = answer["choices"][0]
    top = tuple(
        {int(token.removeprefix("token_id:")): value for token, value in position.items()}
        for position in choice["logprobs"]["top_logprobs"]
    )
    return Answer(tuple(choice["token_ids"]), top, elapsed, answer)


def at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Results of calls that run side by side, each in a thread; the first exception is raised."""
    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def until(condition: Callable[[], bool], deadline_s: float, what: str) -> float:
    """Seconds until `condition` held.

    Raises:
        AssertionError: it did not within `deadline_s`.
    """
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < deadline_s, f"not within {deadline_s:g} s: {what}"
        time.sleep(POLL_S)
    return time.monotonic() - started
