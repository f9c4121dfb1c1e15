"""What a decoder knows of each prefiller in its pool, and which one gets the next request. Pure."""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from vllm_pd_connector.lifecycle.table import Transitions


class PrefillerState(Enum):
    UNKNOWN = auto()  # not greeted yet
    USABLE = auto()  # greeted, compatible
    LOST = auto()  # did not answer, or answered as another process; greeted again after a pause
    REFUSED = auto()  # answered and does not fit; greeted again after a longer pause, since it may be restarted


class PrefillerEvent(Enum):
    GREETED = auto()
    MISFIT = auto()
    GONE = auto()


_S, _E = PrefillerState, PrefillerEvent

PREFILLER_TABLE: Transitions[PrefillerState, PrefillerEvent, PrefillerEvent] = {
    state: {_E.GREETED: (_S.USABLE, ()), _E.MISFIT: (_S.REFUSED, ()), _E.GONE: (_S.LOST, ())} for state in _S
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One prefiller of the pool at this moment.

    Attributes:
        outstanding: requests of this decoder that it has not answered.
        complaint: why it is not usable, as far as that is known.
        is_full: it has as many of them as it may have.
    """

    url: str
    state: PrefillerState
    outstanding: int
    complaint: str = ""
    is_full: bool = False


def choose(pool: Iterable[Candidate], wanted: str | None, turn: int) -> list[str]:
    """URLs to try in order: the wanted one first, then usable ones by fewest outstanding requests; full ones last.

    Args:
        pool: every configured prefiller.
        wanted: the request's own choice, already checked against the pool.
        turn: grows by one with each request, so that ties take turns.
    """
    usable = [candidate for candidate in pool if candidate.state is PrefillerState.USABLE]
    if not usable:
        return []
    start = turn % len(usable)
    ordered = sorted(usable[start:] + usable[:start], key=lambda c: (c.is_full, c.url != wanted, c.outstanding))
    return [candidate.url for candidate in ordered]


def all_full(pool: Iterable[Candidate], tried: Container[str]) -> bool:
    """Whether every usable prefiller but those that were tried has as many requests as it may have."""
    return all(c.is_full for c in pool if c.state is PrefillerState.USABLE and c.url not in tried)
