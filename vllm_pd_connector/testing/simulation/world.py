"""Virtual time: one queue of events, processes that pause and die, and the log of what happened."""

import heapq
from collections.abc import Callable
from random import Random

Action = Callable[[], None]

MAX_WAKE_S = 0.02
"""Threads of a process that was stopped go on within this time."""

MAX_LOG = 20_000
"""Lines kept of a run; a shrunk run has a few hundred."""


class Violation(Exception):
    """A law does not hold.

    Args:
        law: number of the law in docs/failure-model.md, or 0 for an error that no law names.
        text: what was seen.
    """

    def __init__(self, law: int, text: str) -> None:
        super().__init__(law, text)
        self.law = law
        self.text = text

    def __str__(self) -> str:
        return f"law {self.law}: {self.text}" if self.law else self.text


class Process:
    """One server process: an incarnation at an address. Its clock starts anywhere (law 10).

    Args:
        world: where it lives.
        name: of the address, such as `d0`; the next incarnation has the same.
        incarnation: counts from 0.
    """

    def __init__(self, world: "World", name: str, incarnation: int) -> None:
        self.world = world
        self.name = name
        self.incarnation = incarnation
        self.is_alive = True
        self.paused_until = 0.0
        self.paused_s = 0.0
        self._clock_start = world.random.uniform(-1e5, 1e5)

    def clock(self) -> float:
        """What `time.monotonic` says in this process."""
        return self.world.now + self._clock_start

    def pause(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while: nothing of the process runs; what it posted goes on."""
        until = self.world.now + seconds
        if until > self.paused_until:
            self.paused_s += until - max(self.paused_until, self.world.now)
            self.paused_until = until

    def __str__(self) -> str:
        return f"{self.name}.{self.incarnation}"


class Thread:
    """A thread of a process. After a pause threads go on in any order, but each does its own things in order.

    Args:
        process: lives and sleeps with it.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self._pause = 0.0
        self._late_by = 0.0

    def runs_at(self, now: float) -> float:
        """When it can run next."""
        until = self.process.paused_until
        if until != self._pause:
            self._pause = until
            self._late_by = self.process.world.random.uniform(0.0, MAX_WAKE_S)
        return max(now, until + self._late_by) if until else now


class World:
    """Args:
    seed: decides everything random in the run.
    keep_log: remember what happens, as text.
    """

    def __init__(self, seed: int, *, keep_log: bool) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.keep_log = keep_log
        self.log: list[str] = []
        self.num_events = 0
        self.violation: Violation | None = None
        self._queue: list[tuple[float, int, Thread | None, Action]] = []
        self._order = 0

    def at(self, when: float, owner: Thread | None, action: Action) -> None:
        """Run an action at a time; not at all when its owner is dead then, later when it is paused."""
        self._order += 1
        heapq.heappush(self._queue, (when, self._order, owner, action))

    def after(self, delay: float, owner: Thread | None, action: Action) -> None:
        self.at(self.now + delay, owner, action)

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Let events happen until a condition holds; False when nothing happens until `limit`.

        May be called by an action: a thread of a simulated process waits, the rest of the world goes on.
        """
        queue = self._queue
        while not until():
            if not queue or queue[0][0] > limit:
                self.now = max(self.now, limit)
                return False
            when, _, owner, action = heapq.heappop(queue)
            self.now = max(self.now, when)
            if owner is not None:
                if not owner.process.is_alive:
                    continue
                if (runs_at := owner.runs_at(self.now)) > self.now:
                    self.at(runs_at, owner, action)
                    continue
            self.num_events += 1
            action()
            if self.violation is not None:
                raise self.violation
        return True

    def break_law(self, law: int, text: str) -> None:
        """Record the first violation; the run ends with it even if something on the way catches the exception.

        Raises:
            Violation: always.
        """
        violation = Violation(law, text)
        if self.violation is None:
            self.violation = violation
            self.tell("VIOLATION %s", violation)
        raise violation

    def tell(self, text: str, *args: object) -> None:
        """Add a line to the log; formatted only when it is kept."""
        if self.keep_log and len(self.log) < MAX_LOG:
            self.log.append(f"{self.now:10.4f}  {text % args if args else text}")
