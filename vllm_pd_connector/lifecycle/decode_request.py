"""A decoder's request from reservation to release. Pure: the table is the program.

Two rules. Every way out of a state that still has writers goes through FENCE, which takes over the pages (law 1), so
the request itself never waits for a prefiller that will not answer (law 9). Every state that waits has a deadline
(law 8).
"""

from enum import Enum, auto

from vllm_pd_connector.lifecycle.table import Transitions


class DecodeState(Enum):
    DISPATCHED = auto()  # pages reserved, request held; the prefiller computes and writes
    SETTLING = auto()  # the prefiller has finished; the last notifications are on their way
    RECLAIMING = auto()  # given up; the workers are being told to hand the request back to vLLM
    RELEASED = auto()  # vLLM has the request back; nothing of ours refers to it


class DecodeEvent(Enum):
    ARRIVED = auto()  # every rank has seen all its units, and vLLM was told
    HANDED_BACK = auto()  # every rank reported the request as failed or left, and vLLM was told
    ANSWERED = auto()  # the prefiller's reply: all pages are posted
    NEVER_SENT = auto()  # no prefiller got the dispatch, so nobody can be writing
    FAILED = auto()  # refused, broken off, or a write failed
    ABORTED = auto()  # the client left
    DEADLINE = auto()


class DecodeCommand(Enum):
    ARM_SETTLE = auto()  # the deadline is now `settle_s` away
    ARM_RECLAIM = auto()  # the deadline is now `RECLAIM_S` away
    CLOSE_DISPATCH = auto()  # break the HTTP request off: vLLM aborts the prefill
    FENCE = auto()  # pin the pages until every sender is quiet
    REPORT_FAILED = auto()  # workers: hand the request back as failed
    REPORT_LEFT = auto()  # workers: hand the request back, nobody wants it
    COMPLAIN = auto()  # a bug: log it loudly


_S, _E, _C = DecodeState, DecodeEvent, DecodeCommand

_GIVE_UP = (_C.CLOSE_DISPATCH, _C.FENCE, _C.REPORT_FAILED, _C.ARM_RECLAIM)
_LEAVE = (_C.CLOSE_DISPATCH, _C.FENCE, _C.REPORT_LEFT, _C.ARM_RECLAIM)

DECODE_TABLE: Transitions[DecodeState, DecodeEvent, DecodeCommand] = {
    _S.DISPATCHED: {
        _E.ARRIVED: (_S.RELEASED, ()),
        _E.ANSWERED: (_S.SETTLING, (_C.ARM_SETTLE,)),
        _E.NEVER_SENT: (_S.RECLAIMING, (_C.REPORT_FAILED, _C.ARM_RECLAIM)),
        _E.FAILED: (_S.RECLAIMING, _GIVE_UP),
        _E.DEADLINE: (_S.RECLAIMING, _GIVE_UP),
        _E.ABORTED: (_S.RECLAIMING, _LEAVE),
    },
    _S.SETTLING: {
        _E.ARRIVED: (_S.RELEASED, ()),
        _E.ANSWERED: (_S.SETTLING, ()),
        _E.NEVER_SENT: (_S.SETTLING, ()),
        _E.FAILED: (_S.RECLAIMING, _GIVE_UP),
        _E.DEADLINE: (_S.RECLAIMING, _GIVE_UP),
        _E.ABORTED: (_S.RECLAIMING, _LEAVE),
    },
    # All units may have arrived just before we gave up: then vLLM rightly takes the request as loaded.
    _S.RECLAIMING: {
        _E.ARRIVED: (_S.RELEASED, ()),
        _E.HANDED_BACK: (_S.RELEASED, ()),
        _E.ANSWERED: (_S.RECLAIMING, ()),
        _E.NEVER_SENT: (_S.RECLAIMING, ()),
        _E.FAILED: (_S.RECLAIMING, ()),
        _E.ABORTED: (_S.RECLAIMING, ()),
        _E.DEADLINE: (_S.RECLAIMING, (_C.COMPLAIN, _C.ARM_RECLAIM)),
    },
    _S.RELEASED: {},
}

RECLAIM_S = 30.0
"""Seconds the workers may take to hand a request back: they do it in the next step unless a forward pass is stuck."""
