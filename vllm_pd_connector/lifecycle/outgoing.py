"""One transfer on one prefiller rank, from its first page to silence. Pure: the table is the program.

Law 2: the prefiller's pages are given back (`REPORT_SENT`) only when nothing posted can still read them. A fence may
come before the transfer is known here; it then is born CANCELLED and never posts anything.
"""

from enum import Enum, auto

from vllm_pd_connector.lifecycle.table import Transitions


class OutgoingState(Enum):
    OPEN = auto()  # more pages may be planned
    CLOSING = auto()  # everything is planned; the rest is being posted and drained
    CANCELLED = auto()  # nothing more is posted; what was posted drains
    QUIET = auto()  # nothing is in flight and nothing will be


class OutgoingEvent(Enum):
    CLOSE = auto()  # the prompt is finished: the last page has been planned
    CANCEL = auto()  # fenced, aborted, out of time, or a write failed
    DRAINED = auto()  # no write planned (unless cancelled) and none in flight


class OutgoingCommand(Enum):
    DROP_UNPOSTED = auto()


_S, _E, _C = OutgoingState, OutgoingEvent, OutgoingCommand

OUTGOING_TABLE: Transitions[OutgoingState, OutgoingEvent, OutgoingCommand] = {
    _S.OPEN: {
        _E.CLOSE: (_S.CLOSING, ()),
        _E.CANCEL: (_S.CANCELLED, (_C.DROP_UNPOSTED,)),
        _E.DRAINED: (_S.OPEN, ()),
    },
    _S.CLOSING: {
        _E.CLOSE: (_S.CLOSING, ()),
        _E.CANCEL: (_S.CANCELLED, (_C.DROP_UNPOSTED,)),
        _E.DRAINED: (_S.QUIET, ()),
    },
    _S.CANCELLED: {
        _E.CLOSE: (_S.CANCELLED, ()),
        _E.CANCEL: (_S.CANCELLED, ()),
        _E.DRAINED: (_S.QUIET, ()),
    },
    _S.QUIET: {
        _E.CLOSE: (_S.QUIET, ()),
        _E.CANCEL: (_S.QUIET, ()),
        _E.DRAINED: (_S.QUIET, ()),
    },
}
