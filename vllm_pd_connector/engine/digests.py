"""`verify_pages`: digests of the parts of pages a write carries, made by the sender and compared by the receiver."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.page import PageShape
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.plan.route import Route
from vllm_pd_connector.plan.write import BoundWrite, GroupWrite, PieceNumbers, partial_granules
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.wire.messages import WriteNote

DIGEST_BYTES = 8

MAX_KINDS = 4096 + 256
"""Kinds of parts a note may have: spots of the largest page, and the end of each cache group."""


def digest(page: bytes, pieces: Iterable[tuple[int, int]]) -> bytes:
    """The digest of some (offset, length) pieces of a page."""
    made = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for offset, length in pieces:
        made.update(page[offset : offset + length])
    return made.digest()


def signature(
    transport: Transport, bound: BoundWrite, groups: Sequence[GroupWrite], route: Route, src: PageTable, dst: PageTable
) -> dict[str, Any]:
    """The fields of a `WriteNote` that let the receiver compare what it got.

    Only wanted tokens are compared: a drafter that guesses several tokens goes on writing into the last page, behind
    the prompt, while that page is being sent.

    Args:
        transport: of the sender.
        bound: the write, or some layers of it.
        groups: the same in tokens, with all layers.
        route: from sender to receiver.
        src: the sender's pages.
        dst: the receiver's pages.
    """
    ends = partial_granules(groups, route)
    kinds = [(spot, route.granule) for spot in range(route.num_spots)]
    kinds += sorted({(spot, num_tokens) for (_, spot), num_tokens in ends.items()})
    runs = [route.common.runs(spot, num_tokens) for spot, num_tokens in kinds]
    sources, spots = [], []
    for layer, block, spot in _parts(bound.src_pieces, route, src):
        kind = kinds.index((spot, ends.get((block, spot), route.granule)))
        sources.append(digest(transport.read_page(layer, block), ((run.src, run.length) for run in runs[kind])))
        spots.append(kind)
    layers, blocks, _ = (list(part) for part in zip(*_parts(bound.dst_pieces, route, dst), strict=True))
    return {
        "digests": b"".join(sources),
        "layers": layers,
        "blocks": blocks,
        "spots": spots,
        "pieces": [[(run.dst, run.length) for run in kind] for kind in runs],
    }


def compare(transport: Transport, note: WriteNote, pages: PageTable, shape: PageShape) -> list[tuple[int, int, bool]]:
    """(layer, block, equal) of each part of a page that a note has a digest of.

    Args:
        transport: of the receiver.
        note: with digests.
        pages: the receiver's.
        shape: of one of them.

    Raises:
        ProtocolError: the note names pages or pieces that there are not, or more than a sender has. Nothing was read.
        UnsupportedEngine: the pages cannot be read by the CPU.
    """
    if not (_is_consistent(note, pages) and _has_honest_runs(note, pages, shape) and _is_disjoint(note, pages, shape)):
        raise ProtocolError("the digests do not fit the pages they are said to be of")
    expected = [note.digests[start : start + DIGEST_BYTES] for start in range(0, len(note.digests), DIGEST_BYTES)]
    parts = sorted(zip(note.layers, note.blocks, note.spots, expected, strict=True))
    results: list[tuple[int, int, bool]] = []
    for (layer, block), same_page in groupby(parts, key=itemgetter(0, 1)):
        page = transport.read_page(layer, block)  # once, however many parts it has
        results += ((layer, block, digest(page, note.pieces[spot]) == want) for _, _, spot, want in same_page)
    return results


def _is_consistent(note: WriteNote, pages: PageTable) -> bool:
    return (
        len(note.digests) == note.pages * DIGEST_BYTES
        and len(note.layers) == len(note.blocks) == len(note.spots) == note.pages
        and all(layer < pages.num_layers for layer in note.layers)
        and all(block < pages.num_blocks for block in note.blocks)
        and all(spot < len(note.pieces) for spot in note.spots)
    )


def _has_honest_runs(note: WriteNote, pages: PageTable, shape: PageShape) -> bool:
    """As `signature` makes them: in order, apart from each other, inside a page, no more than there can be."""
    # Each token of each head, or each row of each head.
    most_runs = shape.num_heads * max(shape.block_size, sum(plane.rows for plane in shape.planes))
    if len(note.pieces) > MAX_KINDS:
        return False
    for kind in note.pieces:
        end = 0
        for offset, length in kind:
            if offset < end:
                return False
            end = offset + length
        if end > pages.page_bytes or not 0 < len(kind) <= most_runs:
            return False
    return True


def _is_disjoint(note: WriteNote, pages: PageTable, shape: PageShape) -> bool:
    """No page is said to have had more bytes or parts than it has, so none is hashed again and again."""
    sizes = [sum(length for _, length in kind) for kind in note.pieces]
    written, parts = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for layer, block, spot in zip(note.layers, note.blocks, note.spots, strict=True):
        written[layer, block] += sizes[spot]
        parts[layer, block] += 1
    return max(written.values()) <= pages.page_bytes and max(parts.values()) <= shape.block_size


def _parts(pieces: PieceNumbers, route: Route, pages: PageTable) -> Iterator[tuple[int, int, int]]:
    """(layer, block, spot) of each granule, from the number of its first piece."""
    for number in pieces[:: route.pieces_per_spot].tolist():
        row, block = divmod(number, pages.num_blocks)
        layer, piece = divmod(row, len(route.src_pieces))
        yield layer, block, piece // route.pieces_per_spot
