"""The prefillers of a decoder's pool: each is greeted until it is usable, and again when it was lost."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import aiohttp

from vllm_pd_connector.config import PDConfig
from vllm_pd_connector.control.prefiller_client import NotTaken, PrefillerClient
from vllm_pd_connector.errors import IncompatiblePeer, PDConnectorError
from vllm_pd_connector.lifecycle.peer_clock import PeerClock
from vllm_pd_connector.lifecycle.prefiller import PREFILLER_TABLE, Candidate, PrefillerEvent, PrefillerState
from vllm_pd_connector.lifecycle.table import step
from vllm_pd_connector.wire.compatibility import CacheShape, differences
from vllm_pd_connector.wire.messages import DispatchReply, HelloReply

logger = getLogger(__name__)

MISFIT_PAUSES = 15
"""A prefiller that does not fit is greeted again after this many ordinary pauses."""

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


@dataclass(slots=True)
class Prefiller:
    """owned by: the event loop, except `promised`; the engine thread reads `state` and the counts.

    Attributes:
        hello: its last greeting; None while it is not usable.
        outstanding: dispatches it is serving for us.
        promised: dispatches meant for it that the engine thread has handed over, ever.
        begun: those of them that the loop has taken up.
        clock: its latest reading; None when it sends none.
    """

    url: str
    state: PrefillerState = PrefillerState.UNKNOWN
    hello: HelloReply | None = None
    outstanding: int = 0
    promised: int = 0
    begun: int = 0
    clock: PeerClock | None = None
    complaint: str = ""
    greeting: asyncio.Task[None] | None = None

    def hear(self, reply: DispatchReply, now: float) -> None:
        """Take in the reading of its clock that a reply brings."""
        if reply.clock is not None:
            self.clock = PeerClock(reply.clock, now)


class PrefillerPool:
    """owned by: the dispatcher's event loop, except `candidates`.

    Args:
        config: validated.
        client: opened before the first greeting.
        spawn: starts a task on the loop.
        engine_id: this decoder.
        model: served model name to greet with.
        shape: this decoder's pages.
    """

    def __init__(
        self,
        config: PDConfig,
        client: PrefillerClient,
        spawn: Spawn,
        *,
        engine_id: str,
        model: str,
        shape: CacheShape,
    ) -> None:
        self._config = config
        self._client = client
        self._spawn = spawn
        self._engine_id = engine_id
        self._model = model
        self._shape = shape
        self._prefillers = {url: Prefiller(url) for url in config.prefillers}

    def __getitem__(self, url: str) -> Prefiller:
        return self._prefillers[url]

    def candidates(self) -> list[Candidate]:
        """Every configured prefiller as it stands. Any thread."""
        found = []
        for p in self._prefillers.values():
            outstanding = p.outstanding + p.promised - p.begun
            found.append(Candidate(p.url, p.state, outstanding, p.complaint, self._reaches_limit(outstanding)))
        return found

    def is_full(self, prefiller: Prefiller) -> bool:
        """Whether it serves as many dispatches as it may."""
        return self._reaches_limit(prefiller.outstanding)

    def _reaches_limit(self, outstanding: int) -> bool:
        return 0 < self._config.max_outstanding_per_prefiller <= outstanding

    def greet_all(self) -> None:
        for prefiller in self._prefillers.values():
            self._greet_later(prefiller)

    def lose(self, prefiller: Prefiller, hello: HelloReply, reason: str) -> None:
        """Stop using a prefiller until it has been greeted again, unless it has been since `hello`."""
        if prefiller.hello is not hello:
            return  # several requests may have seen the same process die
        prefiller.state, _ = step(PREFILLER_TABLE, prefiller.state, PrefillerEvent.GONE)
        prefiller.hello = None
        logger.warning("event=prefiller_lost prefiller=%s reason=%s", prefiller.url, reason)
        self._greet_later(prefiller)

    def _greet_later(self, prefiller: Prefiller) -> None:
        if prefiller.greeting is None or prefiller.greeting.done():
            prefiller.greeting = self._spawn(self._greet(prefiller))

    async def _greet(self, prefiller: Prefiller) -> None:
        """Greet until the prefiller is usable."""
        while True:
            started = asyncio.get_running_loop().time()
            delay_s = self._config.retry_s
            try:
                reply = await asyncio.wait_for(
                    self._client.greet(prefiller.url, self._model, self._engine_id), self._config.fence_s
                )
                assert reply.hello is not None
                if differing := differences(self._shape, reply.hello.shape):
                    raise IncompatiblePeer(prefiller.url, differing)
            except IncompatiblePeer as error:
                prefiller.state, _ = step(PREFILLER_TABLE, prefiller.state, PrefillerEvent.MISFIT)
                self._complain(prefiller, "prefiller_misfit", str(error), serious=True)
                delay_s *= MISFIT_PAUSES
            except (NotTaken, PDConnectorError, aiohttp.ClientError, OSError, TimeoutError) as error:
                prefiller.state, _ = step(PREFILLER_TABLE, prefiller.state, PrefillerEvent.GONE)
                self._complain(prefiller, "prefiller_absent", str(error) or "time-out")
            else:
                prefiller.clock = None  # of another process, perhaps another boot
                prefiller.hear(reply, asyncio.get_running_loop().time())
                self._welcome(prefiller, reply.hello, asyncio.get_running_loop().time() - started)
                return
            await asyncio.sleep(delay_s)

    @staticmethod
    def _welcome(prefiller: Prefiller, hello: HelloReply, elapsed_s: float) -> None:
        prefiller.hello = hello
        prefiller.complaint = ""
        prefiller.state, _ = step(PREFILLER_TABLE, prefiller.state, PrefillerEvent.GREETED)
        logger.info(
            "event=prefiller_greeted prefiller=%s engine=%s generation=%s elapsed_s=%.3f",
            prefiller.url,
            hello.engine,
            hello.generation,
            elapsed_s,
        )

    @staticmethod
    def _complain(prefiller: Prefiller, event: str, reason: str, *, serious: bool = False) -> None:
        """Log a complaint once until it changes."""
        if prefiller.complaint != reason:
            prefiller.complaint = reason
            log = logger.error if serious else logger.warning
            log("event=%s prefiller=%s reason=%s", event, prefiller.url, reason)
