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


class Offers:
    """Whether vLLM had room for those it was told to hold.

    It counts what it must keep free otherwise than we can see (blocks that prompts under way still need, prefix hits on
    blocks of nobody), and ends its scan of the queue at the first request it has no room for. So after a step in which
    it refused one, there is a step in which none is offered and those behind get their turn.
    """

    def __init__(self) -> None:
        self._open: set[str] = set()
        self.is_pausing = False

    def made(self, request_id: str) -> None:
        """The request may be held, if vLLM allocates its pages."""
        self._open.add(request_id)

    def taken(self, request_id: str) -> None:
        self._open.discard(request_id)

    def end_step(self) -> None:
        """vLLM has looked through its queue."""
        self.is_pausing = bool(self._open)
        self._open.clear()


def admit(
    *,
    num_pages: int,
    num_free: int,
    num_pinned: int,
    max_pinned: int,
    must_wait: bool,
    is_short: bool,
    has_waited: bool,
) -> Admission:
    """The decision for one request.

    Args:
        num_pages: pages a prefiller would write for it.
        num_free: free pages of the decoder.
        num_pinned: pages held or fenced for requests.
        max_pinned: how many may be.
        must_wait: no prefiller may be given another request now, or vLLM has just had no room for one.
        is_short: cheap enough to be prefilled here rather than to wait.
        has_waited: long enough.
    """
    if num_pages > max_pinned:
        return Admission.LOCAL
    if not must_wait and num_pages <= num_free and num_pinned + num_pages <= max_pinned:
        return Admission.REMOTE
    return Admission.LOCAL if is_short or has_waited else Admission.LATER
