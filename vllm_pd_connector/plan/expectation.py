"""How many units a decoder rank must see before a request may run (law 5). Pure.

A unit is the KV of one token of one head in one layer. Whatever the prefiller's shape, its chunks and its merging are,
each unit comes from exactly one of its ranks; so the number follows from the decoder's side alone, and is known before
a prefiller has been chosen.
"""

from collections.abc import Sequence

from vllm_pd_connector.plan.extent import Span


def expected_units(spans: Sequence[Span], *, layers: Sequence[int], num_heads: int) -> int:
    """Units that fill the wanted tokens of one rank.

    Args:
        spans: wanted tokens of each cache group.
        layers: number of layers of each cache group.
        num_heads: KV heads of the rank.
    """
    return num_heads * sum(len(span) * count for span, count in zip(spans, layers, strict=True))
