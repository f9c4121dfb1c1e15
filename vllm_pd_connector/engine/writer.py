"""The prefiller's writer: posts each layer's pages as soon as they are in memory, and keeps account until silence.

Grain: at each turn all layers that became ready since the last one go out in one write per transfer, so whatever delays
the writer makes its writes larger. It is woken when `min_write_bytes` are ready: short steps travel in one write and
long ones layer by layer. Where a native thread posts (`arming`), the same layers are put together beforehand.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from logging import getLogger

from vllm_pd_connector.engine.layer_signal import LayerSignal
from vllm_pd_connector.engine.ledger import Ledger
from vllm_pd_connector.engine.links import Links
from vllm_pd_connector.engine.outgoing import Outgoing, WhenQuiet
from vllm_pd_connector.engine.posting import PlannedWrite, Posted, Posting
from vllm_pd_connector.engine.step import BeginTransfer, CloseTransfer
from vllm_pd_connector.engine.worker_rank import WorkerRank
from vllm_pd_connector.errors import ConfigError, OutOfRegion, PeerLost
from vllm_pd_connector.kernels.poller import Trigger
from vllm_pd_connector.lifecycle.outgoing import OutgoingEvent, OutgoingState
from vllm_pd_connector.plan.write import ChunkWrite, layer_bytes
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import Timeline
from vllm_pd_connector.transport.base import ArmingTransport, Transport, WriteStatus
from vllm_pd_connector.wire.codec import encode
from vllm_pd_connector.wire.messages import FailureNote, Quiet, Standing

logger = getLogger(__name__)

OUT_OF_LEASE = "the decoder's lease has run out"


@dataclass(slots=True)
class _Step:
    """Chunk writes of one forward pass and the signal that releases their layers."""

    writes: list[PlannedWrite]
    signal: LayerSignal
    num_layers_left: int


@dataclass(slots=True)
class _Drain:
    transfer_ids: list[str]
    when_drained: Callable[[], None]


class Writer:
    """owned by: the messenger thread; everything is called there, but the model thread empties `sent` and `failures`.

    Args:
        transport: the rank's endpoint.
        rank: the worker.
        verify: send a digest of each page along.
        tally: counters.
        timeline: moments.
        clock: monotonic seconds; those of `time.monotonic` where writes are armed.
        grain_bytes: ready layers of this size, over all transfers of a step, are worth a write of their own.
        arming: the transport again, when a native thread is to post.
    """

    def __init__(
        self,
        transport: Transport,
        rank: WorkerRank,
        *,
        verify: bool,
        tally: Tally,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
        grain_bytes: int = 1,
        arming: ArmingTransport | None = None,
    ) -> None:
        self._transport = transport
        self._may_arm = arming is not None
        self._grain_bytes = grain_bytes
        self._pages = rank.pages
        self._rank = rank
        self._sender = rank.number
        self._tally = tally
        self._timeline = timeline
        self._clock = clock
        self._ledger = Ledger()
        self._links = Links(transport, rank.pages, rank.geometry, rank.tp_rank)
        self._steps: list[_Step] = []
        self._posting = Posting(
            transport, rank, verify=verify, tally=tally, timeline=timeline, clock=clock, arming=arming
        )
        self._drains: list[_Drain] = []
        self.sent: deque[str] = deque()
        self.failures: deque[tuple[str, str]] = deque()

    @property
    def is_busy(self) -> bool:
        return self._posting.must_be_polled or any(step.signal.must_poll for step in self._steps)

    def begin(self, order: BeginTransfer) -> None:
        """Know a transfer; refuse it silently when it has been fenced already."""
        reservation = order.reservation
        transfer_id = reservation.transfer_id
        if self._ledger.is_fenced(transfer_id):
            self._ledger.add(Outgoing(transfer_id, state=OutgoingState.CANCELLED))
            return
        outgoing = Outgoing(transfer_id, dst_layers=self._rank.layers_among(order.layers))
        self._ledger.add(outgoing)
        outgoing.lease_ends = self._clock() + order.lease_s
        self._ledger.leases.arm(transfer_id, outgoing.lease_ends)
        try:
            outgoing.links = self._links.to(reservation)
        except (PeerLost, OutOfRegion, ConfigError, IndexError, ValueError) as error:
            self._give_up(outgoing, f"the decoder cannot be reached from rank {self._sender}: {error}")

    def start_step(self, writes: list[ChunkWrite], signal: LayerSignal) -> None:
        """Take over the pages a forward pass will complete."""
        live: list[PlannedWrite] = []
        for write in writes:
            outgoing = self._ledger.get(write.transfer_id)
            if outgoing is not None and outgoing.may_post:
                outgoing.num_unposted += 1
                live.append(PlannedWrite(write.transfer_id, [group.as_arrays() for group in write.groups]))
        if not live:
            return
        step = _Step(live, signal, self._pages.num_layers)
        ready_bytes = layer_bytes(writes, self._pages.page_bytes)
        portions = _portions(self._pages.num_layers, -(-self._grain_bytes // max(ready_bytes, 1)))
        if self._may_arm and signal.trigger([], 0) is not None:
            for layers in portions:
                self._arm(step, layers)
        else:
            signal.watch(portions)
            self._steps.append(step)

    def close(self, order: CloseTransfer) -> None:
        """The scheduler half is done with a transfer; it is reported once quiet."""
        outgoing = self._ledger.get(order.transfer_id)
        if outgoing is None:
            outgoing = Outgoing(order.transfer_id, state=OutgoingState.CANCELLED)
            self._ledger.add(outgoing)
        outgoing.report_as = order.request_id if order.report else None
        if order.cancel:
            self._cancel(outgoing)
            self._ledger.fence(order.transfer_id)
        else:
            outgoing.event(OutgoingEvent.CLOSE)
        outgoing.waiters.append(lambda _quiet: self._retire(outgoing))

    def fence(self, transfer_id: str, when_quiet: WhenQuiet) -> None:
        """Stop a transfer, or make sure it never starts; `when_quiet` is called once nothing is in flight."""
        self._ledger.fence(transfer_id)
        outgoing = self._ledger.get(transfer_id)
        if outgoing is None:
            when_quiet(Quiet(transfer_id, 0, is_clean=self._ledger.was_clean(transfer_id)))
            return
        self._cancel(outgoing)
        outgoing.waiters.append(when_quiet)

    def standing(self, transfer_id: str) -> Standing:
        """What a decoder is told that waits for pages although the prompt is finished."""
        outgoing = self._ledger.get(transfer_id)
        is_over = outgoing is None or outgoing.state is OutgoingState.QUIET
        return Standing(transfer_id=transfer_id, is_over=is_over, error=self._ledger.failure(transfer_id)[:4096])

    def drain(self, transfer_ids: list[str], when_drained: Callable[[], None]) -> None:
        """Call back once nothing of these transfers is left to post or in flight (preemption)."""
        self._drains.append(_Drain(transfer_ids, when_drained))

    def abandon(self, transfer_ids: list[str], reason: str) -> None:
        """Fail transfers whose source pages are about to be overwritten."""
        for transfer_id in transfer_ids:
            outgoing = self._ledger.get(transfer_id)
            if outgoing is not None and not outgoing.is_drained:
                self._give_up(outgoing, reason)

    def advance(self) -> None:
        # Leases first: a transfer out of time posts nothing more.
        for transfer_id in self._ledger.leases.expired(self._clock()):
            outgoing = self._ledger.get(transfer_id)
            if outgoing is not None and outgoing.may_post:
                self._give_up(outgoing, OUT_OF_LEASE)
        for step in self._steps:
            self._post_ready(step)
        self._steps = [step for step in self._steps if step.num_layers_left]
        for posted, status in self._posting.poll():
            self._account(posted, status)
        for peer in self._links.take_distrusted(self._posting.peers):
            self._transport.disconnect(peer)
        self._settle()

    def _post_ready(self, step: _Step) -> None:
        ready = step.signal.take()
        if not ready:
            return
        layers = [layer for layer, _ in ready]
        for write, outgoing in self._live(step):
            for layer, at_ns in ready:
                self._timeline.mark(outgoing.transfer_id, "layer_computed", layer=layer, at_ns=at_ns, rank=self._sender)
            self._post_all(outgoing, write, layers)
        self._count_off(step, layers)

    def _arm(self, step: _Step, layers: Sequence[int]) -> None:
        """Have these layers posted when the last of them is in memory."""
        for write, outgoing in self._live(step):
            self._post_all(outgoing, write, layers, step.signal.trigger(layers, round(outgoing.lease_ends * 1e9)))
        self._count_off(step, layers)

    def _live(self, step: _Step) -> Iterator[tuple[PlannedWrite, Outgoing]]:
        for write in step.writes:
            outgoing = self._ledger.get(write.transfer_id)
            if outgoing is not None and outgoing.may_post:
                yield write, outgoing

    def _count_off(self, step: _Step, layers: Sequence[int]) -> None:
        step.num_layers_left -= len(layers)
        if not step.num_layers_left:
            for _, outgoing in self._live(step):
                outgoing.num_unposted -= 1

    def _post_all(
        self, outgoing: Outgoing, write: PlannedWrite, layers: Sequence[int], trigger: Trigger | None = None
    ) -> None:
        try:
            for link in outgoing.links:
                self._posting.post(outgoing, link, write, layers, trigger)
        except (PeerLost, OutOfRegion) as error:
            for link in outgoing.links:
                self._links.distrust(link.peer)
            outgoing.is_clean &= isinstance(error, OutOfRegion)  # some of its pages may be on the wire
            self._give_up(outgoing, str(error))

    def _account(self, posted: Posted, status: WriteStatus) -> None:
        outgoing = posted.outgoing
        outgoing.num_in_flight -= 1
        if status is WriteStatus.WITHDRAWN:
            if outgoing.may_post:
                self._give_up(outgoing, OUT_OF_LEASE)
            return
        if status is not WriteStatus.DONE:
            self._tally.add("write_failures")
            outgoing.is_clean = False
            self._links.distrust(posted.link.peer)
            if outgoing.may_post:
                self._give_up(outgoing, f"a write of layers {list(posted.layers)} failed")
            return
        outgoing.units += posted.bound.units
        self._tally.add("pages_written", posted.bound.num_pages)
        self._tally.add("descriptors_written", len(posted.bound.src_pieces))
        self._tally.add("bytes_written", posted.num_bytes)
        self._timeline.mark(
            outgoing.transfer_id,
            "write_done",
            layers=list(posted.layers),
            bytes=posted.num_bytes,
            rank=self._sender,
        )

    def _settle(self) -> None:
        """Announce every transfer that has fallen quiet, and every drain that is over."""
        for outgoing in self._ledger.unsettled():
            if outgoing.is_drained:
                outgoing.event(OutgoingEvent.DRAINED)
            if outgoing.state is OutgoingState.QUIET:
                waiters, outgoing.waiters = outgoing.waiters, []
                for waiter in waiters:
                    waiter(outgoing.silence)
        if self._drains:
            over = [d for d in self._drains if all(self._ledger.is_drained(t) for t in d.transfer_ids)]
            self._drains = [d for d in self._drains if d not in over]
            for drain in over:
                drain.when_drained()

    def _retire(self, outgoing: Outgoing) -> None:
        if outgoing.report_as is not None:
            self.sent.append(outgoing.report_as)
        self._timeline.mark(outgoing.transfer_id, "quiet", units=outgoing.units, rank=self._sender)
        self._ledger.drop(outgoing.transfer_id)

    def _cancel(self, outgoing: Outgoing) -> None:
        if outgoing.may_post:
            self._tally.add("transfers_cancelled")
        outgoing.event(OutgoingEvent.CANCEL)
        self._posting.withdraw(outgoing)

    def _give_up(self, outgoing: Outgoing, reason: str) -> None:
        """Cancel for a reason the decoder should know at once."""
        logger.warning(
            "event=transfer_failed transfer=%s rank=%d reason=%s", outgoing.transfer_id, self._sender, reason
        )
        self.failures.append((outgoing.transfer_id, reason))
        self._ledger.note_failure(outgoing.transfer_id, reason)
        self._cancel(outgoing)
        note = encode(FailureNote(transfer_id=outgoing.transfer_id, sender=self._sender, reason=reason[:4096]))
        for link in outgoing.links:
            try:
                self._transport.notify(link.peer, note)
            except PeerLost as error:
                logger.info("event=failure_note_lost transfer=%s reason=%s", outgoing.transfer_id, error)


def _portions(num_layers: int, size: int) -> list[range]:
    """Layers in order, `size` in each portion but the last."""
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]
