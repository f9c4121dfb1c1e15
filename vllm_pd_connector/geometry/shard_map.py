"""Which prefiller rank holds which heads of which decoder rank: computed from head counts, never from a TP ratio. Pure.

Ownership follows vLLM: with `num_kv_heads >= tp`, rank r holds `num_kv_heads / tp` consecutive heads; with fewer heads
than ranks, each head is held by `tp / num_kv_heads` consecutive ranks (MLA is the case of one head).
"""

from dataclasses import dataclass

from vllm_pd_connector.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSlice:
    """Part of a destination page that comes from one source rank, or from any of several that hold the same.

    Attributes:
        src_ranks: prefiller ranks that hold these heads; they take turns, page by page (see `chosen_replica`).
        src_head: first head, counted within the source page.
        dst_head: first head, counted within the destination page.
        num_heads: consecutive heads.
    """

    src_ranks: range
    src_head: int
    dst_head: int
    num_heads: int


def owned_heads(rank: int, tp_size: int, num_kv_heads: int) -> range:
    """Global numbers of the KV heads that `rank` of `tp_size` holds.

    Raises:
        ConfigError: heads and ranks do not divide each other (vLLM refuses such a model as well).
    """
    if num_kv_heads % tp_size == 0:
        per_rank = num_kv_heads // tp_size
        return range(rank * per_rank, (rank + 1) * per_rank)
    if tp_size % num_kv_heads == 0:
        head = rank // (tp_size // num_kv_heads)
        return range(head, head + 1)
    raise ConfigError(
        f"{num_kv_heads} KV heads cannot be shared by tensor_parallel_size {tp_size}: neither divides the other"
    )


def holders(head: int, tp_size: int, num_kv_heads: int) -> range:
    """The ranks that hold a head."""
    if num_kv_heads % tp_size == 0:
        rank = head // (num_kv_heads // tp_size)
        return range(rank, rank + 1)
    replicas = tp_size // num_kv_heads
    return range(head * replicas, (head + 1) * replicas)


def sources(dst_rank: int, *, src_tp: int, dst_tp: int, num_kv_heads: int) -> list[HeadSlice]:
    """The slices that together fill every page of `dst_rank` exactly once, in head order."""
    wanted = owned_heads(dst_rank, dst_tp, num_kv_heads)
    slices: list[HeadSlice] = []
    head = wanted.start
    while head < wanted.stop:
        ranks = holders(head, src_tp, num_kv_heads)
        owned = owned_heads(ranks.start, src_tp, num_kv_heads)
        count = min(owned.stop, wanted.stop) - head
        slices.append(
            HeadSlice(src_ranks=ranks, src_head=head - owned.start, dst_head=head - wanted.start, num_heads=count)
        )
        head += count
    return slices


def first_replica(transfer_id: str, dst_rank: int) -> int:
    """Where the turns of the replicas begin: spread over transfers, and over the destinations of one transfer.

    Replica `(first_replica(...) + position) % len(src_ranks)` sends the page at that position of the prompt to
    `dst_rank`. Both sides can compute it, and one long prompt is striped over all replicas.
    """
    return int(transfer_id[:8], 16) + dst_rank
