"""All pages of one rank as plain integers: which bytes hold (layer, block). Pure."""

from typing import Literal

import msgspec

from vllm_pd_connector.errors import OutOfRegion


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

    def page_index(self, layer: int, block: int) -> int:
        """Number of a page in `rows` order; no bounds check (see `plan.bind`)."""
        return layer * self.num_blocks + block

    def address(self, layer: int, block: int) -> int:
        """Absolute address of a page.

        Raises:
            OutOfRegion: the layer or block does not exist.
        """
        if not (0 <= layer < self.num_layers and 0 <= block < self.num_blocks):
            raise OutOfRegion(f"page (layer {layer}, block {block}) of {self.num_layers} x {self.num_blocks}")
        return self.base + self.layer_offsets[layer] + block * self.block_stride

    def rows(self) -> list[tuple[int, int, int, int, int]]:
        """One (address, length, device, stride, count) row for each layer: NIXL's strided descriptor list."""
        return [
            (self.base + offset, self.page_bytes, self.device_id, self.block_stride, self.num_blocks)
            for offset in self.layer_offsets
        ]
