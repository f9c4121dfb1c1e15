"""Models that need no hub: built on first use and kept in the user's cache directory.

Owns: the model directories under the cache. Must not import vLLM. `transformers`, `tokenizers` and `gguf` are
imported by the builders, when one is called.
"""

from vllm_pd_connector.testing.models.cache import ModelBuildError, cache_dir
from vllm_pd_connector.testing.models.random_kinds import random_deepseek, random_eagle, random_gemma
from vllm_pd_connector.testing.models.random_llama import random_llama
from vllm_pd_connector.testing.models.random_lora import random_lora
from vllm_pd_connector.testing.models.smollm2 import smollm2

__all__ = [
    "ModelBuildError",
    "cache_dir",
    "random_deepseek",
    "random_eagle",
    "random_gemma",
    "random_llama",
    "random_lora",
    "smollm2",
]
