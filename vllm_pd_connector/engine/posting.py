"""One rank's writes: prepared for some layers of a step, posted or armed, and watched until they are over."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

import msgspec

from vllm_pd_connector.engine.digests import signature
from vllm_pd_connector.engine.links import Link
from vllm_pd_connector.engine.outgoing import Outgoing
from vllm_pd_connector.engine.worker_rank import WorkerRank
from vllm_pd_connector.kernels.poller import Trigger
from vllm_pd_connector.plan.grain import Grain
from vllm_pd_connector.plan.write import BoundWrite, Granules, GroupWrite, bind, join, select
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import Timeline
from vllm_pd_connector.transport.base import ArmingTransport, Transport, WriteStatus
from vllm_pd_connector.wire.codec import encode
from vllm_pd_connector.wire.messages import WriteNote

logger = getLogger(__name__)

UNFINISHED = (WriteStatus.PREPARED, WriteStatus.ARMED, WriteStatus.POSTED)

STUCK_S = 10.0
"""Seconds in flight after which a write is complained about. Nothing can end it (docs/adr/0008)."""


@dataclass(slots=True)
class PlannedWrite:
    """A chunk write, and its granules for each link and cache group, worked out when its first layer is posted."""

    transfer_id: str
    groups: Sequence[GroupWrite]
    granules: dict[Link, list[Granules]] = field(default_factory=dict)


@dataclass(slots=True)
class PreparedWrite:
    """A write to one decoder rank, from when it is made until it is over.

    Attributes:
        planned: what it is a part of.
        note: what the rank is told with it.
        is_armed: a native thread posts it.
        posted_at: seconds on the writer's clock; None before.
        is_stuck: complained about.
    """

    outgoing: Outgoing
    link: Link
    handle: Any
    planned: PlannedWrite
    bound: BoundWrite
    layers: list[int]
    note: WriteNote
    is_armed: bool = False
    posted_at: float | None = None
    is_stuck: bool = False

    @property
    def must_be_polled(self) -> bool:
        """Nobody tells when it is over."""
        return not self.outgoing.may_post or (self.posted_at is not None and not self.is_armed)

    @property
    def num_bytes(self) -> int:
        """Bytes of its pages."""
        return self.bound.num_pages * self.link.route.spot_bytes


class Posting:
    """owned by: Writer, on the messenger thread.

    Args:
        transport: the rank's endpoint.
        rank: the worker.
        verify: send a digest of each page along.
        grain: learns what writes take.
        tally: counters.
        timeline: moments.
        clock: monotonic seconds.
        cpu_clock: CPU seconds of the thread.
        arming: the transport again, when a native thread is to post.
    """

    def __init__(
        self,
        transport: Transport,
        rank: WorkerRank,
        *,
        verify: bool,
        grain: Grain,
        tally: Tally,
        timeline: Timeline,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
        arming: ArmingTransport | None = None,
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._pages = rank.pages
        self._sender = rank.number
        self._verify = verify
        self._grain = grain
        self._tally = tally
        self._timeline = timeline
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._arming = arming
        self._writes: list[PreparedWrite] = []

    @property
    def must_be_polled(self) -> bool:
        return any(write.must_be_polled for write in self._writes)

    @property
    def may_arm(self) -> bool:
        """A native thread posts what is armed."""
        return self._arming is not None

    @property
    def peers(self) -> set[int]:
        """`id` of each peer that a write is made for and not over."""
        return {id(write.link.peer) for write in self._writes}

    def withdraw(self, outgoing: Outgoing) -> None:
        """Post nothing of a transfer that is not posted yet; `poll` then finds it withdrawn."""
        for write in self._writes:
            if write.outgoing is outgoing:
                self._transport.withdraw(write.handle)

    def prepare(
        self, outgoing: Outgoing, link: Link, planned: PlannedWrite, layers: Sequence[int]
    ) -> PreparedWrite | None:
        """What one decoder rank gets of these layers; None if other ranks send it that. In flight from now on.

        Raises:
            PeerLost: the rank is gone.
            OutOfRegion: a page is outside either side's pool.
        """
        started = self._cpu_clock()
        bound = self._bind(outgoing, link, planned, layers)
        if bound is None:
            return None
        span = planned.groups[0].span
        note = WriteNote(
            transfer_id=outgoing.transfer_id,
            sender=self._sender,
            seq=outgoing.next_seq(),
            units=bound.units,
            pages=bound.num_pages,
            start=span.start,
            stop=span.stop,
        )
        handle = self._transport.prepare_write(link.lane, bound, encode(note))
        outgoing.num_in_flight += 1
        write = PreparedWrite(outgoing, link, handle, planned, bound, list(layers), note)
        self._writes.append(write)
        self._grain.posting.add(write.num_bytes, self._cpu_clock() - started)
        return write

    def post(self, write: PreparedWrite) -> None:
        """Its pages are ready.

        Raises:
            PeerLost: the rank is gone; `poll` finds the write failed.
        """
        write.posted_at = self._clock()
        self._mark_posted(write)
        self._transport.post(write.handle, self._signed(write) if self._verify else None)
        self._tally.add("writes")

    def arm(self, write: PreparedWrite, trigger: Trigger) -> None:
        """Have the native thread post it."""
        assert self._arming is not None
        write.is_armed = True
        self._tally.add("writes")
        self._arming.arm(write.handle, trigger)

    def poll(self) -> list[tuple[PreparedWrite, WriteStatus]]:
        """Drive what is in flight; the writes that are over by now, each once."""
        still: list[PreparedWrite] = []
        over: list[tuple[PreparedWrite, WriteStatus]] = []
        for write in self._writes:
            status = self._transport.poll(write.handle)
            if status in UNFINISHED or not self._transport.release(write.handle):
                self._complain_if_stuck(write, status)
                still.append(write)  # it may still read the pages: they stay (law 2)
                continue
            over.append((write, status))
            if status is WriteStatus.WITHDRAWN:
                continue
            began = self._note_armed(write) if write.is_armed else write.posted_at
            if status is WriteStatus.DONE and began is not None:
                self._grain.wire.add(write.num_bytes, self._clock() - began)
        self._writes = still
        return over

    def _bind(self, outgoing: Outgoing, link: Link, planned: PlannedWrite, layers: Sequence[int]) -> BoundWrite | None:
        route, pages = link.route, link.peer.pages
        if link not in planned.granules:
            planned.granules[link] = [
                select(group, route, outgoing.transfer_id, self._pages, pages) for group in planned.groups
            ]
        parts: list[BoundWrite] = []
        for group, granules in enumerate(planned.granules[link]):
            rows = [layer for layer in layers if self._rank.groups[layer] == group]
            if rows and granules.num_tokens:
                targets = [outgoing.dst_layers[layer] for layer in rows]
                parts.append(bind(granules, route, self._pages, pages, src_layers=rows, dst_layers=targets))
        return join(parts) if parts else None

    def _signed(self, write: PreparedWrite) -> bytes:
        """Its note with digests."""
        link = write.link
        fields = signature(self._transport, write.bound, write.planned.groups, link.route, self._pages, link.peer.pages)
        return encode(msgspec.structs.replace(write.note, **fields))

    def _complain_if_stuck(self, write: PreparedWrite, status: WriteStatus) -> None:
        """Once: no bound of ours ends this wait (law 2 before law 8)."""
        if status in (WriteStatus.PREPARED, WriteStatus.ARMED):
            return
        if write.posted_at is None:  # by the native thread, since the last look
            write.posted_at = self._clock()
        elif not write.is_stuck and self._clock() - write.posted_at > STUCK_S:
            write.is_stuck = True
            self._tally.add("writes_stuck")
            logger.error(
                "event=write_stuck transfer=%s rank=%d layers=%s its pages stay until the transport ends it",
                write.outgoing.transfer_id,
                self._sender,
                write.layers,
            )

    def _mark_posted(self, write: PreparedWrite, at_ns: int | None = None) -> None:
        self._timeline.mark(
            write.outgoing.transfer_id,
            "write_posted",
            at_ns=at_ns,
            layers=write.layers,
            rank=self._sender,
            seq=write.note.seq,
            to=write.link.route.dst_rank,
        )

    def _note_armed(self, write: PreparedWrite) -> float:
        """What the native thread saw, told afterwards; when it began to post."""
        assert self._arming is not None
        ready_ns, posted_ns = self._arming.moments(write.handle)
        self._mark_posted(write, posted_ns)
        return ready_ns / 1e9
