"""The servers of a fault run: one decoder and a pool of prefillers that can be killed and put back one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from server_tier.ask import Answer, ask, until
from server_tier.probe import counts
from server_tier.stage import FLOAT32

from fault_run.clients import MAX_TOKENS, PROMPTS
from fault_run.link import Link
from vllm_pd_connector.testing.machine import FEW_CORES, free_ports
from vllm_pd_connector.testing.models import random_llama
from vllm_pd_connector.testing.servers import Server, ServerSpec, start_all

START_S = 400.0
DEADLINE_S = 20.0
"""`request_deadline_s` of the decoder, hence the lease of its prefillers."""

SLACK_S = 40.0
"""A local prefill of several long prompts on two busy cores, while servers start beside it."""

LIMIT_S = DEADLINE_S + SLACK_S
QUICK = {
    "min_remote_tokens": 1,
    "request_deadline_s": DEADLINE_S,
    "settle_s": 3,
    "quarantine_s": 3,
    "fence_s": 2,
    "retry_s": 0.5,
}
ARGS = (*FLOAT32, "--max-num-batched-tokens", "512")
BOTH_CORES = [0, 1]


def reference(folder: Path) -> dict[str, Answer]:
    """One ordinary server's answers to every prompt; it is gone afterwards."""
    spec = ServerSpec(random_llama(), cores=BOTH_CORES, name="reference", args=FLOAT32, env=FEW_CORES)
    with start_all([spec], START_S, log_dir=folder) as (server,):
        return {name: ask(server.url, prompt, max_tokens=MAX_TOKENS) for name, prompt in PROMPTS.items()}


class Cast:
    """Servers that share two cores.

    Args:
        folder: for logs and timelines.
        num_prefillers: size of the pool.
        decoder: more configuration of the decoder.
        prefiller: more configuration of the prefillers.
        env: more environment of all.
        args: more arguments of all.
        link: puts the prefillers behind it, in a namespace of their own.
        prefix: before the command of each prefiller.
    """

    def __init__(
        self,
        folder: Path,
        num_prefillers: int = 2,
        *,
        decoder: Mapping[str, Any] | None = None,
        prefiller: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] = (),
        link: Link | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.link = link
        self.clock: Path | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._stack = ExitStack()
        self._starter = ThreadPoolExecutor(max_workers=1)
        self._starting: list[Future[None]] = []
        self._num_restarts = 0
        *ports, decoder_port = free_ports(num_prefillers + 1)
        common: dict[str, Any] = {
            "cores": BOTH_CORES,
            "args": (*ARGS, *args),
            "env": {**FEW_CORES, **(env or {})},
        }
        self._ordinary = ServerSpec(random_llama(), name="ordinary", **common)
        # Each layer is a write of its own, so that a fault can strike between any two.
        extra = {"timeline_dir": str(folder / "timeline"), "min_write_bytes": 1, **(prefiller or {})}
        self._specs = [
            ServerSpec(
                random_llama(), "prefiller", port=port, name=f"prefiller-{i}", extra=extra, prefix=prefix, **common
            )
            for i, port in enumerate(ports)
        ]
        if link is not None:
            self._specs = [link.behind(spec) for spec in self._specs]
            common["env"] = common["env"] | link.near_env
        pool = [f"http://{spec.host}:{spec.port}" for spec in self._specs]
        extra = {"timeline_dir": str(folder / "timeline"), **QUICK, "prefillers": pool, **(decoder or {})}
        self._specs.append(
            ServerSpec(random_llama(), "decoder", port=decoder_port, name="decoder", extra=extra, **common)
        )
        self.servers: list[Server] = self._stack.enter_context(start_all(self._specs, START_S, log_dir=folder))
        self.wait_usable(num_prefillers)

    def __enter__(self) -> Cast:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait_started()
        finally:
            self._stack.close()
            self._starter.shutdown()

    @property
    def decoder(self) -> Server:
        return self.servers[-1]

    @property
    def prefillers(self) -> list[Server]:
        return self.servers[:-1]

    def wait_usable(self, count: int, deadline_s: float = 60.0) -> None:
        """Wait until the decoder would use so many prefillers."""
        until(lambda: usable(self.decoder) >= count, deadline_s, f"{count} prefillers greeted")

    def put_back(self, dead: Server, *, wait: bool = True) -> None:
        """Start a killed server again on its port; in the background unless `wait`."""
        index = self.servers.index(dead)
        self._num_restarts += 1
        spec = replace(self._specs[index], name=f"{self._specs[index].name}-again-{self._num_restarts}")

        def start() -> None:
            (self.servers[index],) = self._stack.enter_context(start_all([spec], START_S, log_dir=self.folder))

        # A server gets SIGTERM when the thread that started it ends; the starter's thread stays.
        self._starting.append(self._starter.submit(start))
        if wait:
            self.wait_started()

    def wait_started(self) -> None:
        """Until every server that was put back is ready.

        Raises:
            ServerFailed: one is not.
        """
        starting, self._starting = self._starting, []
        for future in starting:
            future.result()

    def num_writes(self) -> int:
        """Writes that the prefillers have posted so far."""
        return sum(len(self.moments(prefiller, "write_posted")) for prefiller in self.prefillers)

    @contextmanager
    def ordinary_server(self) -> Iterator[Server]:
        """A server without a connector, with the arguments of the others."""
        with start_all([self._ordinary], START_S, log_dir=self.folder) as (server,):
            yield server

    def shift_clock(self, seconds: int) -> None:
        """Set the wall clock of every server so far from the right time."""
        assert self.clock is not None
        self.clock.write_text(str(seconds))

    def moments(self, server: Server, moment: str) -> list[dict[str, Any]]:
        """Lines of a timeline that the worker of a server has written, oldest first."""
        children = _processes_of(server)
        found: list[dict[str, Any]] = []
        for file in (self.folder / "timeline").glob("worker-*.jsonl"):
            if int(file.stem.rpartition("-")[2]) in children:
                lines = file.read_text().splitlines()
                found += [json.loads(line) for line in lines if f'"{moment}"' in line and line.endswith("}")]
        return found


def usable(decoder: Server) -> int:
    """Prefillers that are greeted and not lost since."""
    try:
        return int(counts(decoder).get("prefillers_usable", 0))
    except (AssertionError, OSError):
        return 0  # the decoder itself is not up yet


def _processes_of(server: Server) -> set[int]:
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if int(fields[2]) == server.process.pid:
            found.add(int(stat.parent.name))
    return found
