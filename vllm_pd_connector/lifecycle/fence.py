"""Pages whose request is gone but whose writers are not yet known to be quiet. Pure: the table is the program.

Law 1: the pages go back to the pool when every sender said it is quiet, or when the sender cannot be reached any more
and the longest time in which a write of it could still land has passed.
"""

from enum import Enum, auto

from vllm_pd_connector.lifecycle.table import Transitions


class FenceState(Enum):
    ASKING = auto()  # senders were told to stop; their answers are awaited
    QUARANTINED = auto()  # a sender is gone; waiting out its late writes
    LIFTED = auto()  # the pages are back in the pool


class FenceEvent(Enum):
    QUIET = auto()  # every sender stopped and drained
    UNREACHABLE = auto()  # at least one sender did not answer, or is another generation now
    DEADLINE = auto()


class FenceCommand(Enum):
    ARM_QUARANTINE = auto()  # the deadline is now the end of the quarantine
    UNPIN = auto()  # give the pages back; workers forget the transfer


_S, _E, _C = FenceState, FenceEvent, FenceCommand

FENCE_TABLE: Transitions[FenceState, FenceEvent, FenceCommand] = {
    _S.ASKING: {
        _E.QUIET: (_S.LIFTED, (_C.UNPIN,)),
        _E.UNREACHABLE: (_S.QUARANTINED, (_C.ARM_QUARANTINE,)),
        _E.DEADLINE: (_S.QUARANTINED, (_C.ARM_QUARANTINE,)),
    },
    _S.QUARANTINED: {
        _E.QUIET: (_S.LIFTED, (_C.UNPIN,)),
        _E.UNREACHABLE: (_S.QUARANTINED, ()),
        _E.DEADLINE: (_S.LIFTED, (_C.UNPIN,)),
    },
    _S.LIFTED: {_E.QUIET: (_S.LIFTED, ()), _E.UNREACHABLE: (_S.LIFTED, ())},
}


def quarantine_end(*, now: float, closed_at: float, lease_s: float, quarantine_s: float, is_dead: bool) -> float:
    """When the pages of an unreachable sender may be used again, on the caller's clock, in seconds.

    A process that is gone posts nothing more, so only the transport's own lateness counts. One that may still be alive
    behind a broken network posts until its lease has run out, which it started when it took the dispatch: before the
    decoder closed it, at `closed_at`.
    """
    if is_dead:
        return now + quarantine_s
    return max(now, closed_at + lease_s) + quarantine_s
