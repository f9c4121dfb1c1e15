"""How one engine's pages are cut and arranged, over all its ranks. Pure."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from vllm_pd_connector.geometry.page import PageLayout, PageShape, Plane, obstacles
from vllm_pd_connector.geometry.shard_map import owned_heads

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
BlockSize = Annotated[int, Meta(ge=1, le=4096)]
Ranks = Annotated[int, Meta(ge=1, le=1024)]
Planes = Annotated[tuple[tuple[Size, Size], ...], Meta(max_length=16)]


class CacheGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides where a token's bytes lie, except addresses. Small enough to travel with a reservation.

    Attributes:
        tp_size: tensor-parallel ranks.
        num_kv_heads: over all ranks, replicas not counted (1 for MLA).
        block_size: tokens per page.
        slot_bytes: bytes of one head of one token, K and V together.
        layout: vLLM's layout name; LBHNC is HND, LBNHC is NHD.
        planes: (rows, bytes per token) of each plane of a head; empty when only whole heads can be moved.
        kernel_blocks: parts the attention kernel cuts a page into; with more than one only whole pages can be moved.
    """

    tp_size: Ranks
    num_kv_heads: Size
    block_size: BlockSize
    slot_bytes: Size
    layout: Literal["LBHNC", "LBNHC"]
    planes: Planes = ()
    kernel_blocks: Size = 1

    def heads(self, rank: int) -> range:
        """Global numbers of the KV heads of a rank.

        Raises:
            ConfigError: heads and ranks do not divide each other.
        """
        return owned_heads(rank, self.tp_size, self.num_kv_heads)

    def page(self, rank: int = 0) -> PageShape:
        """One page of a rank.

        Raises:
            ConfigError: heads and ranks do not divide each other.
        """
        return PageShape(
            num_heads=len(self.heads(rank)),
            block_size=self.block_size,
            slot_bytes=self.slot_bytes,
            layout=PageLayout(self.layout),
            planes=tuple(Plane(*plane) for plane in self.planes),
            kernel_blocks=self.kernel_blocks,
        )


def mismatches(src: CacheGeometry, dst: CacheGeometry) -> list[str]:
    """Names of the fields that keep bytes of one geometry from being moved into the other; none if they can be."""
    found = [] if src.num_kv_heads == dst.num_kv_heads else ["num_kv_heads"]
    return found + obstacles(src.page(), dst.page())
