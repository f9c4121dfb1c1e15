"""Log lines of this package go where vLLM's go, in vLLM's format and level."""

import logging

PACKAGE = "vllm_pd_connector"


def adopt_vllm_logging() -> None:
    """Share vLLM's handlers; without any (a library user's own set-up) nothing changes. Idempotent."""
    vllm = logging.getLogger("vllm")
    ours = logging.getLogger(PACKAGE)
    if vllm.handlers and not ours.handlers:
        ours.handlers = list(vllm.handlers)
        ours.setLevel(vllm.level)
        ours.propagate = False
