"""The threads of a server, on virtual time: the messenger and the dispatcher without theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pd_connector.control.dispatcher import Dispatcher
from vllm_pd_connector.engine.messenger import Messenger
from vllm_pd_connector.testing.simulation.loop import VirtualLoop
from vllm_pd_connector.testing.simulation.network import Network, SimulatedFenceClient, SimulatedPrefillerClient

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from vllm_pd_connector.testing.simulation.world import Process

BUSY_POLL_S = 0.1
"""Between turns when nothing happened. In production it is `poll_pause_s`; here the transport calls when it matters."""


class SimulatedMessenger(Messenger):
    """Turns happen a random while after they were asked for."""

    def __init__(self, duties: list[Any], pause_s: float, on_start: Any = None, *, process: Process) -> None:
        super().__init__(duties, pause_s, on_start)
        self._process = process
        self._next_turn = float("inf")

    def start(self) -> None:
        self.wake()

    def submit(self, action: Callable[[], None]) -> None:
        self._inbox.put(action)
        self.wake()

    def wake(self) -> None:
        self._turn_within(0.001)

    def wait(self, signal: threading.Event, timeout_s: float) -> bool:
        """The model thread waits; everything else in the world goes on."""
        world = self._process.world
        world.run(lambda: signal.is_set() or not self._process.is_alive, world.now + timeout_s)
        return signal.is_set()

    def stop(self) -> None:
        pass

    def _turn_within(self, seconds: float) -> None:
        world = self._process.world
        when = world.now + world.random.uniform(seconds / 20, seconds)
        if when < self._next_turn:
            self._next_turn = when
            world.at(when, self._process, lambda: self._take_turn(when))

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
    """The real one on a virtual loop, with simulated sockets."""

    def __init__(self, *args: Any, process: Process, network: Network, **kwargs: Any) -> None:
        super().__init__(
            *args,
            **kwargs,
            open_loop=lambda: VirtualLoop(process),
            open_client=lambda config: SimulatedPrefillerClient(config, process=process, network=network),
            open_fences=lambda key: SimulatedFenceClient(process=process, network=network),
        )

    @property
    def client(self) -> SimulatedPrefillerClient:
        assert isinstance(self._client, SimulatedPrefillerClient)
        return self._client

    def start(self) -> None:
        self._loop.create_task(self._open())

    def close(self) -> None:
        pass
