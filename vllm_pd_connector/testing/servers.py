"""Real `vllm serve` processes for tests, the demo and the benchmarks.

    specs = [ServerSpec(model, "prefiller", cores=[0]), ServerSpec(model, "decoder", cores=[1])]
    with start_all(specs, deadline_s=240) as (prefiller, decoder):
        requests.post(f"{decoder.url}/v1/completions", ...)

Ports are free ones unless given. A decoder without `prefillers` in its `extra` gets every prefiller of the same
call, and counts as ready only when it has greeted them. On exit, also by an exception, Ctrl-C or SIGTERM, every
process is gone. Never imports vLLM.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm_pd_connector.telemetry.counters import parse_metrics
from vllm_pd_connector.testing.machine import HOST, assign_gpus, environment, free_ports, num_gpus
from vllm_pd_connector.testing.process_group import ProcessGroup, exit_on_signal, stop_all

Role = Literal["prefiller", "decoder", "both", "plain"]

KV_ROLES: dict[Role, str] = {"prefiller": "kv_producer", "decoder": "kv_consumer", "both": "kv_both"}
HTTP_TIMEOUT_S = 5.0
POLL_S = 0.25
TAIL_LINES = 40
GREETED = "event=prefiller_greeted"


class ServerFailed(RuntimeError):
    """A server ended, or was not ready in time. The text holds the tail of its log."""


@dataclass(frozen=True)
class ServerSpec:
    """One server to start.

    Args:
        model: directory or hub name.
        role: "plain" has no connector.
        cores: CPU cores it is pinned to; on a CPU give each server its own. Also sets its OpenMP threads.
        gpus: CUDA devices; empty: the servers of one call are spread over those there are. No effect without GPUs.
        port: 0 for a free one.
        name: for the log file and progress; "" makes "decoder-0" and so on.
        extra: `kv_connector_extra_config`.
        args: further arguments of `vllm serve`; they come last and win.
        env: further environment variables.
        host: address it listens on and is asked at.
        prefix: put before the command, e.g. to run it in another network namespace.
        max_model_len: tokens.
        max_num_seqs: requests that run at once.
        block_size: tokens per page; on a CPU a multiple of 32 (MLA: 16).
    """

    model: str | Path
    role: Role = "plain"
    _: KW_ONLY
    cores: Sequence[int] = ()
    gpus: Sequence[int] = ()
    port: int = 0
    name: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = HOST
    prefix: Sequence[str] = ()
    max_model_len: int = 8192
    max_num_seqs: int = 16
    block_size: int = 32


class Server:
    """A running server.

    Attributes:
        url: base URL, without a slash at the end.
        log: file with its output.
        ready_after_s: seconds from start until ready; None before.
    """

    def __init__(self, name: str, url: str, log: Path, group: ProcessGroup, num_greetings: int) -> None:
        self.name = name
        self.url = url
        self.log = log
        self.ready_after_s: float | None = None
        self._group = group
        self._num_greetings = num_greetings

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The API server's process; the engine's are its children."""
        return self._group.process

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """SIGKILL to the API server, the engine and the workers at once; returns when they are gone."""
        self._group.kill()

    def stop(self) -> None:
        """SIGTERM and an orderly end; SIGKILL after 15 s."""
        stop_all([self._group])

    def pin(self, cores: Sequence[int]) -> None:
        """Move every thread it has now, and those that they start, to these CPU cores."""
        self._group.pin(cores)

    def is_ready(self) -> bool:
        """Whether it answers /health and has greeted its prefillers."""
        try:
            self._get("/health")
        except OSError:  # URLError, HTTPError and time-outs are OSErrors
            return False
        return self.count_log(GREETED) >= self._num_greetings

    def metrics(self) -> dict[str, float]:
        """This connector's samples, e.g. {"bytes_written": 69206016.0}: sums over labels, without `vllm:pd_`.

        The engine publishes them when it steps: after the last step of a burst they can be one step old.

        Raises:
            OSError: the server cannot be reached.
        """
        return parse_metrics(self._get("/metrics"))

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def log_tail(self, num_lines: int = TAIL_LINES) -> str:
        return "\n".join(self.log_text().splitlines()[-num_lines:])

    def count_log(self, text: str) -> int:
        """How often `text` occurs in the log."""
        return self.log_text().count(text)

    def wait_log(self, text: str, deadline_s: float, count: int = 1) -> None:
        """Return once `text` has been logged `count` times.

        Raises:
            ServerFailed: it was not within `deadline_s` seconds.
        """
        deadline = time.monotonic() + deadline_s
        while self.count_log(text) < count:
            if time.monotonic() > deadline or not self._group.is_alive:
                raise ServerFailed(f"{self.name} did not log {text!r}; tail of {self.log}:\n{self.log_tail()}")
            time.sleep(POLL_S)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=HTTP_TIMEOUT_S) as response:
            body: bytes = response.read()
        return body.decode()


Progress = Callable[[Sequence[Server], float], None]
"""Called about four times a second while servers start: all of them, and seconds since the start."""


@contextmanager
def start_all(
    specs: Sequence[ServerSpec],
    deadline_s: float = 240.0,
    *,
    log_dir: str | Path | None = None,
    progress: Progress | None = None,
) -> Iterator[list[Server]]:
    """Start servers at once and yield them, in order, when all are ready; stop all of them at the end.

    Args:
        specs: what to start.
        deadline_s: seconds until all must be ready.
        log_dir: for `<name>.log`; None makes a temporary directory, which is kept.
        progress: called while waiting.

    Raises:
        ServerFailed: one ended or was late.
    """
    folder = Path(log_dir or tempfile.mkdtemp(prefix="pd-servers-"))
    folder.mkdir(parents=True, exist_ok=True)
    servers: list[Server] = []
    with exit_on_signal():
        try:
            devices = assign_gpus([spec.gpus for spec in specs])
            for (name, spec, port, extra), device in zip(_resolve(specs), devices, strict=True):
                command = command_line(spec, port, extra, device.memory_share)
                env = environment(cores=spec.cores, gpus=device.gpus, extra=spec.env)
                log = folder / f"{name}.log"
                group = ProcessGroup(command, env=env, log=log, cores=spec.cores)
                num_greetings = len(extra.get("prefillers", ())) if "prefillers" not in spec.extra else 0
                servers.append(Server(name, f"http://{spec.host}:{port}", log, group, num_greetings))
            _wait_ready(servers, deadline_s, progress)
            yield servers
        finally:
            stop_all([server._group for server in servers])


def command_line(spec: ServerSpec, port: int, extra: Mapping[str, Any], memory_share: float | None) -> list[str]:
    """The `vllm serve` command; `extra` is the connector's configuration, `memory_share` is for GPUs."""
    beside = Path(sys.executable).parent / "vllm"
    vllm = str(beside) if beside.exists() else "vllm"
    command = [
        *spec.prefix,
        vllm,
        "serve",
        str(spec.model),
        "--host",
        spec.host,
        "--port",
        str(port),
        "--enforce-eager",
    ]
    command += ["--max-model-len", str(spec.max_model_len), "--max-num-seqs", str(spec.max_num_seqs)]
    command += ["--block-size", str(spec.block_size)]
    command += [] if memory_share is None else ["--gpu-memory-utilization", f"{memory_share:.2f}"]
    if spec.role != "plain":
        transfer = {
            "kv_connector": "PDConnector",
            "kv_role": KV_ROLES[spec.role],
            "kv_buffer_device": "cuda" if num_gpus() else "cpu",
            "kv_connector_extra_config": dict(extra),
        }
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return [*command, *spec.args]


def _resolve(specs: Sequence[ServerSpec]) -> list[tuple[str, ServerSpec, int, dict[str, Any]]]:
    """(name, spec, port, connector configuration) of each; decoders without a pool get the prefillers among them."""
    ports = [spec.port or free for spec, free in zip(specs, free_ports(len(specs)), strict=True)]
    pool = [f"http://{spec.host}:{port}" for spec, port in zip(specs, ports, strict=True) if spec.role == "prefiller"]
    resolved: list[tuple[str, ServerSpec, int, dict[str, Any]]] = []
    for index, (spec, port) in enumerate(zip(specs, ports, strict=True)):
        before = sum(other.role == spec.role for other in specs[:index])
        defaults = {"prefillers": pool, "retry_s": 0.5} if spec.role == "decoder" and pool else {}
        resolved.append((spec.name or f"{spec.role}-{before}", spec, port, {**defaults, **spec.extra}))
    return resolved


def _wait_ready(servers: Sequence[Server], deadline_s: float, progress: Progress | None) -> None:
    start = time.monotonic()
    while True:
        elapsed = time.monotonic() - start
        for server in servers:
            if server.process.poll() is not None:
                raise ServerFailed(
                    f"{server.name} ended with status {server.process.returncode} after {elapsed:.0f} s; "
                    f"tail of {server.log}:\n{server.log_tail()}"
                )
            if server.ready_after_s is None and server.is_ready():
                server.ready_after_s = elapsed
        if progress is not None:
            progress(servers, elapsed)
        late = [server for server in servers if server.ready_after_s is None]
        if not late:
            return
        if elapsed > deadline_s:
            tails = "\n".join(f"tail of {server.log}:\n{server.log_tail()}" for server in late)
            raise ServerFailed(f"{', '.join(s.name for s in late)} not ready after {deadline_s:.0f} s; {tails}")
        time.sleep(POLL_S)
