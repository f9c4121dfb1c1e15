"""The decoder's half of the scheduler: reserves pages, holds the request, dispatches its prompt, gives it back.

owned by: EngineCore's main thread; nothing here blocks. What happens elsewhere arrives as events and is taken in once a
step, so the tables in `lifecycle/` see one event at a time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.control.dispatcher import Dispatch, FenceResult
from vllm_pd_connector.control.fence_client import MARGIN_S
from vllm_pd_connector.engine import vllm_compat
from vllm_pd_connector.engine.step import ExpectTransfer, HandBack, StepMetadata
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.lifecycle.deadline import Deadlines
from vllm_pd_connector.lifecycle.decode_request import (
    DECODE_TABLE,
    RECLAIM_S,
    DecodeCommand,
    DecodeEvent,
    DecodeState,
)
from vllm_pd_connector.lifecycle.fence import FENCE_TABLE, FenceCommand, FenceEvent, FenceState, quarantine_end
from vllm_pd_connector.lifecycle.prefiller import PrefillerState, choose
from vllm_pd_connector.lifecycle.table import step
from vllm_pd_connector.plan.extent import remote_extent
from vllm_pd_connector.wire.messages import DecoderRank, Reservation
from vllm_pd_connector.wire.transfer_params import parse_params
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from vllm_pd_connector.config import PDConfig
    from vllm_pd_connector.control.dispatcher import Dispatcher
    from vllm_pd_connector.telemetry.counters import Tally
    from vllm_pd_connector.telemetry.timeline import Timeline

logger = getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderIdentity:
    """What a reservation says of this decoder."""

    engine_id: str
    generation: str
    model: str
    tp_size: int
    block_size: int
    ranks: list[DecoderRank]


@dataclass(slots=True)
class _Held:
    """A request whose pages are reserved."""

    request_id: str
    transfer_id: str
    blocks: list[int]
    state: DecodeState = DecodeState.DISPATCHED
    reason: str = ""


@dataclass(slots=True)
class _Fenced:
    """Pages without a request whose writers are not known to be quiet."""

    transfer_id: str
    blocks: list[int]
    closed_at: float
    state: FenceState = FenceState.ASKING
    is_dead: bool = False


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
        self._held: dict[str, _Held] = {}
        self._fenced: dict[str, _Fenced] = {}
        self._deadlines: Deadlines[str] = Deadlines()
        self._spent: set[str] = set()
        self._turn = 0
        self._orders = StepMetadata()

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

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

    def match(self, request: Request, num_local_tokens: int) -> int:
        """Tokens a prefiller will compute for this request; 0 to prefill it here. No side effects."""
        remote = request.num_prompt_tokens - 1 - num_local_tokens
        if (
            remote < self._config.min_remote_tokens
            or request.request_id in self._spent
            or request.num_preemptions
            or request.num_output_tokens
            or not vllm_compat.needs_only_tokens(request)
        ):
            return 0
        return remote if any(c.state is PrefillerState.USABLE for c in self._dispatcher.pool()) else 0

    def reserve(self, request: Request, block_ids: list[int], num_remote_tokens: int) -> None:
        """vLLM has allocated the pages and holds the request: dispatch it.

        Args:
            request: held from now on.
            block_ids: all its blocks, prefix hits first.
            num_remote_tokens: what `match` returned.
        """
        num_tokens = request.num_prompt_tokens - 1
        extent = remote_extent(
            num_tokens=num_tokens,
            local_tokens=num_tokens - num_remote_tokens,
            block_size=self._identity.block_size,
        )
        held = _Held(
            request_id=request.request_id,
            transfer_id=secrets.token_hex(16),
            blocks=block_ids[extent.first_page : extent.stop],
        )
        self._held[held.transfer_id] = held
        self._spent.add(held.request_id)
        self._deadlines.arm(held.transfer_id, self._clock() + self._config.request_deadline_s)
        self._orders.expects.append(
            ExpectTransfer(
                transfer_id=held.transfer_id,
                request_id=held.request_id,
                num_pages=extent.num_pages,
                src_tp=self._identity.tp_size,
            )
        )
        vllm_compat.count_as_computed(request, num_remote_tokens)
        self._tally.add("dispatched")
        self._timeline.mark(
            held.transfer_id, "reserved", request=held.request_id, pages=extent.num_pages, tokens=num_remote_tokens
        )
        self._dispatcher.dispatch(self._order(request, held, extent.first_page))

    def prefill_here(self, request: Request) -> None:
        """vLLM is about to run a request that was never held, although a prefiller is configured."""
        if self._config.prefillers and request.request_id not in self._spent and not request.num_output_tokens:
            self._spent.add(request.request_id)
            self._tally.add("prefilled_locally")

    def finished(self, request: Request) -> None:
        """vLLM has finished a request, whatever the reason."""
        self._spent.discard(request.request_id)
        for held in [h for h in self._held.values() if h.request_id == request.request_id]:
            if held.state is not DecodeState.RECLAIMING:
                self._tally.add("aborted")
            self._event(held, DecodeEvent.ABORTED, "the client left")

    def reported(self, request_id: str, *, failed: bool) -> None:
        """Every rank has reported a held request, and vLLM is taking it back in this step."""
        for held in [h for h in self._held.values() if h.request_id == request_id]:
            handed_back = failed or held.state is DecodeState.RECLAIMING
            self._event(held, DecodeEvent.HANDED_BACK if handed_back else DecodeEvent.ARRIVED)

    def spoiled(self, transfer_id: str, reason: str) -> None:
        """A worker has seen the transfer fail."""
        held = self._held.get(transfer_id)
        if held is not None:
            self._event(held, DecodeEvent.FAILED, reason)

    def orders(self) -> StepMetadata:
        """Take in what happened since the last step, and give this step's orders for the workers."""
        for event in self._dispatcher.take_events():
            if isinstance(event, FenceResult):
                self._fence_answered(event)
            elif held := self._held.get(event.transfer_id):
                self._event(held, event.event, event.reason)
        now = self._clock()
        for transfer_id in self._deadlines.expired(now):
            self._expire(transfer_id)
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
            "held_pages": sum(len(h.blocks) for h in self._held.values()),
            "fenced_pages": sum(len(f.blocks) for f in self._fenced.values()),
            "prefillers_usable": sum(c.state is PrefillerState.USABLE for c in self._dispatcher.pool()),
        }

    def _order(self, request: Request, held: _Held, first_page: int) -> Dispatch:
        wanted = parse_params(request.kv_transfer_params).prefiller
        adapter = request.lora_request
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
            first_page=first_page,
            blocks=held.blocks,
            lease_s=self._config.request_deadline_s,
            ranks=self._identity.ranks,
        )
        self._turn += 1
        urls = choose(self._dispatcher.pool(), wanted, turn=self._turn)
        return Dispatch(body=body, reservation=reservation, urls=urls)

    def _event(self, held: _Held, event: DecodeEvent, reason: str = "") -> None:
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

    def _carry_out(self, held: _Held, command: DecodeCommand) -> None:
        now = self._clock()
        match command:
            case DecodeCommand.ARM_SETTLE:
                self._deadlines.arm(held.transfer_id, now + self._config.settle_s)
            case DecodeCommand.ARM_RECLAIM:
                self._deadlines.arm(held.transfer_id, now + RECLAIM_S)
            case DecodeCommand.CLOSE_DISPATCH:
                self._dispatcher.cancel(held.transfer_id)
            case DecodeCommand.FENCE:
                self._fence(held)
            case DecodeCommand.REPORT_FAILED | DecodeCommand.REPORT_LEFT:
                failed = command is DecodeCommand.REPORT_FAILED
                if failed:
                    self._tally.add("failed")
                    logger.warning(
                        "event=remote_prefill_failed request=%s transfer=%s then=%s reason=%s",
                        held.request_id,
                        held.transfer_id,
                        self._config.on_failure,
                        held.reason,
                    )
                self._orders.hand_backs.append(
                    HandBack(transfer_id=held.transfer_id, request_id=held.request_id, failed=failed)
                )
            case DecodeCommand.COMPLAIN:
                logger.error("event=invariant_broken law=7 request=%s not handed back by a worker", held.request_id)

    def _fence(self, held: _Held) -> None:
        """Take the pages over from the request, so that it can go on while their writers are asked to stop."""
        assert self._manager is not None
        vllm_compat.pin_blocks(self._manager, held.blocks)
        self._fenced[held.transfer_id] = _Fenced(held.transfer_id, held.blocks, self._clock())
        self._dispatcher.fence(held.transfer_id)
        # The dispatcher answers in time; this one catches a dispatcher that died.
        self._deadlines.arm(_fence_key(held.transfer_id), self._clock() + self._config.fence_s + MARGIN_S)

    def _fence_answered(self, result: FenceResult) -> None:
        fenced = self._fenced.get(result.transfer_id)
        if fenced is None:
            return
        fenced.is_dead = result.is_dead
        if not result.is_quiet:
            logger.warning("event=fence_unanswered transfer=%s reason=%s", result.transfer_id, result.reason)
        self._fence_event(fenced, FenceEvent.QUIET if result.is_quiet else FenceEvent.UNREACHABLE)

    def _fence_event(self, fenced: _Fenced, event: FenceEvent) -> None:
        fenced.state, commands = step(FENCE_TABLE, fenced.state, event)
        key = _fence_key(fenced.transfer_id)
        for command in commands:
            match command:
                case FenceCommand.ARM_QUARANTINE:
                    end = quarantine_end(
                        now=self._clock(),
                        closed_at=fenced.closed_at,
                        lease_s=self._config.request_deadline_s,
                        quarantine_s=self._config.quarantine_s,
                        is_dead=fenced.is_dead,
                    )
                    self._deadlines.arm(key, end)
                case FenceCommand.UNPIN:
                    assert self._manager is not None
                    vllm_compat.unpin_blocks(self._manager, fenced.blocks)
                    self._deadlines.disarm(key)
                    del self._fenced[fenced.transfer_id]
                    self._tally.add("fences_lifted" if event is FenceEvent.QUIET else "fences_expired")
                    self._timeline.mark(fenced.transfer_id, "fence_lifted", cause=event.name.lower())
                    if fenced.transfer_id not in self._held:
                        self._orders.forgets.append(fenced.transfer_id)

    def _expire(self, key: str) -> None:
        held = self._held.get(key)
        if held is not None:
            limit = "settle_s" if held.state is DecodeState.SETTLING else "request_deadline_s"
            self._event(held, DecodeEvent.DEADLINE, f"{limit} has passed")
            return
        fenced = self._fenced.get(key.removeprefix(_FENCE))
        if fenced is not None:
            self._fence_event(fenced, FenceEvent.DEADLINE)


_FENCE = "fence:"


def _fence_key(transfer_id: str) -> str:
    return _FENCE + transfer_id
