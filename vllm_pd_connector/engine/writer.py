"""The prefiller's writer: posts each layer's pages as soon as they are in memory, and keeps account until silence.

A step's layers are divided into portions, each a write per transfer (`plan.grain`). Writes of the next portions are
prepared while layers compute, so that little is left to do when one is ready. Where a native thread posts, all are
prepared and armed when the step begins.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger

from vllm_pd_connector.engine.layer_signal import LayerSignal
from vllm_pd_connector.engine.ledger import Ledger
from vllm_pd_connector.engine.links import Link, Links
from vllm_pd_connector.engine.outgoing import Outgoing, WhenQuiet
from vllm_pd_connector.engine.posting import PlannedWrite, Posting, PreparedWrite
from vllm_pd_connector.engine.step import BeginTransfer, CloseTransfer
from vllm_pd_connector.engine.worker_rank import WorkerRank
from vllm_pd_connector.errors import ConfigError, OutOfRegion, PeerLost
from vllm_pd_connector.lifecycle.outgoing import OutgoingEvent, OutgoingState
from vllm_pd_connector.plan.grain import Grain
from vllm_pd_connector.plan.write import ChunkWrite, layer_bytes
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import Timeline
from vllm_pd_connector.transport.base import Peer, Transport, WriteStatus
from vllm_pd_connector.wire.codec import encode
from vllm_pd_connector.wire.messages import FailureNote, Quiet, Standing

logger = getLogger(__name__)

OUT_OF_LEASE = "the decoder's lease has run out"

AHEAD = 4
"""Portions whose writes are prepared before they are ready."""


@dataclass(slots=True)
class _Portion:
    """Layers that travel together.

    Attributes:
        num_missing: layers not in memory yet.
        writes: of each transfer to each decoder rank, once prepared.
    """

    layers: Sequence[int]
    num_missing: int
    writes: list[PreparedWrite] | None = None


@dataclass(slots=True)
class _Step:
    """Chunk writes of one forward pass, and the signal that releases their layers.

    Attributes:
        portions: not posted and not armed yet.
        layer_bytes: that each layer makes ready.
        num_layers: all of them.
        ready_ns: when each layer that is in memory was seen.
    """

    planned: list[PlannedWrite]
    signal: LayerSignal
    portions: list[_Portion]
    layer_bytes: int
    num_layers: int
    ready_ns: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return len(self.ready_ns) == self.num_layers

    @property
    def layer_s(self) -> float:
        """Seconds of compute of a layer; of a step of one layer nothing is known."""
        return (max(self.ready_ns) - min(self.ready_ns)) / 1e9 / max(self.num_layers - 1, 1)

    def note_ready(self, seen: list[tuple[int, int]]) -> None:
        """Layers, and monotonic ns when each was ready."""
        for layer, at_ns in seen:
            self.ready_ns.append(at_ns)
            for portion in self.portions:
                if layer in portion.layers:
                    portion.num_missing -= 1

    def take_ready(self) -> list[_Portion]:
        """Portions whose layers are all in memory, each once."""
        ready = [portion for portion in self.portions if not portion.num_missing]
        self.portions = [portion for portion in self.portions if portion.num_missing]
        return ready


@dataclass(slots=True)
class _Drain:
    transfer_ids: list[str]
    when_drained: Callable[[], None]


class Writer:
    """owned by: the messenger thread; everything is called there, but the model thread empties `sent` and `failures`.

    Args:
        transport: the rank's endpoint.
        rank: the worker.
        posting: its writes.
        grain: how many layers go into one.
        tally: counters.
        timeline: moments.
        clock: monotonic seconds; those of `time.monotonic` where writes are armed.
    """

    def __init__(
        self,
        transport: Transport,
        rank: WorkerRank,
        posting: Posting,
        grain: Grain,
        *,
        tally: Tally,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._posting = posting
        self._grain = grain
        self._rank = rank
        self._sender = rank.number
        self._tally = tally
        self._timeline = timeline
        self._clock = clock
        self._ledger = Ledger()
        self._links = Links(transport, rank.pages, rank.geometry, rank.tp_rank, clock)
        self._steps: list[_Step] = []
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

    def start_step(self, writes: list[ChunkWrite], signal: LayerSignal, layers: Sequence[Sequence[int]]) -> None:
        """Take over the pages a forward pass will complete.

        Args:
            writes: of all transfers in the step.
            signal: tells when layers are in memory.
            layers: those of each portion; together all of the rank's.
        """
        planned: list[PlannedWrite] = []
        for write in writes:
            outgoing = self._ledger.get(write.transfer_id)
            if outgoing is not None and outgoing.may_post:
                outgoing.num_unposted += 1
                planned.append(PlannedWrite(write.transfer_id, [group.as_arrays() for group in write.groups]))
        if not planned:
            return
        pages = self._rank.pages
        step = _Step(
            planned,
            signal,
            portions=[_Portion(some, len(some)) for some in layers],
            layer_bytes=layer_bytes(writes, pages.page_bytes),
            num_layers=pages.num_layers,
        )
        self._steps.append(step)
        if self._posting.may_arm and signal.has_triggers:
            self._arm(step)
        else:
            signal.watch(layers)
            self._prepare_ahead(step)

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
        self._steps = [step for step in self._steps if not step.is_over]
        for write, status in self._posting.poll():
            self._account(write, status)
        for step in self._steps:
            self._prepare_ahead(step)
        self._settle()
        if self._links.may_drop:
            self._links.drop_unused(self._posting.peers | self._ledger.peers)

    def _post_ready(self, step: _Step) -> None:
        seen = step.signal.take()
        if not seen:
            return
        step.note_ready(seen)
        ready = step.take_ready()
        for portion in ready:
            for write in self._prepared(step, portion):
                self._attempt(write.outgoing, write.link.peer, partial(self._posting.post, write))
        for _, outgoing in self._live(step):
            for layer, at_ns in seen:
                self._timeline.mark(outgoing.transfer_id, "layer_computed", layer=layer, at_ns=at_ns, rank=self._sender)
        if ready and not step.portions:
            self._count_off(step)
        if step.is_over and step.num_layers > 1:
            self._grain.layer.add(step.layer_bytes, step.layer_s)

    def _arm(self, step: _Step) -> None:
        """Have each portion posted when its last layer is in memory."""
        portions, step.portions = step.portions, []
        for portion in portions:
            for write in self._prepared(step, portion):
                deadline_ns = round(write.outgoing.lease_ends * 1e9)
                self._posting.arm(write, step.signal.trigger(portion.layers, deadline_ns))
        self._count_off(step)

    def _prepare_ahead(self, step: _Step) -> None:
        for portion in step.portions[:AHEAD]:
            self._prepared(step, portion)

    def _prepared(self, step: _Step, portion: _Portion) -> Iterator[PreparedWrite]:
        """A portion's writes, made now if they are not; those that may be posted."""
        if portion.writes is None:
            portion.writes = []
            for planned, outgoing in self._live(step):
                for link in outgoing.links:
                    if outgoing.may_post:
                        self._attempt(outgoing, link.peer, partial(self._prepare, portion, outgoing, link, planned))
        return (write for write in portion.writes if write.outgoing.may_post)

    def _prepare(self, portion: _Portion, outgoing: Outgoing, link: Link, planned: PlannedWrite) -> None:
        assert portion.writes is not None
        write = self._posting.prepare(outgoing, link, planned, portion.layers)
        if write is not None:
            portion.writes.append(write)

    def _attempt(self, outgoing: Outgoing, peer: Peer, action: Callable[[], None]) -> None:
        """Do something for a transfer. It fails if that cannot be done, and with a lost peer all others to it do."""
        try:
            action()
        except OutOfRegion as error:
            self._give_up(outgoing, str(error))
        except PeerLost as error:
            outgoing.is_clean = False  # some of its pages may be on the wire
            self._give_up(outgoing, str(error))
            self._distrust(peer)

    def _distrust(self, peer: Peer) -> None:
        """Drop a peer that lost a write, and give up what else would be posted to it: it would get lost as well."""
        self._links.distrust(peer)
        for outgoing in self._ledger.posting_to(peer):
            self._give_up(outgoing, "another write to the same decoder rank failed")

    def _live(self, step: _Step) -> Iterator[tuple[PlannedWrite, Outgoing]]:
        for planned in step.planned:
            outgoing = self._ledger.get(planned.transfer_id)
            if outgoing is not None and outgoing.may_post:
                yield planned, outgoing

    def _count_off(self, step: _Step) -> None:
        """All its writes are posted or armed."""
        for _, outgoing in self._live(step):
            outgoing.num_unposted -= 1

    def _account(self, write: PreparedWrite, status: WriteStatus) -> None:
        outgoing = write.outgoing
        outgoing.num_in_flight -= 1
        if status is WriteStatus.WITHDRAWN:
            if outgoing.may_post:
                self._give_up(outgoing, OUT_OF_LEASE)
            return
        if status is not WriteStatus.DONE:
            self._tally.add("write_failures")
            outgoing.is_clean = False
            if outgoing.may_post:
                self._give_up(outgoing, f"a write of layers {write.layers} failed")
            self._distrust(write.link.peer)
            return
        outgoing.units += write.bound.units
        self._tally.add_all(
            pages_written=write.bound.num_pages,
            descriptors_written=len(write.bound.src_pieces),
            bytes_written=write.num_bytes,
        )
        self._timeline.mark(
            outgoing.transfer_id, "write_done", layers=write.layers, bytes=write.num_bytes, rank=self._sender
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
