"""vLLM's KV cache in our terms: groups, pages, packing, and what peers compare. Checked on vLLM 0.32 and 0.33."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from vllm_pd_connector.errors import ConfigError, UnsupportedEngine
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.geometry.shard_map import owned_heads
from vllm_pd_connector.wire.compatibility import CacheShape
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

NEEDED_LAYOUT: Literal["LBHNC"] = "LBHNC"
LAYOUTS = ("LBHNC", "LBNHC", "HND", "NHD", None)
LINEAR_BACKENDS = {"FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION"}
"""Backends that keep K and V of a token side by side: they split vLLM's view in its last dimension."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a block table.

    Attributes:
        index: vLLM's number of the group.
        kind: full or window.
        window: tokens a sliding-window layer reads, the one it computes included; None for all.
    """

    index: int
    kind: str
    window: int | None

    def __str__(self) -> str:
        return self.kind if self.window is None else f"{self.kind}({self.window})"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPages:
    """What `page_table` found.

    Attributes:
        names: layers in order, without aliases of the same memory.
        groups: cache group of each, counted over the groups that move.
        table: where their pages are.
        layout: order of heads and tokens within a page.
        slot_bytes: bytes of one head of one token.
        kernel_blocks: parts a page is cut into for the kernel.
    """

    names: list[str]
    groups: list[int]
    table: PageTable
    layout: Literal["LBHNC", "LBNHC"]
    slot_bytes: int
    kernel_blocks: int


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[CacheGroup]:
    """The cache groups whose pages move, in vLLM's order.

    Raises:
        UnsupportedEngine: layout, cache groups or parallelism this release cannot move pages for; names the field.
    """
    layout = vllm_config.cache_config.kv_cache_layout
    name = getattr(layout, "name", layout)
    if name not in LAYOUTS:
        raise UnsupportedEngine(
            f"the attention backend resolved KV layout {name}; pages can be written in LBHNC (HND) and LBNHC (NHD). "
            f"Unset VLLM_KV_CACHE_LAYOUT or choose another attention backend."
        )
    groups = [
        _group(index, spec)
        for index, spec in zip(kv_cache_config.transfer_group_ids, _specs(kv_cache_config), strict=True)
    ]
    if len(sizes := {spec.block_size for spec in _specs(kv_cache_config)}) != 1:
        raise UnsupportedEngine(f"cache groups with block sizes {sorted(sizes)}: all must have one")
    _check_parallelism(vllm_config)
    return groups


def join_stages(shapes: Sequence[CacheShape]) -> CacheShape:
    """The shape of an engine from those of its pipeline stages, each of which knows its own layers."""
    layers = sorted((name for shape in shapes for name in shape.layers.split()), key=in_natural_order)
    return msgspec.structs.replace(shapes[0], layers=" ".join(layers))


def layer_names(shape: CacheShape) -> tuple[str, ...]:
    """The names in `CacheShape.layers`, without the groups."""
    return tuple(item.partition("@")[0] for item in shape.layers.split())


def block_size(kv_cache_config: KVCacheConfig) -> int:
    """Tokens per page, of every group that moves."""
    size: int = _specs(kv_cache_config)[0].block_size
    return size


def cache_shape(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, pages: LayerPages, groups: Sequence[CacheGroup]
) -> CacheShape:
    """What peers compare with theirs, as far as one rank knows it."""
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    spec = _specs(kv_cache_config)[0]
    return CacheShape(
        protocol=PROTOCOL_VERSION,
        architecture=",".join(model.architectures or ["unknown"]),
        model_config=_model_numbers(model.hf_text_config),
        quantization=str(model.quantization or "none"),
        dtype=str(model.dtype),
        cache_dtype=str(spec.dtype),
        attention=_attention_name(vllm_config, spec, pages.names),
        layout=pages.layout,
        block_size=spec.block_size,
        slot_bytes=pages.slot_bytes,
        planes=_planes(spec, pages.slot_bytes, _backends(vllm_config, pages.names)) if pages.kernel_blocks == 1 else (),
        kernel_blocks=pages.kernel_blocks,
        num_kv_heads=_num_kv_heads(vllm_config),
        layers=" ".join(
            name if len(groups) == 1 else f"{name}@{group}"
            for name, group in zip(pages.names, pages.groups, strict=True)
        ),
        groups=" ".join(str(group) for group in groups),
        speculative=_speculation(speculative),
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
    )


def page_table(kv_caches: Mapping[str, torch.Tensor], kv_cache_config: KVCacheConfig) -> LayerPages:
    """The rank's pages, from the per-layer views `[num_blocks * ratio, heads, tokens, content]` vLLM hands out.

    Layers of different groups may use the same memory, under different blocks; within a group that is an alias.

    Raises:
        UnsupportedEngine: pages are not contiguous or layers differ in shape.
    """
    group_of = kv_cache_config.transfer_group_index_by_layer
    owned: dict[tuple[int, int], str] = {}
    for name in sorted((name for name in kv_caches if name in group_of), key=in_natural_order):
        owned.setdefault((group_of[name], kv_caches[name].data_ptr()), name)
    names = sorted(owned.values(), key=in_natural_order)
    first = kv_caches[names[0]]
    num_blocks = kv_cache_config.num_blocks
    ratio = first.shape[0] // num_blocks
    itemsize = first.element_size()
    page_bytes = ratio * first.shape[1:].numel() * itemsize
    block_stride = ratio * first.stride(0) * itemsize
    layout = _layout(names[0], first)
    for name in names:
        view = kv_caches[name]
        if view.shape != first.shape or view.stride() != first.stride():
            raise UnsupportedEngine(
                f"KV of layer {name} has shape {tuple(view.shape)} strides {view.stride()}; "
                f"every layer must match {names[0]}: {tuple(first.shape)} {first.stride()}"
            )
    if ratio > 1 and block_stride != page_bytes:
        raise UnsupportedEngine(f"{ratio} kernel blocks of one block are not adjacent in memory")
    storage = first.untyped_storage()
    if others := [name for name in names if kv_caches[name].untyped_storage().data_ptr() != storage.data_ptr()]:
        raise UnsupportedEngine(f"KV of layers {others} is not in the allocation of {names[0]}")
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
    return LayerPages(
        names=names,
        groups=[group_of[name] for name in names],
        table=table,
        layout=layout,
        slot_bytes=first.shape[3] * itemsize,
        kernel_blocks=ratio,
    )


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    for field in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (size := getattr(parallel, field)) > 1:
            raise UnsupportedEngine(f"{field} is {size}: it must be 1 in this release")
    if parallel.pipeline_parallel_size > 1 and transfer is not None and transfer.is_kv_consumer:
        raise UnsupportedEngine(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: a decoder must have 1 in this release; "
            "a prefiller (kv_role kv_producer) may have more"
        )
    # A layer's hook runs in each microbatch; the pages are all there after the last one only.
    is_prefiller = transfer is not None and transfer.is_kv_producer
    if is_prefiller and (parallel.enable_dbo or parallel.ubatch_size > 1):
        raise UnsupportedEngine(
            f"enable_dbo is {parallel.enable_dbo}, ubatch_size is {parallel.ubatch_size}: a prefiller cannot compute "
            "in microbatches in this release; leave enable_dbo unset and ubatch_size 0"
        )
    try:
        owned_heads(0, parallel.tensor_parallel_size, _num_kv_heads(vllm_config))
    except ConfigError as error:
        raise UnsupportedEngine(str(error)) from None


def check_readable(table: PageTable) -> None:
    """Raises:
    UnsupportedEngine: digests of these pages cannot be taken.
    """
    if table.memory != "DRAM":
        raise UnsupportedEngine(
            "verify_pages must be false: the CPU reads the pages, and this KV cache is device memory"
        )


def _specs(kv_cache_config: KVCacheConfig) -> list[AttentionSpec]:
    return [kv_cache_config.kv_cache_groups[i].kv_cache_spec for i in kv_cache_config.transfer_group_ids]


def _group(index: int, spec: Any) -> CacheGroup:
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return CacheGroup(index, "full", None)
    if type(spec) is SlidingWindowSpec:
        return CacheGroup(index, "window", spec.sliding_window + spec.extra_retained_tokens)
    raise UnsupportedEngine(
        f"a KV cache group is a {type(spec).__name__}: pages of full, MLA and sliding-window attention can be moved, "
        "states of Mamba and linear attention and other kinds cannot. Serve this model without the connector."
    )


def _num_kv_heads(vllm_config: VllmConfig) -> int:
    model = vllm_config.model_config
    return 1 if model.use_mla else model.get_total_num_kv_heads()


def _layout(name: str, view: torch.Tensor) -> Literal["LBHNC", "LBNHC"]:
    """The order of heads and tokens that a layer's view really has."""
    if view[0].is_contiguous():
        return "LBHNC"
    if view[0].transpose(0, 1).is_contiguous():
        return "LBNHC"
    raise UnsupportedEngine(f"a page of layer {name} is not contiguous: shape {tuple(view.shape)} {view.stride()}")


def in_natural_order(name: str) -> list[tuple[int, str]]:
    """Layer 10 after layer 9, so that pipeline stages put together give the order of an engine without."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _model_numbers(config: Any) -> str:
    """The configuration's plain values that shape the computation, as sorted JSON."""
    left_out = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures", "use_cache")
    plain = {k: v for k, v in config.to_dict().items() if k not in left_out and not k.endswith("token_id")}
    return json.dumps(plain, sort_keys=True, default=str)


def _speculation(config: Any) -> str:
    if config is None:
        return "none"
    return f"{config.method} {config.num_speculative_tokens} tokens"


def _backends(vllm_config: VllmConfig, names: Sequence[str]) -> set[str]:
    """The attention backends that vLLM has chosen for these layers; none where no model is loaded."""
    layers = vllm_config.compilation_config.static_forward_context
    return {layers[name].get_attn_backend().get_name() for name in names if name in layers}


def _attention_name(vllm_config: VllmConfig, spec: AttentionSpec, names: Sequence[str]) -> str:
    backends = "+".join(sorted(_backends(vllm_config, names))) or "unknown"
    if vllm_config.device_config.device_type != "cpu":
        return backends
    # CPU pages are packed for the instruction set, so it has to be equal as well.
    return f"{backends} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_packing(spec)}"


def _cpu_packing(spec: AttentionSpec) -> str:
    """The name vLLM's CPU attention gives its packing."""
    if isinstance(spec, MLAAttentionSpec):
        return "mla"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(spec.dtype, spec.block_size, spec.head_size)


def _planes(spec: AttentionSpec, slot_bytes: int, backends: set[str]) -> tuple[tuple[int, int], ...]:
    """How the KV of one head lies in a page, where that is known."""
    if isinstance(spec, MLAAttentionSpec):
        return ((1, slot_bytes),)
    element = spec.dtype.itemsize
    if slot_bytes != 2 * spec.head_size * element:  # scales or padding
        return ()
    if backends == {"CPU_ATTN"} and _cpu_packing(spec) in ("vec", "vec16"):
        return (spec.head_size, element), (1, spec.head_size * element)  # K transposed, then V (a test compares)
    return ((1, slot_bytes),) if backends and backends <= LINEAR_BACKENDS else ()
