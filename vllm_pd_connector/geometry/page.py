"""The byte arithmetic of one page: where each head and token lies, and which runs two pages have in common. Pure."""

from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from vllm_pd_connector.errors import OutOfRegion


class PageLayout(Enum):
    """Order of the axes inside a page; the value is vLLM's name for the layout with layers and blocks outermost."""

    HND = "LBHNC"
    NHD = "LBNHC"


class Plane(NamedTuple):
    """A part of the KV of one head whose bytes lie apart from the others': `rows` rows of all the block's tokens.

    A GPU page has one plane of one row, K and V of a token side by side. vLLM's CPU pages have two: K transposed, a
    row for each element of the head, then V, one row.

    Attributes:
        rows: rows of the plane.
        token_bytes: bytes of one token in each row.
    """

    rows: int
    token_bytes: int


class Run(NamedTuple):
    """Bytes that are contiguous in a source page and in a destination page."""

    src: int
    dst: int
    length: int


class TokenRange(NamedTuple):
    """Tokens to copy between two pages, each side counted within its page."""

    src_token: int
    dst_token: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """One page: a block's tokens, one layer, one rank.

    Attributes:
        num_heads: KV heads this rank holds (1 for MLA).
        block_size: tokens.
        slot_bytes: bytes of one head of one token, K and V together.
        layout: order of heads and tokens.
        planes: how a head's bytes are arranged; empty when it is not known, and then only whole heads can be moved.
        kernel_blocks: parts the attention kernel cuts the page into; more than one can only be moved as whole pages.
    """

    num_heads: int
    block_size: int
    slot_bytes: int
    layout: PageLayout
    planes: tuple[Plane, ...] = ()
    kernel_blocks: int = 1

    @property
    def page_bytes(self) -> int:
        return self.num_heads * self.block_size * self.slot_bytes

    @property
    def is_linear(self) -> bool:
        """Whether each token's slot of a head is contiguous, so that it can be found in either layout."""
        return len(self.planes) == 1 and self.planes[0].rows == 1

    @property
    def tells_tokens_apart(self) -> bool:
        """Whether it is known which of a block's bytes belong to which of its tokens."""
        known = self.is_linear or (bool(self.planes) and self.layout is PageLayout.HND)
        return known and self.kernel_blocks == 1

    def slot_offset(self, head: int, token: int) -> int:
        """Where the slot of (head, token) begins; only for linear pages."""
        if self.layout is PageLayout.HND:
            return (head * self.block_size + token) * self.slot_bytes
        return (token * self.num_heads + head) * self.slot_bytes

    def row_offsets(self, head: int, token: int) -> list[int]:
        """Where the token's bytes lie in each row of each plane of a head; only for HND."""
        starts = accumulate((p.rows * p.token_bytes * self.block_size for p in self.planes), initial=0)
        slab = head * self.block_size * self.slot_bytes
        return [
            slab + start + row * self.block_size * plane.token_bytes + token * plane.token_bytes
            for start, plane in zip(starts, self.planes, strict=False)
            for row in range(plane.rows)
        ]


def obstacles(src: PageShape, dst: PageShape) -> list[str]:
    """Names of the fields in which two pages differ so that bytes cannot be moved between them; none if they can."""
    found: list[str] = []
    if src.slot_bytes != dst.slot_bytes:
        found.append("slot_bytes")
    if src.planes != dst.planes:
        found.append("planes")
    if max(src.kernel_blocks, dst.kernel_blocks) > 1 and src != dst:
        found.append("kernel_blocks")
    small, large = sorted((src.block_size, dst.block_size))
    if large % small or (large != small and not src.planes):
        found.append("block_size")
    if PageLayout.NHD in (src.layout, dst.layout) and not src.is_linear and src != dst:
        found.append("layout")
    return found


def common_runs(
    src: PageShape, dst: PageShape, *, src_head: int, dst_head: int, num_heads: int, tokens: TokenRange
) -> list[Run]:
    """The fewest runs that carry some heads of some tokens from a page of one shape into a page of another.

    Between HND pages of one block size that is one run. Every token of NHD is a run of its own, unless all heads of
    both sides take part; unequal blocks need a run for each row of each plane of each head.

    Raises:
        OutOfRegion: the heads or tokens are not on these pages, or the pages have `obstacles`.
    """
    src_token, dst_token, num_tokens = tokens
    for page, head, token in ((src, src_head, src_token), (dst, dst_head, dst_token)):
        if not (head >= 0 and num_heads > 0 and head + num_heads <= page.num_heads):
            raise OutOfRegion(f"heads {head}..{head + num_heads - 1} of a page with {page.num_heads} heads")
        if not (token >= 0 and num_tokens > 0 and token + num_tokens <= page.block_size):
            raise OutOfRegion(f"tokens {token}..{token + num_tokens - 1} of a page with {page.block_size} tokens")
    if differing := obstacles(src, dst):
        raise OutOfRegion(f"no common runs of {src} and {dst}: {', '.join(differing)}")
    both_hnd = src.layout is dst.layout is PageLayout.HND
    heads = range(num_heads)
    if src.block_size == dst.block_size == num_tokens and (both_hnd or (src == dst and num_heads == src.num_heads)):
        slab = src.block_size * src.slot_bytes
        pieces = [Run(src_head * slab, dst_head * slab, num_heads * slab)]
    elif both_hnd:
        lengths = [num_tokens * plane.token_bytes for plane in src.planes for _ in range(plane.rows)]
        pieces = [
            Run(*run)
            for head in heads
            for run in zip(
                src.row_offsets(src_head + head, src_token),
                dst.row_offsets(dst_head + head, dst_token),
                lengths,
                strict=True,
            )
        ]
    else:
        pieces = [
            Run(
                src.slot_offset(src_head + head, src_token + token),
                dst.slot_offset(dst_head + head, dst_token + token),
                src.slot_bytes,
            )
            for token in range(num_tokens)
            for head in heads
        ]
    return _merge(pieces)


def _merge(pieces: list[Run]) -> list[Run]:
    """Join runs that follow each other on both sides."""
    merged: list[Run] = []
    for piece in sorted(pieces, key=lambda run: run.dst):
        last = merged[-1] if merged else None
        if last and last.src + last.length == piece.src and last.dst + last.length == piece.dst:
            merged[-1] = Run(last.src, last.dst, last.length + piece.length)
        else:
            merged.append(piece)
    return merged
