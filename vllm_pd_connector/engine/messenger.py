"""The KV messenger: the one thread of a worker that owns the transport, drives it, and sleeps when idle.

    model thread ──submit──▶ inbox ──▶ messenger ──▶ writer / receiver ──▶ transport
    fence server ──submit──▶   ▲
    layer hook  ──ring──────────┘

Woken by: `submit`, its bell. While a write is in flight or pages are expected it polls with a pause; otherwise it waits
without a time-out, so an idle worker uses no CPU (law 15).
"""

import threading
from collections import deque
from collections.abc import Callable
from logging import getLogger
from typing import Protocol

from vllm_pd_connector.kernels.bell import Bell, PythonBell

logger = getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Seconds `stop` waits for the thread; vLLM kills a worker that hangs in shutdown."""


class Duty(Protocol):
    """Something the messenger drives. All methods run on the messenger thread."""

    @property
    def is_busy(self) -> bool:
        """It must be driven again soon."""
        ...

    def advance(self) -> None:
        """Do what can be done without waiting."""
        ...


class Messenger:
    """The thread. `duties` are advanced in order, once per turn.

    Args:
        duties: writer and receiver.
        pause_s: seconds between turns while one of them is busy.
        on_start: run first on the thread; selects the GPU, without which UCX does without its fast paths.
        bell: what the thread sleeps on. None: one for Python threads.

    Attributes:
        bell: whoever rings it has the duties advanced.
    """

    def __init__(
        self,
        duties: list[Duty],
        pause_s: float,
        on_start: Callable[[], None] | None = None,
        bell: Bell | None = None,
    ) -> None:
        self._on_start = on_start
        self._duties = duties
        self._pause_s = pause_s
        self._inbox: deque[Callable[[], None]] = deque()
        self.bell = bell or PythonBell()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="pd-messenger", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, action: Callable[[], None]) -> None:
        """Run an action on the messenger thread, in order of submission. Any thread; never blocks."""
        self._inbox.append(action)
        self.bell.ring()

    def wait(self, signal: threading.Event, timeout_s: float) -> bool:
        """Let another thread wait for what an action it submitted will set; False when the time is over first."""
        return signal.wait(timeout_s)

    def stop(self) -> bool:
        """End the thread after its current turn, within `STOP_TIMEOUT_S`; False when it is still in that turn."""
        self._is_stopping = True
        self.bell.ring()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("event=messenger_unfinished what it does takes more than %g s", STOP_TIMEOUT_S)
        return not self._thread.is_alive()

    def turn(self) -> bool:
        """Carry out the inbox and advance each duty once; True when one is busy. For tests without a thread."""
        while self._inbox:
            self._guarded(self._inbox.popleft())
        for duty in self._duties:
            self._guarded(duty.advance)
        return any(duty.is_busy for duty in self._duties)

    def _run(self) -> None:
        if self._on_start is not None:
            self._guarded(self._on_start)
        while not self._is_stopping:
            if self.turn():
                self.bell.wait_for(self._pause_s)
            else:
                self.bell.wait()

    @staticmethod
    def _guarded(action: Callable[[], None]) -> None:
        # A blanket except: this thread serves every request of the rank. What failed keeps
        # its deadlines, so its request ends in a local prefill.
        try:
            action()
        except Exception:
            logger.exception("event=messenger_error the transfer concerned will run into its deadline")
