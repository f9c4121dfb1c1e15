"""A dispatcher without HTTP: it remembers what it was asked, and a test says what became of it.

Its methods are those of `control.dispatcher.Dispatcher`; a contract test compares them.
"""

from collections.abc import Callable
from typing import Any

from vllm_pd_connector.control.dispatcher import Dispatch, DispatchOutcome, FenceResult
from vllm_pd_connector.lifecycle.decode_request import DecodeEvent
from vllm_pd_connector.lifecycle.prefiller import Candidate, PrefillerState


class FakeDispatcher:
    """owned by: one test, in one thread.

    Args:
        urls: the pool; all usable at first.

    Attributes:
        states: of each prefiller; a test may change them.
        complaints: about those that are not usable.
        full: those that may be given nothing more.
        dispatched: orders in sequence.
        cancelled: transfer ids whose dispatch was broken off.
        fenced: transfer ids whose senders were asked to be quiet.
        finished: transfer ids nothing more will be asked about.
    """

    def __init__(self, urls: list[str]) -> None:
        self.states = dict.fromkeys(urls, PrefillerState.USABLE)
        self.complaints: dict[str, str] = {}
        self.full: set[str] = set()
        self.dispatched: list[Dispatch] = []
        self.cancelled: list[str] = []
        self.fenced: list[str] = []
        self.finished: list[str] = []
        self.is_started = False
        self.is_closed = False
        self._events: list[DispatchOutcome | FenceResult] = []

    @classmethod
    def factory(cls, made: list["FakeDispatcher"]) -> Callable[..., Any]:
        """What to pass as `open_dispatcher`; every dispatcher made is added to `made`."""

        def open_dispatcher(config: Any, **_: Any) -> FakeDispatcher:
            made.append(cls(list(config.prefillers)))
            return made[-1]

        return open_dispatcher

    def start(self) -> None:
        self.is_started = True

    def close(self) -> None:
        self.is_closed = True

    def pool(self) -> list[Candidate]:
        return [
            Candidate(url, state, 0, self.complaints.get(url, ""), url in self.full)
            for url, state in self.states.items()
        ]

    def take_events(self) -> list[DispatchOutcome | FenceResult]:
        events, self._events = self._events, []
        return events

    def dispatch(self, order: Dispatch) -> None:
        self.dispatched.append(order)

    def cancel(self, transfer_id: str) -> None:
        self.cancelled.append(transfer_id)

    def fence(self, transfer_id: str) -> None:
        self.fenced.append(transfer_id)

    def finish(self, transfer_id: str) -> None:
        self.finished.append(transfer_id)

    # What a test scripts

    def report(self, transfer_id: str, event: DecodeEvent, reason: str = "", url: str = "") -> None:
        """A dispatch has ended: ANSWERED, FAILED or NEVER_SENT."""
        self._events.append(DispatchOutcome(transfer_id=transfer_id, event=event, reason=reason, url=url))

    def answer_fence(self, transfer_id: str, *, is_quiet: bool, is_dead: bool = False) -> None:
        """The senders of a transfer have answered, or have not."""
        reason = "" if is_quiet else "no answer"
        self._events.append(FenceResult(transfer_id=transfer_id, is_quiet=is_quiet, is_dead=is_dead, reason=reason))
