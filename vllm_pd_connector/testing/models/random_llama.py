"""A small Llama with random weights, for tests that choose layers, heads and KV heads freely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.testing.models.cache import cached_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_CONTEXT_TOKENS = 8192
# With the usual 0.02 a KV page replaced by a wrong one left the greedy tokens unchanged in 4 of 5 cases; with
# 0.08 in none of 5. Tests that compare tokens rest on this.
INITIALIZER_STD = 0.08
SEED = 20_251
VOCABULARY_TOKENS = 512
# Training text of the tokenizer: enough common English that a word is one to three tokens.
CORPUS = """
The prefiller reads the prompt and computes the keys and values of every layer. The decoder receives
those pages over the network and then writes the answer, one token after another. When the decoder asks
for more pages than there are, the request has to wait until another request has finished and its blocks
are free again. What is the capital of France? The capital of France is Paris. What would you like to do
today? I would like to read a book about the history of science, and then I will go for a long walk along
the river with some friends of mine. She said that it was not the first time that this had happened, but
that it would be the last. How many people live in the city? There are about two million people in the
city and more than ten million in the whole region. Please give me the weather in Berlin, in London and
in New York. The number of tokens in this list is 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 10. You can call a
function with a name and with arguments; the result comes back as text.
"""
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def random_llama(
    *, num_layers: int = 8, num_heads: int = 8, num_kv_heads: int = 4, head_size: int = 32, seed: int = SEED
) -> Path:
    """A directory that `vllm serve` takes: config, float32 weights, tokenizer and chat template.

    The same arguments give the same weights. The hidden size is `num_heads * head_size`; the context is 8,192
    tokens. Its text is noise, and it may end an answer at any token: pass `ignore_eos` where length matters.

    Raises: ValueError if `num_heads` is not a multiple of `num_kv_heads`.
    Cost: about 10 s and 20 MB the first time, mostly the import of transformers; microseconds afterwards.
    """
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads={num_heads} is not a multiple of num_kv_heads={num_kv_heads}")

    def build(directory: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        tokenizer = small_tokenizer()
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=num_heads * head_size,
            intermediate_size=2 * num_heads * head_size,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_size,
            max_position_embeddings=MAX_CONTEXT_TOKENS,
            initializer_range=INITIALIZER_STD,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
            dtype=torch.float32,
        )
        save_random(directory, LlamaForCausalLM, config, tokenizer, seed)

    shape = f"{num_layers} {num_heads} {num_kv_heads} {head_size} {seed}"
    return cached_model("random-llama", f"{shape}\n{Path(__file__).read_text()}", build)


def save_random(
    directory: Path,
    model_class: Callable[..., Any],
    config: Any,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    adjust: Callable[[Any], None] = lambda model: None,
) -> None:
    """A model of a transformers class with random weights, the same for the same seed; `adjust` may change them."""
    import torch

    with torch.random.fork_rng(devices=[]):  # the caller's random state stays as it was
        torch.manual_seed(seed)
        model = model_class(config)
    adjust(model)
    model.to(config.dtype).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def small_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: encodes any text, adds no token of its own, always the same."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(CORPUS.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_CONTEXT_TOKENS,
    )
