"""A writer's books: transfers, fenced ids, and leases."""

from collections import OrderedDict

from vllm_pd_connector.engine.outgoing import Outgoing
from vllm_pd_connector.lifecycle.deadline import Deadlines
from vllm_pd_connector.lifecycle.outgoing import OutgoingState
from vllm_pd_connector.transport.base import Peer

MAX_REMEMBERED = 65_536
"""Ids of fenced and unclean transfers remembered, oldest dropped first. Dispatches that old have long been closed."""

MAX_FAILURES = 4_096
"""Failed transfers whose reason is remembered: decoders ask within seconds."""


class Ledger:
    """owned by: Writer, on the messenger thread."""

    def __init__(self) -> None:
        self._transfers: dict[str, Outgoing] = {}
        self._fenced: OrderedDict[str, None] = OrderedDict()
        self._unclean: OrderedDict[str, None] = OrderedDict()
        self._failures: OrderedDict[str, str] = OrderedDict()
        self.leases: Deadlines[str] = Deadlines()

    def add(self, outgoing: Outgoing) -> None:
        self._transfers[outgoing.transfer_id] = outgoing

    def get(self, transfer_id: str) -> Outgoing | None:
        return self._transfers.get(transfer_id)

    def unsettled(self) -> list[Outgoing]:
        return [o for o in self._transfers.values() if o.state is not OutgoingState.OPEN]

    def posting_to(self, peer: Peer) -> list[Outgoing]:
        """Transfers that would post more to a peer."""
        return [o for o in self._transfers.values() if o.will_post and any(link.peer is peer for link in o.links)]

    @property
    def peers(self) -> set[int]:
        """`id` of each peer that a transfer may post more to."""
        return {id(link.peer) for o in self._transfers.values() if o.will_post for link in o.links}

    def is_drained(self, transfer_id: str) -> bool:
        outgoing = self._transfers.get(transfer_id)
        return outgoing is None or outgoing.is_drained

    def drop(self, transfer_id: str) -> None:
        outgoing = self._transfers.pop(transfer_id, None)
        if outgoing is not None and not outgoing.is_clean:
            _remember(self._unclean, transfer_id)
        self.leases.disarm(transfer_id)

    def was_clean(self, transfer_id: str) -> bool:
        """Whether no write of a transfer that was dropped had failed: its fence may come after that."""
        return transfer_id not in self._unclean

    def fence(self, transfer_id: str) -> None:
        _remember(self._fenced, transfer_id)

    def is_fenced(self, transfer_id: str) -> bool:
        return transfer_id in self._fenced

    def note_failure(self, transfer_id: str, reason: str) -> None:
        self._failures[transfer_id] = reason
        while len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def failure(self, transfer_id: str) -> str:
        """Why a transfer was given up, also after it was dropped; empty when it was not."""
        return self._failures.get(transfer_id, "")


def _remember(ids: OrderedDict[str, None], transfer_id: str) -> None:
    ids[transfer_id] = None
    while len(ids) > MAX_REMEMBERED:
        ids.popitem(last=False)
