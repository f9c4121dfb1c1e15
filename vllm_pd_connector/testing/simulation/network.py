"""What lies between processes: latency, cut links, HTTP exchanges, control sockets.

Streams (HTTP, control) lose nothing while both ends live: a cut delays them, as TCP does. What is lost or doubled by
seed are the notes of the transport (see `transport`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from vllm_pd_connector.control.addresses import PROBE_S
from vllm_pd_connector.control.fence_client import FenceClient
from vllm_pd_connector.control.fence_server import FenceServer
from vllm_pd_connector.control.prefiller_client import PrefillerClient
from vllm_pd_connector.testing.simulation.world import Action, Process, Thread, World

if TYPE_CHECKING:
    from vllm_pd_connector.config import PDConfig
    from vllm_pd_connector.testing.simulation.scenario import Noise

RESEND_S = 0.2
"""Seconds between attempts of a control socket to reach an address at which nobody listens."""

CONNECT_REFUSED = 111


class Network:
    """Args:
    world: whose time it keeps.
    noise: how often what goes wrong.
    """

    def __init__(self, world: World, noise: Noise) -> None:
        self.world = world
        self.noise = noise
        self.servers: dict[str, Any] = {}
        self.controls: dict[str, SimulatedFenceServer] = {}
        self.endpoints: dict[bytes, Any] = {}
        self._cut_until: dict[tuple[str, str], float] = {}
        self._last: dict[object, float] = {}

    def cut(self, a: str, b: str, seconds: float) -> None:
        """Nothing passes between two addresses for a while."""
        key = (min(a, b), max(a, b))
        self._cut_until[key] = max(self._cut_until.get(key, 0.0), self.world.now + seconds)

    def cut_until(self, a: str, b: str) -> float:
        return self._cut_until.get((min(a, b), max(a, b)), 0.0)

    def is_cut(self, a: str, b: str) -> bool:
        return self.cut_until(a, b) > self.world.now

    def latency(self) -> float:
        if self.world.random.random() < self.noise.slow:
            return self.world.random.uniform(0.0, self.noise.slow_s)
        return self.world.random.uniform(0.0002, 0.004)

    def carry(self, a: str, b: str, owner: Thread | None, action: Action, *, stream: object = None) -> None:
        """Bring something from address `a` to address `b`; what one stream carries arrives in order."""
        held_s = max(0.0, self.cut_until(a, b) - self.world.now)
        when = self.world.now + held_s + self.latency()
        if stream is not None:
            # The longer a TCP connection has tried in vain, the later it tries again: up to twice as late as needed.
            when += self.world.random.uniform(0.0, held_s) if held_s else 0.0
            when = self._last[stream] = max(when, self._last.get(stream, 0.0))
        self.world.at(when, owner, lambda: self._arrive(a, b, owner, action))

    def _arrive(self, a: str, b: str, owner: Thread | None, action: Action) -> None:
        if self.is_cut(a, b):
            self.world.at(self.cut_until(a, b), owner, lambda: self._arrive(a, b, owner, action))
        else:
            action()


@dataclass
class Response:
    """What an HTTP server answered: the part of `aiohttp.ClientResponse` that is used."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    content_type: str = "application/json"

    @property
    def content(self) -> Response:
        return self

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self.body


class Exchange:
    """One HTTP request on its own connection: what `session.post` returns."""

    def __init__(self, network: Network, thread: Thread, url: str, body: bytes) -> None:
        self.network = network
        self.client = thread.process
        self._thread = thread
        self.url = url
        self.body = body
        self.address = url.split("//")[1].split("/")[0]
        self.server: Any = None
        self.is_closed = False
        self._future: asyncio.Future[Response] | None = None

    async def __aenter__(self) -> Response:
        self._future = asyncio.get_running_loop().create_future()
        self._connect()
        try:
            return await self._future
        except asyncio.CancelledError:
            self.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        self.is_closed = True

    def close(self) -> None:
        """The client closes the connection, or its kernel does because it died."""
        if not self.is_closed:
            self.is_closed = True
            self.network.carry(self.client.name, self.address, None, self._closed_at_server, stream=self)

    def answer(self, status: int, value: Any) -> None:
        """The server answers; any process state of the server is allowed."""
        body = msgspec.json.encode(value)
        self._to_client(lambda future: future.set_result(Response(status, body)))

    def reset(self) -> None:
        """The server's side of the connection is gone."""
        self._to_client(lambda future: future.set_exception(aiohttp.ServerDisconnectedError()))

    def _to_client(self, settle: Callable[[asyncio.Future[Response]], None]) -> None:
        def arrive() -> None:
            if self._future is not None and not self._future.done():
                settle(self._future)

        self.network.carry(self.address, self.client.name, self._thread, arrive, stream=self)

    def _connect(self) -> None:
        network = self.network
        cut_s = network.cut_until(self.client.name, self.address) - network.world.now
        if cut_s > network.noise.connect_timeout_s:
            error = aiohttp.ConnectionTimeoutError(f"{self.address}: connection time-out")
            network.world.after(network.noise.connect_timeout_s, self._thread, lambda: self._fail(error))
            return
        network.carry(self.client.name, self.address, None, self._arrive_at_server, stream=self)

    def _arrive_at_server(self) -> None:
        server = self.network.servers.get(self.address)
        if server is None:
            key = SimpleNamespace(host=self.address, port=80, ssl=None, is_ssl=False)
            error = aiohttp.ClientConnectorError(key, OSError(CONNECT_REFUSED, "refused"))  # type: ignore[arg-type]
            self._to_client(lambda future: future.set_exception(error))
        elif self.network.world.random.random() < self.network.noise.busy:
            self.answer(503, {"error": "busy"})
        else:
            self.server = server
            server.take(self, msgspec.json.decode(self.body))

    def _closed_at_server(self) -> None:
        if self.server is not None:
            self.server.connection_closed(self)

    def _fail(self, error: Exception) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)


class _Session:
    """The part of `aiohttp.ClientSession` that is used."""

    def __init__(self, client: SimulatedPrefillerClient) -> None:
        self._client = client

    def post(self, url: str, *, json: Any, headers: Any = None) -> Exchange:
        exchange = Exchange(self._client.network, self._client.thread, url, msgspec.json.encode(json))
        self._client.exchanges.append(exchange)
        return exchange

    async def close(self) -> None:
        pass


class SimulatedPrefillerClient(PrefillerClient):
    """The real client on a simulated session."""

    def __init__(self, config: PDConfig, *, thread: Thread, network: Network) -> None:
        super().__init__(config)
        self.thread = thread
        self.network = network
        self.exchanges: list[Exchange] = []

    def open(self) -> None:
        self._session = _Session(self)  # type: ignore[assignment]


class _Dealer:
    """The part of a ZMQ DEALER socket that `FenceClient` uses."""

    def __init__(self, thread: Thread, network: Network) -> None:
        self._process = thread.process
        self._thread = thread
        self._network = network
        self._future: asyncio.Future[bytes] | None = None
        self._endpoint = ""
        self._is_closed = False
        self.linger = 0

    def setsockopt(self, option: int, value: int) -> None:
        pass

    def connect(self, endpoint: str) -> None:
        self._endpoint = endpoint

    async def send(self, frame: bytes) -> None:
        self._future = asyncio.get_running_loop().create_future()
        address = _host(self._endpoint)
        copies = 2 if self._network.world.random.random() < self._network.noise.fence_twice else 1
        for _ in range(copies):
            self._network.carry(self._process.name, address, None, lambda: self._deliver(frame))

    async def recv(self) -> bytes:
        assert self._future is not None
        return await self._future

    def close(self) -> None:
        self._is_closed = True

    def answered(self, frame: bytes) -> None:
        """Called at the server; the answer still has to travel."""

        def arrive() -> None:
            if self._future is not None and not self._future.done() and not self._is_closed:
                self._future.set_result(frame)

        self._network.carry(_host(self._endpoint), self._process.name, self._thread, arrive)

    def _deliver(self, frame: bytes) -> None:
        server = self._network.controls.get(self._endpoint)
        if self._is_closed and self._network.world.random.random() < 0.5:
            return  # it had not left the socket yet
        if server is not None:
            server.receive_later(self, frame)
        elif not self._is_closed and self._process.is_alive:
            self._network.world.after(RESEND_S, None, lambda: self._deliver(frame))


class SimulatedFenceClient(FenceClient):
    """The real client on simulated sockets."""

    def __init__(self, *, thread: Thread, network: Network) -> None:
        sockets = SimpleNamespace(socket=lambda kind: _Dealer(thread, network), destroy=lambda linger: None)
        super().__init__(None, self._answers, context=sockets)  # type: ignore[arg-type]
        self._process = thread.process
        self._network = network

    async def _is_refused(self, endpoint: str) -> bool:  # type: ignore[override]
        # Behind a cut a router refuses, or nobody says anything.
        network, host = self._network, _host(endpoint)
        is_silent = network.is_cut(self._process.name, host) and not network.noise.refusing_router
        await asyncio.sleep(PROBE_S if is_silent else 2 * network.latency())
        if network.is_cut(self._process.name, host):
            return network.noise.refusing_router
        return endpoint not in network.controls

    async def _leads_home(self, endpoint: str, url: str) -> bool:  # type: ignore[override]
        return False

    async def _answers(self, url: str, host: str) -> bool:
        await asyncio.sleep(2 * self._network.latency())
        return not self._network.is_cut(self._process.name, host) and host in self._network.servers


class SimulatedFenceServer(FenceServer):
    """The real answers on a simulated socket. `process` and `network` come by `functools.partial`.

    Every incarnation listens at the same endpoint: the hardest case for generations.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        generation: str,
        key: Any,
        on_fence: Any,
        on_inquiry: Any,
        process: Process,
        network: Network,
        rank: int,
    ) -> None:
        self._generation = generation
        self._on_fence = on_fence
        self._on_inquiry = on_inquiry
        self._listener = Thread(process)
        self._network = network
        self._router = SimpleNamespace(send_multipart=self._send)  # type: ignore[assignment]
        self.endpoint = f"tcp://{process.name}:{rank + 1}"

    def start(self) -> None:
        self._network.controls[self.endpoint] = self

    def close(self) -> None:
        if self._network.controls.get(self.endpoint) is self:
            del self._network.controls[self.endpoint]

    def receive_later(self, dealer: _Dealer, frame: bytes) -> None:
        """A frame reached the socket; the fence server's thread reads it when the process runs."""
        self._network.world.after(0.0001, self._listener, lambda: self._receive([dealer, frame]))  # type: ignore[list-item]

    def _send(self, frames: list[Any]) -> None:
        frames[0].answered(frames[1])

    def _answer(self, identity: Any, answer: Any) -> None:
        from vllm_pd_connector.wire.codec import encode

        self._send([identity, encode(answer)])


def _host(endpoint: str) -> str:
    return endpoint.split("//")[1].split(":")[0]
