"""Writes in logical pages, and their binding to page numbers of both sides; nothing unbound is ever posted. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.errors import OutOfRegion
from vllm_pd_connector.geometry.page_table import PageTable

PageIndices = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWrite:
    """The pages of one transfer that one step completes; the same for every layer. No addresses.

    Attributes:
        transfer_id: whose pages.
        src_blocks: prefiller block of each page.
        dst_blocks: decoder block of each page.
    """

    transfer_id: str
    src_blocks: tuple[int, ...]
    dst_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundWrite:
    """One write, checked: page numbers in `PageTable.rows` order on both sides.

    Attributes:
        src_pages: int32 `[num_units]`.
        dst_pages: int32 `[num_units]`.
    """

    src_pages: PageIndices
    dst_pages: PageIndices

    @property
    def num_units(self) -> int:
        return len(self.src_pages)


def bind(write: ChunkWrite, layers: Sequence[int], src: PageTable, dst: PageTable) -> BoundWrite:
    """Page numbers of these layers of a chunk, every one inside both tables (law 3).

    Raises:
        OutOfRegion: a block or layer is outside its table, a null block is named, or the sides differ in the number or
            the size of the pages.

    Cost: linear in `len(layers) * len(write.src_blocks)`, in numpy.
    """
    if len(write.src_blocks) != len(write.dst_blocks):
        raise OutOfRegion(f"{len(write.src_blocks)} source pages for {len(write.dst_blocks)} destination pages")
    if src.page_bytes != dst.page_bytes:
        raise OutOfRegion(f"source pages of {src.page_bytes} B for destination pages of {dst.page_bytes} B")
    src_blocks = _checked(write.src_blocks, src, "source")
    dst_blocks = _checked(write.dst_blocks, dst, "destination")
    rows = np.asarray(layers, dtype=np.int32)
    if rows.size and (rows.min() < 0 or rows.max() >= min(src.num_layers, dst.num_layers)):
        raise OutOfRegion(f"layers {list(layers)} of {src.num_layers} here and {dst.num_layers} there")
    return BoundWrite(
        src_pages=(rows[:, None] * np.int32(src.num_blocks) + src_blocks).ravel(),
        dst_pages=(rows[:, None] * np.int32(dst.num_blocks) + dst_blocks).ravel(),
    )


def _checked(blocks: Sequence[int], table: PageTable, side: str) -> PageIndices:
    """Blocks as int32; 0 is vLLM's null block, which no request owns."""
    array = np.asarray(blocks, dtype=np.int64)
    if array.size and (array.min() < 1 or array.max() >= table.num_blocks):
        raise OutOfRegion(f"{side} blocks {array.min()}..{array.max()} of a pool with blocks 1..{table.num_blocks - 1}")
    return array.astype(np.int32)
