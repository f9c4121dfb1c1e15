"""The threads of a server, on virtual time: the messenger and the dispatcher without theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pd_connector.control.dispatcher import Dispatch, Dispatcher, DispatchOutcome, FenceResult
from vllm_pd_connector.engine.messenger import Messenger
from vllm_pd_connector.kernels.bell import PythonBell
from vllm_pd_connector.lifecycle.decode_request import DecodeEvent
from vllm_pd_connector.testing.simulation.loop import VirtualLoop
from vllm_pd_connector.testing.simulation.network import Network, SimulatedFenceClient, SimulatedPrefillerClient
from vllm_pd_connector.testing.simulation.world import Process, Thread

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

BUSY_POLL_S = 0.1
"""Between turns when nothing happened. In production it is `poll_pause_s`; here the transport calls when it matters."""


class SimulatedBell(PythonBell):
    """Nobody sleeps on it: a ring is a call."""

    def __init__(self, ring: Callable[[], None]) -> None:
        super().__init__()
        self.ring = ring


class SimulatedMessenger(Messenger):
    """Turns happen a random while after they were asked for."""

    def __init__(
        self, duties: list[Any], pause_s: float, on_start: Any = None, bell: Any = None, *, process: Process
    ) -> None:
        super().__init__(duties, pause_s, on_start, SimulatedBell(lambda: self._turn_within(0.001)))
        self._process = process
        self._thread_of = Thread(process)
        self._next_turn = float("inf")

    def start(self) -> None:
        self.bell.ring()

    def wait(self, signal: threading.Event, timeout_s: float) -> bool:
        """The model thread waits; everything else in the world goes on."""
        world = self._process.world
        world.run(lambda: signal.is_set() or not self._process.is_alive, world.now + timeout_s)
        return signal.is_set()

    def stop(self) -> bool:
        return True

    def _turn_within(self, seconds: float) -> None:
        world = self._process.world
        when = world.now + world.random.uniform(seconds / 20, seconds)
        if when < self._next_turn:
            self._next_turn = when
            world.at(when, self._thread_of, lambda: self._take_turn(when))

    def _take_turn(self, when: float) -> None:
        if when != self._next_turn:
            return
        self._next_turn = float("inf")
        if self.turn():
            self._turn_within(BUSY_POLL_S)

    @staticmethod
    def _guarded(action: Callable[[], None]) -> None:
        action()  # an error that the thread would survive is a finding here


class SimulatedDispatcher(Dispatcher):
    """The real one on a virtual loop, with simulated sockets, held to what `FakeDispatcher` lets tests assume.

    Attributes:
        unanswered: transfers whose fence has no result yet.
    """

    def __init__(self, *args: Any, process: Process, network: Network, **kwargs: Any) -> None:
        self._world = process.world
        self._outcomes: dict[str, DecodeEvent | None] = {}
        self.unanswered: set[str] = set()
        self._silent: set[str] = set()
        loop = VirtualLoop(process)
        super().__init__(
            *args,
            **kwargs,
            open_loop=lambda: loop,
            open_client=lambda config: SimulatedPrefillerClient(config, thread=loop.thread, network=network),
            open_fences=lambda key, is_serving: SimulatedFenceClient(thread=loop.thread, network=network),
        )

    @property
    def client(self) -> SimulatedPrefillerClient:
        assert isinstance(self._client, SimulatedPrefillerClient)
        return self._client

    def dispatch(self, order: Dispatch) -> None:
        self._outcomes[order.reservation.transfer_id] = None
        super().dispatch(order)

    def fence(self, transfer_id: str) -> None:
        self.unanswered.add(transfer_id)
        super().fence(transfer_id)

    def take_events(self) -> list[DispatchOutcome | FenceResult]:
        events = super().take_events()
        for event in events:
            if isinstance(event, FenceResult):
                self._check_result(event)
            else:
                self._check_outcome(event)
        return events

    def _check_result(self, event: FenceResult) -> None:
        """One for each fence; after silence another one, that is none, may follow."""
        is_certain = event.is_quiet or event.is_dead
        expected = self.unanswered | self._silent if is_certain else self.unanswered
        if event.transfer_id not in expected:
            self._world.break_law(7, f"a fence is answered that was not asked, or twice: {event}")
        self.unanswered.discard(event.transfer_id)
        (self._silent.discard if is_certain else self._silent.add)(event.transfer_id)

    def _check_outcome(self, event: DispatchOutcome) -> None:
        """One for each dispatch; after ANSWERED it may still turn out to have FAILED."""
        before = self._outcomes.get(event.transfer_id, DecodeEvent.FAILED)
        is_news = before is DecodeEvent.ANSWERED and event.event is DecodeEvent.FAILED
        if before is not None and not is_news:
            self._world.break_law(7, f"a dispatch ends twice or was never sent: {event} after {before}")
        self._outcomes[event.transfer_id] = event.event

    def start(self) -> None:
        self._loop.create_task(self._open())

    def close(self) -> None:
        pass
