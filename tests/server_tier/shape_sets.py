"""Sets of servers whose shapes differ, and what each row of the table of shapes asks of them.

Servers are kv_both and name each other, so that one set serves both directions of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_pd_connector.testing.machine import (
    FEW_CORES,
    HOST,
    SECOND_RUNNER,
    SECOND_RUNNER_ARGS,
    free_ports,
    num_gpus,
)
from vllm_pd_connector.testing.models import random_deepseek, random_eagle, random_gemma, random_llama
from vllm_pd_connector.testing.servers import ServerSpec

FLOAT32 = ("--dtype", "float32")
TP2 = ("--tensor-parallel-size", "2")
EXTRA = {"min_remote_tokens": 1, "settle_s": 30, "request_deadline_s": 90, "retry_s": 0.5, "verify_pages": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What a model's KV cache is made of, for computing what must move.

    Attributes:
        windows: of each layer; None reads everything.
        num_heads: KV heads.
        slot_bytes: of one head of one token.
    """

    windows: tuple[int | None, ...]
    num_heads: int
    slot_bytes: int

    def bytes_for(self, prompt_tokens: int, *, granule: int, copies: int) -> int:
        """Bytes of all granules that hold tokens a decoder reads, once for each rank that holds a head."""
        num_tokens = prompt_tokens - 1
        total = 0
        for window in self.windows:
            start = max(0, num_tokens + 1 - window) if window else 0
            granules = -(-num_tokens // granule) - start // granule if num_tokens > start else 0
            total += granules * granule
        return total * self.num_heads * self.slot_bytes * copies


LLAMA = Cache(windows=(None,) * 8, num_heads=4, slot_bytes=256)
ONE_HEAD = Cache(windows=(None,) * 8, num_heads=1, slot_bytes=256)
DEEPSEEK = Cache(windows=(None,), num_heads=1, slot_bytes=2304)
GEMMA = Cache(windows=(128,) * 5 + (None,), num_heads=4, slot_bytes=256)
EAGLE = Cache(windows=(None,) * 9, num_heads=4, slot_bytes=256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        servers: name of the set.
        decoder: position of the server that is asked.
        prefiller: position of the one that prefills.
        reference: whose answers must be equal.
        cache: of the model.
        granule: tokens that move at once.
        copies: decoder ranks that hold the same head.
        greetings: prefillers the decoder has in its pool.
        is_native: a native thread posts the prefiller's writes, so no digests travel.
        has_second_runner: vLLM's V2 model runner computes on both sides.
        is_continued: prompts end with the reference's first token and come one by one, see `tests/e2e/test_shapes.py`.
    """

    servers: str
    decoder: int
    prefiller: int
    reference: str = "random"
    cache: Cache = LLAMA
    granule: int = 32
    copies: int = 1
    greetings: int = 1
    is_native: bool = False
    has_second_runner: bool = False
    is_continued: bool = False


MLA = Row(
    servers="mla",
    decoder=0,
    prefiller=0,
    greetings=2,
    reference="mla-tp2",
    cache=DEEPSEEK,
    granule=16,
    copies=2,
    is_continued=True,
)

ROWS: dict[str, Row] = {
    "TP 2 to 1": Row(servers="shapes", decoder=0, prefiller=1, greetings=2),
    "TP 1 to 2": Row(servers="shapes", decoder=1, prefiller=0, greetings=2),
    "blocks of 64 to 32": Row(servers="shapes", decoder=0, prefiller=2, greetings=2),
    "blocks of 32 to 64": Row(servers="shapes", decoder=2, prefiller=0, greetings=2),
    "one head, TP 2 to 1": Row(servers="replicas", decoder=0, prefiller=1, reference="one-head", cache=ONE_HEAD),
    "one head, TP 1 to 2": Row(
        servers="replicas", decoder=1, prefiller=0, reference="one-head", cache=ONE_HEAD, copies=2
    ),
    "MLA, TP 2 to 1": replace(MLA, decoder=0, prefiller=1, reference="mla", copies=1),
    "MLA, TP 1 to 2": replace(MLA, decoder=1, prefiller=0),
    "MLA, TP 2 to 2": replace(MLA, decoder=2, prefiller=1),
    "sliding window and full": Row(servers="window", decoder=1, prefiller=0, reference="window", cache=GEMMA),
    "TP 1 to 2, posted natively": Row(servers="native", decoder=1, prefiller=0, is_native=True),
    "V2 model runner, EAGLE layers": Row(servers="second", decoder=1, prefiller=0, cache=EAGLE, has_second_runner=True),
    "EAGLE layers": Row(servers="eagle", decoder=1, prefiller=0, cache=EAGLE),
}


def shapes_set() -> list[ServerSpec]:
    """TP 1 with blocks of 32, TP 2 with blocks of 32, TP 1 with blocks of 64."""
    return _knowing_each_other(random_llama(), [(FLOAT32, 32), ((*FLOAT32, *TP2), 32), (FLOAT32, 64)])


def replicas_set() -> list[ServerSpec]:
    """One KV head, TP 1 and TP 2: both ranks of the second hold it."""
    return _knowing_each_other(random_llama(num_kv_heads=1), [(FLOAT32, 32), ((*FLOAT32, *TP2), 32)])


def mla_set() -> list[ServerSpec]:
    """A latent of one head, TP 1, TP 2 and TP 2. One layer: see `tests/e2e/test_shapes.py`."""
    ranks = (*FLOAT32, *TP2)
    return _knowing_each_other(random_deepseek(num_layers=1), [(FLOAT32, 16), (ranks, 16), (ranks, 16)])


def window_set() -> list[ServerSpec]:
    """Five layers with a window of 128 tokens and one without: several cache groups."""
    args = (*FLOAT32, "--max-num-batched-tokens", "256")
    return _one_way(random_gemma(), args, args)


def eagle_set() -> list[ServerSpec]:
    """The same drafter on both sides: its layer is one more."""
    args = (*FLOAT32, *_drafter())
    return _one_way(random_llama(), args, args)


def second_set() -> list[ServerSpec]:
    """The same on the V2 model runner: on a GPU it is the default, on a CPU its kernels are interpreted."""
    args, env = (*FLOAT32, *_drafter(), "--max-num-batched-tokens", "512"), {}
    if not num_gpus():
        args, env = (*args, *SECOND_RUNNER_ARGS), SECOND_RUNNER
    return [replace(spec, cores=[core], env=env) for core, spec in enumerate(_one_way(random_llama(), args, args))]


def native_set() -> list[ServerSpec]:
    """A prefiller with chunks of 512 tokens whose writes to two decoder ranks a native thread posts."""
    prefiller, decoder = _one_way(random_llama(), (*FLOAT32, "--max-num-batched-tokens", "512"), (*FLOAT32, *TP2))
    native = {"native_posting": True, "min_write_bytes": 1 << 16}
    return [replace(prefiller, extra=native), replace(decoder, extra={**EXTRA, "verify_pages": False})]


def dp_set() -> list[ServerSpec]:
    """A decoder of two data-parallel ranks: two engines behind one address."""
    return _one_way(random_llama(), FLOAT32, (*FLOAT32, "--data-parallel-size", "2"))


def _drafter() -> tuple[str, str]:
    """An EAGLE model with two guesses."""
    drafter = f'{{"method": "eagle", "model": "{random_eagle()}", "num_speculative_tokens": 2}}'
    return "--speculative-config", drafter


def _one_way(model: Path, prefiller_args: Sequence[str], decoder_args: Sequence[str]) -> list[ServerSpec]:
    return [
        ServerSpec(model, "prefiller", cores=[0, 1], args=prefiller_args, extra={"verify_pages": True}, env=FEW_CORES),
        ServerSpec(model, "decoder", cores=[0, 1], args=decoder_args, extra=EXTRA, env=FEW_CORES),
    ]


def _knowing_each_other(model: Path, servers: Sequence[tuple[Sequence[str], int]]) -> list[ServerSpec]:
    ports = free_ports(len(servers))
    specs: list[ServerSpec] = []
    for (args, block_size), port in zip(servers, ports, strict=True):
        others = [f"http://{HOST}:{other}" for other in ports if other != port]
        extra: dict[str, Any] = {**EXTRA, "prefillers": others}
        name = f"server-{len(specs)}"
        specs.append(
            ServerSpec(
                model,
                "both",
                cores=[0, 1],
                port=port,
                name=name,
                args=args,
                extra=extra,
                env=FEW_CORES,
                block_size=block_size,
            )
        )
    return specs
