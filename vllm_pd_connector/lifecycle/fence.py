"""Pages whose request is gone but whose writers are not yet known to be quiet. Pure: the table is the program.

Law 1: the pages go back to the pool when every sender said it is quiet; when the senders that did not are gone and what
they had on the wire cannot land any more; or when one that may be alive has not answered for `unreachable_s`.
"""

from enum import Enum, auto

from vllm_pd_connector.lifecycle.table import Transitions


class FenceState(Enum):
    ASKING = auto()  # senders were told to stop; their answers are awaited
    SILENT = auto()  # a sender that may be alive does not answer; it is asked again and again
    QUARANTINED = auto()  # every sender that did not answer is gone; waiting out what it had on the wire
    LIFTED = auto()  # the pages are back in the pool


class FenceEvent(Enum):
    QUIET = auto()  # every sender stopped and drained
    UNREACHABLE = auto()  # at least one sender that may be alive did not answer
    GONE = auto()  # every sender that is not quiet posts nothing more for certain
    DEADLINE = auto()


class FenceCommand(Enum):
    ARM_SILENCE = auto()  # the deadline is now the end of our patience with a silent sender
    ARM_QUARANTINE = auto()  # the deadline is now the end of the quarantine
    UNPIN = auto()  # give the pages back; workers forget the transfer


_S, _E, _C = FenceState, FenceEvent, FenceCommand

FENCE_TABLE: Transitions[FenceState, FenceEvent, FenceCommand] = {
    _S.ASKING: {
        _E.QUIET: (_S.LIFTED, (_C.UNPIN,)),
        _E.UNREACHABLE: (_S.SILENT, (_C.ARM_SILENCE,)),
        _E.GONE: (_S.QUARANTINED, (_C.ARM_QUARANTINE,)),
        _E.DEADLINE: (_S.SILENT, (_C.ARM_SILENCE,)),
    },
    _S.SILENT: {
        _E.QUIET: (_S.LIFTED, (_C.UNPIN,)),
        _E.UNREACHABLE: (_S.SILENT, ()),
        _E.GONE: (_S.QUARANTINED, (_C.ARM_QUARANTINE,)),
        _E.DEADLINE: (_S.LIFTED, (_C.UNPIN,)),
    },
    _S.QUARANTINED: {
        _E.QUIET: (_S.QUARANTINED, ()),
        _E.UNREACHABLE: (_S.QUARANTINED, ()),
        _E.GONE: (_S.QUARANTINED, ()),
        _E.DEADLINE: (_S.LIFTED, (_C.UNPIN,)),
    },
    _S.LIFTED: {_E.QUIET: (_S.LIFTED, ()), _E.UNREACHABLE: (_S.LIFTED, ()), _E.GONE: (_S.LIFTED, ())},
}


def silence_end(*, now: float, closed_at: float, lease_s: float, unreachable_s: float) -> float:
    """When the pages of a silent sender may be used again, on the caller's clock, in seconds.

    A sender that may be alive behind a broken network posts until its lease has run out, which it started when it took
    the dispatch: before the decoder closed it, at `closed_at`. One that stands still sends what it had posted when it
    goes on: only if that is within `unreachable_s` of its lease is law 1 kept.
    """
    return max(now, closed_at + lease_s) + unreachable_s
