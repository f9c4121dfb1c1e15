"""Which pages of a prompt a transfer covers, and which of them a step completes. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The pages a decoder asked for, by position in the prompt.

    Attributes:
        first_page: position of the first page; those before it were prefix hits on the decoder and are shared.
        num_pages: pages to write; the last may be partial.
    """

    first_page: int
    num_pages: int

    @property
    def stop(self) -> int:
        return self.first_page + self.num_pages


def remote_extent(*, num_tokens: int, local_tokens: int, block_size: int) -> Extent:
    """The pages that hold tokens `local_tokens .. num_tokens - 1`.

    Args:
        num_tokens: tokens whose KV is wanted: the prompt without its last token.
        local_tokens: leading tokens the decoder already has; a multiple of `block_size`.
        block_size: tokens per page.
    """
    first = local_tokens // block_size
    return Extent(first_page=first, num_pages=-(-num_tokens // block_size) - first)


def completed_pages(extent: Extent, *, sent_stop: int, computed_tokens: int, num_tokens: int, block_size: int) -> range:
    """Positions that a step completes and that were not handed out before (law 4).

    A page counts as complete when all its slots are computed, or when the whole prompt is: so a partial last page goes
    exactly once, at the end.

    Args:
        extent: the pages of the transfer.
        sent_stop: position after the last page handed out so far (the high-water mark).
        computed_tokens: tokens whose KV is in memory after the step.
        num_tokens: tokens in the prefiller's prompt.
        block_size: tokens per page.
    """
    whole = computed_tokens >= num_tokens
    stop = -(-num_tokens // block_size) if whole else computed_tokens // block_size
    start = max(extent.first_page, sent_stop)
    return range(start, max(start, min(stop, extent.stop)))
