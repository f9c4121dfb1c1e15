"""An asyncio event loop on virtual time, so that the real dispatcher runs without its thread."""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

from vllm_pd_connector.testing.simulation.world import Process, Thread

T = TypeVar("T")


class _Handle(asyncio.Handle):
    """A scheduled callback; the part of `asyncio.TimerHandle` that tasks and time-outs use."""

    def __init__(
        self, loop: "VirtualLoop", callback: Callable[..., object], args: Any, context: Any, when: float
    ) -> None:
        super().__init__(callback, args, loop, context)
        self._when = when

    def when(self) -> float:
        return self._when


class VirtualLoop(asyncio.AbstractEventLoop):
    """owned by: one simulated process; its callbacks die with it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.thread = Thread(process)
        self._world = process.world
        self._last_from_outside = 0.0

    def time(self) -> float:
        return self._process.clock()

    def call_soon(self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None) -> Any:
        return self._schedule(0.0, callback, args, context)

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        # Other threads' calls come in the order in which they were made.
        when = max(self._last_from_outside, self._world.now + self._world.random.uniform(0.0, 0.001))
        self._last_from_outside = when
        return self._schedule(when - self._world.now, callback, args, context)

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        return self._schedule(max(0.0, delay), callback, args, context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> Any:
        return self._schedule(max(0.0, when - self.time()), callback, args, context)

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], **_: Any) -> "asyncio.Task[T]":
        return asyncio.Task(coro, loop=self)  # type: ignore[arg-type]

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def stop(self) -> None:
        pass

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A task that failed and that nobody asked: no code of ours may leave one behind."""
        error = context.get("exception")
        if error is not None and self._process.is_alive and self._world.violation is None:
            self._world.break_law(0, f"{self._process}: {context['message']}: {error!r}")

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass

    def _schedule(self, delay: float, callback: Callable[..., object], args: Any, context: Any) -> _Handle:
        handle = _Handle(self, callback, args, context, self.time() + delay)
        self._world.after(delay, self.thread, lambda: self._carry_out(handle))
        return handle

    def _carry_out(self, handle: _Handle) -> None:
        if handle.cancelled():
            return
        previous = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(previous)
