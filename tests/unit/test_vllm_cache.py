"""vLLM's caches in our terms: groups, layouts, aliases, packing, pipeline stages, and what is refused at start."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.config import ParallelConfig
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from vllm_pd_connector.engine import vllm_cache
from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.geometry.page import PageLayout, PageShape
from vllm_pd_connector.testing.oracle import byte_map
from vllm_pd_connector.testing.shapes import some_shape

NUM_BLOCKS, BLOCK, HEADS, HEAD_SIZE = 6, 32, 4, 16
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32, sliding_window=128
)
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((2, 3),), dtypes=(torch.float32,))


def caches(*groups: tuple[Sequence[str], Any]) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(list(names), spec) for names, spec in groups],
    )


def config(
    *, layout: str = "LBHNC", tp: int = 1, pp: int = 1, heads: int = HEADS, is_decoder: bool = False, **parallel: Any
) -> Any:
    """As much of a `VllmConfig` as is asked for. The rest of the parallelism is what vLLM has without a setting."""
    model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: heads)
    return SimpleNamespace(
        cache_config=SimpleNamespace(kv_cache_layout=layout),
        parallel_config=replace(ParallelConfig(), tensor_parallel_size=tp, pipeline_parallel_size=pp, **parallel),
        kv_transfer_config=SimpleNamespace(is_kv_consumer=is_decoder, is_kv_producer=not is_decoder),
        model_config=model,
    )


class TestGroups:
    def test_each_group_has_its_kind_and_window(self) -> None:
        found = vllm_cache.check_engine(config(), caches((["l0"], WINDOW), (["l1"], FULL), (["l2"], WINDOW)))
        assert [str(group) for group in found] == ["window(128)", "full", "window(128)"]
        assert [group.index for group in found] == [0, 1, 2]

    def test_groups_that_do_not_move_are_left_out_and_keep_their_numbers(self) -> None:
        made = caches((["l0"], FULL), (["l1"], MAMBA), (["l2"], WINDOW))
        made.kv_cache_groups[1].enable_kv_transfer = False
        assert [group.index for group in vllm_cache.check_engine(config(), made)] == [0, 2]

    @pytest.mark.parametrize(
        ("settings", "groups", "complaint"),
        [
            ({}, [(["l0"], FULL), (["l1"], MAMBA)], "MambaSpec.*Mamba and linear attention.*without the connector"),
            ({}, [(["l0"], FULL), (["l1"], MLA)], "block sizes .16, 32.: all must have one"),
            ({"layout": "LHBNC"}, [(["l0"], FULL)], "LHBNC.*VLLM_KV_CACHE_LAYOUT"),
            ({"heads": 3, "tp": 2}, [(["l0"], FULL)], "3 KV heads cannot be shared by tensor_parallel_size 2"),
            ({"pp": 2, "is_decoder": True}, [(["l0"], FULL)], "pipeline_parallel_size is 2: a decoder must have 1"),
            ({"tp": 2, "decode_context_parallel_size": 2}, [(["l0"], FULL)], "decode_context_parallel_size is 2"),
            ({"prefill_context_parallel_size": 2}, [(["l0"], FULL)], "prefill_context_parallel_size is 2"),
            ({"enable_dbo": True}, [(["l0"], FULL)], "enable_dbo is True.*microbatches"),
            ({"ubatch_size": 2}, [(["l0"], FULL)], "ubatch_size is 2.*microbatches"),
        ],
        ids=[
            "Mamba",
            "block sizes",
            "layout",
            "3 heads on 2 ranks",
            "stages on a decoder",
            "decode context parallel",
            "prefill context parallel",
            "two microbatches",
            "some microbatches",
        ],
    )
    def test_what_cannot_be_moved_is_refused_by_name(
        self, settings: dict[str, Any], groups: list[Any], complaint: str
    ) -> None:
        with pytest.raises(UnsupportedEngine, match=complaint):
            vllm_cache.check_engine(config(**settings), caches(*groups))

    def test_a_decoder_may_compute_in_microbatches(self) -> None:
        """It waits for no layer: what it writes, it keeps."""
        made = config(is_decoder=True, enable_dbo=True, ubatch_size=2)
        assert vllm_cache.check_engine(made, caches((["l0"], FULL)))

    def test_a_prefiller_may_have_stages(self) -> None:
        assert vllm_cache.check_engine(config(pp=2), caches((["l0"], FULL)))


def tensors(number: int, *, layout: str = "LBHNC") -> list[torch.Tensor]:
    """Layers in one allocation, as vLLM's views of it."""
    inner = (HEADS, BLOCK) if layout == "LBHNC" else (BLOCK, HEADS)
    whole = torch.zeros(number, NUM_BLOCKS, *inner, 2 * HEAD_SIZE)
    return [layer if layout == "LBHNC" else layer.transpose(1, 2) for layer in whole]


class TestPages:
    @pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
    def test_the_layout_is_read_from_the_memory(self, layout: str) -> None:
        pages = vllm_cache.page_table(
            dict(zip(["l0", "l1"], tensors(2, layout=layout), strict=True)), caches((["l0", "l1"], FULL))
        )
        assert pages.layout == layout
        assert (pages.slot_bytes, pages.kernel_blocks) == (2 * HEAD_SIZE * 4, 1)
        assert pages.table.page_bytes == HEADS * BLOCK * 2 * HEAD_SIZE * 4

    def test_a_layer_that_shares_the_cache_of_another_moves_once(self) -> None:
        first, second = tensors(2)
        pages = vllm_cache.page_table({"l0": first, "l1": second, "l2": second}, caches((["l0", "l1", "l2"], FULL)))
        assert pages.names == ["l0", "l1"]

    def test_layers_of_two_groups_in_the_same_memory_move_both(self) -> None:
        """Their blocks are different ones of one pool."""
        (both,) = tensors(1)
        pages = vllm_cache.page_table({"l0": both, "l1": both}, caches((["l0"], WINDOW), (["l1"], FULL)))
        assert pages.names == ["l0", "l1"]
        assert pages.groups == [0, 1]
        assert pages.table.layer_offsets[0] == pages.table.layer_offsets[1]

    def test_layers_are_in_the_order_of_their_numbers(self) -> None:
        names = ["draft.l2", "l10", "l9", "l2"]
        pages = vllm_cache.page_table(dict(zip(names, tensors(4), strict=True)), caches((names, FULL)))
        assert pages.names == ["draft.l2", "l2", "l9", "l10"]

    def test_stages_put_together_are_the_whole_model(self) -> None:
        stages = [some_shape(layers="m.2@0 m.3@1", pipeline_parallel_size=2), some_shape(layers="m.9@0 m.10@1")]
        joined = vllm_cache.join_stages(stages)
        assert joined.layers == "m.2@0 m.3@1 m.9@0 m.10@1"
        assert vllm_cache.layer_names(joined) == ("m.2", "m.3", "m.9", "m.10")


@pytest.mark.parametrize("head_size", [32, 64, 80])
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_packing_of_the_cpu_cache_is_what_the_planes_say(
    dtype: torch.dtype, block_size: int, head_size: int
) -> None:
    """Writes known keys and values with vLLM's own kernel and looks where their bytes are."""
    isa = _get_attn_isa(dtype, block_size, head_size)
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=head_size, dtype=dtype)
    slot_bytes = 2 * head_size * dtype.itemsize
    planes = vllm_cache._planes(spec, slot_bytes, {"CPU_ATTN"})
    if isa not in ("vec", "vec16"):
        assert planes == ()  # packed in a way of its own: only whole heads are moved
        return
    shape = PageShape(num_heads=2, block_size=block_size, slot_bytes=slot_bytes, layout=PageLayout.HND, planes=planes)
    cache = torch.zeros(3, 2, block_size, 2 * head_size, dtype=dtype)
    halves = cache.view(3, 2, 2 * block_size, head_size).chunk(2, dim=2)
    heads, tokens, parts = byte_map(shape)
    for token in (0, 1, block_size - 1):
        cache.zero_()
        key, value = torch.ones(1, 2, head_size, dtype=dtype), torch.ones(1, 2, head_size, dtype=dtype)
        ops.cpu_attn_reshape_and_cache(key, value, *halves, torch.tensor([block_size + token]), isa)
        page = cache[1].contiguous().view(torch.uint8).reshape(-1).numpy()
        written = set((page.reshape(-1, dtype.itemsize).any(axis=1)).nonzero()[0].tolist())
        elements = {at // dtype.itemsize for at in (tokens == token).nonzero()[0].tolist()}
        assert written == elements
        assert {int(heads[at * dtype.itemsize]) for at in written} == {0, 1}
        assert len({int(parts[at * dtype.itemsize]) for at in written}) == 2 * head_size


@pytest.mark.parametrize(
    ("spec", "slot_bytes", "backends", "planes"),
    [
        (FULL, 128, {"FLASH_ATTN"}, ((1, 128),)),
        (FULL, 128, {"FLASH_ATTN", "TRITON_ATTN"}, ((1, 128),)),
        (FULL, 132, {"TRITON_ATTN"}, ()),
        (FULL, 128, {"FLASH_ATTN", "SOMETHING_NEW"}, ()),
        (FULL, 128, set(), ()),
        (MLA, 1152, {"SOMETHING_NEW"}, ((1, 1152),)),
    ],
    ids=["one", "two", "with scales", "one unknown", "none", "MLA"],
)
def test_planes_are_claimed_only_where_they_are_known(
    spec: Any, slot_bytes: int, backends: set[str], planes: tuple[tuple[int, int], ...]
) -> None:
    assert vllm_cache._planes(spec, slot_bytes, backends) == planes
