"""The parts of an engine that single operations are measured on: vLLM's configuration, a worker half, a scheduler.

The worker half is the real one, with its messenger and registered tensors; there is no model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from benchmarks.micro.timing import wait
from vllm_pd_connector.config import parse
from vllm_pd_connector.engine.messenger import Messenger
from vllm_pd_connector.engine.step import BeginTransfer, CloseTransfer, StepMetadata
from vllm_pd_connector.engine.worker_half import WorkerHalf
from vllm_pd_connector.kernels import native
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.plan.write import ChunkWrite, GroupWrite
from vllm_pd_connector.testing.modelless import modelless_config
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.wire.messages import DecoderRank, Reservation
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

WRITERS: dict[str, Mapping[str, Any]] = {
    "pure Python": {},
    **({"native": {"native_posting": True}} if native.is_built() else {}),
}
"""Whoever posts in this installation, and the configuration that chooses it."""

BLOCK_TOKENS = 16
MAX_TOKENS = 1 << 18
LEASE_S = 3600.0


def names(num_layers: int) -> list[str]:
    return [f"model.layers.{layer}.self_attn.attn" for layer in range(num_layers)]


def vllm_config(role: str, extra: Mapping[str, Any], *, max_num_seqs: int = 16) -> VllmConfig:
    """What vLLM hands to the connector of a server with one KV head and blocks of 16 tokens."""
    with tempfile.TemporaryDirectory() as directory:
        return modelless_config(
            Path(directory),
            role=role,
            block_size=BLOCK_TOKENS,
            max_batched=MAX_TOKENS,
            max_model_len=MAX_TOKENS,
            max_num_seqs=max_num_seqs,
            num_kv_heads=1,
            extra=dict(extra),
        )


def kv_cache_config(num_layers: int, num_blocks: int, page_bytes: int) -> KVCacheConfig:
    """One group of full attention in float32."""
    head_size = page_bytes // BLOCK_TOKENS // 8
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=head_size, dtype=torch.float32)
    groups = [KVCacheGroupSpec(names(num_layers), spec)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


@dataclass
class Worker:
    """A rank's worker half with its pages `[num_layers, num_blocks, 1, tokens, content]`, driven as vLLM drives it."""

    half: WorkerHalf
    names: list[str]
    kv: torch.Tensor

    def begin(self, transfer_id: str, target: DecoderRank, blocks: list[int]) -> BeginTransfer:
        """A reservation of these blocks of a decoder of the same shape."""
        reservation = Reservation(
            protocol=PROTOCOL_VERSION,
            transfer_id=transfer_id,
            decoder="bench",
            decoder_generation="0" * 16,
            prefiller_generation="0" * 16,
            local_tokens=0,
            blocks=[blocks],
            lease_s=LEASE_S,
            geometry=self.half.handshake().shape.geometry(),
            ranks=[target],
        )
        return BeginTransfer(reservation=reservation, lease_s=LEASE_S)

    def write(self, transfer_id: str, src_blocks: list[int], dst_blocks: list[int]) -> ChunkWrite:
        """A step that completes these pages."""
        span = Span(0, len(src_blocks) * BLOCK_TOKENS)
        group = GroupWrite(span=span, src_blocks=tuple(src_blocks), dst_blocks=tuple(dst_blocks))
        return ChunkWrite(transfer_id=transfer_id, groups=(group,))

    def step(self, orders: StepMetadata, between: Callable[[int], None], before: Callable[[int], None]) -> None:
        """One forward pass: `before` a layer's hook, and what the model computes `between` it and the next one."""
        self.half.start_step(orders)
        for layer, name in enumerate(self.names):
            between(layer)
            before(layer)
            self.half.layer_done(name)
        self.half.end_step()

    def close(self, transfer_id: str) -> None:
        """Hand a transfer's end over and wait until nothing of it is in flight.

        Raises:
            TimeoutError: that took a minute.
            RuntimeError: the transfer has failed.
        """
        close = CloseTransfer(transfer_id=transfer_id, request_id=transfer_id, cancel=False, report=True)
        self.half.start_step(StepMetadata(closes=[close]))
        wait(lambda: transfer_id in self.half.take_results()[0], f"{transfer_id} does not end")
        report = self.half.take_report()
        if report is not None:
            raise RuntimeError(f"writes failed, so this measures nothing: {report.failures}")


def worker_half(
    role: str,
    extra: Mapping[str, Any],
    transport: Transport,
    *,
    num_layers: int,
    num_blocks: int,
    page_bytes: int,
    messenger: Callable[..., Messenger] = Messenger,
) -> Worker:
    """A registered worker half; whoever asks for it calls `half.shutdown()`.

    Args:
        role: kv_producer or kv_consumer.
        extra: the connector's configuration.
        transport: the rank's endpoint.
        num_blocks: blocks of each layer, the null block among them.
        page_bytes: a multiple of 128.
        messenger: makes the messenger.
    """
    kv = torch.zeros(num_layers, num_blocks, 1, BLOCK_TOKENS, page_bytes // BLOCK_TOKENS // 4)
    half = WorkerHalf(
        parse(dict(extra)),
        vllm_config(role, extra),
        kv_cache_config(num_layers, num_blocks, page_bytes),
        rank=0,
        open_transport=lambda _name, _placement: transport,
        open_messenger=messenger,
    )
    half.register(dict(zip(names(num_layers), kv, strict=True)))
    if extra.get("native_posting") and half._native.arming is None:
        raise RuntimeError("native posting does not work here; the log says why")
    return Worker(half, names(num_layers), kv)
