"""vLLM's two model runners without a model: their real connector code around forward passes that a test computes.

A layer is vLLM's own attention operator with the hook, over an implementation that fills pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import unified_attention_with_output
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector, get_kv_connector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from vllm_pd_connector.engine.connector import PDConnector
from vllm_pd_connector.engine.step import StepMetadata
from vllm_pd_connector.engine.worker_half import WorkerHalf
from vllm_pd_connector.testing.modelless import modelless_config

BLOCK, NUM_BLOCKS, HEADS, HEAD_SIZE = 16, 12, 2, 32
LAYERS = ["l0", "l1", "l2"]
"""The last one is the drafter's where there is one."""
COMPUTED = 3.5

Pass = Callable[[], None]
"""Runs layers by calling `Worker.compute`."""


@dataclass
class Worker:
    """One worker process: vLLM's configuration, our connector as vLLM makes it, and its pages."""

    config: Any
    connector: PDConnector
    kv: dict[str, torch.Tensor]
    hooks: list[str] = field(default_factory=list)

    @property
    def half(self) -> WorkerHalf:
        return self.connector._w

    @contextmanager
    def process(self) -> Iterator[None]:
        """vLLM has one connector in each process."""
        before, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, self.connector
        try:
            yield
        finally:
            kv_transfer_state._KV_CONNECTOR_AGENT = before

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """As for a batch with attention metadata."""
        layers = dict.fromkeys(LAYERS, SimpleNamespace())
        with set_forward_context(layers, self.config, num_tokens=2 * BLOCK, slot_mapping={}):
            yield

    def compute(self, *names: str, blocks: tuple[int, ...] = (1, 2)) -> None:
        """Layers of a forward pass, through the operator that carries vLLM's hook; no blocks: a dummy batch."""
        self._blocks = list(blocks)
        for name in names:
            unified_attention_with_output(*[torch.empty(0)] * 4, name)

    def replay(self, *names: str, blocks: tuple[int, ...] = (1, 2)) -> None:
        """What the replay of a full graph does: the same bytes, and no Python between the layers."""
        for name in names:
            self.kv[name][list(blocks)] = COMPUTED

    def fill(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """The attention of a layer."""
        layer.kv_cache[self._blocks] = COMPUTED


def make_worker(directory: Path, role: str) -> Worker:
    """Args:
    directory: for the model's `config.json`.
    role: kv_producer or kv_consumer.
    """
    directory.mkdir()
    config = modelless_config(
        directory, role=role, block_size=BLOCK, num_blocks=NUM_BLOCKS, extra={"min_write_bytes": 1}
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
    caches = KVCacheConfig(num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(LAYERS, spec)])
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, caches)
    assert isinstance(connector, PDConnector)
    storage = torch.zeros(len(LAYERS), NUM_BLOCKS, HEADS, BLOCK, 2 * HEAD_SIZE)
    worker = Worker(config, connector, dict(zip(LAYERS, storage, strict=True)))
    attention = SimpleNamespace(forward=worker.fill)
    config.compilation_config.static_forward_context |= {
        name: SimpleNamespace(kv_cache=kv, impl=attention, get_attn_backend=lambda: CPUAttentionBackend)
        for name, kv in worker.kv.items()
    }
    worker.hooks = _record_hooks(worker.half)
    return worker


def _record_hooks(half: WorkerHalf) -> list[str]:
    """The names of layers whose hook vLLM runs, from now on."""
    seen: list[str] = []
    inner = half.layer_done

    def layer_done(name: str) -> None:
        seen.append(name)
        inner(name)

    half.layer_done = layer_done  # type: ignore[method-assign]
    return seen


class Runner(ABC):
    """What one of vLLM's runners does with the connector, call by call as in its `execute_model`."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    @abstractmethod
    def step(
        self, orders: StepMetadata, forward: Pass, *, is_full: bool = False, sample: Pass | None = None
    ) -> KVConnectorOutput:
        """A step with a forward pass.

        Args:
            orders: of the scheduler half.
            forward: the pass.
            is_full: it is the replay of a full graph.
            sample: happens between the pass and the step's end: sampling, and a drafter's layers.
        """

    @abstractmethod
    def idle(self, orders: StepMetadata) -> KVConnectorOutput:
        """A step without a forward pass."""

    @abstractmethod
    def dummy(self, forward: Pass) -> None:
        """A profile run, a warm-up, or a batch of an idle data-parallel rank."""

    @abstractmethod
    def capture(self, forward: Pass) -> None:
        """The capture of a graph."""


class FirstRunner(Runner):
    """V1: `GPUModelRunner` of `v1/worker/gpu_model_runner.py`, whose connector code is the mixin."""

    def __init__(self, worker: Worker, *, has_drafter: bool = False) -> None:
        super().__init__(worker)
        self._has_drafter = has_drafter
        worker.connector.register_kv_caches(worker.kv)

    def step(
        self, orders: StepMetadata, forward: Pass, *, is_full: bool = False, sample: Pass | None = None
    ) -> KVConnectorOutput:
        mixin = KVConnectorModelRunnerMixin
        with self.worker.process():
            self.worker.connector.handle_preemptions(orders)
            with (
                self.worker.forward_context(),
                mixin.maybe_get_kv_connector_output(scheduled(orders), defer_finalize=self._has_drafter) as output,
            ):
                forward()
            if sample is not None:
                with self.worker.forward_context():
                    sample()
            if self._has_drafter:
                mixin.finalize_kv_connector()
        assert output is not None
        return output

    def step_of_an_early_stage(self, orders: StepMetadata, forward: Pass) -> None:
        """A pipeline stage without the drafter: the end is left to `sample_tokens`, which returns early there."""
        with self.worker.process(), self.worker.forward_context():
            self.worker.connector.handle_preemptions(orders)
            with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled(orders), defer_finalize=True):
                forward()

    def idle(self, orders: StepMetadata) -> KVConnectorOutput:
        with self.worker.process():
            self.worker.connector.handle_preemptions(orders)
            made = KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled(orders), self.worker.config)
        return made.kv_connector_output or KVConnectorOutput()

    def dummy(self, forward: Pass) -> None:
        with self.worker.process(), self.worker.forward_context():
            forward()

    capture = dummy


class SecondRunner(Runner):
    """V2: `GPUModelRunner` of `v1/worker/gpu/model_runner.py`, whose connector code is `ActiveKVConnector`."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        with worker.process():
            made = get_kv_connector(worker.config, worker.kv)
        assert isinstance(made, ActiveKVConnector)
        self._connector = made

    def step(
        self, orders: StepMetadata, forward: Pass, *, is_full: bool = False, sample: Pass | None = None
    ) -> KVConnectorOutput:
        batch: Any = SimpleNamespace(idx_mapping=torch.zeros(1), req_ids=["r"], num_tokens=2 * BLOCK)
        with self.worker.process():
            if is_full:  # outside a forward context
                self._connector.pre_forward(scheduled(orders), batch, attn_metadata={})
                forward()
            else:
                with self.worker.forward_context():
                    self._connector.pre_forward(scheduled(orders), batch)
                    forward()
            self._connector.finish_forward()
            if sample is not None:
                with self.worker.forward_context():
                    sample()
            output = self._connector.post_forward(set())
        assert output is not None
        return output

    def idle(self, orders: StepMetadata) -> KVConnectorOutput:
        with self.worker.process():
            made = self._connector.no_forward(scheduled(orders))
        return made.kv_connector_output or KVConnectorOutput()

    def dummy(self, forward: Pass) -> None:
        with self.worker.process():
            self._connector.set_disabled(True)
            with self.worker.forward_context():
                self._connector.pre_forward(SchedulerOutput.make_empty())
                forward()
            self._connector.finish_forward()
            self._connector.set_disabled(False)

    def capture(self, forward: Pass) -> None:
        with self.worker.process():
            with self.worker.forward_context():
                forward()
            self._connector.reset_capture_state()


def scheduled(orders: StepMetadata) -> SchedulerOutput:
    """A step of the scheduler with orders for the workers."""
    output = SchedulerOutput.make_empty()
    output.kv_connector_metadata = orders
    return output
