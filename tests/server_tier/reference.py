"""One ordinary server's answers to everything, recorded once before any other server starts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from server_tier.ask import Answer, ask, at_once
from server_tier.probe import idle_cores
from server_tier.prompts import BFLOAT16, RANDOM, SMOLLM, names
from server_tier.shape_sets import TP2
from server_tier.stage import FLOAT32, REDUCED, TOOLS
from vllm_pd_connector.testing.machine import FEW_CORES
from vllm_pd_connector.testing.models import random_deepseek, random_gemma, random_llama, smollm2
from vllm_pd_connector.testing.servers import Server, ServerSpec, start_all

START_S = 300.0
IDLE_S = 10.0


@dataclass(slots=True)
class Reference:
    """Attributes:
    answers: completions by prompt name.
    again: the same a second time, with prefix hits; how far an ordinary server is from itself (bf16 only).
    chats: results of `chats.CASES` by name.
    idle_cores: cores the idle server used; 0 if not measured.
    """

    answers: dict[str, Answer] = field(default_factory=dict)
    again: dict[str, Answer] = field(default_factory=dict)
    chats: dict[str, Any] = field(default_factory=dict)
    idle_cores: float = 0.0


def record(models: Collection[str], folder: Path) -> dict[str, Reference]:
    """The references that are asked for, by name, from servers that are gone then."""
    specs: list[ServerSpec] = []
    if "random" in models:
        specs.append(ServerSpec(random_llama(), cores=[0], name="random", args=FLOAT32))
    if "smollm" in models:
        specs.append(ServerSpec(smollm2(), cores=[1], name="smollm", args=(*FLOAT32, *TOOLS)))
    if "bf16" in models:
        specs.append(ServerSpec(smollm2(), cores=[0], name="bf16", args=REDUCED))
    found = _answers(specs, folder)  # side by side; the slowest has a core to itself
    shaped = [
        ServerSpec(random_llama(num_kv_heads=1), cores=[0], name="one-head", args=FLOAT32),
        ServerSpec(random_deepseek(num_layers=1), cores=[1], name="mla", args=FLOAT32, block_size=16),
        ServerSpec(
            random_deepseek(num_layers=1),
            cores=[0, 1],
            name="mla-tp2",
            args=(*FLOAT32, *TP2),
            block_size=16,
            env=FEW_CORES,
        ),
        ServerSpec(random_gemma(), cores=[0], name="window", args=FLOAT32),
    ]
    return found | _answers([spec for spec in shaped if spec.name in models], folder)


def _answers(specs: list[ServerSpec], folder: Path) -> dict[str, Reference]:
    """What each of some servers answers, all of them started at once."""
    with start_all(specs, START_S, log_dir=folder) as servers:
        found = (
            at_once([partial(_RECORDERS.get(server.name, _shapes), server) for server in servers]) if servers else []
        )
    return {server.name: reference for server, reference in zip(servers, found, strict=True)}


def _random(server: Server) -> Reference:
    into = Reference()
    for name, prompt in RANDOM.items():
        into.answers[name] = ask(server.url, prompt)
    into.idle_cores = idle_cores(server, IDLE_S)
    return into


def _smollm(server: Server) -> Reference:
    from server_tier.chats import CASES, client_of, model_of  # imports openai, which takes a second

    into = Reference()
    client = client_of(server.url)
    model = model_of(client)
    for name, case in CASES.items():
        into.chats[name] = case(client, model)
    for name, prompt in SMOLLM.items():
        into.answers[name] = ask(server.url, prompt)
    return into


def _shapes(server: Server) -> Reference:
    into = Reference()
    for name in (*names("shape"), *names("four")):
        into.answers[name] = ask(server.url, RANDOM[name], max_tokens=17)  # one more than is compared
    return into


def _bf16(server: Server) -> Reference:
    into = Reference()
    for answers in (into.answers, into.again):
        for name, prompt in BFLOAT16.items():
            answers[name] = ask(server.url, prompt)
    return into


_RECORDERS = {"random": _random, "smollm": _smollm, "bf16": _bf16}
