"""Disaggregated prefill and decode for vLLM: a KV connector that pushes each layer's pages while later ones compute.

Importing this package is cheap and needs no GPU, NIXL or vLLM; `vllm_pd_connector.engine` does.
"""

__version__ = "0.1.0"
