"""A LoRA adapter with random weights for a random Llama: its answers are not those of the base model."""

from __future__ import annotations

import json
from pathlib import Path

from vllm_pd_connector.testing.models.cache import cached_model
from vllm_pd_connector.testing.models.random_llama import random_llama

RANK = 8
STD = 0.2
SEED = 20_252
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The attention's projections: the pages of a prompt depend on the adapter from the first layer on."""


def random_lora() -> Path:
    """A directory for `vllm serve --enable-lora --lora-modules NAME=DIRECTORY`; its base is `random_llama()`.

    Cost: a second the first time; microseconds afterwards.
    """
    base = random_llama()

    def build(directory: Path) -> None:
        import torch
        from safetensors.torch import save_file

        config = json.loads((base / "config.json").read_text())
        heads = config["num_attention_heads"] * config["head_dim"]
        kv_heads = config["num_key_value_heads"] * config["head_dim"]
        hidden = config["hidden_size"]
        sizes = {"q_proj": (hidden, heads), "k_proj": (hidden, kv_heads), "v_proj": (hidden, kv_heads)}
        sizes["o_proj"] = (heads, hidden)
        random = torch.Generator().manual_seed(SEED)
        weights: dict[str, torch.Tensor] = {}
        for layer in range(config["num_hidden_layers"]):
            for module in MODULES:
                inputs, outputs = sizes[module]
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
                weights[f"{name}.lora_A.weight"] = STD * torch.randn(RANK, inputs, generator=random)
                weights[f"{name}.lora_B.weight"] = STD * torch.randn(outputs, RANK, generator=random)
        save_file(weights, directory / "adapter_model.safetensors")
        adapter = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": RANK,
            "lora_alpha": RANK,
            "target_modules": list(MODULES),
            "bias": "none",
        }
        (directory / "adapter_config.json").write_text(json.dumps(adapter))

    return cached_model("random-lora", f"{base.name}\n{Path(__file__).read_text()}", build)
