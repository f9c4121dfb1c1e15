"""Which servers run: one set at a time, each on its own core, started when the first test needs it.

Two cores carry two busy servers, and a server takes 20 to 60 s to start; so tests that can share a set do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

from server_tier import shape_sets
from vllm_pd_connector.testing.machine import FEW_CORES, HOST, free_ports
from vllm_pd_connector.testing.models import random_llama, random_lora, smollm2
from vllm_pd_connector.testing.models.random_lora import RANK as LORA_RANK
from vllm_pd_connector.testing.servers import Server, ServerFailed, ServerSpec, start_all

START_S = 400.0
# One attempt: a test names the prefiller whose failure it looks at. Retries: `fault_run` and `integration`.
SHORT = {
    "min_remote_tokens": 1,
    "settle_s": 3,
    "quarantine_s": 3,
    "unreachable_s": 3,
    "retry_s": 0.5,
    "max_attempts": 1,
}
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details")
FLOAT32 = ("--dtype", "float32")
REDUCED = ("--dtype", "bfloat16")
GUARD = ("--middleware", "vllm_pd_connector.control.request_guard.RequestGuard")
ADAPTER = "adapter"
ALARMS = ("event=messenger_error", "event=invariant_broken", "EngineDeadError")


def main_set() -> list[ServerSpec]:
    """A prefiller that chunks and a decoder; every page is compared after it arrived."""
    args = (*FLOAT32, "--max-num-batched-tokens", "512", "--enable-prompt-tokens-details")
    extra = {"verify_pages": True}
    return [
        ServerSpec(random_llama(), "prefiller", cores=[0], args=args, extra=extra),
        ServerSpec(
            random_llama(),
            "decoder",
            cores=[1],
            args=args,
            extra={**extra, **SHORT, "request_deadline_s": 60, "fence_s": 2},
        ),
    ]


def smollm_set() -> list[ServerSpec]:
    """The real small model in float32, with tools, and the request guard in front of both servers."""
    args = (*FLOAT32, *TOOLS, *GUARD)
    return [
        ServerSpec(smollm2(), "prefiller", cores=[0], args=args, extra={"verify_pages": True}),
        ServerSpec(smollm2(), "decoder", cores=[1], args=args, extra={**SHORT, "verify_pages": True}),
    ]


def bf16_set() -> list[ServerSpec]:
    """The real small model as it is meant to run."""
    return [
        ServerSpec(smollm2(), "prefiller", cores=[0], args=REDUCED, extra={"verify_pages": True}),
        ServerSpec(smollm2(), "decoder", cores=[1], args=REDUCED, extra={**SHORT, "verify_pages": True}),
    ]


def tp2_set() -> list[ServerSpec]:
    """Two ranks on each side: four workers on two cores."""
    args = (*FLOAT32, "--tensor-parallel-size", "2")
    slow = {"min_remote_tokens": 1, "verify_pages": True, "settle_s": 60, "request_deadline_s": 120, "retry_s": 0.5}
    return [
        ServerSpec(random_llama(), "prefiller", cores=[0, 1], args=args, extra={"verify_pages": True}, env=FEW_CORES),
        ServerSpec(random_llama(), "decoder", cores=[0, 1], args=args, extra=slow, env=FEW_CORES),
    ]


def faulty_set() -> list[ServerSpec]:
    """A decoder with three prefillers that misbehave; a test names the one it wants.

    wrong: every write carries another page. checked: one wrong page, then pages that never arrive, with digests.
    stuck: one write that fails, then writes that never end.
    """
    wrong = {"faults": [{"action": "wrong_page", "nth": 0, "count": 100_000}]}
    checked = {
        "verify_pages": True,
        "faults": [
            {"action": "wrong_page", "nth": 0, "count": 1},
            {"action": "drop", "nth": 1, "count": 100_000},
        ],
    }
    stuck = {
        "faults": [{"action": "fail", "nth": 0, "count": 1}, {"action": "hang", "nth": 1, "count": 100_000}],
    }
    prefillers = [
        ServerSpec(random_llama(), "prefiller", cores=[0, 1], args=FLOAT32, extra=extra, name=name, env=FEW_CORES)
        for name, extra in (("wrong", wrong), ("checked", checked), ("stuck", stuck))
    ]
    decoder = ServerSpec(
        random_llama(),
        "decoder",
        cores=[0, 1],
        env=FEW_CORES,
        args=FLOAT32,
        extra={**SHORT, "verify_pages": True, "request_deadline_s": 15, "fence_s": 4},
    )
    return [*prefillers, decoder]


def both_set() -> list[ServerSpec]:
    """Two kv_both servers that prefill for each other, and a decoder without prefillers, loaded by its module path.

    The pools of the two also name the port of `FakePrefiller`. The first answers failures with an error. All of them
    have the base model and an adapter.
    """
    first, second = free_ports(2)
    lora = ("--enable-lora", "--max-lora-rank", str(LORA_RANK), "--lora-modules", f"{ADAPTER}={random_lora()}")
    args = (*FLOAT32, *lora, "--scheduling-policy", "priority")
    servers = [
        ServerSpec(
            random_llama(),
            "both",
            cores=[core],
            port=port,
            args=args,
            extra={
                **SHORT,
                "request_deadline_s": 15,
                "fence_s": 2,
                "on_failure": policy,
                "prefillers": [f"http://{HOST}:{peer}", f"http://{HOST}:{fake_port()}"],
            },
        )
        for core, port, peer, policy in ((0, first, second, "error"), (1, second, first, "local"))
    ]
    transfer = (
        '{"kv_connector": "PDConnector", "kv_connector_module_path": "vllm_pd_connector.engine.connector", '
        '"kv_role": "kv_consumer", "kv_buffer_device": "cpu"}'
    )
    alone = ServerSpec(
        random_llama(),
        "plain",
        cores=[0, 1],
        env=FEW_CORES,
        name="alone",
        args=(*args, "--kv-transfer-config", transfer),
    )
    return [*servers, alone]


@cache
def fake_port() -> int:
    """Where `FakePrefiller` listens."""
    return free_ports(1)[0]


# In the order in which their tests run.
SETS: dict[str, Callable[[], Sequence[ServerSpec]]] = {
    "main": main_set,
    "faulty": faulty_set,
    "both": both_set,
    "smollm": smollm_set,
    "bf16": bf16_set,
    "tp2": tp2_set,
    "shapes": shape_sets.shapes_set,
    "replicas": shape_sets.replicas_set,
    "native": shape_sets.native_set,
    "mla": shape_sets.mla_set,
    "window": shape_sets.window_set,
    "eagle": shape_sets.eagle_set,
    "second": shape_sets.second_set,
    "dp": shape_sets.dp_set,
}


class Stage:
    """At most one set of servers at a time."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pd-tests-"))
        self.started: dict[str, float] = {}
        self.alarms: list[str] = []
        self._stack = ExitStack()
        self._name = ""
        self._servers: list[Server] = []
        self._failed: dict[str, ServerFailed] = {}

    def use(self, name: str) -> list[Server]:
        """The servers of a set, in the order of its specification; another set is stopped first."""
        if name != self._name or any(server.process.poll() is not None for server in self._servers):
            self.close()
            if name in self._failed:
                raise self._failed[name]
            try:
                self._servers = self._stack.enter_context(start_all(SETS[name](), START_S, log_dir=self.folder / name))
            except ServerFailed as error:
                self._failed[name] = error  # one wait for a set that does not start is enough
                raise
            self._name = name
            self.started[name] = max(server.ready_after_s or 0.0 for server in self._servers)
        return self._servers

    def put_back(self, dead: Server) -> Server:
        """Start a server of the present set again, on the same port, in place of one that was killed."""
        index = self._servers.index(dead)
        spec = SETS[self._name]()[index]
        spec = replace(spec, port=dead.port, name=f"{dead.name}-again", cores=[0, 1], env=FEW_CORES)
        (server,) = self._stack.enter_context(start_all([spec], START_S, log_dir=self.folder / self._name))
        self._servers[index] = server
        return server

    def close(self) -> None:
        """Stop everything, and note what no log may contain."""
        for server in self._servers:
            self.alarms += [line for line in server.log_text().splitlines() if any(word in line for word in ALARMS)]
        self._stack.close()
        self._name, self._servers = "", []
