"""A request that vLLM holds for a prefiller, as the decoder's scheduler half sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_pd_connector.lifecycle.decode_request import DecodeState

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class Held:
    """One attempt: its pages are reserved. owned by: DecodeSide.

    Attributes:
        local_tokens: leading tokens that are not transferred.
        url: the prefiller that works for it, as far as is known.
        ends_at: until when it may, on this decoder's clock; `lease_s`: how long that was when it was asked.
        stops: token after the last that has arrived without a gap, from each rank that has handed it back as failed.
    """

    request: Request
    transfer_id: str
    local_tokens: int
    blocks: list[int]
    url: str
    ends_at: float
    lease_s: float
    state: DecodeState = DecodeState.DISPATCHED
    reason: str = ""
    stops: list[int] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id
