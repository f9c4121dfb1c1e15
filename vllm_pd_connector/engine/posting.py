"""One rank's writes: made of the layers of a step, posted now or armed, and watched until they are over."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import getLogger
from typing import Any

from vllm_pd_connector.engine.digests import signature
from vllm_pd_connector.engine.links import Link
from vllm_pd_connector.engine.outgoing import Outgoing
from vllm_pd_connector.engine.worker_rank import WorkerRank
from vllm_pd_connector.kernels.poller import Trigger
from vllm_pd_connector.plan.write import BoundWrite, Granules, GroupWrite, bind, join, select
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import Timeline
from vllm_pd_connector.transport.base import ArmingTransport, Transport, WriteStatus
from vllm_pd_connector.wire.codec import encode
from vllm_pd_connector.wire.messages import WriteNote

logger = getLogger(__name__)

STUCK_S = 10.0
"""Seconds in flight after which a write is complained about. Nothing can end it (docs/adr/0008)."""


@dataclass(slots=True)
class PlannedWrite:
    """A chunk write, and its granules for each link and cache group, worked out when its first layer is posted."""

    transfer_id: str
    groups: Sequence[GroupWrite]
    granules: dict[Link, list[Granules]] = field(default_factory=dict)


@dataclass(slots=True)
class Posted:
    """A write that is posted, or armed to be."""

    outgoing: Outgoing
    link: Link
    handle: Any
    bound: BoundWrite
    layers: Sequence[int]
    seq: int
    is_armed: bool
    posted_at: float
    is_stuck: bool = False

    @property
    def must_be_polled(self) -> bool:
        """Nobody tells when it is over."""
        return not self.is_armed or not self.outgoing.may_post

    @property
    def num_bytes(self) -> int:
        return self.bound.num_pages * self.link.route.spot_bytes


class Posting:
    """owned by: Writer, on the messenger thread.

    Args:
        transport: the rank's endpoint.
        rank: the worker.
        verify: send a digest of each page along.
        tally: counters.
        timeline: moments.
        clock: monotonic seconds.
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
        arming: ArmingTransport | None = None,
    ) -> None:
        self._transport = transport
        self._rank = rank
        self._pages = rank.pages
        self._sender = rank.number
        self._verify = verify
        self._tally = tally
        self._timeline = timeline
        self._clock = clock
        self._arming = arming
        self._posted: list[Posted] = []

    @property
    def must_be_polled(self) -> bool:
        return any(posted.must_be_polled for posted in self._posted)

    @property
    def peers(self) -> set[int]:
        """`id` of each peer that a write is in flight to."""
        return {id(posted.link.peer) for posted in self._posted}

    def withdraw(self, outgoing: Outgoing) -> None:
        """Post nothing of a transfer that is not posted yet; `poll` then finds it withdrawn."""
        if self._arming is not None:
            for posted in self._posted:
                if posted.outgoing is outgoing and posted.is_armed:
                    self._arming.withdraw(posted.handle)

    def post(
        self, outgoing: Outgoing, link: Link, write: PlannedWrite, layers: Sequence[int], trigger: Trigger | None
    ) -> None:
        """Post what one decoder rank gets of these layers, now or by a trigger; nothing if other ranks send it that."""
        route, pages = link.route, link.peer.pages
        if link not in write.granules:
            write.granules[link] = [
                select(group, route, outgoing.transfer_id, self._pages, pages) for group in write.groups
            ]
        parts: list[BoundWrite] = []
        for group, granules in enumerate(write.granules[link]):
            rows = [layer for layer in layers if self._rank.groups[layer] == group]
            if rows and granules.num_tokens:
                targets = [outgoing.dst_layers[layer] for layer in rows]
                parts.append(bind(granules, route, self._pages, pages, src_layers=rows, dst_layers=targets))
        if not parts:
            return
        bound = join(parts)
        step = write.groups[0].span
        note = WriteNote(
            transfer_id=outgoing.transfer_id,
            sender=self._sender,
            seq=outgoing.next_seq(),
            units=bound.units,
            pages=bound.num_pages,
            start=step.start,
            stop=step.stop,
            **(signature(self._transport, bound, route, self._pages, pages) if self._verify else {}),
        )
        if trigger is None:
            self._mark_posted(outgoing.transfer_id, layers, note.seq, route.dst_rank)
            handle = self._transport.post_write(link.lane, bound, encode(note))
        else:
            assert self._arming is not None
            handle = self._arming.arm_write(link.lane, bound, encode(note), trigger)
        self._tally.add("writes")
        outgoing.num_in_flight += 1
        is_armed = trigger is not None
        self._posted.append(Posted(outgoing, link, handle, bound, layers, note.seq, is_armed, self._clock()))

    def poll(self) -> list[tuple[Posted, WriteStatus]]:
        """Drive what is in flight; the writes that are over by now, each once."""
        still: list[Posted] = []
        over: list[tuple[Posted, WriteStatus]] = []
        for posted in self._posted:
            status = self._transport.poll(posted.handle)
            if status in (WriteStatus.ARMED, WriteStatus.POSTED) or not self._transport.release(posted.handle):
                self._complain_if_stuck(posted, status)
                still.append(posted)  # it may still read the pages: they stay (law 2)
            else:
                over.append((posted, status))
                if posted.is_armed and status is not WriteStatus.WITHDRAWN:
                    self._mark_armed(posted)
        self._posted = still
        return over

    def _complain_if_stuck(self, posted: Posted, status: WriteStatus) -> None:
        """Once: no bound of ours ends this wait (law 2 before law 8)."""
        if status is WriteStatus.ARMED:
            posted.posted_at = self._clock()  # it is not in flight yet
        elif not posted.is_stuck and self._clock() - posted.posted_at > STUCK_S:
            posted.is_stuck = True
            self._tally.add("writes_stuck")
            logger.error(
                "event=write_stuck transfer=%s rank=%d layers=%s its pages stay until the transport ends it",
                posted.outgoing.transfer_id,
                self._sender,
                list(posted.layers),
            )

    def _mark_posted(
        self, transfer_id: str, layers: Sequence[int], seq: int, dst_rank: int, at_ns: int | None = None
    ) -> None:
        mark = partial(self._timeline.mark, transfer_id, "write_posted", layers=list(layers), rank=self._sender)
        mark(seq=seq, to=dst_rank, at_ns=at_ns)

    def _mark_armed(self, posted: Posted) -> None:
        """What the native thread saw, told afterwards."""
        assert self._arming is not None
        transfer_id = posted.outgoing.transfer_id
        ready_ns, posted_ns = self._arming.moments(posted.handle)
        for layer in posted.layers:
            self._timeline.mark(transfer_id, "layer_computed", layer=layer, at_ns=ready_ns, rank=self._sender)
        self._mark_posted(transfer_id, posted.layers, posted.seq, posted.link.route.dst_rank, posted_ns)
