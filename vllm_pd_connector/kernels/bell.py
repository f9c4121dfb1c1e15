"""What a thread sleeps on, and what others wake it with.

`_native.Bell` is another one: a thread that knows no Python can ring it.
"""

from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol


class Bell(Protocol):
    """One thread waits, any thread rings."""

    def ring(self) -> None:
        """End the present or the next wait. Microseconds; never blocks."""
        ...

    def wait(self) -> None:
        """Until it has been rung since the last wait. Without the GIL."""
        ...

    def wait_for(self, seconds: float) -> bool:
        """As `wait`; False when the time was over first."""
        ...


class PythonBell:
    """The bell of Python threads."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()  # written in C: half the cost of an Event
        self.ring = partial(self._rings.put, None)

    def wait(self) -> None:
        self._rings.get()
        self._forget_more()

    def wait_for(self, seconds: float) -> bool:
        try:
            self._rings.get(timeout=seconds)
        except Empty:
            return False
        self._forget_more()
        return True

    def _forget_more(self) -> None:
        with suppress(Empty):
            while True:
                self._rings.get_nowait()
