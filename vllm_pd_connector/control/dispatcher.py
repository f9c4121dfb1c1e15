"""Sends held requests to prefillers over HTTP, greets prefillers, and asks them to go quiet.

One thread, one event loop, one HTTP session for the life of the process.

Nothing here blocks the engine: calls are posted to the loop, and what happened is collected from `events`.
"""

import asyncio
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

import msgspec

from vllm_pd_connector.config import PDConfig
from vllm_pd_connector.control.fence_client import FenceClient, FenceOutcome, IsServing
from vllm_pd_connector.control.keys import ControlKey
from vllm_pd_connector.control.pool import Prefiller, PrefillerPool
from vllm_pd_connector.control.prefiller_client import NotTaken, PrefillerClient, ShuttingDown, is_own_end
from vllm_pd_connector.errors import PDConnectorError, PeerLost, ProtocolError
from vllm_pd_connector.lifecycle import backoff
from vllm_pd_connector.lifecycle.decode_request import DecodeEvent
from vllm_pd_connector.lifecycle.peer_clock import PeerClock
from vllm_pd_connector.lifecycle.prefiller import Candidate
from vllm_pd_connector.telemetry.timeline import Timeline
from vllm_pd_connector.wire.compatibility import CacheShape
from vllm_pd_connector.wire.messages import DispatchReply, HelloReply, Reservation
from vllm_pd_connector.wire.transfer_params import RESERVATION, to_params

logger = getLogger(__name__)

ASK_AGAIN_S, MAX_ASK_AGAIN_S = 1.0, 16.0
"""Seconds until a prefiller that did not answer a fence is asked again; doubled each time, up to the second."""

LOOK_PAUSE_S = 2.0
"""Seconds without an answer until a prefiller's ranks are looked at; doubled each time."""

WATCH_PAUSE_S = 0.25
"""Seconds from a prefiller's answer until its ranks are asked about pages still missing; doubled each time."""

STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """A held request on its way.

    Attributes:
        body: the completion request without `kv_transfer_params`.
        reservation: with an empty `prefiller_generation`; filled in for the prefiller that takes it.
        urls: prefillers to try, in order.
        ends_at: when its decoder stops waiting, in seconds of `time.monotonic`, which the event loop goes by too.
    """

    body: dict[str, Any]
    reservation: Reservation
    urls: list[str]
    ends_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOutcome:
    """What became of a dispatch: ANSWERED, FAILED or NEVER_SENT. `url`: the prefiller concerned, if there is one."""

    transfer_id: str
    event: DecodeEvent
    reason: str = ""
    url: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceResult:
    """What became of a fence. `is_dead`: whoever could still write is certainly gone."""

    transfer_id: str
    is_quiet: bool
    is_dead: bool
    reason: str


@dataclass(slots=True)
class _Sent:
    """A dispatch under way, and who may be writing for it."""

    task: asyncio.Task[None] | None = None
    hello: HelloReply | None = None
    url: str = ""
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
        open_client: makes the HTTP client, from the configuration.
        open_fences: makes the fence client, from the key and what asks API servers; called inside the loop.
        open_loop: makes the event loop.

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
        open_client: Callable[[PDConfig], PrefillerClient] = PrefillerClient,
        open_fences: Callable[[ControlKey | None, IsServing], FenceClient] = FenceClient,
        open_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self._config = config
        self._key = key
        self._timeline = timeline
        self._client = open_client(config)
        self._open_fences = open_fences
        self._pool = PrefillerPool(config, self._client, self._spawn, engine_id=engine_id, model=model, shape=shape)
        self._sent: dict[str, _Sent] = {}
        self._asked: set[str] = set()
        self._events: deque[DispatchOutcome | FenceResult] = deque()
        self._loop = open_loop()
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
        return self._pool.candidates()

    def take_events(self) -> list[DispatchOutcome | FenceResult]:
        """What happened since the last call, in order."""
        events: list[DispatchOutcome | FenceResult] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def dispatch(self, order: Dispatch) -> None:
        """Send a held request; one `DispatchOutcome` follows unless it is cancelled.

        After ANSWERED a FAILED may follow, when pages are late and a rank says that they will not come.
        """
        if order.urls:
            self._pool[order.urls[0]].promised += 1
        self._loop.call_soon_threadsafe(self._begin, order)

    def cancel(self, transfer_id: str) -> None:
        """Break a dispatch off: its prefiller sees the connection close and aborts."""
        self._loop.call_soon_threadsafe(self._cancel, transfer_id)

    def fence(self, transfer_id: str) -> None:
        """Ask whoever may write for a transfer to go quiet; one `FenceResult` follows.

        If it is neither quiet nor dead, they are asked again until they are, when another one follows, or `finish`.
        """
        self._loop.call_soon_threadsafe(self._begin_fence, transfer_id)

    def finish(self, transfer_id: str) -> None:
        """Nothing more will be asked about a transfer. A reply that comes within `settle_s` is read and ignored."""
        self._loop.call_soon_threadsafe(self._finish, transfer_id)

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
        self._fences = self._open_fences(self._key, self._client.is_serving)
        self._pool.greet_all()

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
        if order.urls:
            self._pool[order.urls[0]].begun += 1
        sent = self._sent.setdefault(order.reservation.transfer_id, _Sent())
        sent.task = self._spawn(self._send(order, sent))

    def _cancel(self, transfer_id: str) -> None:
        sent = self._sent.get(transfer_id)
        if sent is not None and sent.task is not None:
            sent.task.cancel()

    def _begin_fence(self, transfer_id: str) -> None:
        self._asked.add(transfer_id)
        self._spawn(self._ask_quiet(transfer_id))

    def _finish(self, transfer_id: str) -> None:
        self._asked.discard(transfer_id)
        sent = self._sent.pop(transfer_id, None)
        if sent is not None and sent.task is not None and not sent.task.done():
            # A machine that died after its last write never answers, and would count as serving us for ever.
            self._loop.call_later(self._config.settle_s, sent.task.cancel)

    async def _send(self, order: Dispatch, sent: _Sent) -> None:
        """Try the prefillers in order until one takes the request; ask busy ones again for `busy_wait_s`."""
        transfer_id = order.reservation.transfer_id
        give_up_at = self._loop.time() + self._config.busy_wait_s
        urls, attempt, reason = order.urls, 0, "no prefiller is usable"
        while urls:
            pauses: dict[str, float] = {}
            for url in urls:
                try:
                    if await self._try(order, sent, self._pool[url]):
                        return
                except NotTaken as error:
                    sent.hello = None
                    reason = f"{url}: {error}"
                    logger.warning(
                        "event=dispatch_not_taken transfer=%s prefiller=%s reason=%s", transfer_id, url, error
                    )
                    if error.is_busy:
                        pauses[url] = backoff.pause_s(attempt, retry_after_s=error.retry_after_s, dice=random.random())
            now = self._loop.time()
            urls = [url for url in urls if url in pauses and now + pauses[url] <= give_up_at]
            if urls:
                await asyncio.sleep(min(pauses[url] for url in urls))
                attempt += 1
        self._report(transfer_id, DecodeEvent.NEVER_SENT, reason)

    async def _try(self, order: Dispatch, sent: _Sent, prefiller: Prefiller) -> bool:
        """Send to one prefiller and report what became of it; False when it is not usable now.

        Raises:
            NotTaken: it certainly did not take the request.
        """
        if prefiller.hello is None:
            return False
        if self._pool.is_full(prefiller):
            raise NotTaken(f"{prefiller.outstanding} requests of this decoder are there already", is_busy=True)
        transfer_id = order.reservation.transfer_id
        sent.hello = hello = prefiller.hello
        sent.url = prefiller.url
        self._timeline.mark(transfer_id, "dispatched", prefiller=prefiller.url)
        prefiller.outstanding += 1
        try:
            reply = await self._answer(order, prefiller, hello)
            prefiller.hear(reply, self._loop.time())
            self._check(prefiller, hello, reply)
        except NotTaken as error:
            if error.is_absent:
                self._pool.lose(prefiller, hello, str(error))
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is, the prefiller may have taken the request)
            if is_own_end(error) and self._fences is not None:
                self._spawn(self._fences.see_end(hello.controls, prefiller.url))
            if isinstance(error, ShuttingDown) or not isinstance(error, PDConnectorError):
                self._pool.lose(prefiller, hello, f"{type(error).__name__}: {error}")
            reason = f"{prefiller.url}: {type(error).__name__}: {error}"
            self._report(transfer_id, DecodeEvent.FAILED, reason, prefiller.url)
        else:
            self._report(transfer_id, DecodeEvent.ANSWERED, url=prefiller.url)
            self._spawn(self._watch(transfer_id, prefiller.url))
        finally:
            prefiller.outstanding -= 1
        return True

    async def _answer(self, order: Dispatch, prefiller: Prefiller, hello: HelloReply) -> DispatchReply:
        """What a prefiller answers.

        vLLM's API server outlives its engine: it takes requests after the engine has drained and ended, and keeps them.

        Raises:
            ShuttingDown: a rank of it is gone and no answer has come.
            NotTaken, PDConnectorError, aiohttp.ClientError: as `PrefillerClient.complete`.
        """
        params = self._reserve(order, hello, prefiller.clock)
        answer = asyncio.ensure_future(self._client.complete(prefiller.url, hello, order.body, params))
        gone = asyncio.ensure_future(self._until_gone(order.reservation.transfer_id, hello))
        try:
            await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ShuttingDown(f"no answer, and {gone.result()}")
            return await answer
        finally:
            answer.cancel()
            gone.cancel()

    async def _until_gone(self, transfer_id: str, hello: HelloReply) -> str:
        """Returns when a rank of a prefiller is gone for certain, and says which; looked at ever more seldom."""
        assert self._fences is not None
        pause_s = LOOK_PAUSE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s *= 2
            outlook = await self._fences.inquire(hello.controls, transfer_id, self._config.fence_s)
            if outlook.is_gone:
                return outlook.error

    @staticmethod
    def _reserve(order: Dispatch, hello: HelloReply, clock: PeerClock | None) -> dict[str, Any]:
        reservation = msgspec.structs.replace(
            order.reservation,
            prefiller_generation=hello.generation,
            expires_at=clock.at_least(order.ends_at) if clock is not None else None,
        )
        return to_params(RESERVATION, reservation)

    def _check(self, prefiller: Prefiller, hello: HelloReply, reply: DispatchReply) -> None:
        """Raises:
        NotTaken, PeerLost, ProtocolError: the pages will not come.
        """
        if reply.error:
            if reply.hello is not None:
                self._pool.lose(prefiller, hello, "it is another process now")
            if reply.declined:
                # The reading it went by was old, as after a day without requests; now there is a new one.
                raise NotTaken(reply.error, is_busy=reply.expired)
            raise PeerLost(reply.error)
        if not reply.pages:
            raise ProtocolError(f"{prefiller.url} finished without having written a page")

    async def _watch(self, transfer_id: str, url: str) -> None:
        """Pages that are late after the answer: a rank that failed may have had no other way to say so."""
        pause = WATCH_PAUSE_S
        while True:
            await asyncio.sleep(pause)
            sent = self._sent.get(transfer_id)
            if sent is None or sent.hello is None or self._fences is None:
                return
            outlook = await self._fences.inquire(sent.hello.controls, transfer_id, self._config.fence_s)
            if outlook.error and transfer_id in self._sent:
                self._report(transfer_id, DecodeEvent.FAILED, f"{url}: {outlook.error}", url)
            if outlook.is_over:
                return
            pause *= 2

    def _report(self, transfer_id: str, event: DecodeEvent, reason: str = "", url: str = "") -> None:
        self._timeline.mark(transfer_id, event.name.lower())
        self._events.append(DispatchOutcome(transfer_id=transfer_id, event=event, reason=reason, url=url))

    async def _ask_quiet(self, transfer_id: str) -> None:
        sent = self._sent.pop(transfer_id, None)
        if sent is None or sent.hello is None or self._fences is None:
            self._tell(transfer_id, FenceOutcome(is_quiet=True))
            return
        outcome = await self._ask(transfer_id, sent.hello, sent.url)
        self._tell(transfer_id, outcome)
        pause_s = ASK_AGAIN_S
        while not (outcome.is_quiet or outcome.is_dead):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_ASK_AGAIN_S)
            if transfer_id not in self._asked:
                return
            outcome = await self._ask(transfer_id, sent.hello, sent.url)
            if outcome.is_quiet or outcome.is_dead:
                self._tell(transfer_id, outcome)

    async def _ask(self, transfer_id: str, hello: HelloReply, url: str) -> FenceOutcome:
        assert self._fences is not None
        try:
            return await self._fences.ask(hello.controls, transfer_id, self._config.fence_s, url)
        except Exception as error:  # else the transfer's pages would wait until `unreachable_s` is over
            logger.exception("event=fence_error transfer=%s it is asked again", transfer_id)
            return FenceOutcome(is_quiet=False, reason=f"{type(error).__name__}: {error}")

    def _tell(self, transfer_id: str, outcome: FenceOutcome) -> None:
        self._events.append(
            FenceResult(
                transfer_id=transfer_id, is_quiet=outcome.is_quiet, is_dead=outcome.is_dead, reason=outcome.reason
            )
        )
