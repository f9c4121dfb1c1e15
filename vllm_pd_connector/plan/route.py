"""What one source rank writes into the pages of one destination rank: the pieces of a page, whatever the shapes. Pure.

Computed once for each pair of ranks. A step then only numbers pieces (see `plan.write`).
"""

from dataclasses import dataclass

from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.geometry.page import PageShape, Run, TokenRange, common_runs
from vllm_pd_connector.geometry.shard_map import HeadSlice, first_replica, sources


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonHeads:
    """What a source page and a destination page both hold.

    Attributes:
        src: shape of a source page.
        dst: shape of a destination page.
        heads: where the heads lie in them.
    """

    src: PageShape
    dst: PageShape
    heads: HeadSlice

    @property
    def granule(self) -> int:
        """Tokens of the smaller page."""
        return min(self.src.block_size, self.dst.block_size)

    @property
    def num_spots(self) -> int:
        """Granules in the larger page."""
        return max(self.src.block_size, self.dst.block_size) // self.granule

    def runs(self, spot: int, num_tokens: int) -> list[Run]:
        """The bytes of a spot's first tokens; of all of them where a page's shape does not tell tokens apart."""
        if not (self.src.tells_tokens_apart and self.dst.tells_tokens_apart):
            num_tokens = self.granule
        first = spot * self.granule
        return common_runs(
            self.src,
            self.dst,
            src_head=self.heads.src_head,
            dst_head=self.heads.dst_head,
            num_heads=self.heads.num_heads,
            tokens=TokenRange(first % self.src.block_size, first % self.dst.block_size, num_tokens),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """From one source rank to one destination rank.

    A granule at position p of the prompt lies in spot `p % num_spots` of its page on the side with the larger pages;
    a spot is made of the same number of pieces on both sides, which are copied one to one.

    Attributes:
        dst_rank: destination rank.
        common: what is carried of a page, in tokens; the other fields are worked out of it once.
        num_heads: heads that are carried.
        granule: tokens that move at once.
        src_block: tokens of a source page.
        dst_block: tokens of a destination page.
        num_spots: granules in the larger page.
        src_pieces: (offset, length) within a source page, spot after spot.
        dst_pieces: the same within a destination page.
        num_replicas: source ranks that hold the same heads and take turns.
        replica: this one among them.
    """

    dst_rank: int
    common: CommonHeads
    num_heads: int
    granule: int
    src_block: int
    dst_block: int
    num_spots: int
    src_pieces: tuple[tuple[int, int], ...]
    dst_pieces: tuple[tuple[int, int], ...]
    num_replicas: int
    replica: int

    @property
    def pieces_per_spot(self) -> int:
        return len(self.src_pieces) // self.num_spots

    @property
    def spot_bytes(self) -> int:
        """Bytes of one granule of one layer."""
        return sum(length for _, length in self.src_pieces[: self.pieces_per_spot])

    def turn(self, transfer_id: str) -> int:
        """Positions p with `(p + turn) % num_replicas == replica` are this rank's to send."""
        return first_replica(transfer_id, self.dst_rank) % self.num_replicas


def routes(src_rank: int, src: CacheGeometry, dst: CacheGeometry) -> list[Route]:
    """The routes from one source rank, in the order of destination ranks; none if nobody needs anything of it.

    Raises:
        OutOfRegion: the geometries have `mismatches`.
        ConfigError: heads and ranks of one side do not divide each other.
    """
    found: list[Route] = []
    for dst_rank in range(dst.tp_size):
        for part in sources(dst_rank, src_tp=src.tp_size, dst_tp=dst.tp_size, num_kv_heads=src.num_kv_heads):
            if src_rank not in part.src_ranks:
                continue
            common = CommonHeads(src=src.page(src_rank), dst=dst.page(dst_rank), heads=part)
            runs = [run for spot in range(common.num_spots) for run in common.runs(spot, common.granule)]
            found.append(
                Route(
                    dst_rank=dst_rank,
                    common=common,
                    num_heads=part.num_heads,
                    granule=common.granule,
                    src_block=src.block_size,
                    dst_block=dst.block_size,
                    num_spots=common.num_spots,
                    src_pieces=tuple((run.src, run.length) for run in runs),
                    dst_pieces=tuple((run.dst, run.length) for run in runs),
                    num_replicas=len(part.src_ranks),
                    replica=src_rank - part.src_ranks.start,
                )
            )
    return found
