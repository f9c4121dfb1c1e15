"""Pages taken over from a request that was given up, until their writers are quiet or cannot write any more (law 1).

owned by: EngineCore's main thread; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING

from vllm_pd_connector.control.fence_client import MARGIN_S
from vllm_pd_connector.engine import vllm_compat
from vllm_pd_connector.lifecycle.deadline import Deadlines
from vllm_pd_connector.lifecycle.fence import FENCE_TABLE, FenceCommand, FenceEvent, FenceState, silence_end
from vllm_pd_connector.lifecycle.table import step

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from vllm_pd_connector.config import PDConfig
    from vllm_pd_connector.control.dispatcher import Dispatcher, FenceResult
    from vllm_pd_connector.telemetry.counters import Tally
    from vllm_pd_connector.telemetry.timeline import Timeline

logger = getLogger(__name__)


@dataclass(slots=True)
class Fenced:
    """Pages of one transfer. `closed_at`: when its dispatch was closed; `lease_s`: what its prefiller was given."""

    transfer_id: str
    blocks: list[int]
    closed_at: float
    lease_s: float
    state: FenceState = FenceState.ASKING


class FencedPages:
    """Args:
    config: validated.
    dispatcher: asks the writers.
    tally: counters.
    timeline: moments.
    clock: monotonic seconds.
    on_lifted: called with the transfer id when its pages have gone back.
    """

    def __init__(
        self,
        config: PDConfig,
        dispatcher: Dispatcher,
        tally: Tally,
        timeline: Timeline,
        clock: Callable[[], float],
        on_lifted: Callable[[str], None],
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._tally = tally
        self._timeline = timeline
        self._clock = clock
        self._on_lifted = on_lifted
        self._manager: KVCacheManager | None = None
        self._fenced: dict[str, Fenced] = {}
        self._deadlines: Deadlines[str] = Deadlines()

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def __contains__(self, transfer_id: str) -> bool:
        return transfer_id in self._fenced

    def __len__(self) -> int:
        return len(self._fenced)

    def values(self) -> Iterable[Fenced]:
        return self._fenced.values()

    @property
    def num_pages(self) -> int:
        return sum(len(fenced.blocks) for fenced in self._fenced.values())

    def take_over(self, transfer_id: str, blocks: list[int], lease_s: float) -> None:
        """Keep the pages by a reference of our own, so that their request can go on, and have their writers stopped."""
        assert self._manager is not None
        vllm_compat.pin_blocks(self._manager, blocks)
        self._fenced[transfer_id] = Fenced(transfer_id, blocks, self._clock(), lease_s)
        self._dispatcher.fence(transfer_id)
        # The dispatcher answers in time; this one catches a dispatcher that died.
        self._deadlines.arm(transfer_id, self._clock() + self._config.fence_s + MARGIN_S)

    def release(self, transfer_id: str, blocks: list[int]) -> None:
        """Give some of the pages back before the others: every write of them is over."""
        assert self._manager is not None
        fenced = self._fenced.get(transfer_id)
        if fenced is not None:
            released = set(blocks)
            fenced.blocks = [block for block in fenced.blocks if block not in released]
            vllm_compat.unpin_blocks(self._manager, blocks)

    def answered(self, result: FenceResult) -> None:
        """The writers of a transfer have answered, or have not."""
        fenced = self._fenced.get(result.transfer_id)
        if fenced is None:
            return
        if result.is_quiet:
            self._event(fenced, FenceEvent.QUIET)
            return
        logger.warning("event=fence_unanswered transfer=%s reason=%s", result.transfer_id, result.reason)
        self._event(fenced, FenceEvent.GONE if result.is_dead else FenceEvent.UNREACHABLE)

    def expire(self) -> None:
        """Carry out what is due."""
        for transfer_id in self._deadlines.expired(self._clock()):
            self._event(self._fenced[transfer_id], FenceEvent.DEADLINE)

    def _event(self, fenced: Fenced, event: FenceEvent) -> None:
        fenced.state, commands = step(FENCE_TABLE, fenced.state, event)
        for command in commands:
            match command:
                case FenceCommand.ARM_SILENCE:
                    end = silence_end(
                        now=self._clock(),
                        closed_at=fenced.closed_at,
                        lease_s=fenced.lease_s,
                        unreachable_s=self._config.unreachable_s,
                    )
                    self._deadlines.arm(fenced.transfer_id, end)
                case FenceCommand.ARM_QUARANTINE:
                    self._deadlines.arm(fenced.transfer_id, self._clock() + self._config.quarantine_s)
                case FenceCommand.UNPIN:
                    self._lift(fenced, event)

    def _lift(self, fenced: Fenced, cause: FenceEvent) -> None:
        assert self._manager is not None
        vllm_compat.unpin_blocks(self._manager, fenced.blocks)
        self._deadlines.disarm(fenced.transfer_id)
        del self._fenced[fenced.transfer_id]
        self._tally.add("fences_lifted" if cause is FenceEvent.QUIET else "fences_expired")
        self._dispatcher.finish(fenced.transfer_id)
        self._timeline.mark(fenced.transfer_id, "fence_lifted", cause=cause.name.lower())
        self._on_lifted(fenced.transfer_id)
