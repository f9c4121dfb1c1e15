"""Runs of consecutive blocks: the unit in which pages merge into one descriptor. Pure."""

from collections.abc import Sequence


def num_runs(src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> int:
    """Descriptors that remain after merging neighbours: pages adjacent at the source and at the destination alike."""
    if not src_blocks:
        return 0
    steps = zip(src_blocks, src_blocks[1:], dst_blocks, dst_blocks[1:], strict=False)
    return 1 + sum(1 for s0, s1, d0, d1 in steps if s1 != s0 + 1 or d1 != d0 + 1)
