"""Whether a request goes to a prefiller now, waits for room, or is prefilled on the decoder. Pure.

Held pages make no progress on the decoder and cannot be preempted, so they may take only a share of its pages, and
none are taken for a request that would only queue at a prefiller. A request that finds no room is passed over and asked
about again in the next step: it does not block those behind it.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

RETRY_NEEDS_S = 1.0
"""Seconds that must be left of a request's deadline for another prefiller to be worth trying."""


class Admission(Enum):
    REMOTE = auto()
    LOCAL = auto()
    LATER = auto()


@dataclass(slots=True)
class Course:
    """What one request has been through on its way to its pages.

    Attributes:
        ends_at: until when a prefiller may work for it, all attempts together; seconds on the caller's clock.
        tried: prefillers that failed it.
        waiting_since: when it first found no room.
        is_over: no prefiller will be tried again.
        reason: why the last attempt failed; empty while none has.
    """

    ends_at: float | None = None
    tried: list[str] = field(default_factory=list)
    waiting_since: float | None = None
    is_over: bool = False
    reason: str = ""

    def may_retry(self, now: float, max_attempts: int) -> bool:
        """Whether another prefiller may be tried after those that failed."""
        has_time = self.ends_at is None or self.ends_at - now >= RETRY_NEEDS_S
        return not self.is_over and has_time and len(self.tried) < max_attempts


def admit(
    *,
    num_pages: int,
    num_free: int,
    num_pinned: int,
    max_pinned: int,
    is_pool_full: bool,
    is_short: bool,
    has_waited: bool,
) -> Admission:
    """The decision for one request.

    Args:
        num_pages: pages a prefiller would write for it.
        num_free: free pages of the decoder.
        num_pinned: pages held or fenced for requests.
        max_pinned: how many may be.
        is_pool_full: no prefiller may be given another request now.
        is_short: cheap enough to be prefilled here rather than to wait.
        has_waited: long enough.
    """
    if num_pages > max_pinned:
        return Admission.LOCAL
    if not is_pool_full and num_pages <= num_free and num_pinned + num_pages <= max_pinned:
        return Admission.REMOTE
    return Admission.LOCAL if is_short or has_waited else Admission.LATER
