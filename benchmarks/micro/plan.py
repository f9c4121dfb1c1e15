"""Binding a step's pages to page numbers, and the notification codec."""

from __future__ import annotations

from typing import Any

from benchmarks.micro.timing import per_call
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.plan.write import ChunkWrite, bind
from vllm_pd_connector.wire.codec import decode_note, encode
from vllm_pd_connector.wire.messages import WriteNote

NUM_LAYERS = 8
PAGE_BYTES = 32_768


def measure() -> list[dict[str, Any]]:
    return [_bind(4096), _bind(64), *_codec()]


def _bind(num_pages: int) -> dict[str, Any]:
    num_blocks = 2 * num_pages + 1
    layer_bytes = num_blocks * PAGE_BYTES
    table = PageTable(
        base=1 << 20,
        size_bytes=NUM_LAYERS * layer_bytes,
        device_id=0,
        memory="DRAM",
        num_blocks=num_blocks,
        page_bytes=PAGE_BYTES,
        block_stride=PAGE_BYTES,
        layer_offsets=[layer * layer_bytes for layer in range(NUM_LAYERS)],
    )
    blocks = tuple(range(1, num_pages + 1))
    write = ChunkWrite(transfer_id="0" * 32, src_blocks=blocks, dst_blocks=blocks[::-1])
    what = f"plan.write.bind, {num_pages:,} pages × {NUM_LAYERS} layers"
    return per_call(what, lambda: bind(write, range(NUM_LAYERS), table, table), calls=10, repeats=30)


def _codec() -> list[dict[str, Any]]:
    note = WriteNote(transfer_id="0123456789abcdef" * 2, sender=0, seq=7, units=1750)
    frame = encode(note)
    return [
        per_call(f"encode a notification ({len(frame)} B)", lambda: encode(note), calls=10_000, repeats=30),
        per_call(f"decode a notification ({len(frame)} B)", lambda: decode_note(frame), calls=10_000, repeats=30),
    ]
