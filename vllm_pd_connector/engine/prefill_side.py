"""The prefiller's half of the scheduler: takes reservations, says which pages a step completes, keeps them until sent.

owned by: EngineCore's main thread; nothing here blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.request import RequestStatus

from vllm_pd_connector.engine import vllm_cache, vllm_compat
from vllm_pd_connector.engine.step import BeginTransfer, CloseTransfer, StepMetadata
from vllm_pd_connector.errors import OtherProtocol, PDConnectorError, ProtocolError
from vllm_pd_connector.geometry.cache_geometry import mismatches
from vllm_pd_connector.plan.extent import Span, completed_span, wanted_span
from vllm_pd_connector.plan.write import ChunkWrite, GroupWrite
from vllm_pd_connector.wire.messages import DispatchReply, HelloReply, Reservation
from vllm_pd_connector.wire.transfer_params import REPLY, parse_params, to_params

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_pd_connector.engine.vllm_cache import CacheGroup
    from vllm_pd_connector.telemetry.counters import Tally
    from vllm_pd_connector.telemetry.timeline import Timeline

logger = getLogger(__name__)


@dataclass(slots=True)
class _Prefill:
    """A request that computes pages for a decoder. `sent_stop`: token after the last one handed to the writers."""

    request: Request
    reservation: Reservation
    spans: list[Span]
    lease_end: float
    sent_stop: int = 0
    has_begun: bool = False
    error: str = ""


class PrefillSide:
    """Args:
    hello: what this prefiller answers to a greeting.
    groups: cache groups whose pages move.
    tally: counters.
    timeline: moments.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        hello: HelloReply,
        groups: Sequence[CacheGroup],
        tally: Tally,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hello = hello
        self._geometry = hello.shape.geometry()
        self._groups = groups
        self._tally = tally
        has_stages = hello.shape.pipeline_parallel_size > 1
        self._layers = vllm_cache.layer_names(hello.shape) if has_stages else ()
        self._timeline = timeline
        self._clock = clock
        self._manager: KVCacheManager | None = None
        self._prefills: dict[str, _Prefill] = {}
        self._by_transfer: dict[str, str] = {}
        self._replies: dict[str, DispatchReply] = {}
        self._draining: set[str] = set()
        self._closes: list[CloseTransfer] = []

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def new_request(self, request: Request) -> bool:
        """Take a greeting or a reservation; False when the request carries neither."""
        try:
            params = parse_params(request.kv_transfer_params)
        except OtherProtocol as error:
            self._refuse(request, error)
            return True
        except ProtocolError as error:
            # No decoder of ours says such things: this is a client, and it gets an error and no answer.
            self._tally.add("refused_params")
            vllm_compat.fail_request(request, str(error))
            return True
        try:
            if params.hello is not None:
                self._answer_early(request, DispatchReply(hello=self._hello))
                return True
            if params.reservation is None:
                return False
            self._accept(request, params.reservation)
        except PDConnectorError as error:
            self._refuse(request, error)
        return True

    def plan(self, scheduler_output: SchedulerOutput, orders: StepMetadata) -> None:
        """Add what this step completes, before it is computed."""
        preempted = scheduler_output.preempted_req_ids or ()
        for request_id in preempted:
            if prefill := self._prefills.get(request_id):
                orders.preempted.append(prefill.reservation.transfer_id)
        # One that was finished since gave its blocks up all the same (law 2).
        orders.preempted.extend(close.transfer_id for close in self._closes if close.request_id in preempted)
        if self._prefills:
            for request_id, computed in _computed_before(scheduler_output):
                if prefill := self._prefills.get(request_id):
                    after = computed + scheduler_output.num_scheduled_tokens[request_id]
                    self._plan_one(prefill, after, orders)
        orders.closes.extend(self._closes)
        self._closes = []

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM must keep the request's blocks, and what its response carries."""
        if (early := self._replies.pop(request.request_id, None)) is not None:
            return False, self._answer(early)
        prefill = self._prefills.pop(request.request_id, None)
        if prefill is None:
            return False, None
        transfer_id = prefill.reservation.transfer_id
        self._by_transfer.pop(transfer_id, None)
        is_complete = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        self._closes.append(
            CloseTransfer(
                transfer_id=transfer_id,
                request_id=request.request_id,
                cancel=not is_complete or bool(prefill.error),
                report=prefill.has_begun,
            )
        )
        if prefill.has_begun:
            self._draining.add(request.request_id)
        self._timeline.mark(transfer_id, "prefill_finished", status=request.status.name)
        return prefill.has_begun, self._answer(DispatchReply(pages=_pages_sent(prefill), error=prefill.error))

    def spoiled(self, transfer_id: str, reason: str) -> None:
        """A worker could not write: the response will say so."""
        if prefill := self._prefills.get(self._by_transfer.get(transfer_id, "")):
            prefill.error = prefill.error or reason

    def sent(self, request_id: str) -> None:
        """Every rank is done with a finished request's blocks."""
        self._draining.discard(request_id)

    @property
    def is_pending(self) -> bool:
        """The engine must keep stepping although no request needs it."""
        return bool(self._closes)

    def gauges(self) -> dict[str, int]:
        return {"draining_requests": len(self._draining)}

    def _accept(self, request: Request, reservation: Reservation) -> None:
        """Raises:
        ProtocolError: the reservation does not fit this engine or this request.
        """
        now = self._clock()
        if reservation.prefiller_generation != self._hello.generation:
            raise _StaleGeneration("the prefiller was restarted since this decoder greeted it")
        if reservation.expires_at is not None and reservation.expires_at <= now:
            raise _Expired(f"the decoder stopped waiting {now - reservation.expires_at:.3f} s ago")
        spans = self._spans(request.num_prompt_tokens, reservation)
        self._check_ranks(reservation)
        if reservation.transfer_id in self._by_transfer:
            raise _AlreadyServed("this transfer is already being served")
        lease_end = now + reservation.lease_s
        if reservation.expires_at is not None:
            lease_end = min(lease_end, reservation.expires_at)
        self._prefills[request.request_id] = _Prefill(request, reservation, spans, lease_end=lease_end)
        self._by_transfer[reservation.transfer_id] = request.request_id
        self._timeline.mark(reservation.transfer_id, "received", tokens=request.num_prompt_tokens)

    def _spans(self, num_tokens: int, reservation: Reservation) -> list[Span]:
        """The wanted tokens of each group, if the reservation has a block for each of their pages."""
        if reservation.local_tokens >= num_tokens:
            raise ProtocolError(f"{reservation.local_tokens} tokens are there already, of a prompt of {num_tokens}")
        if len(reservation.blocks) != len(self._groups):
            raise ProtocolError(f"blocks of {len(reservation.blocks)} cache groups; there are {len(self._groups)} here")
        spans = [
            wanted_span(num_tokens=num_tokens, local_tokens=reservation.local_tokens, window=group.window)
            for group in self._groups
        ]
        for number, (span, blocks) in enumerate(zip(spans, reservation.blocks, strict=True)):
            pages = span.pages(reservation.geometry.block_size)
            if len(blocks) != len(pages):
                raise ProtocolError(
                    f"{len(blocks)} blocks of {reservation.geometry.block_size} tokens are reserved for tokens "
                    f"{span.start}..{span.stop - 1} of group {number}, which lie in {len(pages)} pages"
                )
        blocks = [block for group in reservation.blocks for block in group]
        if len(set(blocks)) != len(blocks):
            raise ProtocolError("a block is reserved twice")
        return spans

    def _check_ranks(self, reservation: Reservation) -> None:
        geometry = reservation.geometry
        if fields := mismatches(self._geometry, geometry):
            values = ", ".join(
                f"{name}: here {getattr(self._geometry, name)}, there {getattr(geometry, name)}" for name in fields
            )
            raise ProtocolError(f"pages cannot be moved between the two servers: {values}")
        if len(reservation.ranks) != geometry.tp_size:
            raise ProtocolError(f"{len(reservation.ranks)} ranks of a tensor_parallel_size of {geometry.tp_size}")
        last = max((block for group in reservation.blocks for block in group), default=0)
        for number, rank in enumerate(reservation.ranks):
            rank.pages.check()
            if last >= rank.pages.num_blocks:
                raise ProtocolError(f"block {last} of a pool with {rank.pages.num_blocks} blocks")
            if rank.pages.page_bytes != geometry.page(number).page_bytes:
                raise ProtocolError(
                    f"pages of {rank.pages.page_bytes} B where the geometry makes {geometry.page(number).page_bytes} B"
                )
            if rank.pages.num_layers != len(self._hello.shape.layers.split()):
                raise ProtocolError(f"{rank.pages.num_layers} layers there, another number here")

    def _refuse(self, request: Request, error: PDConnectorError) -> None:
        """Tell a decoder why its reservation is not served, at the price of one token."""
        self._tally.add("refused_params")
        logger.warning("event=reservation_refused request=%s reason=%s", request.request_id, error)
        hello = self._hello if isinstance(error, _StaleGeneration) else None
        reply = DispatchReply(
            error=str(error)[:4096],
            hello=hello,
            declined=not isinstance(error, _AlreadyServed),
            expired=isinstance(error, _Expired),
        )
        self._answer_early(request, reply)

    def _answer(self, reply: DispatchReply) -> dict[str, Any]:
        """The reply as parameters, with what this clock reads now."""
        return to_params(REPLY, msgspec.structs.replace(reply, clock=self._clock()))

    def _answer_early(self, request: Request, reply: DispatchReply) -> None:
        vllm_compat.shorten_to_one_token(request)
        self._replies[request.request_id] = reply

    def _plan_one(self, prefill: _Prefill, computed_after: int, orders: StepMetadata) -> None:
        assert self._manager is not None
        if not prefill.has_begun:
            prefill.has_begun = True
            lease_s = max(0.0, prefill.lease_end - self._clock())
            orders.begins.append(BeginTransfer(reservation=prefill.reservation, lease_s=lease_s, layers=self._layers))
        num_tokens = prefill.request.num_prompt_tokens
        dst_block, src_block = prefill.reservation.geometry.block_size, self._geometry.block_size
        tables = self._manager.get_block_ids(prefill.request.request_id)
        groups: list[GroupWrite] = []
        for wanted, table, targets in zip(
            prefill.spans, (tables[group.index] for group in self._groups), prefill.reservation.blocks, strict=True
        ):
            span = completed_span(
                wanted,
                sent_stop=prefill.sent_stop,
                computed_tokens=computed_after,
                num_tokens=num_tokens,
                granule=min(src_block, dst_block),
            )
            sources, pages, first = span.pages(src_block), span.pages(dst_block), wanted.pages(dst_block).start
            groups.append(
                GroupWrite(
                    span=span,
                    src_blocks=tuple(table[sources.start : sources.stop]),
                    dst_blocks=tuple(targets[pages.start - first : pages.stop - first]),
                )
            )
        if not any(len(group.span) for group in groups):
            return
        prefill.sent_stop = max(group.span.stop for group in groups if len(group.span))
        orders.writes.append(ChunkWrite(transfer_id=prefill.reservation.transfer_id, groups=tuple(groups)))
        self._timeline.mark(
            prefill.reservation.transfer_id,
            "chunk_scheduled",
            pages=sum(len(group.dst_blocks) for group in groups),
            computed=computed_after,
        )


def _pages_sent(prefill: _Prefill) -> int:
    """Decoder pages of which something was handed to the writers."""
    size = prefill.reservation.geometry.block_size
    return sum(len(Span(span.start, min(span.stop, prefill.sent_stop)).pages(size)) for span in prefill.spans)


class _StaleGeneration(ProtocolError):
    """The decoder greeted an earlier process at this address."""


class _Expired(ProtocolError):
    """The decoder has given the reservation up since it sent it."""


class _AlreadyServed(ProtocolError):
    """The same reservation came twice; the first one is being written for."""


def _computed_before(scheduler_output: SchedulerOutput) -> list[tuple[str, int]]:
    """(request id, tokens computed before this step) of everything scheduled."""
    new = [(r.req_id, r.num_computed_tokens) for r in scheduler_output.scheduled_new_reqs]
    cached = scheduler_output.scheduled_cached_reqs
    return new + list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
