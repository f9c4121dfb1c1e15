"""KV memory of one rank on the host: a numpy array with the page table that describes it."""

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.geometry.page_table import PageTable

Bytes = NDArray[np.uint8]


class KvBuffer:
    """Layers of pages with a gap before each layer and behind each page, so that a stray write is seen.

    Args:
        num_layers: layers.
        num_blocks: blocks of each layer; block 0 is the null block.
        page_bytes: length of a page.
        gap: unused bytes after each page and before each layer.
        fill: value of every byte at the start.
    """

    def __init__(self, *, num_layers: int, num_blocks: int, page_bytes: int, gap: int = 0, fill: int = 0) -> None:
        stride = page_bytes + gap
        layer_bytes = gap + num_blocks * stride
        self.array: Bytes = np.full(num_layers * layer_bytes, fill, dtype=np.uint8)
        self.table = PageTable(
            base=self.array.ctypes.data,
            size_bytes=self.array.nbytes,
            device_id=0,
            memory="DRAM",
            num_blocks=num_blocks,
            page_bytes=page_bytes,
            block_stride=stride,
            layer_offsets=[layer * layer_bytes + gap for layer in range(num_layers)],
        )

    def page(self, layer: int, block: int) -> Bytes:
        """A view of one page."""
        start = self.table.address(layer, block) - self.table.base
        return self.array[start : start + self.table.page_bytes]

    def pages(self) -> Bytes:
        """A view `[layers, blocks, page_bytes]` of all pages."""
        table = self.table
        rows = self.array.reshape(table.num_layers, -1)[:, table.layer_offsets[0] :]
        rows = rows[:, : table.num_blocks * table.block_stride]
        return rows.reshape(table.num_layers, table.num_blocks, table.block_stride)[:, :, : table.page_bytes]

    def fill_random(self, seed: int) -> None:
        """Give every byte a value that the seed decides."""
        self.array[:] = np.random.default_rng(seed).integers(0, 256, self.array.size, dtype=np.uint8)
