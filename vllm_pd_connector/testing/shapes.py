"""Small geometries and writes of whole blocks, for tests and benchmarks in which the shape is not the point."""

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.plan.route import Route, routes
from vllm_pd_connector.plan.write import BoundWrite, ChunkWrite, GroupWrite, bind, select
from vllm_pd_connector.wire.compatibility import CacheShape
from vllm_pd_connector.wire.messages import DecoderRank, Reservation
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

BLOCK_TOKENS = 4


def plain_geometry(page_bytes: int, *, tp_size: int = 1, block_size: int = BLOCK_TOKENS) -> CacheGeometry:
    """One KV head for each rank, HND."""
    slot_bytes = page_bytes // block_size
    return CacheGeometry(
        tp_size=tp_size,
        num_kv_heads=tp_size,
        block_size=block_size,
        slot_bytes=slot_bytes,
        layout="LBHNC",
        planes=((1, slot_bytes),),
    )


def whole_blocks(
    transfer_id: str,
    src_blocks: Sequence[int],
    dst_blocks: Sequence[int],
    *,
    first_page: int = 0,
    block_size: int = BLOCK_TOKENS,
) -> ChunkWrite:
    """A write of so many whole pages from a position of the prompt on, one cache group."""
    span = Span(first_page * block_size, (first_page + len(src_blocks)) * block_size)
    return ChunkWrite(
        transfer_id=transfer_id,
        groups=(GroupWrite(span=span, src_blocks=tuple(src_blocks), dst_blocks=tuple(dst_blocks)),),
    )


def reservation(
    transfer_id: str,
    blocks: list[list[int]],
    geometry: CacheGeometry,
    ranks: Sequence[tuple[bytes, PageTable]],
    *,
    lease_s: float = 60.0,
    local_tokens: int = 0,
) -> Reservation:
    """Decoder blocks of each cache group, and what each decoder rank says of itself: its descriptor and its pages."""
    return Reservation(
        protocol=PROTOCOL_VERSION,
        transfer_id=transfer_id,
        decoder="d",
        decoder_generation="d" * 16,
        prefiller_generation="e" * 16,
        local_tokens=local_tokens,
        blocks=blocks,
        lease_s=lease_s,
        geometry=geometry,
        ranks=[
            DecoderRank(descriptor=base64.b64encode(descriptor).decode(), pages=pages) for descriptor, pages in ranks
        ],
    )


def plain_route(page_bytes: int) -> Route:
    """From a rank to its equal: whole pages."""
    (route,) = routes(0, plain_geometry(page_bytes), plain_geometry(page_bytes))
    return route


def bind_whole(write: ChunkWrite, layers: Sequence[int], src: PageTable, dst: PageTable) -> BoundWrite:
    """A write of whole blocks between two ranks of equal shape.

    Raises:
        OutOfRegion: a block or a layer is not there.
    """
    route = plain_route(src.page_bytes)
    granules = select(write.groups[0], route, write.transfer_id, src, dst)
    return bind(granules, route, src, dst, src_layers=layers, dst_layers=layers)


def bound_pieces(src_pieces: Sequence[int], dst_pieces: Sequence[int]) -> BoundWrite:
    """A write of pieces by number, unchecked."""
    return BoundWrite(
        src_pieces=np.asarray(src_pieces, dtype=np.int32),
        dst_pieces=np.asarray(dst_pieces, dtype=np.int32),
        units=len(src_pieces),
        num_pages=len(src_pieces),
    )


def some_shape(**changes: Any) -> CacheShape:
    """The shape of an engine that does not exist: 4 KV heads of 8 B, blocks of 32 tokens, one rank."""
    texts: dict[str, Any] = {field.name: "x" for field in msgspec.structs.fields(CacheShape) if field.type is str}
    numbers = {
        "protocol": PROTOCOL_VERSION,
        "layout": "LBHNC",
        "block_size": 32,
        "slot_bytes": 8,
        "planes": ((1, 8),),
        "kernel_blocks": 1,
        "num_kv_heads": 4,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }
    return CacheShape(**{**texts, **numbers, **changes})
