"""What happens in one run, as data: a seed draws it, the shrinker takes parts of it away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, NamedTuple, get_args

from vllm.v1.engine import PauseMode

NUM_FAMILIES = 6
"""Prompts of one family begin alike, so that they hit each other's prefixes."""

FaultKind = Literal["kill", "kill_silently", "pause", "cut", "reset_cache", "terminate", "pause_engine"]


class Side(NamedTuple):
    """How the servers of one role cut their pages.

    Attributes:
        num_ranks: tensor-parallel ranks.
        block_size: tokens of a page; a multiple of `pages.GRANULE`.
    """

    num_ranks: int = 1
    block_size: int = 4


class Shape(NamedTuple):
    """Both sides of a pool, and the model's KV heads: with fewer than ranks, ranks hold the same one, as with MLA."""

    prefiller: Side = Side()
    decoder: Side = Side()
    num_heads: int = 1


PLAIN = Shape()
UNEQUAL = (
    Shape(Side(2), Side(2), 2),
    Shape(Side(2), Side(1), 2),
    Shape(Side(1), Side(2), 2),
    Shape(Side(2), Side(1), 1),
    Shape(Side(1), Side(2), 1),
    Shape(Side(2), Side(2), 1),
    Shape(Side(1, 8), Side(1), 1),
    Shape(Side(1), Side(1, 8), 1),
    Shape(Side(2, 8), Side(1), 2),
    Shape(Side(1), Side(2, 8), 2),
    Shape(Side(2), Side(1, 8), 1),
    Shape(Side(4), Side(2), 2),
)
"""Equal ranks, split and joined heads, replicas that take turns, pages of two sizes, and some of that together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One request of a client.

    Attributes:
        at: seconds from the start.
        decoder: index.
        num_tokens: of the prompt.
        leaves_after_s: the client closes its connection then, None if it waits for the answer.
        params: its kv_transfer_params.
    """

    name: str
    at: float
    decoder: int
    family: int
    num_tokens: int
    max_tokens: int
    leaves_after_s: float | None
    params: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that breaks: `target` is an address; of a cut, `other` is the other end.

    kill: SIGKILL; the kernel closes the sockets; another incarnation starts after `seconds`.
    kill_silently: the machine dies: nobody is told.
    pause: SIGSTOP for `seconds`.
    cut: nothing passes between the two for `seconds`.
    reset_cache: vLLM's `reset_prefix_cache(reset_running_requests=True)`.
    terminate: SIGTERM; what runs is finished within `grace_s` (`--shutdown-timeout`), or aborted when that is 0, then
        SIGKILL; another incarnation starts `seconds` after the end.
    pause_engine: vLLM's `pause_scheduler(mode)`, and `resume_scheduler` after `seconds`.
    """

    kind: FaultKind
    at: float
    target: str
    other: str = ""
    seconds: float = 0.0
    grace_s: float = 0.0
    mode: PauseMode = "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How often the network misbehaves (probabilities) and within what bounds (seconds).

    Attributes:
        refusing_router: who looks for a control port behind a cut is refused, instead of hearing nothing.
    """

    slow: float = 0.0
    slow_s: float = 0.5
    busy: float = 0.0
    note_lost: float = 0.0
    note_twice: float = 0.0
    fence_twice: float = 0.0
    write_fails: float = 0.0
    write_hangs: float = 0.0
    fail_s: float = 2.0
    late_s: float = 3.0
    connect_timeout_s: float = 0.5
    refusing_router: bool = False


NOISE_KINDS = ("slow", "busy", "note_lost", "note_twice", "fence_twice", "write_fails", "write_hangs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run.

    Attributes:
        num_blocks: pages of a server, if they have 4 tokens; half as many of 8.
        config: the connector's configuration on decoders.
    """

    seed: int
    num_decoders: int
    num_prefillers: int
    shape: Shape
    num_blocks: int
    chunk_tokens: int
    config: dict[str, Any]
    noise: Noise
    requests: tuple[ClientRequest, ...]
    faults: tuple[Fault, ...]

    @property
    def size(self) -> int:
        noisy = sum(getattr(self.noise, kind) > 0 for kind in NOISE_KINDS)
        return len(self.requests) + len(self.faults) + noisy + self.num_decoders + self.num_prefillers


TIMES = {
    "request_deadline_s": 12.0,
    "settle_s": 2.0,
    "fence_s": 1.0,
    "quarantine_s": 6.0,
    "unreachable_s": 12.0,
    "connect_timeout_s": 0.5,
    "retry_s": 0.5,
}
"""Shorter than in production, in like proportions; `quarantine_s` covers `Noise.late_s`."""

FAULT_KINDS: tuple[FaultKind, ...] = (
    *("kill", "kill_silently", "pause", "pause", "cut", "cut", "reset_cache"),
    *("terminate", "terminate", "pause_engine"),
)

FAULT_S = ((0.02, 1.0), (1.0, 8.0), (8.0, 32.0))
"""Shorter than a step to longer than a deadline, a lease and a quarantine together."""


def draw(seed: int, num_requests: int) -> Scenario:
    """The scenario of a seed."""
    random = Random(f"scenario {seed}")
    num_decoders, num_prefillers = random.choice([(1, 1), (1, 2), (2, 1), (2, 2), (2, 3)])
    calm = random.random() < 0.15
    span = num_requests * random.choice([0.005, 0.01, 0.05])
    num_blocks = random.choice([24, 48, 96])
    return Scenario(
        seed=seed,
        num_decoders=num_decoders,
        num_prefillers=num_prefillers,
        shape=PLAIN if random.random() < 0.6 else random.choice(UNEQUAL),
        num_blocks=num_blocks,
        chunk_tokens=random.choice([8, 16, 64]),
        config={
            **TIMES,
            "on_failure": random.choice(["local", "error"]),
            "min_remote_tokens": random.choice([1, 8]),
            "min_write_bytes": random.choice([1, 1 << 20]),
            "verify_pages": random.random() < 0.2,
            "max_held_share": random.choice([0.5, 0.9]),
            "short_prompt_tokens": random.choice([0, 8]),
            "max_outstanding_per_prefiller": random.choice([0, 0, 1, 4]),
            "max_attempts": random.choice([1, 2, 3]),
            "busy_wait_s": random.choice([0.0, 0.5, 2.0]),
        },
        noise=Noise() if calm else _noise(random),
        requests=tuple(_request(random, i, span, num_decoders, num_blocks) for i in range(num_requests)),
        faults=() if calm else _faults(random, span, num_decoders, num_prefillers),
    )


def _noise(random: Random) -> Noise:
    """Half of the kinds, each rare or frequent."""
    rates = {kind: random.choice([0.002, 0.02, 0.1]) for kind in NOISE_KINDS if random.random() < 0.5}
    return replace(Noise(), **rates, refusing_router=random.random() < 0.5)  # type: ignore[arg-type]


def _request(random: Random, number: int, span: float, num_decoders: int, num_blocks: int) -> ClientRequest:
    num_pages = random.choice([1, 2, 3, 5, 8, min(14, num_blocks // 3)])
    return ClientRequest(
        name=f"r{number}",
        at=random.uniform(0.0, span),
        decoder=random.randrange(num_decoders),
        family=random.randrange(NUM_FAMILIES),
        num_tokens=max(1, num_pages * 4 - random.randrange(4)),
        max_tokens=random.choice([1, 1, 2, 4]),
        leaves_after_s=random.choice([0.0, 0.01, 0.03, 0.1, 1.0]) if random.random() < 0.12 else None,
        params=random.choice([None] * 12 + [{"prefiller": "http://p0"}, {"prefiller": 7}]),
    )


def _faults(random: Random, span: float, num_decoders: int, num_prefillers: int) -> tuple[Fault, ...]:
    decoders = [f"d{i}" for i in range(num_decoders)]
    prefillers = [f"p{i}" for i in range(num_prefillers)]
    faults = []
    for _ in range(random.choice([1, 2, 4, 6])):
        kind: FaultKind = random.choice(FAULT_KINDS)
        faults.append(
            Fault(
                kind=kind,
                at=random.uniform(0.0, span),
                target=random.choice(decoders) if kind == "cut" else random.choice(decoders + prefillers),
                other=random.choice(prefillers) if kind == "cut" else "",
                seconds=random.uniform(*random.choice(FAULT_S)),
                grace_s=random.choice([0.0, random.uniform(0.1, 30.0)]),
                mode=random.choice(get_args(PauseMode)),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at))
