"""One run of a scenario, from its first event to the silence after the last."""

from __future__ import annotations

import logging
import random
import secrets
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_pd_connector.telemetry.log import PACKAGE
from vllm_pd_connector.testing.simulation.network import Network
from vllm_pd_connector.testing.simulation.server import Server
from vllm_pd_connector.testing.simulation.world import Violation, World

if TYPE_CHECKING:
    from vllm_pd_connector.testing.simulation.scenario import Fault, Scenario

SETTLE_S = 60.0
"""Virtual seconds after the last arrival, fault or answer within which something must end (law 8)."""

LOOK_EVERY_S = 0.5

SILENT = logging.CRITICAL + 1


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        violation: the first law that did not hold, None in a good run.
        ends: how many requests ended in which way.
        longest_wait_s: longest virtual time from a request to its end.
        counters: of all processes that lived, summed.
    """

    violation: Violation | None
    ends: Counter[str]
    longest_wait_s: float
    num_events: int
    log: list[str]
    counters: Counter[str] = field(default_factory=Counter)


class Run:
    """Args:
    scenario: what happens.
    keep_log: as text as well.
    """

    def __init__(self, scenario: Scenario, *, keep_log: bool = False) -> None:
        self._scenario = scenario
        self.world = World(scenario.seed, keep_log=keep_log)
        self._network = Network(self.world, scenario.noise)
        self._open: dict[str, float] = {}
        self._ends: Counter[str] = Counter()
        self._longest_wait_s = 0.0
        self._last_end = 0.0
        self._servers: dict[str, Server] = {}

    def run(self) -> Outcome:
        """Everything, checks included."""
        scenario, world = self._scenario, self.world
        with _all_randomness_from(scenario.seed), _package_log_in(world):
            try:
                self._start()
                last = max(
                    [r.at for r in scenario.requests] + [f.at + f.seconds + f.grace_s for f in scenario.faults] + [0.0]
                )
                world.run(lambda: False, last)
                while not self._is_over():
                    if world.now > max(last, self._last_end) + SETTLE_S:
                        self._complain()
                    world.run(lambda: False, world.now + LOOK_EVERY_S)
            except Violation:
                pass
            except Exception as error:  # noqa: BLE001 - what would end a process, whatever it is
                world.tell("%s", traceback.format_exc())
                world.violation = Violation(0, f"code of ours raises {error!r}")
        return Outcome(world.violation, self._ends, self._longest_wait_s, world.num_events, world.log, self._counters())

    def _start(self) -> None:
        scenario = self._scenario
        names = [f"p{i}" for i in range(scenario.num_prefillers)] + [f"d{i}" for i in range(scenario.num_decoders)]
        for name in names:
            self._servers[name] = Server(name, self._network, scenario, self._end)
        for request in scenario.requests:
            self._open[request.name] = request.at
            server = self._servers[f"d{request.decoder}"]
            self.world.at(request.at, None, lambda server=server, request=request: server.submit(request))  # type: ignore[misc]
        for fault in scenario.faults:
            self.world.at(fault.at, None, lambda fault=fault: self._break(fault))  # type: ignore[misc]

    def _break(self, fault: Fault) -> None:
        server = self._servers[fault.target]
        self.world.tell("FAULT %s %s %s for %g s", fault.kind, fault.target, fault.other, fault.seconds)
        match fault.kind:
            case "kill" | "kill_silently":
                server.kill(silently=fault.kind == "kill_silently", back_after_s=fault.seconds)
            case "pause":
                server.process.pause(fault.seconds)
            case "cut":
                self._network.cut(fault.target, fault.other, fault.seconds)
            case "terminate":
                server.terminate(grace_s=fault.grace_s, back_after_s=fault.seconds)
            case "reset_cache" if server.is_up:
                server.engine.reset_cache()
            case "pause_engine" if server.is_up:
                server.engine.pause(fault.mode, fault.seconds)

    def _end(self, name: str, how: str) -> None:
        at = self._open.pop(name, None)
        if at is None:
            self.world.break_law(7, f"{name} ends twice")
            return
        self._ends[how] += 1
        self._last_end = self.world.now
        self._longest_wait_s = max(self._longest_wait_s, self.world.now - at)

    def _is_over(self) -> bool:
        return (
            not self._open
            and all(server.is_quiet for server in self._servers.values())
            and not any(server.leftovers() for server in self._servers.values())
        )

    def _complain(self) -> None:
        left = {str(server.process): server.leftovers() for server in self._servers.values()}
        self.world.break_law(
            8, f"{SETTLE_S:g} s after the end there are still requests {list(self._open)[:5]} and {left}"
        )

    def _counters(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for server in self._servers.values():
            total.update(server.counters)
            total.update(server.engine.counters())
        return total


@contextmanager
def _all_randomness_from(seed: int) -> Iterator[None]:
    """Ids and jitter of the code under test are drawn from the seed as well, so that a run can be repeated."""
    source, real = random.Random(f"ids {seed}"), secrets.token_hex
    secrets.token_hex = lambda nbytes=32: source.randbytes(nbytes or 32).hex()
    random.seed(seed)
    try:
        yield
    finally:
        secrets.token_hex = real


class _ToWorld(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        self._world.tell("log: %s", record.getMessage())


@contextmanager
def _package_log_in(world: World) -> Iterator[None]:
    """The package's log lines become part of the run's log, and go nowhere else; vLLM's are left out."""
    logger, vllm = logging.getLogger(PACKAGE), logging.getLogger("vllm")
    before = logger.handlers, logger.propagate, logger.level, vllm.level
    logger.handlers, logger.propagate = [_ToWorld(world)], False
    _set_level(logger, logging.INFO if world.keep_log else SILENT)
    _set_level(vllm, SILENT)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[:2]
        _set_level(logger, before[2])
        _set_level(vllm, before[3])


def quieten() -> None:
    """For a process that only simulates: no run has to set levels and set them back."""
    _set_level(logging.getLogger(PACKAGE), SILENT)
    _set_level(logging.getLogger("vllm"), SILENT)


def _set_level(logger: logging.Logger, level: int) -> None:
    """Setting a level empties a cache of all loggers, which costs as much as a simulated request."""
    if logger.level != level:
        logger.setLevel(level)
