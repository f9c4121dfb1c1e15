"""What a decoder says of itself in every reservation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
    from vllm_pd_connector.wire.messages import DecoderRank


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderIdentity:
    """What a reservation says of this decoder. `windows`: tokens each cache group reads, None for all."""

    engine_id: str
    generation: str
    model: str
    geometry: CacheGeometry
    windows: list[int | None]
    ranks: list[DecoderRank]
