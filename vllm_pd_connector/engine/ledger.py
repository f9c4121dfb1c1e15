"""A writer's books: transfers, fenced ids, leases, and the decoder ranks it is connected to."""

import base64
from collections import OrderedDict

from vllm_pd_connector.engine.outgoing import Outgoing
from vllm_pd_connector.lifecycle.deadline import Deadlines
from vllm_pd_connector.lifecycle.outgoing import OutgoingState
from vllm_pd_connector.transport.base import Peer, Transport
from vllm_pd_connector.wire.messages import DecoderRank

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
        self._peers: dict[tuple[str, int], Peer] = {}
        self._distrusted: list[Peer] = []
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

    def peer(self, target: DecoderRank, transport: Transport) -> Peer:
        """The connected peer for a decoder rank; the first transfer to it connects.

        Raises:
            PeerLost: it cannot be reached.
            OutOfRegion: its page table is inconsistent.
            ValueError: its descriptor is not base64.
        """
        key = (target.descriptor, target.pages.base)
        if key not in self._peers:
            target.pages.check()
            self._peers[key] = transport.connect(base64.b64decode(target.descriptor, validate=True), target.pages)
        return self._peers[key]

    def distrust(self, peer: Peer | None) -> None:
        """A write to this peer has failed: drop it as soon as nothing is in flight to it, and connect afresh."""
        if peer is not None and peer not in self._distrusted:
            self._distrusted.append(peer)

    def take_distrusted(self, in_flight: set[int]) -> list[Peer]:
        """Distrusted peers without a write in flight (given by object id); they are forgotten here."""
        gone = [peer for peer in self._distrusted if id(peer) not in in_flight]
        if gone:
            self._distrusted = [peer for peer in self._distrusted if id(peer) in in_flight]
            self._peers = {key: peer for key, peer in self._peers.items() if peer not in gone}
        return gone
