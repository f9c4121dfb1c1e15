"""A writer's books: transfers, fenced ids, leases, and patience."""

from collections import OrderedDict

from vllm_pd_connector.engine.outgoing import Outgoing
from vllm_pd_connector.lifecycle.deadline import Deadlines
from vllm_pd_connector.lifecycle.outgoing import OutgoingState

MAX_FENCED = 65_536
"""Fenced transfer ids remembered, oldest dropped first. A dispatch that old has long been closed by its decoder."""

MAX_FAILURES = 4_096
"""Failed transfers whose reason is remembered: decoders ask within seconds."""

PATIENCE_S = 2.0
"""Seconds a cancelled transfer's posted writes get to end by themselves before their handles are cancelled."""


class Ledger:
    """owned by: Writer, on the messenger thread."""

    def __init__(self) -> None:
        self._transfers: dict[str, Outgoing] = {}
        self._fenced: OrderedDict[str, None] = OrderedDict()
        self._failures: OrderedDict[str, str] = OrderedDict()
        self._patience: dict[str, float] = {}
        self.leases: Deadlines[str] = Deadlines()

    def add(self, outgoing: Outgoing) -> None:
        self._transfers[outgoing.transfer_id] = outgoing

    def get(self, transfer_id: str) -> Outgoing | None:
        return self._transfers.get(transfer_id)

    def unsettled(self) -> list[Outgoing]:
        return [o for o in self._transfers.values() if o.state is not OutgoingState.OPEN]

    def is_drained(self, transfer_id: str) -> bool:
        outgoing = self._transfers.get(transfer_id)
        return outgoing is None or outgoing.is_drained

    def drop(self, transfer_id: str) -> None:
        self._transfers.pop(transfer_id, None)
        self._patience.pop(transfer_id, None)
        self.leases.disarm(transfer_id)

    def fence(self, transfer_id: str) -> None:
        self._fenced[transfer_id] = None
        while len(self._fenced) > MAX_FENCED:
            self._fenced.popitem(last=False)

    def is_fenced(self, transfer_id: str) -> bool:
        return transfer_id in self._fenced

    def note_failure(self, transfer_id: str, reason: str) -> None:
        self._failures[transfer_id] = reason
        while len(self._failures) > MAX_FAILURES:
            self._failures.popitem(last=False)

    def failure(self, transfer_id: str) -> str:
        """Why a transfer was given up, also after it was dropped; empty when it was not."""
        return self._failures.get(transfer_id, "")

    def limit_patience(self, transfer_id: str, now: float) -> None:
        self._patience.setdefault(transfer_id, now + PATIENCE_S)

    def patience_is_over(self, transfer_id: str, now: float) -> bool:
        return now > self._patience.get(transfer_id, now)
