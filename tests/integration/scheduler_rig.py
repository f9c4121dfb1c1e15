"""A real vLLM `Scheduler` with our connector and no model: steps are computed by nobody and reported by hand."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_pd_connector.config import parse
from vllm_pd_connector.engine.connector import PDConnector
from vllm_pd_connector.engine.scheduler_half import SchedulerHalf
from vllm_pd_connector.engine.step import RankHandshake, StepMetadata, WorkerReport
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.clock import FakeClock
from vllm_pd_connector.testing.fake_dispatcher import FakeDispatcher
from vllm_pd_connector.testing.modelless import modelless_config
from vllm_pd_connector.testing.shapes import some_shape
from vllm_pd_connector.wire.compatibility import CacheShape

BLOCK = 16
LAYERS = ["l0", "l1"]
PROMPT = 6 * BLOCK + 4
PAGES = 7
"""What `hold` reserves for a prompt of `PROMPT` tokens."""

SHAPE = some_shape(block_size=BLOCK, layers=" ".join(LAYERS))
PREFILLER = "http://prefiller:8100"


def handshake(num_blocks: int = 64, shape: CacheShape = SHAPE) -> RankHandshake:
    """What one worker would have said."""
    page_bytes = shape.geometry().page().page_bytes
    return RankHandshake(
        descriptor=b"rank 0",
        pages=KvBuffer(num_layers=len(LAYERS), num_blocks=num_blocks, page_bytes=page_bytes).table,
        shape=shape,
        control="tcp://127.0.0.1:1",
        generation="a" * 16,
    )


@dataclass
class Step:
    """One `schedule` with its orders for the workers."""

    output: SchedulerOutput
    orders: StepMetadata

    @property
    def tokens(self) -> dict[str, int]:
        return self.output.num_scheduled_tokens


@dataclass
class Rig:
    """Args: see `make_rig`."""

    scheduler: Scheduler
    half: SchedulerHalf
    clock: FakeClock
    made: list[FakeDispatcher]
    worker: RankHandshake
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    num_added: int = 0

    @property
    def dispatcher(self) -> FakeDispatcher:
        return self.made[0]

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def add(
        self,
        num_tokens: int,
        *,
        params: dict[str, Any] | None = None,
        max_tokens: int = 4,
        seed: int = 0,
        salt: str | None = None,
    ) -> Request:
        self.num_added += 1
        request = Request(
            request_id=f"r{self.num_added}",
            prompt_token_ids=[(seed * 31 + i) % 128 for i in range(num_tokens)],
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                temperature=0.0,
                extra_args={"kv_transfer_params": params} if params else None,
            ),
            pooling_params=None,
            cache_salt=salt,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Step:
        output = self.scheduler.schedule()
        assert isinstance(output.kv_connector_metadata, StepMetadata)
        return Step(output, output.kv_connector_metadata)

    def complete(
        self,
        step: Step,
        *,
        received: set[str] | None = None,
        failed: set[str] | None = None,
        sent: set[str] | None = None,
        failures: dict[str, str] | None = None,
        whole: dict[str, list[int]] | None = None,
    ) -> list[EngineCoreOutput]:
        """The workers' answer to a step; every request past its prompt samples token 7."""
        ids = list(step.tokens)
        requests = self.scheduler.requests
        sampled = [[7] if requests[r].num_computed_tokens >= requests[r].num_tokens else [] for r in ids]
        reported = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            failed_recving=failed or set(),
            kv_connector_worker_meta=WorkerReport(failures or {}, whole or {}) if failures or whole else None,
        )
        made = self.scheduler.update_from_output(
            step.output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={r: i for i, r in enumerate(ids)},
                sampled_token_ids=sampled,
                kv_connector_output=None if reported.is_empty() else reported,
            ),
        )
        for outputs in made.values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self.counters.update(outputs.scheduler_stats.kv_connector_stats["counters"])
        new = [output for outputs in made.values() for output in outputs.outputs]
        self.outputs += new
        return new

    def step(self, **reports: Any) -> Step:
        step = self.schedule()
        self.complete(step, **reports)
        return step

    def obey(self, step: Step, **reports: Any) -> None:
        """Complete a step as workers do that hand requests back when they are told to."""
        back = {h.request_id for h in step.orders.hand_backs}
        failed = {h.request_id for h in step.orders.hand_backs if h.failed}
        self.complete(step, received=back or None, failed=failed, **reports)

    def run_until_done(self, *, limit: int = 60) -> None:
        for _ in range(limit):
            if not self.scheduler.has_requests():
                return
            self.obey(self.schedule())
        raise AssertionError("the engine still has requests")

    def run_until_nothing_but_fences(self, *, limit: int = 60) -> None:
        for _ in range(limit):
            if not self.scheduler.requests:
                return
            self.obey(self.schedule())
        raise AssertionError("the engine still has requests")

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)


MakeRig = Callable[..., Rig]
"""`make_rig` without its directory and role."""


def make_rig(
    directory: Path,
    *,
    role: str = "kv_consumer",
    num_blocks: int = 64,
    max_batched: int = 2048,
    window: int | None = None,
    shape: CacheShape = SHAPE,
    num_ranks: int = 1,
    prefix_caching: bool = True,
    **extra: Any,
) -> Rig:
    """A scheduler for one role.

    Args:
        directory: for the model's `config.json`.
        role: kv_consumer or kv_producer.
        num_blocks: blocks of its pool, the null block among them.
        max_batched: tokens in one step, so the length of a prefill chunk.
        window: makes the second layer a cache group of its own that reads so many tokens.
        shape: what its worker says.
        num_ranks: workers that say so.
        prefix_caching: as vLLM is told.
        extra: the connector's configuration.
    """
    if role == "kv_consumer":
        extra = {"prefillers": [PREFILLER], "min_remote_tokens": BLOCK, **extra}
    config = modelless_config(
        directory,
        role=role,
        block_size=BLOCK,
        num_blocks=num_blocks,
        max_batched=max_batched,
        prefix_caching=prefix_caching,
        extra=extra,
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    groups = [KVCacheGroupSpec(LAYERS, spec)]
    if window is not None:
        sliding = SlidingWindowSpec(
            block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=window
        )
        groups = [KVCacheGroupSpec(LAYERS[:1], spec), KVCacheGroupSpec(LAYERS[1:], sliding)]
    caches = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    clock = FakeClock()
    made: list[FakeDispatcher] = []
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=caches,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=True,
    )
    half = SchedulerHalf(parse(extra), config, caches, open_dispatcher=FakeDispatcher.factory(made), clock=clock)
    connector = scheduler.connector
    assert isinstance(connector, PDConnector)
    connector._scheduler = half
    half.bind(scheduler.kv_cache_manager)
    worker = handshake(shape=shape)
    half.greet_workers({(0, rank): worker for rank in range(num_ranks)})
    return Rig(scheduler, half, clock, made, worker)


def hold(rig: Rig, num_tokens: int = PROMPT, **kwargs: Any) -> tuple[Request, str]:
    """A held request and its transfer id."""
    request = rig.add(num_tokens, **kwargs)
    step = rig.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert request.request_id not in step.tokens
    (expect,) = step.orders.expects
    assert expect.request_id == request.request_id
    return request, expect.transfer_id


def give_up(rig: Rig, request: Request, transfer: str, *, failed: bool = True) -> None:
    """The next step hands the request back, and the workers obey."""
    step = rig.schedule()
    assert [(h.transfer_id, h.request_id, h.failed) for h in step.orders.hand_backs] == [
        (transfer, request.request_id, failed)
    ]
    assert rig.dispatcher.cancelled == [transfer]
    assert rig.dispatcher.fenced == [transfer]
    rig.obey(step)
