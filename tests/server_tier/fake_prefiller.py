"""An HTTP server that a decoder takes for a prefiller: it answers as a test tells it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from server_tier.ask import body_of, post, until
from vllm_pd_connector.testing.machine import HOST
from vllm_pd_connector.testing.servers import Server
from vllm_pd_connector.wire.transfer_params import HELLO, REPLY


@dataclass(frozen=True, slots=True)
class Reply:
    """What is sent back; status 0 closes the connection without a word."""

    status: int
    body: bytes
    retry_after: str | None = None
    wait_for: threading.Event | None = None
    content_type: str = "application/json"

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Reply:
        return cls(status, json.dumps(value).encode())

    @classmethod
    def params(cls, reply: Any) -> Reply:
        """A completion that carries `pd_reply`."""
        return cls.json({"choices": [], "kv_transfer_params": {REPLY: reply}})


@dataclass(slots=True)
class FakePrefiller:
    """Attributes:
    url: base URL.
    real: server whose greeting is passed on while `on_hello` is None.
    on_hello: answer to greetings.
    on_dispatch: answer to dispatches.
    first: answers to the first dispatches, before `on_dispatch`.
    pages: what is answered to GET, by path; 404 elsewhere.
    num_hellos: greetings seen.
    num_dispatches: dispatches seen.
    last_dispatch: body of the newest.
    """

    url: str
    real: str
    on_hello: Reply | None = None
    on_dispatch: Reply = Reply(500, b"")
    first: list[Reply] = field(default_factory=list)
    pages: dict[str, Callable[[], Reply]] = field(default_factory=dict)
    num_hellos: int = 0
    num_dispatches: int = 0
    last_dispatch: dict[str, Any] = field(default_factory=dict)

    def answer(self, body: dict[str, Any]) -> Reply:
        if HELLO not in (body.get("kv_transfer_params") or {}):
            self.num_dispatches += 1
            self.last_dispatch = body
            return self.first.pop(0) if self.first else self.on_dispatch
        self.num_hellos += 1
        return self.on_hello or self.real_hello(body)

    def real_hello(self, body: dict[str, Any]) -> Reply:
        status, answer = post(self.real, {**body, "prompt": [1]})
        return Reply.json(answer, status)


@contextmanager
def fake_prefiller(port: int, real: str) -> Iterator[FakePrefiller]:
    """Listen while the test runs."""
    fake = FakePrefiller(f"http://{HOST}:{port}", real)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send(fake.pages.get(self.path, lambda: Reply(404, b"{}"))())

        def do_POST(self) -> None:
            self.send(fake.answer(json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def send(self, reply: Reply) -> None:
            if reply.wait_for is not None:
                reply.wait_for.wait(30)
            self.close_connection = True  # nothing of an earlier answer is reused
            if not reply.status:
                return
            self.send_response(reply.status)
            self.send_header("content-type", reply.content_type)
            self.send_header("content-length", str(len(reply.body)))
            self.send_header("connection", "close")
            if reply.retry_after is not None:
                self.send_header("retry-after", reply.retry_after)
            self.end_headers()
            with suppress(ConnectionError):  # who asked has heard enough
                self.wfile.write(reply.body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer((HOST, port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


def greet(fake: FakePrefiller, decoder: Server) -> None:
    """Wait until the decoder takes the fake for a good prefiller."""
    until(lambda: _is_trusted(fake, decoder), 30, "the fake is greeted")


def part(fake: FakePrefiller, decoder: Server) -> None:
    """Have the decoder lose the fake, which must close its connections, if it has ever greeted it."""
    while _is_trusted(fake, decoder):
        post(decoder.url, body_of([7] * 40, max_tokens=1, kv_transfer_params={"prefiller": fake.url}))


def _is_trusted(fake: FakePrefiller, decoder: Server) -> bool:
    greeted = f"event=prefiller_greeted prefiller={fake.url}"
    lost = f"event=prefiller_lost prefiller={fake.url}"
    return decoder.count_log(greeted) > decoder.count_log(lost)
