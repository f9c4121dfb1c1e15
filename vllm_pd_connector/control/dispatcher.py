"""Sends held requests to prefillers over HTTP, greets prefillers, and asks them to go quiet.

One thread, one event loop, one HTTP session for the life of the process.

Nothing here blocks the engine: calls are posted to the loop, and what happened is collected from `events`.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

import aiohttp
import msgspec

from vllm_pd_connector.config import PDConfig
from vllm_pd_connector.control.fence_client import FenceClient
from vllm_pd_connector.control.keys import ControlKey
from vllm_pd_connector.control.prefiller_client import NotTaken, PrefillerClient
from vllm_pd_connector.errors import IncompatiblePeer, PDConnectorError, PeerLost, ProtocolError
from vllm_pd_connector.lifecycle.decode_request import DecodeEvent
from vllm_pd_connector.lifecycle.prefiller import (
    PREFILLER_TABLE,
    Candidate,
    PrefillerEvent,
    PrefillerState,
)
from vllm_pd_connector.lifecycle.table import step
from vllm_pd_connector.telemetry.timeline import Timeline
from vllm_pd_connector.wire.compatibility import CacheShape, differences
from vllm_pd_connector.wire.messages import DispatchReply, Hello, HelloReply, Reservation
from vllm_pd_connector.wire.transfer_params import HELLO, RESERVATION, to_params
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

logger = getLogger(__name__)

MISFIT_PAUSES = 15
"""A prefiller that does not fit is greeted again after this many ordinary pauses."""

STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A held request on its way.

    Attributes:
        body: the completion request without `kv_transfer_params`.
        reservation: with an empty `prefiller_generation`; filled in for the prefiller that takes it.
        urls: prefillers to try, in order.
    """

    body: dict[str, Any]
    reservation: Reservation
    urls: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOutcome:
    """What became of a dispatch: ANSWERED, FAILED or NEVER_SENT."""

    transfer_id: str
    event: DecodeEvent
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceResult:
    """What became of a fence. `is_dead`: whoever could still write is certainly gone."""

    transfer_id: str
    is_quiet: bool
    is_dead: bool
    reason: str


@dataclass(slots=True)
class _Prefiller:
    """owned by: the event loop; `state` and `outstanding` are read by the engine thread."""

    url: str
    state: PrefillerState = PrefillerState.UNKNOWN
    hello: HelloReply | None = None
    outstanding: int = 0
    complaint: str = ""
    greeting: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Sent:
    """A dispatch under way, and who may be writing for it."""

    task: asyncio.Task[None] | None = None
    hello: HelloReply | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Dispatcher:
    """Engine thread: `dispatch`, `cancel`, `fence`, `finish`, `pool`, `take_events`. Everything else is the loop's.

    Args:
        config: validated.
        engine_id: this decoder.
        model: served model name to greet with.
        shape: this decoder's pages.
        key: control channel key.
        timeline: moments.

    Raises:
        ConfigError: a key or certificate file cannot be read.
    """

    def __init__(
        self,
        config: PDConfig,
        *,
        engine_id: str,
        model: str,
        shape: CacheShape,
        key: ControlKey | None,
        timeline: Timeline,
    ) -> None:
        self._config = config
        self._engine_id = engine_id
        self._model = model
        self._shape = shape
        self._key = key
        self._timeline = timeline
        self._client = PrefillerClient(config)
        self._prefillers = {url: _Prefiller(url) for url in config.prefillers}
        self._sent: dict[str, _Sent] = {}
        self._events: deque[DispatchOutcome | FenceResult] = deque()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="pd-dispatcher", daemon=True)
        self._fences: FenceClient | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the loop and greet every prefiller."""
        self._thread.start()

    def close(self) -> None:
        """Break off everything under way and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_TIMEOUT_S)

    def pool(self) -> list[Candidate]:
        """Every configured prefiller as it stands."""
        return [Candidate(p.url, p.state, p.outstanding) for p in self._prefillers.values()]

    def take_events(self) -> list[DispatchOutcome | FenceResult]:
        """What happened since the last call, in order."""
        events: list[DispatchOutcome | FenceResult] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def dispatch(self, order: Dispatch) -> None:
        """Send a held request; exactly one `DispatchOutcome` follows unless it is cancelled."""
        self._loop.call_soon_threadsafe(self._begin, order)

    def cancel(self, transfer_id: str) -> None:
        """Break a dispatch off: its prefiller sees the connection close and aborts."""
        self._loop.call_soon_threadsafe(self._cancel, transfer_id)

    def fence(self, transfer_id: str) -> None:
        """Ask whoever may write for a transfer to go quiet; exactly one `FenceResult` follows."""
        self._loop.call_soon_threadsafe(lambda: self._spawn(self._ask_quiet(transfer_id)))

    def finish(self, transfer_id: str) -> None:
        """Nothing more will be asked about a transfer. A reply still under way is read and ignored."""
        self._loop.call_soon_threadsafe(lambda: self._sent.pop(transfer_id, None))

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.create_task(self._open())
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(self._shut())
        self._loop.close()

    async def _open(self) -> None:
        self._client.open()
        self._fences = FenceClient(self._key)
        for prefiller in self._prefillers.values():
            self._greet_later(prefiller, 0.0)

    async def _shut(self) -> None:
        await self._client.close()
        if self._fences is not None:
            self._fences.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _begin(self, order: Dispatch) -> None:
        sent = self._sent.setdefault(order.reservation.transfer_id, _Sent())
        sent.task = self._spawn(self._send(order, sent))

    def _cancel(self, transfer_id: str) -> None:
        sent = self._sent.get(transfer_id)
        if sent is not None and sent.task is not None:
            sent.task.cancel()

    async def _send(self, order: Dispatch, sent: _Sent) -> None:
        """Try the prefillers in order until one takes the request."""
        transfer_id = order.reservation.transfer_id
        reason = "no prefiller is usable"
        for url in order.urls:
            prefiller = self._prefillers[url]
            if prefiller.hello is None:
                continue
            sent.hello = prefiller.hello
            self._timeline.mark(transfer_id, "dispatched", prefiller=url)
            prefiller.outstanding += 1
            try:
                reply = await self._client.complete(
                    url, prefiller.hello, order.body, self._reserve(order, prefiller.hello)
                )
                self._check(prefiller, reply)
                self._report(transfer_id, DecodeEvent.ANSWERED)
                return
            except NotTaken as error:
                if error.is_absent:
                    self._lose(prefiller, str(error))
                sent.hello = None
                reason = str(error)
                logger.warning("event=dispatch_not_taken transfer=%s prefiller=%s reason=%s", transfer_id, url, error)
            except (PDConnectorError, aiohttp.ClientError, OSError) as error:
                if not isinstance(error, PDConnectorError):
                    self._lose(prefiller, f"{type(error).__name__}: {error}")
                self._report(transfer_id, DecodeEvent.FAILED, f"{url}: {type(error).__name__}: {error}")
                return
            finally:
                prefiller.outstanding -= 1
        self._report(transfer_id, DecodeEvent.NEVER_SENT, reason)

    def _reserve(self, order: Dispatch, hello: HelloReply) -> dict[str, Any]:
        reservation = msgspec.structs.replace(order.reservation, prefiller_generation=hello.generation)
        return to_params(RESERVATION, reservation)

    def _check(self, prefiller: _Prefiller, reply: DispatchReply) -> None:
        if reply.error:
            if reply.hello is not None:
                self._lose(prefiller, "it is another process now")
            raise PeerLost(reply.error)
        if not reply.pages:
            raise ProtocolError(f"{prefiller.url} finished without having written a page")

    def _report(self, transfer_id: str, event: DecodeEvent, reason: str = "") -> None:
        self._timeline.mark(transfer_id, event.name.lower())
        self._events.append(DispatchOutcome(transfer_id=transfer_id, event=event, reason=reason))

    async def _ask_quiet(self, transfer_id: str) -> None:
        sent = self._sent.pop(transfer_id, None)
        if sent is None or sent.hello is None or self._fences is None:
            self._events.append(FenceResult(transfer_id=transfer_id, is_quiet=True, is_dead=False, reason=""))
            return
        outcome = await self._fences.ask(sent.hello.controls, transfer_id, self._config.fence_s)
        self._events.append(
            FenceResult(
                transfer_id=transfer_id, is_quiet=outcome.is_quiet, is_dead=outcome.is_dead, reason=outcome.reason
            )
        )

    def _lose(self, prefiller: _Prefiller, reason: str) -> None:
        """Stop using a prefiller until it has been greeted again."""
        prefiller.state, _ = step(PREFILLER_TABLE, prefiller.state, PrefillerEvent.GONE)
        prefiller.hello = None
        logger.warning("event=prefiller_lost prefiller=%s reason=%s", prefiller.url, reason)
        self._greet_later(prefiller, 0.0)

    def _greet_later(self, prefiller: _Prefiller, delay_s: float) -> None:
        if prefiller.greeting is None or prefiller.greeting.done():
            prefiller.greeting = self._spawn(self._greet(prefiller, delay_s))

    async def _greet(self, prefiller: _Prefiller, delay_s: float) -> None:
        """Greet until the prefiller is usable."""
        body = {"model": self._model, "prompt": [0], "max_tokens": 1, "temperature": 0.0}
        params = to_params(HELLO, Hello(protocol=PROTOCOL_VERSION, decoder=self._engine_id))
        while True:
            await asyncio.sleep(delay_s)
            delay_s = self._config.retry_s
            started = time.monotonic()
            try:
                reply = await asyncio.wait_for(
                    self._client.complete(prefiller.url, None, body, params), self._config.fence_s
                )
                if reply.hello is None:
                    raise ProtocolError(reply.error or "the prefiller did not return the greeting")
                if differing := differences(self._shape, reply.hello.shape):
                    raise IncompatiblePeer(prefiller.url, differing)
            except IncompatiblePeer as error:
                prefiller.state, _ = step(PREFILLER_TABLE, prefiller.state, PrefillerEvent.MISFIT)
                self._complain(prefiller, f"event=prefiller_misfit {error}", serious=True)
                delay_s *= MISFIT_PAUSES
                continue
            except (NotTaken, PDConnectorError, aiohttp.ClientError, OSError, TimeoutError) as error:
                prefiller.state, _ = step(PREFILLER_TABLE, prefiller.state, PrefillerEvent.GONE)
                self._complain(
                    prefiller, f"event=prefiller_absent prefiller={prefiller.url} reason={error or 'time-out'}"
                )
                continue
            prefiller.hello = reply.hello
            prefiller.complaint = ""
            prefiller.state, _ = step(PREFILLER_TABLE, prefiller.state, PrefillerEvent.GREETED)
            logger.info(
                "event=prefiller_greeted prefiller=%s engine=%s generation=%s elapsed_s=%.3f",
                prefiller.url,
                reply.hello.engine,
                reply.hello.generation,
                time.monotonic() - started,
            )
            return

    @staticmethod
    def _complain(prefiller: _Prefiller, text: str, *, serious: bool = False) -> None:
        """Log a complaint once until it changes."""
        if prefiller.complaint != text:
            prefiller.complaint = text
            (logger.error if serious else logger.warning)("%s", text)
