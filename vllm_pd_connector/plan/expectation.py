"""How many units a decoder rank must see before a request may run (law 5). Pure.

A unit is one slice of one page of one layer: what one source rank writes of it. Chunking and merging on the prefiller
change how many writes and notifications carry the units, never their number.
"""

from vllm_pd_connector.geometry.shard_map import sources


def expected_units(
    dst_rank: int, *, num_layers: int, num_pages: int, src_tp: int, dst_tp: int, num_kv_heads: int
) -> int:
    """Units that `dst_rank` waits for, over all source ranks."""
    return num_layers * num_pages * len(sources(dst_rank, src_tp=src_tp, dst_tp=dst_tp, num_kv_heads=num_kv_heads))


def sent_units(*, num_layers: int, num_pages: int) -> int:
    """Units that one source rank reports for one destination rank when it has written these pages."""
    return num_layers * num_pages
