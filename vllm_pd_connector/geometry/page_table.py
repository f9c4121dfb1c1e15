"""All pages of one rank as plain integers: which bytes hold (layer, block), or a piece of such a page. Pure."""

from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from vllm_pd_connector.errors import OutOfRegion

MAX_PIECES: Final = 2**31 - 1
"""Descriptor indices are int32."""


class PageTable(msgspec.Struct, frozen=True, kw_only=True):
    """The registered KV memory of one rank. Small enough to travel inside a dispatch.

    Attributes:
        base: address of the registered region.
        size_bytes: length of the region.
        device_id: NIXL device number (0 for host memory).
        memory: "DRAM" or "VRAM", NIXL's names.
        num_blocks: blocks in the pool; block b of layer l starts at `base + layer_offsets[l] + b * block_stride`.
        page_bytes: length of one page.
        block_stride: bytes from one block to the next within a layer.
        layer_offsets: bytes from `base` to block 0 of each layer, in layer order.
    """

    base: int
    size_bytes: int
    device_id: int
    memory: Literal["DRAM", "VRAM"]
    num_blocks: int
    page_bytes: int
    block_stride: int
    layer_offsets: list[int]

    @property
    def num_layers(self) -> int:
        return len(self.layer_offsets)

    def check(self) -> None:
        """Refuse a table whose pages overlap or leave the region; a peer's table is checked once, on arrival.

        Raises:
            OutOfRegion: names the first layer whose pages do not fit.
        """
        if self.num_blocks < 1 or self.page_bytes < 1 or self.block_stride < self.page_bytes or not self.layer_offsets:
            raise OutOfRegion(
                f"page table with {self.num_blocks} blocks of {self.page_bytes} B, stride {self.block_stride} B, "
                f"{self.num_layers} layers"
            )
        span = (self.num_blocks - 1) * self.block_stride + self.page_bytes
        for layer, offset in enumerate(self.layer_offsets):
            if offset < 0 or offset + span > self.size_bytes:
                raise OutOfRegion(f"layer {layer}: bytes {offset}..{offset + span} of a region of {self.size_bytes} B")

    def address(self, layer: int, block: int) -> int:
        """Absolute address of a page.

        Raises:
            OutOfRegion: the layer or block does not exist.
        """
        if not (0 <= layer < self.num_layers and 0 <= block < self.num_blocks):
            raise OutOfRegion(f"page (layer {layer}, block {block}) of {self.num_layers} x {self.num_blocks}")
        return self.base + self.layer_offsets[layer] + block * self.block_stride


@dataclass(frozen=True, slots=True)
class PageView:
    """The same pieces of every page of a table, numbered as NIXL numbers the rows of a strided descriptor list.

    Attributes:
        pages: the table.
        pieces: (offset within a page, length) of each piece.
    """

    pages: PageTable
    pieces: tuple[tuple[int, int], ...]

    def check(self) -> None:
        """Raises:
        OutOfRegion: a piece is not inside the page, or there are more pieces than NIXL can number.
        """
        if self.pages.num_layers * len(self.pieces) * self.pages.num_blocks > MAX_PIECES:
            raise OutOfRegion(
                f"{self.pages.num_layers} layers x {self.pages.num_blocks} blocks x {len(self.pieces)} pieces of a "
                f"page: {MAX_PIECES} can be numbered"
            )
        for offset, length in self.pieces:
            if offset < 0 or length < 1 or offset + length > self.pages.page_bytes:
                raise OutOfRegion(f"bytes {offset}..{offset + length} of a page of {self.pages.page_bytes} B")

    def number(self, layer: int, block: int, piece: int = 0) -> int:
        """Number of a piece; no bounds check (see `plan.bind`)."""
        return (layer * len(self.pieces) + piece) * self.pages.num_blocks + block

    def locate(self, number: int) -> tuple[int, int]:
        """Absolute address and length of a piece.

        Raises:
            OutOfRegion: there is no such piece.
        """
        row, block = divmod(number, self.pages.num_blocks)
        layer, piece = divmod(row, len(self.pieces))
        offset, length = self.pieces[piece]
        return self.pages.address(layer, block) + offset, length

    def rows(self) -> list[tuple[int, int, int, int, int]]:
        """One (address, length, device, stride, count) row for each piece of each layer."""
        pages = self.pages
        return [
            (pages.base + start + offset, length, pages.device_id, pages.block_stride, pages.num_blocks)
            for start in pages.layer_offsets
            for offset, length in self.pieces
        ]


def whole_pages(pages: PageTable) -> PageView:
    """Every page as one piece."""
    return PageView(pages, ((0, pages.page_bytes),))
