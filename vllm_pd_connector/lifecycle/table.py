"""The driver of every transition table: look up, or refuse and change nothing. Pure."""

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from vllm_pd_connector.errors import InvariantBroken

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)
C = TypeVar("C", bound=Enum)

Transitions = Mapping[S, Mapping[E, tuple[S, tuple[C, ...]]]]


def step(table: Transitions[S, E, C], state: S, event: E) -> tuple[S, tuple[C, ...]]:
    """The next state and the commands the caller must carry out, in order.

    Raises:
        InvariantBroken: the table has no such transition; the state is unchanged.
    """
    try:
        return table[state][event]
    except KeyError:
        raise InvariantBroken(f"{type(state).__name__}.{state.name} does not know {event.name}") from None
