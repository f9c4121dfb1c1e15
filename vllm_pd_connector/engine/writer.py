"""The prefiller's writer: posts each layer's pages as soon as they are in memory, and keeps account until silence.

Grain: at each turn all layers that became ready since the last one go out in one write per transfer. The layer hook
wakes the writer when `min_write_bytes` are ready, so short steps travel in one write and long ones layer by layer.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from vllm_pd_connector.engine.layer_signal import LayerSignal
from vllm_pd_connector.engine.ledger import Ledger
from vllm_pd_connector.engine.outgoing import Outgoing, WhenQuiet
from vllm_pd_connector.engine.step import BeginTransfer, CloseTransfer
from vllm_pd_connector.errors import OutOfRegion, PeerLost
from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.lifecycle.outgoing import OutgoingEvent, OutgoingState
from vllm_pd_connector.plan.write import BoundWrite, ChunkWrite, bind
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import Timeline
from vllm_pd_connector.transport.base import Transport, WriteStatus
from vllm_pd_connector.wire.codec import encode
from vllm_pd_connector.wire.messages import FailureNote, Quiet, Standing, WriteNote

logger = getLogger(__name__)

DIGEST_BYTES = 8


def page_digest(page: bytes) -> bytes:
    """The digest that `verify_pages` compares."""
    return hashlib.blake2b(page, digest_size=DIGEST_BYTES).digest()


@dataclass(slots=True)
class _Step:
    """Chunk writes of one forward pass and the signal that releases their layers."""

    writes: list[ChunkWrite]
    signal: LayerSignal
    num_layers_left: int


@dataclass(slots=True)
class _Posted:
    outgoing: Outgoing
    handle: Any
    num_units: int
    layers: Sequence[int]


@dataclass(slots=True)
class _Drain:
    transfer_ids: list[str]
    when_drained: Callable[[], None]


class Writer:
    """owned by: the messenger thread; everything is called there, but the model thread empties `sent` and `failures`.

    Args:
        transport: the rank's endpoint.
        pages: the rank's own pages.
        rank: the rank, which is also the decoder rank it writes to (equal shapes).
        verify: send a digest of each page along.
        tally: counters.
        timeline: moments.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        transport: Transport,
        pages: PageTable,
        *,
        rank: int,
        verify: bool,
        tally: Tally,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._pages = pages
        self._rank = rank
        self._verify = verify
        self._tally = tally
        self._timeline = timeline
        self._clock = clock
        self._ledger = Ledger()
        self._steps: list[_Step] = []
        self._posted: list[_Posted] = []
        self._drains: list[_Drain] = []
        self.sent: deque[str] = deque()
        self.failures: deque[tuple[str, str]] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._posted) or any(step.signal.must_poll for step in self._steps)

    def begin(self, order: BeginTransfer) -> None:
        """Know a transfer; refuse it silently when it has been fenced already."""
        reservation = order.reservation
        transfer_id = reservation.transfer_id
        if self._ledger.is_fenced(transfer_id):
            self._ledger.add(Outgoing(transfer_id, None, state=OutgoingState.CANCELLED))
            return
        outgoing = Outgoing(transfer_id, None)
        self._ledger.add(outgoing)
        self._ledger.leases.arm(transfer_id, self._clock() + order.lease_s)
        try:
            target = reservation.ranks[self._rank]
            outgoing.peer = self._ledger.peer(target, self._transport)
        except (PeerLost, OutOfRegion, IndexError, ValueError) as error:
            self._give_up(outgoing, f"decoder rank {self._rank} cannot be reached: {error}")

    def start_step(self, writes: list[ChunkWrite], signal: LayerSignal) -> None:
        """Take over the pages a forward pass will complete."""
        live: list[ChunkWrite] = []
        for write in writes:
            outgoing = self._ledger.get(write.transfer_id)
            if outgoing is not None and outgoing.may_post:
                outgoing.num_unposted += 1
                live.append(write)
        if live:
            self._steps.append(_Step(live, signal, self._pages.num_layers))

    def close(self, order: CloseTransfer) -> None:
        """The scheduler half is done with a transfer; it is reported once quiet."""
        outgoing = self._ledger.get(order.transfer_id)
        if outgoing is None:
            outgoing = Outgoing(order.transfer_id, None, state=OutgoingState.CANCELLED)
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
            when_quiet(Quiet(transfer_id, 0))
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
                self._give_up(outgoing, "the decoder's lease has run out")
        for step in self._steps:
            self._post_ready(step)
        self._steps = [step for step in self._steps if step.num_layers_left]
        if self._posted:
            self._poll_posted()
        for peer in self._ledger.take_distrusted({id(posted.outgoing.peer) for posted in self._posted}):
            self._transport.disconnect(peer)
        self._settle()

    def _post_ready(self, step: _Step) -> None:
        ready = step.signal.take()
        if not ready:
            return
        layers = [layer for layer, _ in ready]
        step.num_layers_left -= len(layers)
        for write in step.writes:
            outgoing = self._ledger.get(write.transfer_id)
            if outgoing is None or not outgoing.may_post:
                continue
            for layer, at_ns in ready:
                self._timeline.mark(write.transfer_id, "layer_computed", layer=layer, at_ns=at_ns, rank=self._rank)
            try:
                self._post(outgoing, write, layers)
            except (PeerLost, OutOfRegion) as error:
                self._ledger.distrust(outgoing.peer)
                outgoing.is_clean &= isinstance(error, OutOfRegion)  # some of its pages may be on the wire
                self._give_up(outgoing, str(error))
                continue
            if not step.num_layers_left:
                outgoing.num_unposted -= 1

    def _post(self, outgoing: Outgoing, write: ChunkWrite, layers: list[int]) -> None:
        assert outgoing.peer is not None
        bound = bind(write, layers, self._pages, outgoing.peer.pages)
        note = WriteNote(
            transfer_id=outgoing.transfer_id,
            sender=self._rank,
            seq=outgoing.next_seq(),
            units=bound.num_units,
            digests=self._digests(bound) if self._verify else b"",
            layers=layers if self._verify else [],
            blocks=list(write.dst_blocks) if self._verify else [],
        )
        self._timeline.mark(outgoing.transfer_id, "write_posted", layers=layers, seq=note.seq, rank=self._rank)
        handle = self._transport.post_write(outgoing.peer, bound, encode(note))
        self._tally.add("writes")
        outgoing.num_in_flight += 1
        self._posted.append(_Posted(outgoing, handle, bound.num_units, layers))

    def _digests(self, bound: BoundWrite) -> bytes:
        pairs = (divmod(page, self._pages.num_blocks) for page in bound.src_pages.tolist())
        return b"".join(page_digest(self._transport.read_page(layer, block)) for layer, block in pairs)

    def _poll_posted(self) -> None:
        still: list[_Posted] = []
        for posted in self._posted:
            status = self._transport.poll(posted.handle)
            if status is WriteStatus.POSTED and not self._is_hopeless(posted):
                still.append(posted)
                continue
            if not self._transport.release(posted.handle):
                still.append(posted)  # it may still read the pages: they stay (law 2)
                continue
            self._account(posted, status)
        self._posted = still

    def _is_hopeless(self, posted: _Posted) -> bool:
        """A cancelled write that will not end by itself; releasing its handle asks the transport to cancel it."""
        outgoing = posted.outgoing
        return outgoing.state is OutgoingState.CANCELLED and self._ledger.patience_is_over(
            outgoing.transfer_id, self._clock()
        )

    def _account(self, posted: _Posted, status: WriteStatus) -> None:
        outgoing = posted.outgoing
        outgoing.num_in_flight -= 1
        if status is not WriteStatus.DONE:
            self._tally.add("write_failures")
            outgoing.is_clean = False
            self._ledger.distrust(outgoing.peer)
            if outgoing.may_post:
                self._give_up(outgoing, f"a write of layers {list(posted.layers)} failed")
            return
        outgoing.units += posted.num_units
        self._tally.add("pages_written", posted.num_units)
        self._tally.add("bytes_written", posted.num_units * self._pages.page_bytes)
        self._timeline.mark(
            outgoing.transfer_id,
            "write_done",
            layers=list(posted.layers),
            bytes=posted.num_units * self._pages.page_bytes,
            rank=self._rank,
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
        self._timeline.mark(outgoing.transfer_id, "quiet", units=outgoing.units, rank=self._rank)
        self._ledger.drop(outgoing.transfer_id)

    def _cancel(self, outgoing: Outgoing) -> None:
        if outgoing.may_post:
            self._tally.add("transfers_cancelled")
        outgoing.event(OutgoingEvent.CANCEL)
        self._ledger.limit_patience(outgoing.transfer_id, self._clock())

    def _give_up(self, outgoing: Outgoing, reason: str) -> None:
        """Cancel for a reason the decoder should know at once."""
        logger.warning("event=transfer_failed transfer=%s rank=%d reason=%s", outgoing.transfer_id, self._rank, reason)
        self.failures.append((outgoing.transfer_id, reason))
        self._ledger.note_failure(outgoing.transfer_id, reason)
        self._cancel(outgoing)
        if outgoing.peer is None:
            return
        note = FailureNote(transfer_id=outgoing.transfer_id, sender=self._rank, reason=reason[:4096])
        try:
            self._transport.notify(outgoing.peer, encode(note))
        except PeerLost as error:
            logger.info("event=failure_note_lost transfer=%s reason=%s", outgoing.transfer_id, error)
