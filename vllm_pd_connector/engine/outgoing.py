"""One transfer as a prefiller rank sees it: its state, what is unposted, what is in flight, who waits for silence."""

from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_pd_connector.engine.links import Link
from vllm_pd_connector.lifecycle.outgoing import OUTGOING_TABLE, OutgoingCommand, OutgoingEvent, OutgoingState
from vllm_pd_connector.lifecycle.table import step
from vllm_pd_connector.wire.messages import Quiet

WhenQuiet = Callable[[Quiet], None]
"""Called once, on the messenger thread, with what the decoder is to be told."""


@dataclass(slots=True)
class Outgoing:
    """owned by: Writer, on the messenger thread.

    Attributes:
        links: the decoder ranks that need something of this rank, perhaps none.
        dst_layers: this rank's layers in the decoder's tables.
        lease_ends: seconds on the writer's clock after which nothing is posted.
        num_unposted: chunk writes handed out that still have layers to post.
        num_in_flight: writes posted, or armed to be, and not over.
        is_clean: no write has failed.
        report_as: request id to report as sent once quiet.
    """

    transfer_id: str
    links: list[Link] = field(default_factory=list)
    dst_layers: list[int] = field(default_factory=list)
    state: OutgoingState = OutgoingState.OPEN
    lease_ends: float = 0.0
    num_unposted: int = 0
    num_in_flight: int = 0
    seq: int = 0
    units: int = 0
    is_clean: bool = True
    report_as: str | None = None
    waiters: list[WhenQuiet] = field(default_factory=list)

    @property
    def may_post(self) -> bool:
        return self.state in (OutgoingState.OPEN, OutgoingState.CLOSING)

    @property
    def will_post(self) -> bool:
        """More may be handed to the transport, or to a native thread."""
        return self.state is OutgoingState.OPEN or (self.state is OutgoingState.CLOSING and self.num_unposted > 0)

    @property
    def is_drained(self) -> bool:
        return not self.num_unposted and not self.num_in_flight

    def event(self, event: OutgoingEvent) -> None:
        """Take a transition and carry out its command."""
        self.state, commands = step(OUTGOING_TABLE, self.state, event)
        if OutgoingCommand.DROP_UNPOSTED in commands:
            self.num_unposted = 0

    @property
    def silence(self) -> Quiet:
        """What the decoder is told when nothing is in flight any more."""
        return Quiet(self.transfer_id, self.units, self.is_clean)

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq - 1
