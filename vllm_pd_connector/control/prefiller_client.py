"""HTTP to prefillers: one long-lived session, vLLM's own completions endpoint, our messages in `kv_transfer_params`."""

import json
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from yarl import URL

from vllm_pd_connector.config import PDConfig
from vllm_pd_connector.control.addresses import PROBE_S
from vllm_pd_connector.errors import ConfigError, PeerLost, ProtocolError
from vllm_pd_connector.wire.messages import DispatchReply, Hello, HelloReply
from vllm_pd_connector.wire.transfer_params import HELLO, parse_reply, to_params
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

BUSY_STATUSES = frozenset({429, 503})
"""Answers that say the request was not taken: another prefiller may be tried without a fence.

In JSON, as vLLM's and the request guard's: a proxy's own, in other forms, may come after it had passed the request on.
"""

MAX_ANSWER_BYTES = 16 << 20
"""More is not read. The greeting of 1,024 ranks has 0.1 MiB."""

KEEPALIVE_S = 3.0
"""Idle connections are dropped before vLLM's server drops them (5 s), so that none breaks as it is reused."""


class NotTaken(Exception):
    """The prefiller certainly did not take the request, so nobody writes for it.

    Attributes:
        is_absent: nobody listens there.
        is_busy: it asked to be left alone for a while.
        retry_after_s: for how long, in seconds; None when it did not say.
    """

    def __init__(
        self, reason: str, *, is_absent: bool = False, is_busy: bool = False, retry_after_s: float | None = None
    ) -> None:
        super().__init__(reason)
        self.is_absent = is_absent
        self.is_busy = is_busy
        self.retry_after_s = retry_after_s


class ShuttingDown(PeerLost):
    """vLLM aborted the prefill itself, which it does when it shuts down: to new requests and, without
    `--shutdown-timeout`, to running ones.

    Attributes:
        is_own_word: it said so; else nobody listens where its ranks did.
    """

    def __init__(self, reason: str, *, is_own_word: bool = False) -> None:
        super().__init__(reason)
        self.is_own_word = is_own_word


class ServerError(PeerLost):
    """vLLM itself answered HTTP 500, as it does to open requests when its engine has died."""


class PrefillerClient:
    """owned by: the dispatcher's event loop, from `open` on.

    Raises:
        ConfigError: a key or certificate file cannot be read.
    """

    def __init__(self, config: PDConfig) -> None:
        self._connect_timeout_s = config.connect_timeout_s
        self._headers = _bearer(config.prefiller_api_key_file)
        self._tls = _tls(config.prefiller_ca_file)
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Make the session; must run inside the event loop."""
        # No overall time-out: the scheduler half owns the deadline and cancels.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=self._tls or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_s),
            headers=self._headers,
            json_serialize=lambda value: msgspec.json.encode(value).decode(),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def fetch(self, url: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
        """Status and body of a page; with `body` of what is answered to that JSON.

        Raises:
            ProtocolError: more than `MAX_ANSWER_BYTES`.
            aiohttp.ClientError, OSError: it cannot be reached, or breaks off.
        """
        assert self._session is not None
        async with self._session.request("GET" if body is None else "POST", url, json=body) as response:
            return response.status, await _read(response)

    async def is_serving(self, url: str, host: str) -> bool:
        """Whether a vLLM server answers for a base URL at a host's address.

        Taking a connection shows nothing: where the host cannot be reached, a proxy on another way may take it.
        """
        assert self._session is not None
        try:
            base = URL(url)
            async with self._session.get(
                base.with_host(host) / "version",
                server_hostname=base.host if base.scheme == "https" else None,
                timeout=aiohttp.ClientTimeout(total=PROBE_S),
                allow_redirects=False,
            ) as response:
                answer = json.loads(await _read(response))
        except (aiohttp.ClientError, OSError, ProtocolError, ValueError, RecursionError):
            return False
        return response.status == 200 and isinstance(answer, dict) and isinstance(answer.get("version"), str)

    async def greet(self, url: str, model: str, engine_id: str) -> DispatchReply:
        """Greet the prefiller at `url`; the reply's `hello` says what it is.

        Args:
            url: base URL.
            model: a name it serves.
            engine_id: who greets.

        Raises:
            NotTaken, PDConnectorError, aiohttp.ClientError: as `complete`; a ProtocolError if it does not greet back.
        """
        body = {"model": model, "prompt": [0], "max_tokens": 1, "temperature": 0.0}
        hello = to_params(HELLO, Hello(protocol=PROTOCOL_VERSION, decoder=engine_id))
        reply = await self.complete(url, None, body, hello)
        if reply.hello is None:
            raise ProtocolError(reply.error or "the prefiller did not return the greeting")
        return reply

    async def complete(
        self, url: str, hello: HelloReply | None, body: dict[str, Any], params: dict[str, Any]
    ) -> DispatchReply:
        """One completion request to the prefiller at `url`.

        Raises:
            NotTaken: it certainly did not take the request.
            ShuttingDown: it ends; whether it had begun is not known.
            PeerLost, ProtocolError, aiohttp.ClientError: it may have.
        """
        assert self._session is not None
        try:
            async with self._session.post(
                f"{url}/v1/completions",
                json={**body, "kv_transfer_params": params},
                headers=_data_parallel_header(hello),
            ) as response:
                is_json = "json" in response.content_type
                if response.status in BUSY_STATUSES and is_json:
                    retry_after_s = _seconds(response.headers.get("Retry-After"))
                    raise NotTaken(f"HTTP {response.status}", is_busy=True, retry_after_s=retry_after_s)
                if response.status != 200:
                    text = (await _read(response))[:500].decode(errors="replace")
                    kind = ServerError if response.status == 500 and is_json else PeerLost
                    raise kind(f"HTTP {response.status} from {url}: {text}")
                if not is_json:
                    raise aiohttp.ClientPayloadError(f"{url} answered {response.content_type}, which is not JSON")
                answer = json.loads(await _read(response))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise NotTaken(str(error), is_absent=True) from None
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{url} answered something that is not JSON: {error}") from None
        if not isinstance(answer, dict):
            answer = {}
        if answer.get("kv_transfer_params") is None and _was_aborted(answer):
            raise ShuttingDown("it aborted the request; it is shutting down", is_own_word=True)
        return parse_reply(answer.get("kv_transfer_params"))


def is_own_end(error: Exception) -> bool:
    """Whether the prefiller itself has ended the exchange, in a way in which a process does that ends.

    A reset connection is none: a router may send that, for a host that it cannot reach.
    """
    if isinstance(error, ShuttingDown):
        return error.is_own_word
    return isinstance(error, aiohttp.ServerDisconnectedError | ServerError)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """The whole body.

    Raises:
        ProtocolError: it is larger than any of ours.
    """
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise ProtocolError(f"{response.url} answered more than {MAX_ANSWER_BYTES} B")
    return bytes(body)


def _was_aborted(answer: dict[str, Any]) -> bool:
    choices = answer.get("choices")
    return isinstance(choices, list) and any(isinstance(c, dict) and c.get("finish_reason") == "abort" for c in choices)


def _seconds(retry_after: str | None) -> float | None:
    """`Retry-After` as seconds; its other form, a date, would compare two clocks (law 10)."""
    return float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdigit() else None


def _data_parallel_header(hello: HelloReply | None) -> dict[str, str]:
    """vLLM's own header that pins a request to one of the engines behind an address."""
    if hello is None or hello.data_parallel_rank is None:
        return {}
    return {"X-data-parallel-rank": str(hello.data_parallel_rank)}


def _bearer(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"prefiller_api_key_file {path}: {error.strerror}") from None
    if not key.isascii() or len(key.split()) != 1:
        raise ConfigError(f"prefiller_api_key_file {path}: it must hold one key, in ASCII and without blanks")
    return {"Authorization": f"Bearer {key.decode()}"}


def _tls(path: str | None) -> ssl.SSLContext | None:
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"prefiller_ca_file {path}: {error}") from None
