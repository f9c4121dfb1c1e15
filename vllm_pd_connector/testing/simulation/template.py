"""vLLM's configuration of the simulated servers: made once, copied for each server."""

from __future__ import annotations

import copy
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm_pd_connector.testing.modelless import modelless_config
from vllm_pd_connector.testing.simulation.pages import HEAD_SIZE, NUM_LAYERS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_pd_connector.testing.simulation.pages import Layout
    from vllm_pd_connector.testing.simulation.scenario import Scenario

LAYERS = [f"layer{i}" for i in range(NUM_LAYERS)]
TOKENS_PER_FAMILY = 1000
SAMPLED_TOKEN = 7


class _Attention:
    """A layer whose pages have K and V of a token side by side, which can be cut anywhere."""

    def get_attn_backend(self) -> _Attention:
        return self

    def get_name(self) -> str:
        return "FLASH_ATTN"


@cache
def _base(num_heads: int, block_size: int) -> VllmConfig:
    with tempfile.TemporaryDirectory() as directory:
        config = modelless_config(Path(directory), role="kv_both", block_size=block_size, num_kv_heads=num_heads)
    config.compilation_config.static_forward_context.update(dict.fromkeys(LAYERS, _Attention()))
    return config


def engine_config(role: str, engine_id: str, scenario: Scenario, layout: Layout, extra: dict[str, Any]) -> VllmConfig:
    """vLLM's configuration of one server."""
    config = copy.copy(_base(layout.num_heads, layout.block_size))
    config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    assert config.kv_transfer_config is not None
    config.kv_transfer_config.kv_role = role  # type: ignore[assignment]
    config.kv_transfer_config.engine_id = engine_id
    config.kv_transfer_config.kv_connector_extra_config = extra
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks = layout.num_blocks
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.tensor_parallel_size = layout.num_ranks
    config.scheduler_config = copy.copy(config.scheduler_config)
    if role == "kv_producer":
        config.scheduler_config.max_num_batched_tokens = scenario.chunk_tokens
        config.scheduler_config.max_num_scheduled_tokens = scenario.chunk_tokens
    return config


@cache
def cache_config(layout: Layout) -> KVCacheConfig:
    """One group of full attention."""
    spec = FullAttentionSpec(
        block_size=layout.block_size,
        num_kv_heads=layout.heads_per_rank,
        head_size=HEAD_SIZE,
        dtype=torch.float32,
    )
    groups = [KVCacheGroupSpec(LAYERS, spec)]
    return KVCacheConfig(num_blocks=layout.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


@cache
def kv_tensors(layout: Layout) -> dict[str, torch.Tensor]:
    """Per-layer views `[num_blocks, heads, tokens, content]` as vLLM hands out; only their shapes are used."""
    whole = torch.zeros(NUM_LAYERS, layout.num_blocks, layout.heads_per_rank, layout.block_size, 2 * HEAD_SIZE)
    return dict(zip(LAYERS, whole, strict=True))


@cache
def sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)


def prompt(family: int, num_tokens: int) -> list[int]:
    """The first tokens of a family's text."""
    return list(range(family * TOKENS_PER_FAMILY, family * TOKENS_PER_FAMILY + num_tokens))


def family_of(request: Request) -> int:
    return request.all_token_ids[0] // TOKENS_PER_FAMILY


def make_request(
    request_id: str, tokens: list[int], max_tokens: int, params: dict[str, Any] | None, *, block_size: int
) -> Request:
    """What vLLM's API server hands to its scheduler."""
    request = Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=sampling(max_tokens),
        pooling_params=None,
        block_hasher=partial(_block_hashes, block_size),
        arrival_time=0.0,
    )
    request.kv_transfer_params = params
    return request


def _block_hashes(block_size: int, request: Request) -> list[Any]:
    """A name for each new full block: equal for equal prompts, as vLLM's hashes are; outputs are never shared."""
    family, num_prompt_blocks = family_of(request), request.num_prompt_tokens // block_size
    return [
        b"%d/%d" % (family, i) if i < num_prompt_blocks else f"{request.request_id}/{i}".encode()
        for i in range(len(request.block_hashes), request.num_tokens // block_size)
    ]
