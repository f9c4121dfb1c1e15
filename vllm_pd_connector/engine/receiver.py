"""The decoder's receiver: counts what arrives for each request and says when it may run (laws 5, 6, 7)."""

from collections import OrderedDict, deque
from dataclasses import dataclass
from logging import getLogger

from vllm_pd_connector.engine.digests import compare
from vllm_pd_connector.engine.step import ExpectTransfer, HandBack
from vllm_pd_connector.engine.worker_rank import WorkerRank
from vllm_pd_connector.errors import ProtocolError, UnsupportedEngine
from vllm_pd_connector.ids import TransferId
from vllm_pd_connector.lifecycle.completion import Arrival, CompletionTable
from vllm_pd_connector.plan.expectation import expected_units
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import Timeline
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.wire.codec import decode_note
from vllm_pd_connector.wire.messages import FailureNote, WriteNote

logger = getLogger(__name__)


@dataclass(slots=True)
class _Incoming:
    """A transfer this rank was told of.

    Attributes:
        span: its tokens, of the first cache group.
        is_reported: vLLM has been given its one report (law 7).
        whole_stop: what had arrived without a gap when it was spoiled; None before.
    """

    request_id: str
    span: Span
    is_reported: bool = False
    whole_stop: int | None = None

    @property
    def is_spoiled(self) -> bool:
        return self.whole_stop is not None


class Receiver:
    """owned by: the messenger thread; its queues are emptied by the model thread.

    `whole` has (transfer id, token after the last that arrived without a gap) of each that is handed back as failed,
    before the request is in `finished`.

    Args:
        transport: the rank's endpoint.
        rank: the worker.
        max_parked: transfers with early arrivals.
        verify: compare the digests that senders send along; else nobody looks at them.
        tally: counters.
        timeline: moments.
    """

    def __init__(
        self,
        transport: Transport,
        rank: WorkerRank,
        *,
        max_parked: int,
        verify: bool,
        tally: Tally,
        timeline: Timeline,
    ) -> None:
        self._transport = transport
        self._pages = rank.pages
        self._rank = rank.number
        self._layers_of_groups = rank.layers_of_groups
        self._num_heads = len(rank.geometry.heads(rank.tp_rank))
        self._counts = CompletionTable(max_parked)
        self._incoming: dict[str, _Incoming] = {}
        self._spoiled_early: OrderedDict[str, str] = OrderedDict()
        self._max_parked = max_parked
        self._verify = verify
        self._shape = rank.geometry.page(rank.tp_rank)
        self._frames: deque[bytes] = deque()
        self._tally = tally
        self._timeline = timeline
        self.finished: deque[str] = deque()
        self.failed: deque[str] = deque()
        self.failures: deque[tuple[str, str]] = deque()
        self.whole: deque[tuple[str, int]] = deque()

    @property
    def is_busy(self) -> bool:
        return bool(self._incoming)

    def expect(self, order: ExpectTransfer) -> None:
        """Count a transfer from now on; it may be complete at once."""
        units = expected_units(order.spans, layers=self._layers_of_groups, num_heads=self._num_heads)
        self._incoming[order.transfer_id] = _Incoming(order.request_id, order.spans[0])
        if reason := self._spoiled_early.pop(order.transfer_id, None):
            self._spoil(order.transfer_id, reason)
        self._conclude(order.transfer_id, self._counts.expect(TransferId(order.transfer_id), units))

    def hand_back(self, order: HandBack) -> None:
        """Report a request that will not be completed, unless this rank has reported it already."""
        incoming = self._incoming.get(order.transfer_id)
        if incoming is None:
            return
        if order.failed:
            self.whole.append((order.transfer_id, self._whole_stop(order.transfer_id, incoming)))
        if incoming.is_reported:
            return
        incoming.is_reported = True
        if order.failed:
            self.failed.append(order.request_id)
        self.finished.append(order.request_id)

    def forget(self, transfer_id: str) -> None:
        """The transfer is over: what still arrives for it is late."""
        self._incoming.pop(transfer_id, None)
        self._counts.forget(TransferId(transfer_id))
        self._spoiled_early.pop(transfer_id, None)

    def advance(self) -> None:
        # Also without anything expected: a poll is cheap, and early arrivals must be taken in.
        self._frames.extend(self._transport.notifications())
        while self._frames:
            self._take(self._frames.popleft())  # one that cannot be taken is lost alone

    def _take(self, frame: bytes) -> None:
        try:
            note = decode_note(frame)
        except ProtocolError as error:
            self._tally.add("notes_refused")
            logger.warning("event=note_refused rank=%d reason=%s", self._rank, error)
            return
        if isinstance(note, WriteNote):
            self._count(note)
        else:
            self._fail(note)

    def _count(self, note: WriteNote) -> None:
        arrival = self._counts.arrive(
            TransferId(note.transfer_id),
            sender=note.sender,
            seq=note.seq,
            units=note.units,
            step=Span(note.start, note.stop),
        )
        if arrival is Arrival.LATE or arrival is Arrival.DUPLICATE:
            self._tally.add("notes_late" if arrival is Arrival.LATE else "notes_duplicate")
            return
        if self._verify and note.digests and arrival is not Arrival.EXCESS:
            self._compare(note)  # before what it completes is reported
        self._tally.add("pages_arrived", note.pages)
        self._timeline.mark(note.transfer_id, "note_arrived", seq=note.seq, pages=note.pages, rank=self._rank)
        self._conclude(note.transfer_id, arrival)

    def _conclude(self, transfer_id: str, arrival: Arrival) -> None:
        """What follows from where the count stands now."""
        if arrival is Arrival.REACHED:
            self._report_complete(transfer_id)
        elif arrival is Arrival.EXCESS:
            self._tally.add("notes_refused")
            self._spoil(transfer_id, "the prefiller reports more pages than were reserved", is_trusted=False)
        elif arrival is Arrival.OVERFLOW:
            logger.warning("event=parked_overflow rank=%d limit=max_parked", self._rank)

    def _report_complete(self, transfer_id: str) -> None:
        incoming = self._incoming.get(transfer_id)
        if incoming is None or incoming.is_reported or incoming.is_spoiled:
            return
        incoming.is_reported = True
        self._timeline.mark(transfer_id, "complete", rank=self._rank)
        self.finished.append(incoming.request_id)

    def _fail(self, note: FailureNote) -> None:
        if self._counts.is_forgotten(TransferId(note.transfer_id)):
            self._tally.add("notes_late")
            return
        self._spoil(note.transfer_id, f"prefiller rank {note.sender}: {note.reason}")

    def _whole_stop(self, transfer_id: str, incoming: _Incoming) -> int:
        """Token after the last one that has arrived without a gap, and that nobody writes any more."""
        if incoming.whole_stop is not None:
            return incoming.whole_stop
        units = self._num_heads * sum(self._layers_of_groups)
        stop = self._counts.whole_stop(TransferId(transfer_id), start=incoming.span.start, units_per_token=units)
        return min(stop, incoming.span.stop)

    def _spoil(self, transfer_id: str, reason: str, *, is_trusted: bool = True) -> None:
        """The pages will never be complete, or cannot be trusted; the scheduler half decides what follows.

        What is said to arrive afterwards is not kept: a write whose source is overwritten is announced as failed
        before it is announced as over.
        """
        incoming = self._incoming.get(transfer_id)
        if incoming is None:
            self._spoiled_early[transfer_id] = reason
            while len(self._spoiled_early) > self._max_parked:
                self._spoiled_early.popitem(last=False)
            return
        if not incoming.is_spoiled:
            incoming.whole_stop = self._whole_stop(transfer_id, incoming)
            self.failures.append((transfer_id, reason))
        if not is_trusted:
            incoming.whole_stop = 0

    def _compare(self, note: WriteNote) -> None:
        try:
            results = compare(self._transport, note, self._pages, self._shape)
        except (ProtocolError, UnsupportedEngine) as error:
            self._spoil(note.transfer_id, str(error), is_trusted=False)
            return
        for layer, block, is_equal in results:
            self._tally.add("pages_verified" if is_equal else "pages_mismatched")
            if not is_equal:
                reason = f"page (layer {layer}, block {block}) differs from the prefiller's"
                self._spoil(note.transfer_id, reason, is_trusted=False)
