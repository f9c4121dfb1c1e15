"""The decoder's half of the scheduler: reserves pages, holds the request, dispatches its prompt, gives it back.

owned by: EngineCore's main thread; nothing here blocks. What happens elsewhere arrives as events and is taken in once a
step, so the tables in `lifecycle/` see one event at a time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from logging import getLogger
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.control.dispatcher import Dispatch, FenceResult
from vllm_pd_connector.engine import vllm_compat
from vllm_pd_connector.engine.fenced_pages import FencedPages
from vllm_pd_connector.engine.held_request import Held
from vllm_pd_connector.engine.kept_prefix import KeptPrefix
from vllm_pd_connector.engine.step import ExpectTransfer, HandBack, StepMetadata
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.lifecycle.admission import Admission, Course, Offers, admit
from vllm_pd_connector.lifecycle.deadline import Deadlines
from vllm_pd_connector.lifecycle.decode_request import (
    DECODE_TABLE,
    RECLAIM_S,
    DecodeCommand,
    DecodeEvent,
    DecodeState,
)
from vllm_pd_connector.lifecycle.prefiller import PrefillerState, all_full, choose
from vllm_pd_connector.lifecycle.table import step
from vllm_pd_connector.plan.extent import Span, wanted_span
from vllm_pd_connector.wire.messages import Reservation
from vllm_pd_connector.wire.transfer_params import parse_params
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from vllm_pd_connector.config import PDConfig
    from vllm_pd_connector.control.dispatcher import Dispatcher
    from vllm_pd_connector.engine.decoder_identity import DecoderIdentity
    from vllm_pd_connector.telemetry.counters import Tally
    from vllm_pd_connector.telemetry.timeline import Timeline

logger = getLogger(__name__)


class DecodeSide:
    """Args:
    config: validated.
    identity: this decoder, for reservations.
    dispatcher: started.
    tally: counters.
    timeline: moments.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        config: PDConfig,
        identity: DecoderIdentity,
        dispatcher: Dispatcher,
        tally: Tally,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._identity = identity
        self._dispatcher = dispatcher
        self._tally = tally
        self._timeline = timeline
        self._clock = clock
        self._manager: KVCacheManager | None = None
        self._held: dict[str, Held] = {}
        self._fenced = FencedPages(config, dispatcher, tally, timeline, clock, self._lifted)
        self._kept = KeptPrefix(identity, self._fenced, tally, timeline)
        self._deadlines: Deadlines[str] = Deadlines()
        self._courses: dict[str, Course] = {}
        self._offers = Offers()
        self._turn = 0
        self._orders = StepMetadata()

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._fenced.bind(manager)
        self._kept.bind(manager)

    def new_request(self, request: Request) -> None:
        """Refuse a request whose parameters are wrong, before it costs anything."""
        try:
            wanted = parse_params(request.kv_transfer_params).prefiller
            if wanted is not None and self._config.prefillers and wanted not in self._config.prefillers:
                raise ProtocolError(
                    f"kv_transfer_params.prefiller = {wanted!r} is not in this decoder's pool: "
                    f"{', '.join(self._config.prefillers)}"
                )
        except ProtocolError as error:
            self._tally.add("refused_params")
            vllm_compat.fail_request(request, str(error))

    def match(self, request: Request, num_local_tokens: int) -> int | None:
        """Tokens a prefiller will compute for this request; 0 to prefill it here, None to ask again in the next step.

        May be asked any number of times: all it remembers is since when the request has been waiting for room.
        """
        remote = request.num_prompt_tokens - 1 - num_local_tokens
        course = self._courses.get(request.request_id) or Course()
        if (
            remote < self._config.min_remote_tokens
            or request.num_preemptions
            or request.num_output_tokens
            or not vllm_compat.needs_only_tokens(request)
        ):
            return 0
        if not self._candidates(course):
            return self._match_none(request, course)
        verdict = self._admit(request, course, remote, num_local_tokens)
        if verdict is Admission.REMOTE:
            self._offers.made(request.request_id)
        if verdict is Admission.LATER and course.waiting_since is None:
            course.waiting_since = self._clock()
            self._courses[request.request_id] = course
            self._tally.add("waited")
        return {Admission.REMOTE: remote, Admission.LOCAL: 0, Admission.LATER: None}[verdict]

    def reserve(self, request: Request, block_ids: list[list[int]], num_remote_tokens: int) -> None:
        """vLLM has allocated the pages and holds the request: dispatch it.

        Args:
            request: held from now on.
            block_ids: all its blocks, prefix hits first, of each cache group.
            num_remote_tokens: what `match` returned.
        """
        self._offers.taken(request.request_id)
        num_tokens = request.num_prompt_tokens - 1
        local_tokens = num_tokens - num_remote_tokens
        spans = self._spans(num_tokens, local_tokens)
        now = self._clock()
        course = self._courses.setdefault(request.request_id, Course())
        if course.ends_at is None:
            course.ends_at = now + self._config.request_deadline_s
        urls = self._candidates(course, parse_params(request.kv_transfer_params).prefiller)
        wanted = self._wanted_blocks(spans, block_ids)
        held = Held(
            request=request,
            transfer_id=secrets.token_hex(16),
            local_tokens=local_tokens,
            blocks=[block for blocks in wanted for block in blocks],
            url=urls[0] if urls else "",
            ends_at=course.ends_at,
            lease_s=course.ends_at - now,
        )
        self._turn += 1
        self._held[held.transfer_id] = held
        self._deadlines.arm(held.transfer_id, course.ends_at)
        self._orders.expects.append(
            ExpectTransfer(
                transfer_id=held.transfer_id,
                request_id=held.request_id,
                spans=spans,
            )
        )
        vllm_compat.count_as_computed(request, num_remote_tokens)
        self._kept.count_as_computed(request)
        self._tally.add("retried" if course.tried else "dispatched")
        self._timeline.mark(
            held.transfer_id, "reserved", request=held.request_id, pages=len(held.blocks), tokens=num_remote_tokens
        )
        self._dispatcher.dispatch(self._order(held, wanted, urls))

    def prefill_here(self, request: Request) -> None:
        """vLLM is about to run a request that was never held, although a prefiller is configured, or not any more."""
        self._kept.count_as_computed(request)
        self._kept.forget(request.request_id)
        course = self._courses.setdefault(request.request_id, Course())
        if course.ends_at is None and not course.is_over and not request.num_output_tokens:
            self._tally.add("prefilled_locally")
        course.is_over = True

    def finished(self, request: Request) -> None:
        """vLLM has finished a request, whatever the reason."""
        self._courses.pop(request.request_id, None)
        self._kept.forget(request.request_id)
        for held in [h for h in self._held.values() if h.request_id == request.request_id]:
            if held.state is not DecodeState.RECLAIMING:
                self._tally.add("aborted")
            self._event(held, DecodeEvent.ABORTED, "the client left")

    def reported(self, request_id: str, *, failed: bool) -> None:
        """Every rank has reported a held request, and vLLM is taking it back in this step."""
        for held in [h for h in self._held.values() if h.request_id == request_id]:
            handed_back = failed or held.state is DecodeState.RECLAIMING
            if failed:
                self._kept.keep(
                    held.request,
                    held.transfer_id,
                    blocks=held.blocks,
                    local_tokens=held.local_tokens,
                    stops=held.stops,
                )
            else:
                self._kept.forget(request_id)
            self._event(held, DecodeEvent.HANDED_BACK if handed_back else DecodeEvent.ARRIVED)

    def partly_arrived(self, stops: dict[str, list[int]]) -> None:
        """Ranks hand requests back as failed: token after the last that has arrived without a gap, by transfer."""
        for transfer_id, of_ranks in stops.items():
            if transfer_id in self._held:
                self._held[transfer_id].stops += of_ranks

    def spoiled(self, transfer_id: str, reason: str) -> None:
        """A worker has seen the transfer fail."""
        held = self._held.get(transfer_id)
        if held is not None:
            self._event(held, DecodeEvent.FAILED, reason)

    def orders(self) -> StepMetadata:
        """Take in what happened since the last step, and give this step's orders for the workers."""
        self._offers.end_step()
        for event in self._dispatcher.take_events():
            if isinstance(event, FenceResult):
                self._fenced.answered(event)
            elif held := self._held.get(event.transfer_id):
                held.url = event.url or held.url
                if event.event is DecodeEvent.NEVER_SENT and (course := self._courses.get(held.request_id)):
                    course.is_over = True  # every usable prefiller was asked
                self._event(held, event.event, event.reason)
        self._fenced.expire()
        for transfer_id in self._deadlines.expired(self._clock()):
            held = self._held[transfer_id]
            limit = "settle_s" if held.state is DecodeState.SETTLING else "request_deadline_s"
            self._event(held, DecodeEvent.DEADLINE, f"{limit} has passed")
        orders, self._orders = self._orders, StepMetadata()
        return orders

    @property
    def is_pending(self) -> bool:
        """The engine must keep stepping although no request needs it."""
        orders = self._orders
        return bool(self._fenced or orders.forgets or orders.hand_backs)

    def gauges(self) -> dict[str, int]:
        return {
            "held_requests": len(self._held),
            "held_pages": self._num_held_pages,
            "fenced_pages": self._fenced.num_pages,
            "prefillers_usable": sum(c.state is PrefillerState.USABLE for c in self._dispatcher.pool()),
        }

    def _candidates(self, course: Course, wanted: str | None = None) -> list[str]:
        """URLs of prefillers that may work for a request now, the best first."""
        if not course.may_retry(self._clock(), self._config.max_attempts):
            return []
        return [url for url in choose(self._dispatcher.pool(), wanted, self._turn) if url not in course.tried]

    def _admit(self, request: Request, course: Course, num_remote: int, num_local: int) -> Admission:
        assert self._manager is not None
        block_size = self._identity.geometry.block_size
        num_blocks, num_free = vllm_compat.count_blocks(self._manager)
        since = course.waiting_since
        return admit(
            num_pages=sum(len(span.pages(block_size)) for span in self._spans(num_remote + num_local, num_local)),
            num_free=num_free,
            num_pinned=self._num_held_pages + self._fenced.num_pages,
            max_pinned=int(self._config.max_held_share * num_blocks),
            must_wait=self._offers.is_pausing or all_full(self._dispatcher.pool(), course.tried),
            is_short=num_remote <= self._config.short_prompt_tokens,
            has_waited=since is not None and self._clock() - since >= self._config.busy_wait_s,
        )

    def _spans(self, num_tokens: int, local_tokens: int) -> tuple[Span, ...]:
        """The tokens a prefiller is to send, of each cache group."""
        return tuple(
            wanted_span(num_tokens=num_tokens, local_tokens=local_tokens, window=window)
            for window in self._identity.windows
        )

    def _wanted_blocks(self, spans: Sequence[Span], block_ids: list[list[int]]) -> list[list[int]]:
        """The blocks that hold them."""
        pages = [span.pages(self._identity.geometry.block_size) for span in spans]
        return [blocks[wanted.start : wanted.stop] for wanted, blocks in zip(pages, block_ids, strict=True)]

    def _match_none(self, request: Request, course: Course) -> int | None:
        """No prefiller is left for it: prefill it here, or fail it if that is the policy and there is a reason.

        A reason is that it has failed remotely, or that the prefillers do not fit this decoder, not one of them.
        """
        if self._config.on_failure == "error":
            pool = self._dispatcher.pool()
            misfits = [c.complaint for c in pool if c.state is PrefillerState.REFUSED]
            reason = course.reason or ("; ".join(misfits) if len(misfits) == len(pool) else "")
            if reason:
                vllm_compat.fail_request(request, f"remote prefill failed: {reason}")
                return None
        return 0

    @property
    def _num_held_pages(self) -> int:
        return sum(len(held.blocks) for held in self._held.values())

    def _order(self, held: Held, blocks: list[list[int]], urls: list[str]) -> Dispatch:
        request, adapter = held.request, held.request.lora_request
        body: dict[str, Any] = {
            "model": adapter.lora_name if adapter is not None else self._identity.model,
            "prompt": list(request.prompt_token_ids or ())[:-1],
            "max_tokens": 1,
            "temperature": 0.0,
            "add_special_tokens": False,
            "request_id": f"pd-{held.transfer_id}",
        }
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if request.priority:
            body["priority"] = request.priority
        reservation = Reservation(
            protocol=PROTOCOL_VERSION,
            transfer_id=held.transfer_id,
            decoder=self._identity.engine_id,
            decoder_generation=self._identity.generation,
            prefiller_generation="",
            local_tokens=held.local_tokens,
            blocks=blocks,
            lease_s=held.lease_s,
            geometry=self._identity.geometry,
            ranks=self._identity.ranks,
        )
        return Dispatch(body=body, reservation=reservation, urls=urls, ends_at=held.ends_at)

    def _event(self, held: Held, event: DecodeEvent, reason: str = "") -> None:
        held.state, commands = step(DECODE_TABLE, held.state, event)
        held.reason = reason or held.reason
        for command in commands:
            self._carry_out(held, command)
        if held.state is DecodeState.RELEASED:
            del self._held[held.transfer_id]
            self._deadlines.disarm(held.transfer_id)
            self._timeline.mark(held.transfer_id, "released", outcome=event.name.lower())
            if event is DecodeEvent.ARRIVED:
                self._tally.add("released")
            if held.transfer_id not in self._fenced:
                self._orders.forgets.append(held.transfer_id)
                self._dispatcher.finish(held.transfer_id)

    def _carry_out(self, held: Held, command: DecodeCommand) -> None:
        now = self._clock()
        match command:
            case DecodeCommand.ARM_SETTLE:
                self._deadlines.arm(held.transfer_id, now + self._config.settle_s)
            case DecodeCommand.ARM_RECLAIM:
                self._deadlines.arm(held.transfer_id, now + RECLAIM_S)
            case DecodeCommand.CLOSE_DISPATCH:
                self._dispatcher.cancel(held.transfer_id)
            case DecodeCommand.FENCE:
                self._fenced.take_over(held.transfer_id, held.blocks, held.lease_s)
            case DecodeCommand.REPORT_FAILED:
                self._note_failure(held)
                self._hand_back(held, failed=True)
            case DecodeCommand.REPORT_LEFT:
                self._hand_back(held, failed=False)
            case DecodeCommand.COMPLAIN:
                logger.error("event=invariant_broken law=7 request=%s not handed back by a worker", held.request_id)

    def _hand_back(self, held: Held, *, failed: bool) -> None:
        order = HandBack(transfer_id=held.transfer_id, request_id=held.request_id, failed=failed)
        self._orders.hand_backs.append(order)

    def _note_failure(self, held: Held) -> None:
        course = self._courses[held.request_id]
        course.tried.append(held.url)
        course.reason = held.reason
        self._tally.add("failed")
        logger.warning(
            "event=remote_prefill_failed request=%s transfer=%s prefiller=%s then=%s reason=%s",
            held.request_id,
            held.transfer_id,
            held.url,
            "retry" if self._candidates(course) else self._config.on_failure,
            held.reason,
        )

    def _lifted(self, transfer_id: str) -> None:
        """A fence is over: the workers may forget the transfer, unless they have yet to hand its request back."""
        if transfer_id not in self._held:
            self._orders.forgets.append(transfer_id)
