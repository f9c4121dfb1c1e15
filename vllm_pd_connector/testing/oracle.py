"""A brute-force map of every byte of a page, and the bytes a forward pass would leave there. For tests."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.geometry.page import PageLayout, PageShape

Bytes = NDArray[np.uint8]


@cache
def byte_map(page: PageShape) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """By brute force, for each byte of a page: its head, its token, and which byte of that slot it is."""
    owner: dict[int, tuple[int, int, int]] = {}
    planes = page.planes or ((1, page.slot_bytes),)
    starts = list(accumulate((rows * size for rows, size in planes), initial=0))
    for head in range(page.num_heads):
        for token in range(page.block_size):
            for start, (rows, size) in zip(starts, planes, strict=False):
                for row in range(rows):
                    for byte in range(size):
                        if page.layout is PageLayout.NHD:
                            at = (token * page.num_heads + head) * page.slot_bytes + start + row * size + byte
                        else:
                            at = (head * page.slot_bytes + start + row * size) * page.block_size + token * size + byte
                        assert at not in owner
                        owner[at] = (head, token, start + row * size + byte)
    assert sorted(owner) == list(range(page.page_bytes))
    heads, tokens, parts = (np.asarray([owner[at][i] for at in range(page.page_bytes)]) for i in range(3))
    return heads, tokens, parts


def kv_bytes(
    page: PageShape, first_head: int, positions: Sequence[int], layers: Sequence[int]
) -> tuple[Bytes, NDArray[np.int64]]:
    """What a forward pass leaves in pages at some positions of the prompt, the same whenever and wherever computed.

    Returns:
        bytes `[layers, pages, page_bytes]` and the token each byte belongs to, `[pages, page_bytes]`.
    """
    heads, tokens, parts = byte_map(page)
    token = np.asarray(positions, dtype=np.int64)[:, None] * page.block_size + tokens
    value = (
        np.asarray(layers, dtype=np.int64)[:, None, None] * 7919 + token * 104_729 + (heads + first_head) * 1_299_709
    )
    return ((value + parts * 15_485_863) * 2_654_435_761 >> 16).astype(np.uint8), token
