"""Writes in tokens and blocks, and their binding to pieces of both sides; nothing unbound is ever posted. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.errors import OutOfRegion
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.plan.route import Route

PieceNumbers = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWrite:
    """The pages of one cache group that hold some tokens. No addresses.

    Attributes:
        span: the tokens.
        src_blocks: prefiller block of each of its pages that holds some of them.
        dst_blocks: decoder block of each of its pages that holds some of them.
    """

    span: Span
    src_blocks: tuple[int, ...] | NDArray[np.int64]
    dst_blocks: tuple[int, ...] | NDArray[np.int64]

    def as_arrays(self) -> "GroupWrite":
        """The same for many calls of `select`: converting thousands of numbers costs more than the rest."""
        return GroupWrite(
            span=self.span,
            src_blocks=np.asarray(self.src_blocks, dtype=np.int64),
            dst_blocks=np.asarray(self.dst_blocks, dtype=np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWrite:
    """What one step completes of one transfer; the same for every layer of a group and for every rank.

    Attributes:
        transfer_id: whose tokens.
        groups: one for each cache group, in order.
    """

    transfer_id: str
    groups: tuple[GroupWrite, ...]

    @property
    def max_pages(self) -> int:
        """Source pages it reads from, in a layer of the group with most."""
        return max((len(group.src_blocks) for group in self.groups), default=0)


def partial_granules(groups: Iterable[GroupWrite], route: Route) -> dict[tuple[int, int], int]:
    """Wanted tokens of each group's last granule, by (source block, spot), where it holds others as well."""
    ends: dict[tuple[int, int], int] = {}
    for group in groups:
        position, num_tokens = divmod(group.span.stop, route.granule)
        if len(group.span) and num_tokens:
            ends[int(group.src_blocks[-1]), position % route.num_spots] = num_tokens
    return ends


def layer_bytes(writes: Iterable[ChunkWrite], page_bytes: int) -> int:
    """Bytes that one layer of a step makes ready, over all its transfers; of the group with most pages."""
    return page_bytes * sum(write.max_pages for write in writes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Granules:
    """The granules of a group's write that one route carries, checked against both sides' pools.

    Attributes:
        src_blocks: int32 `[granules]`.
        dst_blocks: int32 `[granules]`.
        spots: int32 `[granules]`, or None when every granule is in spot 0.
        num_tokens: wanted tokens in them; the rest of a partial granule is not counted.
    """

    src_blocks: PieceNumbers
    dst_blocks: PieceNumbers
    spots: PieceNumbers | None
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundWrite:
    """One write, checked: piece numbers of two `PageView`s, copied one to one.

    Attributes:
        src_pieces: int32 `[layers x granules x pieces of a spot]`, raveled.
        dst_pieces: the same on the other side.
        units: see `plan.expectation`.
        num_pages: granules of single layers.
    """

    src_pieces: PieceNumbers
    dst_pieces: PieceNumbers
    units: int
    num_pages: int


def select(write: GroupWrite, route: Route, transfer_id: str, src: PageTable, dst: PageTable) -> Granules:
    """The granules of a write that go over a route, every block inside both pools (law 3).

    Raises:
        OutOfRegion: a block is outside its pool, a null block is named, or the blocks are not those of the tokens.

    Cost: linear in the granules, in numpy.
    """
    span = write.span
    src_pages, dst_pages = span.pages(route.src_block), span.pages(route.dst_block)
    if len(write.src_blocks) != len(src_pages) or len(write.dst_blocks) != len(dst_pages):
        raise OutOfRegion(
            f"{len(write.src_blocks)} source and {len(write.dst_blocks)} destination blocks for tokens "
            f"{span.start}..{span.stop - 1}, which lie in {len(src_pages)} and {len(dst_pages)}"
        )
    src_blocks = _checked(write.src_blocks, src, "source")
    dst_blocks = _checked(write.dst_blocks, dst, "destination")
    if route.num_spots == route.num_replicas == 1:
        return Granules(src_blocks=src_blocks, dst_blocks=dst_blocks, spots=None, num_tokens=len(span))
    positions = np.arange(span.pages(route.granule).start, span.pages(route.granule).stop, dtype=np.int32)
    if route.num_replicas > 1:
        positions = positions[(positions + route.turn(transfer_id)) % route.num_replicas == route.replica]
    first = positions * route.granule
    tokens = np.minimum(first + route.granule, span.stop) - np.maximum(first, span.start)
    return Granules(
        src_blocks=src_blocks[first // route.src_block - src_pages.start],
        dst_blocks=dst_blocks[first // route.dst_block - dst_pages.start],
        spots=positions % route.num_spots if route.num_spots > 1 else None,
        num_tokens=int(tokens.sum()),
    )


def bind(
    granules: Granules,
    route: Route,
    src: PageTable,
    dst: PageTable,
    *,
    src_layers: Sequence[int],
    dst_layers: Sequence[int],
) -> BoundWrite:
    """Piece numbers of some layers of a group.

    Args:
        granules: from `select`.
        route: the same.
        src: the sender's pages.
        dst: the receiver's pages.
        src_layers: rows of the sender's table.
        dst_layers: the same layers in the receiver's table.

    Raises:
        OutOfRegion: a layer is outside its table.

    Cost: linear in the pieces, in numpy.
    """
    return BoundWrite(
        src_pieces=_numbers(granules.src_blocks, granules.spots, route, src, src_layers),
        dst_pieces=_numbers(granules.dst_blocks, granules.spots, route, dst, dst_layers),
        units=granules.num_tokens * route.num_heads * len(src_layers),
        num_pages=len(granules.src_blocks) * len(src_layers),
    )


def join(writes: Sequence[BoundWrite]) -> BoundWrite:
    """Several bound writes between the same two ranks as one."""
    if len(writes) == 1:
        return writes[0]
    return BoundWrite(
        src_pieces=np.concatenate([write.src_pieces for write in writes]),
        dst_pieces=np.concatenate([write.dst_pieces for write in writes]),
        units=sum(write.units for write in writes),
        num_pages=sum(write.num_pages for write in writes),
    )


def _numbers(
    blocks: PieceNumbers, spots: PieceNumbers | None, route: Route, table: PageTable, layers: Sequence[int]
) -> PieceNumbers:
    rows = np.asarray(layers, dtype=np.int32)
    if rows.size and (rows.min() < 0 or rows.max() >= table.num_layers):
        raise OutOfRegion(f"layers {list(layers)} of a table with {table.num_layers}")
    pieces_per_page, per_spot = len(route.src_pieces), route.pieces_per_spot
    first = rows[:, None] * np.int32(pieces_per_page * table.num_blocks) + blocks
    if spots is not None:
        first = first + spots * np.int32(per_spot * table.num_blocks)
    if per_spot == 1:
        return first.ravel()
    return (first[:, :, None] + np.arange(per_spot, dtype=np.int32) * np.int32(table.num_blocks)).ravel()


def _checked(blocks: tuple[int, ...] | NDArray[np.int64], table: PageTable, side: str) -> PieceNumbers:
    """Blocks as int32; 0 is vLLM's null block, which no request owns."""
    array = np.asarray(blocks, dtype=np.int64)
    if array.size and (array.min() < 1 or array.max() >= table.num_blocks):
        raise OutOfRegion(f"{side} blocks {array.min()}..{array.max()} of a pool with blocks 1..{table.num_blocks - 1}")
    return array.astype(np.int32)
