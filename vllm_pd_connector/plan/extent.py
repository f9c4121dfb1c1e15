"""Which tokens of a prompt a transfer covers, and which of them a step completes. Pure.

Everything is counted in tokens: the two sides may cut pages of different sizes. What moves at once is a granule, the
tokens of the smaller of the two pages.
"""

from typing import NamedTuple


class Span(NamedTuple):
    """Tokens `start` to `stop - 1` of a prompt, in one cache group."""

    start: int
    stop: int

    def __len__(self) -> int:
        return max(0, self.stop - self.start)

    def pages(self, block_size: int) -> range:
        """Positions of the pages that hold these tokens; the first and the last may be partial."""
        first = self.start // block_size
        return range(first, -(-self.stop // block_size) if len(self) else first)


def wanted_span(*, num_tokens: int, local_tokens: int, window: int | None = None) -> Span:
    """The tokens whose KV a decoder will read and does not have.

    Args:
        num_tokens: tokens whose KV is wanted: the prompt without its last token.
        local_tokens: leading tokens the decoder already has.
        window: of a sliding-window group; the next token attends to itself and to `window - 1` tokens before it.
    """
    first_read = 0 if window is None else num_tokens + 1 - window
    return Span(min(num_tokens, max(local_tokens, first_read)), num_tokens)


def completed_span(wanted: Span, *, sent_stop: int, computed_tokens: int, num_tokens: int, granule: int) -> Span:
    """The wanted tokens that a step completes and that were not handed out before (law 4).

    A granule counts as complete when all its tokens are computed, or when the whole prompt is: so a partial last one
    goes exactly once, at the end.

    Args:
        wanted: the tokens of the transfer.
        sent_stop: token after the last one handed out so far (the high-water mark).
        computed_tokens: tokens whose KV is in memory after the step.
        num_tokens: tokens in the prefiller's prompt.
        granule: tokens that move at once.
    """
    complete = num_tokens if computed_tokens >= num_tokens else computed_tokens - computed_tokens % granule
    start = max(wanted.start, sent_stop)
    return Span(start, max(start, min(complete, wanted.stop)))
