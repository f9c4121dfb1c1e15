"""Streamed completions with the time of every token, as a client sees them."""

from __future__ import annotations

import http.client
import json
import random
import time
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 120.0
PREFILL_ONLY = {  # what vLLM's example proxy sends to the prefilling server
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class RequestFailed(RuntimeError):
    """A server answered with an error, or with fewer tokens than were asked for."""


def random_prompt(num_tokens: int, *key: object) -> list[int]:
    """Token ids that no other key gives, so no prefix is ever cached; the same key gives the same ids."""
    rng = random.Random(repr((num_tokens, *key)))
    return [rng.randrange(10, 500) for _ in range(num_tokens)]


def stream(
    url: str,
    model: str,
    prompt: list[int],
    max_tokens: int,
    *,
    timeout_s: float = TIMEOUT_S,
    params: dict[str, Any] | None = None,
    into: list[float] | None = None,
) -> list[float]:
    """Monotonic times: the start of the request, then the arrival of each token.

    Args:
        params: `kv_transfer_params`.
        into: filled while the answer runs, for a caller in another thread.

    Raises:
        RequestFailed: the server refused, or ended early.
        OSError: it did not answer within `timeout_s`.
    """
    body = _body(model, prompt, max_tokens, params) | {"stream": True}
    data = json.dumps(body)
    times = into if into is not None else []
    times.append(time.monotonic())
    connection, response = _post(url, data, timeout_s)
    try:
        for line in response:
            if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                if b'"error"' in line[:20]:
                    raise RequestFailed(line.decode()[:300])
                times.append(time.monotonic())
    finally:
        connection.close()
    if len(times) - 1 < max_tokens:
        raise RequestFailed(f"{len(times) - 1} of {max_tokens} tokens from {url}")
    return times


def stream_in_two_steps(
    prefill_url: str, decode_url: str, model: str, prompt: list[int], max_tokens: int, *, timeout_s: float = TIMEOUT_S
) -> list[float]:
    """As `stream`, the way vLLM's example proxy does it: prefill on one server, then decode on the other."""
    start = time.monotonic()
    data = json.dumps(_body(model, prompt, 1, PREFILL_ONLY))
    connection, response = _post(prefill_url, data, timeout_s)
    try:
        answer = json.loads(response.read())
    finally:
        connection.close()
    params = answer.get("kv_transfer_params")
    if not params:
        raise RequestFailed(f"{prefill_url} returned no kv_transfer_params")
    times = stream(decode_url, model, prompt, max_tokens, timeout_s=timeout_s, params=params)
    return [start, *times[1:]]


def _body(model: str, prompt: list[int], max_tokens: int, params: dict[str, Any] | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return body | ({"kv_transfer_params": params} if params is not None else {})


def _post(url: str, data: str, timeout_s: float) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    connection.request("POST", "/v1/completions", data, {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        text = response.read().decode(errors="replace")[:300]
        connection.close()
        raise RequestFailed(f"HTTP {response.status} from {url}: {text}")
    return connection, response
