"""The byte arithmetic of one page: where each (head, token) lies in the HND and NHD layouts. Pure."""

from dataclasses import dataclass
from enum import Enum

from vllm_pd_connector.errors import OutOfRegion


class PageLayout(Enum):
    """Order of the axes inside a page; the value is vLLM's name for the layout with layers and blocks outermost."""

    HND = "LBHNC"
    NHD = "LBNHC"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """One page: a block's tokens, one layer, one rank.

    Attributes:
        num_heads: KV heads this rank holds (1 for MLA).
        block_size: tokens.
        slot_bytes: bytes of one head of one token, K and V packed together.
        layout: order of heads and tokens.
    """

    num_heads: int
    block_size: int
    slot_bytes: int
    layout: PageLayout

    @property
    def page_bytes(self) -> int:
        return self.num_heads * self.block_size * self.slot_bytes

    def slices(self, first_head: int, num_heads: int) -> list[tuple[int, int]]:
        """The contiguous (offset, length) byte runs that hold a range of heads, in ascending order.

        HND gives one run; NHD gives one for each token unless the range is the whole page.

        Raises:
            OutOfRegion: the heads are not all on this page.
        """
        if first_head < 0 or num_heads < 1 or first_head + num_heads > self.num_heads:
            raise OutOfRegion(f"heads {first_head}..{first_head + num_heads - 1} of a page with {self.num_heads} heads")
        if num_heads == self.num_heads:
            return [(0, self.page_bytes)]
        if self.layout is PageLayout.HND:
            slab = self.block_size * self.slot_bytes
            return [(first_head * slab, num_heads * slab)]
        row = self.num_heads * self.slot_bytes
        start = first_head * self.slot_bytes
        return [(token * row + start, num_heads * self.slot_bytes) for token in range(self.block_size)]
