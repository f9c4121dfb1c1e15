"""Counting what arrived. Early arrivals are kept, duplicates and late ones change nothing. Pure.

Laws 5 and 6: units, not messages, are counted; a notification is identified by (sender, seq); one that comes before its
transfer is known is parked within a bound; one that comes after it was forgotten never revives it.

A transfer is whole when all its units have arrived; so is each step of it, as far as notifications say which step their
units are of. Each unit is written once and announced after its bytes (law 4), so the pages of a whole step have no
writer left, however the rest of the transfer ends.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from enum import Enum, auto

from vllm_pd_connector.ids import TransferId
from vllm_pd_connector.plan.extent import Span

MAX_TOMBSTONES = 65_536
"""Forgotten transfers remembered, oldest dropped first: a prefiller stops writing long before this many have passed."""


NO_STEP = Span(0, 0)
"""Of notifications that name no step."""


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
    """Units, also by step, and notifications seen for one transfer. owned by: CompletionTable."""

    arrived: int = 0
    steps: Counter[Span] = field(default_factory=Counter)
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

    def arrive(self, transfer_id: TransferId, *, sender: int, seq: int, units: int, step: Span = NO_STEP) -> Arrival:
        """Count one notification.

        Args:
            transfer_id: what it says it is for.
            sender: rank that wrote.
            seq: number of the write within (transfer, sender).
            units: slices the write carried.
            step: tokens of the step those are of.
        """
        if transfer_id in self._forgotten:
            return Arrival.LATE
        expected = self._expected.get(transfer_id)
        count = self._counts[transfer_id] if expected is not None else self._parked.get(transfer_id, _Count())
        if (sender, seq) in count.seen:
            return Arrival.DUPLICATE
        count.seen.add((sender, seq))
        count.arrived += units
        count.steps[step] += units
        if expected is None:
            return self._park(transfer_id, count)
        return _compare(count.arrived, expected)

    def arrived(self, transfer_id: TransferId) -> int:
        """Units seen so far; 0 for an unknown transfer."""
        count = self._counts.get(transfer_id) or self._parked.get(transfer_id)
        return count.arrived if count else 0

    def whole_stop(self, transfer_id: TransferId, *, start: int, units_per_token: int) -> int:
        """Token after the last of those from `start` on that have arrived without a gap; `start` if none has.

        Args:
            transfer_id: an expected transfer; of others nothing is whole.
            start: first token of the transfer.
            units_per_token: what each token is made of.
        """
        count = self._counts.get(transfer_id, _Count())
        stops = {step.start: step.stop for step, units in count.steps.items() if units == len(step) * units_per_token}
        while start in stops:
            start = stops.pop(start)
        return start

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
