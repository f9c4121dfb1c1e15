"""Counting what arrived. Early arrivals are kept, duplicates and late ones change nothing. Pure.

Laws 5 and 6: units, not messages, are counted; a notification is identified by (sender, seq); one that comes before its
transfer is known is parked within a bound; one that comes after it was forgotten never revives it.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto

from vllm_pd_connector.ids import TransferId

MAX_TOMBSTONES = 65_536
"""Forgotten transfers remembered, oldest dropped first: a prefiller stops writing long before this many have passed."""


class Arrival(Enum):
    COUNTED = auto()
    REACHED = auto()  # this one completed the count
    PARKED = auto()  # the transfer is not known yet
    DUPLICATE = auto()
    LATE = auto()  # the transfer is over
    EXCESS = auto()  # more units than expected: the sender is wrong
    OVERFLOW = auto()  # parked, and the oldest parked transfer was dropped for it


@dataclass(slots=True)
class _Count:
    """Units and notifications seen for one transfer. owned by: CompletionTable."""

    arrived: int = 0
    seen: set[tuple[int, int]] = field(default_factory=set)


class CompletionTable:
    """Arrived and expected units of every transfer of one decoder rank. owned by: the messenger thread.

    Args:
        max_parked: transfers that may have early arrivals before they are known; the oldest gives way.
    """

    def __init__(self, max_parked: int) -> None:
        self._expected: dict[TransferId, int] = {}
        self._counts: dict[TransferId, _Count] = {}
        self._parked: OrderedDict[TransferId, _Count] = OrderedDict()
        self._forgotten: OrderedDict[TransferId, None] = OrderedDict()
        self._max_parked = max_parked

    def expect(self, transfer_id: TransferId, units: int) -> Arrival:
        """Start counting to `units`; REACHED or EXCESS when early arrivals have already come that far, else COUNTED."""
        count = self._parked.pop(transfer_id, None) or _Count()
        self._counts[transfer_id] = count
        self._expected[transfer_id] = units
        return _compare(count.arrived, units)

    def arrive(self, transfer_id: TransferId, *, sender: int, seq: int, units: int) -> Arrival:
        """Count one notification.

        Args:
            transfer_id: what it says it is for.
            sender: rank that wrote.
            seq: number of the write within (transfer, sender).
            units: slices the write carried.
        """
        if transfer_id in self._forgotten:
            return Arrival.LATE
        expected = self._expected.get(transfer_id)
        count = self._counts[transfer_id] if expected is not None else self._parked.get(transfer_id, _Count())
        if (sender, seq) in count.seen:
            return Arrival.DUPLICATE
        count.seen.add((sender, seq))
        count.arrived += units
        if expected is None:
            return self._park(transfer_id, count)
        return _compare(count.arrived, expected)

    def arrived(self, transfer_id: TransferId) -> int:
        """Units seen so far; 0 for an unknown transfer."""
        count = self._counts.get(transfer_id) or self._parked.get(transfer_id)
        return count.arrived if count else 0

    def is_forgotten(self, transfer_id: TransferId) -> bool:
        """Whether the transfer is over."""
        return transfer_id in self._forgotten

    def forget(self, transfer_id: TransferId) -> None:
        """Stop counting; whatever still arrives is late. Unknown transfers are remembered as forgotten too."""
        self._expected.pop(transfer_id, None)
        self._counts.pop(transfer_id, None)
        self._parked.pop(transfer_id, None)
        self._forgotten[transfer_id] = None
        while len(self._forgotten) > MAX_TOMBSTONES:
            self._forgotten.popitem(last=False)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    def _park(self, transfer_id: TransferId, count: _Count) -> Arrival:
        self._parked[transfer_id] = count
        if len(self._parked) <= self._max_parked:
            return Arrival.PARKED
        self._parked.popitem(last=False)
        return Arrival.OVERFLOW


def _compare(arrived: int, expected: int) -> Arrival:
    if arrived > expected:
        return Arrival.EXCESS
    return Arrival.REACHED if arrived == expected else Arrival.COUNTED
