"""What had arrived of a failed attempt is kept: its leading full pages enter vLLM's prefix cache (ADR 6).

owned by: EngineCore's main thread; nothing here blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd_connector.engine import vllm_compat
from vllm_pd_connector.plan.extent import Span

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from vllm_pd_connector.engine.decoder_identity import DecoderIdentity
    from vllm_pd_connector.engine.fenced_pages import FencedPages
    from vllm_pd_connector.telemetry.counters import Tally
    from vllm_pd_connector.telemetry.timeline import Timeline


class KeptPrefix:
    """The next attempt, or the prefill here, finds the pages as a prefix hit, while the fence holds the others.

    Only where the leading pages are all that is read of the leading tokens: one cache group without a window.

    Args:
        identity: this decoder.
        fenced: the pages of failed attempts.
        tally: counters.
        timeline: moments.
    """

    def __init__(self, identity: DecoderIdentity, fenced: FencedPages, tally: Tally, timeline: Timeline) -> None:
        self._identity = identity
        self._fenced = fenced
        self._tally = tally
        self._timeline = timeline
        self._manager: KVCacheManager | None = None
        self._kept: dict[str, Span] = {}

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def keep(
        self, request: Request, transfer_id: str, *, blocks: list[int], local_tokens: int, stops: list[int]
    ) -> None:
        """Every rank has handed a request back as failed, and vLLM is about to take its pages from it.

        Args:
            request: it still has them in vLLM's books.
            transfer_id: the failed attempt.
            blocks: its pages, first to last.
            local_tokens: what the decoder had before it.
            stops: token after the last that had arrived without a gap, from each rank.
        """
        manager = self._manager
        assert manager is not None
        is_exact = self._identity.windows == [None] and vllm_compat.has_one_group(manager)
        if not is_exact or len(stops) != len(self._identity.ranks):
            return
        block_size = self._identity.geometry.block_size
        whole = blocks[: max(0, min(stops) - local_tokens) // block_size]
        vllm_compat.cache_prefix(manager, request, local_tokens + len(whole) * block_size)
        kept = [block for block in whole if vllm_compat.is_cached(manager, block)]
        if not kept:
            return  # nothing had arrived, or prefix caching is off
        self._fenced.release(transfer_id, kept)
        num_tokens = len(kept) * block_size
        start = self._kept.get(request.request_id, Span(local_tokens, 0)).start
        self._kept[request.request_id] = Span(start, local_tokens + num_tokens)
        self._tally.add("tokens_kept", num_tokens)
        self._timeline.mark(transfer_id, "kept", tokens=num_tokens, pages=len(kept))

    def count_as_computed(self, request: Request) -> None:
        """Of the tokens a request has just found in the cache, those that were kept were computed for it."""
        kept = self._kept.get(request.request_id, Span(0, 0))
        found = Span(kept.start, min(kept.stop, vllm_compat.num_found_here(request)))
        vllm_compat.count_as_computed(request, len(found))

    def forget(self, request_id: str) -> None:
        """The request has its pages, or is over."""
        self._kept.pop(request_id, None)
