"""What a peer's clock reads at least, from a reading it has sent. Pure.

Law 10: clocks of two processes are never compared. A peer is only ever told a reading of its own clock, with a duration
of ours added; so it can tell by itself when we have stopped waiting, however long a message was on its way.
"""

from dataclasses import dataclass

DRIFT = 1e-3
"""Seconds by which a second of ours may differ from one of the peer's: Linux slews a clock by at most half of it."""


@dataclass(frozen=True, slots=True)
class PeerClock:
    """Attributes:
    reading: seconds on the peer's clock, read before `heard_at`.
    heard_at: seconds on ours.
    """

    reading: float
    heard_at: float

    def at_least(self, when: float) -> float:
        """What the peer's clock reads at the least when ours reads `when`, not before `heard_at`.

        Too low by the time the reading took to arrive and by the drift since: a lease that ends then ends too early.
        """
        return self.reading + (when - self.heard_at) * (1 - DRIFT)
