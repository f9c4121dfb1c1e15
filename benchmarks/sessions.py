"""Which servers are up together, on which cores, and what is measured on them.

ours      ordinary server and our prefiller on core 0, our decoder on core 1: first token, interference, idle, profile
transfer  two of our pairs, prefillers on core 0, decoders on core 1: where a transfer's time goes, by layer and not
replicas  an ordinary server on each core: interference
pull      vLLM's NixlConnector, prefilling on core 0 and decoding on core 1: first token, idle
push      vLLM's NixlPushConnector, the same: one attempt, and first token if it completes
pull-without-thread   as pull, with a default of NIXL changed: first token, only when asked for
"""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import idle, profile, transfers, ttft
from benchmarks.client import RequestFailed, random_prompt, stream, stream_in_two_steps
from benchmarks.interference import Interference
from benchmarks.records import RecordFile
from benchmarks.summary import (
    BY_LAYER,
    NOT_BY_LAYER,
    OURS,
    OURS_PREFILLER,
    PULL,
    PULL_PREFILLER,
    PUSH,
    PUSH_PREFILLER,
    SHARED,
    THREADLESS,
    THREADLESS_PREFILLER,
)
from vllm_pd_connector.testing.machine import HOST, free_ports
from vllm_pd_connector.testing.servers import GREETED, Server, ServerSpec

PUSH_TIMEOUT_S = 60.0
WITHOUT_THREAD = Path(__file__).parent / "without_thread"
NUM_TOKENS = 2  # per answer where only the first one counts


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much to measure.

    Attributes:
        only: "ttft", "interference", "idle", "transfer", "profile", or nothing for all.
        reps: rounds of first-token times at every length.
        ours_s: seconds for our first-token times; what the rounds leave goes to more of the two longest.
        peers_s: the same for each of vLLM's own connectors.
        ours_extra: added to the connector's configuration on both our servers.
    """

    records: RecordFile
    model: str
    only: str | None
    lengths: Sequence[int] = ttft.PROMPT_TOKENS
    reps: int = 5
    ours_s: float = 450.0
    peers_s: float = 570.0
    answers: int = 3
    answer_tokens: int = 1000
    windows: int = 3
    transfer_lengths: Sequence[int] = transfers.PROMPT_TOKENS
    transfers: int = 8
    profile_s: int = 20
    ours_extra: Mapping[str, Any] = field(default_factory=dict)

    def wants(self, kind: str) -> bool:
        return self.only in (None, kind)


@dataclass(frozen=True, kw_only=True)
class Session:
    """Servers that are up together. `serves` are the kinds of measurement it takes part in."""

    serves: frozenset[str]
    specs: Callable[[Plan], list[ServerSpec]]
    run: Callable[[Plan, Sequence[Server]], None]


def _plain(plan: Plan, core: int) -> ServerSpec:
    return ServerSpec(plan.model, "plain", name=f"plain-core{core}", cores=[core])


def _our_specs(plan: Plan) -> list[ServerSpec]:
    return [
        _plain(plan, 0),
        ServerSpec(plan.model, "prefiller", cores=[0], extra=plan.ours_extra),
        ServerSpec(plan.model, "decoder", cores=[1], extra=plan.ours_extra),
    ]


def _nixl_specs(plan: Plan, connector: str, env: Mapping[str, str] | None = None) -> list[ServerSpec]:
    transfer = json.dumps({"kv_connector": connector, "kv_role": "kv_both", "kv_buffer_device": "cpu"})
    return [
        ServerSpec(
            plan.model,
            "plain",
            name=f"{connector}-core{core}",
            cores=[core],
            args=["--kv-transfer-config", transfer],
            env={
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                **(env or {}),
            },
        )
        for core, port in enumerate(free_ports(2))
    ]


def _run_ours(plan: Plan, servers: Sequence[Server]) -> None:
    shared, prefiller, decoder = servers
    leaders = [server.process.pid for server in servers]
    arms = {SHARED: _asks(plan, shared), OURS_PREFILLER: _asks(plan, prefiller), OURS: _asks(plan, decoder)}
    if plan.wants("ttft"):
        _first_token(plan, "ours", arms, leaders, plan.ours_s)
    if plan.wants("idle"):
        idle.measure(
            plan.records,
            "ours",
            dict(zip((SHARED, "our prefiller", "our decoder"), leaders, strict=True)),
            lambda: _ask_each(arms.values()),
            windows=plan.windows,
        )
    if plan.wants("interference"):
        _interfere(plan, "ours: prefiller + decoder", decoder.url, [decoder.url], leaders)
    if plan.wants("profile"):
        _profile(plan, prefiller, decoder)
    _check_remote(plan, decoder)


def _profile(plan: Plan, prefiller: Server, decoder: Server) -> None:
    """A long prompt and a running answer at a time, so that the prefiller computes and the decoder answers."""
    turns = itertools.count()

    def load() -> None:
        turn = next(turns)
        answer = random_prompt(200, "profile", "answer", turn)
        with ThreadPoolExecutor(max_workers=1) as pool:
            running = pool.submit(stream, decoder.url, plan.model, answer, 300)
            stream(decoder.url, plan.model, random_prompt(3000, "profile", "long", turn), NUM_TOKENS)
            running.result()

    leaders = {"prefiller": prefiller.process.pid, "decoder": decoder.process.pid}
    profile.measure(plan.records, plan.records.path.parent, leaders, load, seconds=plan.profile_s)


def _timelines(plan: Plan, arm: str) -> Path:
    """Where a pair's timelines go: beside the servers' logs."""
    return Path(tempfile.gettempdir(), "pd-bench", plan.records.path.parent.name, "timelines", arm.replace(" ", "-"))


def _transfer_specs(plan: Plan) -> list[ServerSpec]:
    specs: list[ServerSpec] = []
    for arm, wait in ((BY_LAYER, {}), (NOT_BY_LAYER, transfers.NO_LAYERS)):
        shutil.rmtree(_timelines(plan, arm), ignore_errors=True)  # of an earlier run into the same results
        extra = {"timeline_dir": str(_timelines(plan, arm))}
        port = free_ports(1)[0]
        pool = [f"http://{HOST}:{port}"]
        args = transfers.ONE_STEP
        specs += [
            ServerSpec(plan.model, "prefiller", cores=[0], port=port, extra={**extra, **wait}, args=args),
            ServerSpec(
                plan.model, "decoder", cores=[1], extra={**extra, "prefillers": pool, "retry_s": 0.5}, args=args
            ),
        ]
    return specs


def _run_transfer(plan: Plan, servers: Sequence[Server]) -> None:
    decoders = dict(zip((BY_LAYER, NOT_BY_LAYER), (servers[1], servers[3]), strict=True))
    for decoder in decoders.values():
        decoder.wait_log(GREETED, 60.0)
    arms = {arm: (_asks(plan, decoder), _timelines(plan, arm)) for arm, decoder in decoders.items()}
    leaders = [server.process.pid for server in servers]
    transfers.measure(plan.records, arms, leaders, lengths=plan.transfer_lengths, reps=plan.transfers)
    for decoder in decoders.values():
        _check_remote(plan, decoder)


def _run_replicas(plan: Plan, servers: Sequence[Server]) -> None:
    urls = [server.url for server in servers]
    _interfere(plan, "two ordinary servers, in turn", urls[0], urls, [server.process.pid for server in servers])


def _run_pull(plan: Plan, servers: Sequence[Server]) -> None:
    leaders = [server.process.pid for server in servers]
    arms = _peer_arms(plan, servers, PULL, PULL_PREFILLER)
    if plan.wants("ttft"):
        _first_token(plan, "pull", arms, leaders, plan.peers_s)
    if plan.wants("idle"):
        names = ("NixlConnector, prefilling", "NixlConnector, decoding")
        idle.measure(
            plan.records,
            "pull",
            dict(zip(names, leaders, strict=True)),
            lambda: _ask_each(arms.values()),
            windows=plan.windows,
        )


def _run_without_thread(plan: Plan, servers: Sequence[Server]) -> None:
    arms = _peer_arms(plan, servers, THREADLESS, THREADLESS_PREFILLER)
    _first_token(plan, "pull without thread", arms, [server.process.pid for server in servers], plan.peers_s)


def _run_push(plan: Plan, servers: Sequence[Server]) -> None:
    prefiller, decoder = servers
    start, outcome = time.monotonic(), "completed"
    try:
        prompt = random_prompt(200, "push")
        stream_in_two_steps(prefiller.url, decoder.url, plan.model, prompt, NUM_TOKENS, timeout_s=PUSH_TIMEOUT_S)
    except TimeoutError:
        outcome = f"not completed within {PUSH_TIMEOUT_S:.0f} s"
    except (OSError, RequestFailed) as error:
        outcome = f"failed: {error}"
    seconds = round(time.monotonic() - start, 2)
    plan.records.add("attempt", what="NixlPushConnector, 200 tokens", outcome=outcome, s=seconds)
    print(f"  NixlPushConnector: {outcome}", flush=True)
    if outcome == "completed":
        arms = _peer_arms(plan, servers, PUSH, PUSH_PREFILLER)
        _first_token(plan, "push", arms, [server.process.pid for server in servers], plan.peers_s)


def _peer_arms(plan: Plan, servers: Sequence[Server], pair: str, alone: str) -> dict[str, ttft.Ask]:
    """A pair of vLLM's own connectors, and its prefiller asked directly."""
    prefiller, decoder = servers
    return {
        alone: _asks(plan, prefiller),
        pair: lambda prompt: stream_in_two_steps(prefiller.url, decoder.url, plan.model, prompt, NUM_TOKENS),
    }


def _first_token(plan: Plan, name: str, arms: Mapping[str, ttft.Ask], leaders: Sequence[int], budget_s: float) -> None:
    ttft.measure(plan.records, name, arms, leaders, lengths=plan.lengths, reps=plan.reps, budget_s=budget_s)


def _interfere(plan: Plan, arm: str, answer_url: str, prompt_urls: Sequence[str], leaders: Sequence[int]) -> None:
    Interference(
        records=plan.records,
        arm=arm,
        model=plan.model,
        answer_url=answer_url,
        prompt_urls=prompt_urls,
        leaders=leaders,
        answer_tokens=plan.answer_tokens,
    ).measure(plan.answers)


def _check_remote(plan: Plan, decoder: Server) -> None:
    """Record what the decoder counted: figures of a pair that prefilled locally would be worthless."""
    counted = decoder.metrics()
    plan.records.add("counted", **{name: counted.get(name, 0.0) for name in ("dispatched", "released", "failed")})
    if not counted.get("dispatched") or counted.get("failed") or counted.get("prefilled_locally"):
        raise RuntimeError(f"the decoder prefilled requests itself, its figures mean nothing: {counted}")


def _asks(plan: Plan, server: Server) -> ttft.Ask:
    return lambda prompt: stream(server.url, plan.model, prompt, NUM_TOKENS)


def _ask_each(asks: Any) -> None:
    for index, ask in enumerate(asks):
        ask(random_prompt(200, "idle", index))


SESSIONS: dict[str, Session] = {
    "ours": Session(serves=frozenset({"ttft", "interference", "idle", "profile"}), specs=_our_specs, run=_run_ours),
    "transfer": Session(serves=frozenset({"transfer"}), specs=_transfer_specs, run=_run_transfer),
    "replicas": Session(
        serves=frozenset({"interference"}), specs=lambda plan: [_plain(plan, 0), _plain(plan, 1)], run=_run_replicas
    ),
    "pull": Session(
        serves=frozenset({"ttft", "idle"}), specs=lambda plan: _nixl_specs(plan, "NixlConnector"), run=_run_pull
    ),
    "push": Session(
        serves=frozenset({"ttft"}), specs=lambda plan: _nixl_specs(plan, "NixlPushConnector"), run=_run_push
    ),
    "pull-without-thread": Session(
        serves=frozenset({"ttft"}),
        specs=lambda plan: _nixl_specs(plan, "NixlConnector", {"PYTHONPATH": str(WITHOUT_THREAD)}),
        run=_run_without_thread,
    ),
}
DEFAULT = ("ours", "transfer", "replicas", "pull", "push")


def results_directory(root: Path, commit: str) -> Path:
    """`benchmarks/results/<date>-<commit>`, with the time where that exists."""
    directory = root / "benchmarks" / "results" / f"{time.strftime('%Y-%m-%d')}-{commit}"
    return directory.with_name(f"{directory.name}-{time.strftime('%H%M')}") if directory.exists() else directory
