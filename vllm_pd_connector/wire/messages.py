"""Every message one engine sends another. Pure.

Evolution: new fields last and with defaults, types never change, unknown fields are ignored; anything else is a new
protocol version.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.wire.compatibility import CacheShape

Hex32 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Hex16 = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
ShortText = Annotated[str, Meta(min_length=1, max_length=512)]
Duration = Annotated[float, Meta(gt=0, le=86_400)]

MAX_RANKS = 1024
MAX_PAGES = 1 << 20
MAX_GROUPS = 256


class DecoderRank(msgspec.Struct, frozen=True, kw_only=True):
    """Where one decoder rank's pages are and how to reach them.

    Attributes:
        descriptor: the transport's serialised agent, base64.
        pages: the rank's registered pages.
    """

    descriptor: Annotated[str, Meta(max_length=1 << 20)]
    pages: PageTable


class Reservation(msgspec.Struct, frozen=True, kw_only=True):
    """What a decoder asks of a prefiller for one request: `kv_transfer_params["pd_reservation"]` of the dispatch.

    Attributes:
        protocol: version of this message.
        transfer_id: fresh and unguessable.
        decoder: engine id of the decoder.
        decoder_generation: its process.
        prefiller_generation: the process the decoder greeted; another one refuses.
        local_tokens: leading tokens of the prompt that the decoder has already.
        blocks: for each cache group, the decoder's blocks for the tokens it wants (`plan.extent.wanted_span`).
        lease_s: seconds from receipt after which the prefiller must have stopped writing.
        geometry: how the decoder's pages are cut.
        ranks: the decoder's workers in rank order.
        expires_at: seconds on the prefiller's own clock, as it last sent a reading, when the lease ends at the latest:
            a dispatch may be read long after its decoder gave it up. None to a prefiller that sends no readings.
    """

    protocol: int
    transfer_id: Hex32
    decoder: ShortText
    decoder_generation: Hex16
    prefiller_generation: Hex16
    local_tokens: Count
    blocks: Annotated[
        list[Annotated[list[Positive], Meta(max_length=MAX_PAGES)]], Meta(min_length=1, max_length=MAX_GROUPS)
    ]
    lease_s: Duration
    geometry: CacheGeometry
    ranks: Annotated[list[DecoderRank], Meta(min_length=1, max_length=MAX_RANKS)]
    expires_at: float | None = None


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder greets a prefiller: `kv_transfer_params["pd_hello"]` of a one-token request."""

    protocol: int
    decoder: ShortText


class ControlEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where one prefiller rank takes fences, and which process that was."""

    endpoint: ShortText
    generation: Hex16


class HelloReply(msgspec.Struct, frozen=True, kw_only=True):
    """The prefiller's answer to a hello.

    Attributes:
        engine: the prefiller's engine id.
        generation: its process.
        shape: what its pages look like.
        controls: each rank's fence server, in rank order.
        data_parallel_rank: the engine behind the address that answered; dispatches name it, so that they reach it too.
    """

    engine: ShortText
    generation: Hex16
    shape: CacheShape
    controls: Annotated[list[ControlEndpoint], Meta(min_length=1, max_length=MAX_RANKS)]
    data_parallel_rank: int | None = None


class DispatchReply(msgspec.Struct, frozen=True, kw_only=True):
    """The prefiller's answer to a dispatch: `kv_transfer_params["pd_reply"]` of the response.

    Attributes:
        pages: decoder pages handed to the writers; all of the reservation's unless `error` is set.
        error: empty, or why nothing (more) will be written.
        declined: nothing was and nothing will be written for this reservation, so it needs no fence.
        expired: it was declined because its `expires_at` had passed.
        clock: seconds on the prefiller's clock when it answered, to be given back in `expires_at`.
    """

    pages: Count = 0
    error: Annotated[str, Meta(max_length=4096)] = ""
    hello: HelloReply | None = None
    declined: bool = False
    expired: bool = False
    clock: float | None = None


class WriteNote(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Travels with each write, and is delivered after its bytes.

    Attributes:
        transfer_id: which transfer.
        sender: prefiller rank.
        seq: number of the write within (transfer, sender).
        units: what the write carried (`plan.expectation`).
        pages: parts of pages that those are, in single layers.
        digests: empty, or 8 bytes for each of `pages`.
        layers: layer of each of them (with digests only).
        blocks: decoder block of each of them (with digests only).
        spots: index into `pieces` of each of them (with digests only).
        pieces: the (offset, length) runs that make up a part, for each kind of part (with digests only).
        start: first token of the first cache group in the step that the write is a part of; the same for all ranks.
        stop: token after the last one.
    """

    transfer_id: Hex32
    sender: Count
    seq: Count
    units: Positive
    pages: Positive
    digests: bytes = b""
    layers: list[Count] = []
    blocks: list[Positive] = []
    spots: list[Count] = []
    pieces: list[list[tuple[Count, Positive]]] = []
    start: Count = 0
    stop: Count = 0


class FailureNote(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A prefiller rank gives a transfer up; counts as an answer for it, so that nobody waits (law 8)."""

    transfer_id: Hex32
    sender: Count
    reason: Annotated[str, Meta(max_length=4096)]


Note = WriteNote | FailureNote


class Fence(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Decoder to a prefiller rank: stop writing this transfer, or never start, and say when nothing is in flight.

    `generation` is the rank's own: a later process at the address cannot answer for it.
    """

    transfer_id: Hex32
    generation: Hex16


class Quiet(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A prefiller rank has stopped a transfer, and every write it posted is over.

    Attributes:
        units: what was written (`plan.expectation`).
        is_clean: False when a write failed: what it had on the wire may still land, within the transport's retry time.
    """

    transfer_id: Hex32
    units: Count
    is_clean: bool = True


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """One bad or foreign control frame costs this answer, nothing else (law 12)."""

    reason: Annotated[str, Meta(max_length=4096)]
    transfer_id: str = ""


class Inquiry(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Decoder to a prefiller rank: how does this transfer stand? Asked when pages are late after the answer."""

    transfer_id: Hex32
    generation: Hex16


class Standing(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """How a transfer stands on a prefiller rank.

    Attributes:
        is_over: nothing more will be written, nothing is in flight.
        error: empty, or why pages are missing for good.
    """

    transfer_id: Hex32
    is_over: bool
    error: Annotated[str, Meta(max_length=4096)] = ""


Control = Fence | Quiet | Refused | Inquiry | Standing
