"""What a server says about itself: its counters settled, its pages given back, its CPU time."""

from __future__ import annotations

import time
import urllib.request

from server_tier.ask import body_of, post, until
from vllm_pd_connector.testing.process_group import cpu_seconds
from vllm_pd_connector.testing.servers import Server

SPIN_S = 3.0
"""vLLM's shared-memory readers spin for a second after each message."""

QUIET_GAUGES = ("held_requests", "held_pages", "fenced_pages", "draining_requests")


def nudge(server: Server) -> None:
    """Make the engine step, so that it publishes what it has counted."""
    status, answer = post(server.url, body_of([11], max_tokens=2))
    assert status == 200, answer


def counts(server: Server) -> dict[str, float]:
    """The connector's counters and gauges after the engine has published them."""
    nudge(server)
    return server.metrics()


class Since:
    """How far a server's counters have moved since this was made."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = counts(server)

    def __call__(self, *names: str) -> list[int]:
        now = counts(self._server)
        return [int(now.get(name, 0) - self._before.get(name, 0)) for name in names]

    def until(self, name: str, value: int, deadline_s: float = 10.0) -> None:
        """Wait for a counter without nudging; it is published by steps of other requests or of the connector.

        Raises:
            AssertionError: it did not come in time.
        """
        base = self._before.get(name, 0)
        until(lambda: self._server.metrics().get(name, 0) - base >= value, deadline_s, f"{name} >= {value}")


def failures(server: Server) -> str:
    """Why remote prefills of a decoder failed, a line each; to be shown by an assertion that none did."""
    return "\n".join(line for line in server.log_text().splitlines() if "event=remote_prefill_failed" in line)


def held(server: Server) -> dict[str, float]:
    """Gauges of pages that are kept for somebody; empty when there are none."""
    now = counts(server)
    return {name: now[name] for name in QUIET_GAUGES if now.get(name)}


def wait_quiet(*servers: Server, deadline_s: float = 20.0) -> float:
    """Seconds until no server keeps pages for anybody.

    Raises:
        AssertionError: one still does after `deadline_s`.
    """
    return sum(until(lambda s=server: not held(s), deadline_s, f"{server.name} quiet") for server in servers)


def vllm_metric(server: Server, name: str) -> float:
    """One of vLLM's own metrics, summed over labels."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)


def idle_cores(server: Server, seconds: float) -> float:
    """Cores that all processes of a server use while nobody asks it anything.

    The queue readers stop spinning first.
    """
    time.sleep(SPIN_S)
    leader = [server.process.pid]
    before, started = cpu_seconds(leader), time.monotonic()
    time.sleep(seconds)
    return (cpu_seconds(leader) - before) / (time.monotonic() - started)
