"""Clients of a fault run: prompts whose right answers are known, asked side by side, each with a limit on its wait."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from server_tier.ask import Answer, Score, ask, body_of, fresh_salt
from server_tier.fixtures import FLOAT32_TIE, FLOAT32_TOLERANCE
from server_tier.prompts import tokens

Want = dict[str, Answer]
"""The right answer to each prompt, by name."""

MAX_TOKENS = 8
NUM_SMALL, SMALL_TOKENS = 50, (40, 400)
NUM_LONG, LONG_TOKENS = 6, 3000

PROMPTS = {
    **{f"small-{i}": tokens(random.Random(i).randrange(*SMALL_TOKENS), f"fault small {i}") for i in range(NUM_SMALL)},
    **{f"long-{i}": tokens(LONG_TOKENS, f"fault long {i}") for i in range(NUM_LONG)},
}
SMALL = [name for name in PROMPTS if name.startswith("small")]
LONG = [name for name in PROMPTS if name.startswith("long")]


@dataclass(slots=True)
class Tally:
    """What clients got. `errors`: HTTP errors and broken connections, as text."""

    answers: int = 0
    errors: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    score: Score = field(default_factory=lambda: Score(FLOAT32_TIE, FLOAT32_TOLERANCE))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def wrong(self) -> list[str]:
        return self.score.complaints

    def ask(
        self, url: str, name: str, want: Answer, limit_s: float, salt: str = "", max_tokens: int = MAX_TOKENS
    ) -> None:
        """One client: it waits `limit_s` and not longer. Clients with the same `salt` share pages.

        Of a longer answer than the reference's, what the reference has is compared.
        """
        started = time.monotonic()
        try:
            got = ask(url, PROMPTS[name], max_tokens=max_tokens, cache_salt=salt or fresh_salt(), timeout_s=limit_s)
            assert got.body["choices"][0]["finish_reason"] != "abort", "vLLM broke the answer off"
            got = replace(got, ids=got.ids[:MAX_TOKENS], top=got.top[:MAX_TOKENS])
        except (AssertionError, OSError, http.client.HTTPException) as error:
            with self._lock:
                self.errors.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
                self.longest_s = max(self.longest_s, time.monotonic() - started)
            return
        with self._lock:
            self.answers += 1
            self.longest_s = max(self.longest_s, got.elapsed_s)
            self.score.compare(name, got, want)


class Crowd:
    """Clients that ask side by side until they are done.

    Args:
        url: whom they ask.
        names: prompts, one client each.
        want: the right answers.
        limit_s: the longest any of them waits.
        salt: crowds with the same one share pages; empty: nobody does.
        max_tokens: of each answer.
    """

    def __init__(
        self,
        url: str,
        names: Sequence[str],
        want: dict[str, Answer],
        limit_s: float,
        salt: str = "",
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.tally = Tally()
        self._pool = ThreadPoolExecutor(max_workers=len(names))
        for name in names:
            self._pool.submit(self.tally.ask, url, name, want[name], limit_s, salt, max_tokens)

    def join(self) -> Tally:
        self._pool.shutdown(wait=True)
        return self.tally


class Load:
    """Small prompts without a break, in a few threads, until it is stopped."""

    def __init__(self, url: str, want: dict[str, Answer], limit_s: float, width: int = 3) -> None:
        self.tally = Tally()
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(url, want, limit_s, i)) for i in range(width)]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, want: dict[str, Answer], limit_s: float, seed: int) -> None:
        chance = random.Random(seed)
        while not self._is_over.is_set():
            name = chance.choice(SMALL)
            before = len(self.tally.errors)
            self.tally.ask(url, name, want[name], limit_s)
            if len(self.tally.errors) > before:
                self._is_over.wait(0.5)  # nobody may be listening there

    def stop(self) -> Tally:
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        return self.tally


def leave(url: str, name: str, after_s: float, *, stream: bool) -> bool:
    """Ask and close the connection after a time; whether the answer had come by then."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = body_of(PROMPTS[name], max_tokens=60, stream=stream, cache_salt=fresh_salt())
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        assert connection.sock is not None
        connection.sock.settimeout(max(after_s, 1e-3))
        connection.getresponse().read()
        return True
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
