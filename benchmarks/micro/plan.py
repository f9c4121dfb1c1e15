"""Numbering a step's pages on both sides, for equal and for unequal shapes, and the notification codec."""

from __future__ import annotations

from typing import Any

from benchmarks.micro.timing import per_call
from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.plan.route import routes
from vllm_pd_connector.plan.write import GroupWrite, bind, select
from vllm_pd_connector.wire.codec import decode_note, encode
from vllm_pd_connector.wire.messages import WriteNote

NUM_LAYERS = 8
BLOCK_TOKENS, HEADS, SLOT_BYTES = 16, 8, 256
TRANSFER = "0123456789abcdef" * 2


def measure() -> list[dict[str, Any]]:
    return [
        _plan("equal shapes", 4096, range(NUM_LAYERS)),
        _plan("equal shapes", 64, range(NUM_LAYERS)),
        _plan("8 destination slices", 4096, [0], dst_tp=8),
        _plan("8 destination slices", 4096, range(NUM_LAYERS), dst_tp=8),
        _plan("8 replicas to 8 ranks, MLA", 4096, [0], src_tp=8, dst_tp=8, heads=1),
        _plan("blocks of 16 to 32", 4096, [0], dst_block=32),
        _plan("8 destination slices, NHD to NHD", 4096, [0], dst_tp=8, layout="LBNHC"),
        *_codec(),
    ]


def geometry(tp: int, heads: int, block: int, layout: str) -> CacheGeometry:
    return CacheGeometry(
        tp_size=tp,
        num_kv_heads=heads,
        block_size=block,
        slot_bytes=SLOT_BYTES,
        layout=layout,
        planes=((1, SLOT_BYTES),),
    )


def _plan(
    what: str,
    num_pages: int,
    layers: Any,
    *,
    src_tp: int = 1,
    dst_tp: int = 1,
    heads: int = HEADS,
    dst_block: int = BLOCK_TOKENS,
    layout: str = "LBHNC",
) -> dict[str, Any]:
    """What one source rank does for one step of one transfer: all its routes, from block numbers to piece numbers."""
    src, dst = geometry(src_tp, heads, BLOCK_TOKENS, layout), geometry(dst_tp, heads, dst_block, layout)
    tables = [_table(side.page().page_bytes, 2 * num_pages + 1) for side in (src, dst)]
    ways = routes(0, src, dst)
    span = Span(0, num_pages * BLOCK_TOKENS)
    blocks = tuple(range(1, num_pages + 1))
    write = GroupWrite(span=span, src_blocks=blocks, dst_blocks=blocks[::-1][: len(span.pages(dst_block))])

    def plan() -> None:
        arrays = write.as_arrays()
        for route in ways:
            granules = select(arrays, route, TRANSFER, *tables)
            bind(granules, route, *tables, src_layers=layers, dst_layers=layers)

    return per_call(f"plan {num_pages:,} pages x {len(layers)} layers, {what}", plan, calls=10, repeats=30)


def _table(page_bytes: int, num_blocks: int) -> PageTable:
    layer_bytes = num_blocks * page_bytes
    return PageTable(
        base=1 << 20,
        size_bytes=NUM_LAYERS * layer_bytes,
        device_id=0,
        memory="DRAM",
        num_blocks=num_blocks,
        page_bytes=page_bytes,
        block_stride=page_bytes,
        layer_offsets=[layer * layer_bytes for layer in range(NUM_LAYERS)],
    )


def _codec() -> list[dict[str, Any]]:
    note = WriteNote(transfer_id=TRANSFER, sender=0, seq=7, units=1750, pages=1750)
    frame = encode(note)
    return [
        per_call(f"encode a notification ({len(frame)} B)", lambda: encode(note), calls=10_000, repeats=30),
        per_call(f"decode a notification ({len(frame)} B)", lambda: decode_note(frame), calls=10_000, repeats=30),
    ]
