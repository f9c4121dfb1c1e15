"""vLLM's configuration of an engine whose scheduler is real and whose model nobody runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from vllm_pd_connector.plugin import MODULE, NAME, register

if TYPE_CHECKING:
    from pathlib import Path

MAX_MODEL_LEN = 2048
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 32_000,
    "torch_dtype": "float32",
}


def modelless_config(
    directory: Path,
    *,
    role: str,
    block_size: int,
    num_blocks: int | None = None,
    max_batched: int = MAX_MODEL_LEN,
    max_model_len: int = MAX_MODEL_LEN,
    max_num_seqs: int = 16,
    num_kv_heads: int = 2,
    prefix_caching: bool = True,
    extra: dict[str, Any] | None = None,
) -> VllmConfig:
    """The configuration of one engine with chunked prefill and this connector; pages are LBHNC.

    Args:
        directory: for the model's `config.json`; it is read here and not again.
        role: kv_producer, kv_consumer or kv_both; the engine's id as well.
        block_size: tokens.
        num_blocks: of the pool, the null block among them.
        max_batched: tokens in one step, so the length of a prefill chunk.
        max_model_len: tokens of the longest request.
        max_num_seqs: requests in one step.
        num_kv_heads: over all ranks.
        prefix_caching: as vLLM is told.
        extra: the connector's configuration.
    """
    register()
    init_none_hash(sha256)
    model = {**MODEL, "num_key_value_heads": num_kv_heads, "max_position_embeddings": max_model_len}
    (directory / "config.json").write_text(json.dumps(model))
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching)
    cache.num_gpu_blocks = num_blocks
    cache.kv_cache_layout = "LBHNC"  # type: ignore[assignment]
    return VllmConfig(
        model_config=ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="float32"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_batched,
            max_model_len=max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector=NAME,
            kv_connector_module_path=MODULE,
            kv_role=role,  # type: ignore[arg-type]
            engine_id=role,
            kv_connector_extra_config=extra or {},
        ),
    )
