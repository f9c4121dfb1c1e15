"""Small models with random weights whose KV caches differ from a Llama's: MLA, sliding windows, a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_pd_connector.testing.models.cache import cached_model
from vllm_pd_connector.testing.models.random_llama import (
    INITIALIZER_STD,
    MAX_CONTEXT_TOKENS,
    SEED,
    random_llama,
    save_random,
    small_tokenizer,
)

WINDOW_TOKENS = 128
SUBLAYER_GAIN = 3.0


def random_deepseek(*, num_layers: int = 4) -> Path:
    """A DeepSeek-V2 without experts, float32: MLA, a latent of 512 + 64 values as vLLM's CPU kernel wants it.

    vLLM runs it on a CPU with blocks of 16 tokens only. Costs as `random_llama`.
    """

    def build(directory: Path) -> None:
        import torch
        from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

        tokenizer = small_tokenizer()
        config = DeepseekV2Config(
            **_common(tokenizer),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=num_layers,
            first_k_dense_replace=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            dtype=torch.float32,
        )
        save_random(directory, DeepseekV2ForCausalLM, config, tokenizer, SEED)

    return cached_model("random-deepseek", f"{num_layers}\n{_recipe()}", build)


def random_gemma() -> Path:
    """A Gemma 3 of six layers, the last with full attention, the others with a window of 128 tokens. float32.

    Its embeddings are tied and scaled up: with plain random weights it would repeat its last token whatever the KV
    cache holds. So the norms behind attention and MLP make these outweigh the embedding.
    """

    def build(directory: Path) -> None:
        import torch
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        tokenizer = small_tokenizer()
        config = Gemma3TextConfig(
            **_common(tokenizer),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=WINDOW_TOKENS,
            layer_types=["sliding_attention"] * 5 + ["full_attention"],
            dtype=torch.float32,
        )

        def outweigh_embedding(model: Any) -> None:
            for name, weight in model.named_parameters():
                if "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
                    weight.data.fill_(SUBLAYER_GAIN)

        save_random(directory, Gemma3ForCausalLM, config, tokenizer, SEED, outweigh_embedding)

    return cached_model("random-gemma", _recipe(), build)


def random_eagle() -> Path:
    """An EAGLE drafter of one layer for `random_llama()`: its guesses are noise, its KV cache is like any other's."""

    def build(directory: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file
        from transformers import LlamaConfig

        source = load_file(random_llama(num_layers=1, seed=SEED + 1) / "model.safetensors")
        config = LlamaConfig.from_pretrained(random_llama(num_layers=1, seed=SEED + 1))
        config.architectures = ["LlamaForCausalLM"]
        # An EAGLE layer reads the target's hidden state beside the embedding, and has no norm before or after it.
        kept = {
            name.removeprefix("model."): weight
            for name, weight in source.items()
            if ".layers.0." in name and "input_layernorm" not in name
        }
        width = config.hidden_size
        kept["fc.weight"] = (
            torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(SEED)) * INITIALIZER_STD
        )
        save_file(kept, directory / "model.safetensors")
        config.save_pretrained(directory)
        small_tokenizer().save_pretrained(directory)

    return cached_model("random-eagle", _recipe(), build)


def _common(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "initializer_range": INITIALIZER_STD,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
    }


def _recipe() -> str:
    return Path(__file__).read_text()
