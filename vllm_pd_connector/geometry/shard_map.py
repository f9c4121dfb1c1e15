"""Which prefiller rank holds which heads of which decoder rank: computed from head counts, never from a TP ratio. Pure.

Ownership follows vLLM: with `num_kv_heads >= tp`, rank r holds `num_kv_heads / tp` consecutive heads; with fewer heads
than ranks, each head is held by `tp / num_kv_heads` consecutive ranks (MLA is the case of one head).
"""

from dataclasses import dataclass

from vllm_pd_connector.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSlice:
    """Part of a page that one source rank writes to one destination rank.

    Attributes:
        src_rank: prefiller rank.
        src_head: first head, counted within the source page.
        dst_head: first head, counted within the destination page.
        num_heads: consecutive heads.
    """

    src_rank: int
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


def sources(dst_rank: int, *, src_tp: int, dst_tp: int, num_kv_heads: int) -> list[HeadSlice]:
    """The slices that together fill every page of `dst_rank` exactly once, in head order.

    Where several source ranks hold the same head, equal sides pair rank with rank and others take the first holder;
    striping over replicas belongs to unequal shapes.
    """
    wanted = owned_heads(dst_rank, dst_tp, num_kv_heads)
    if src_tp == dst_tp:
        return [HeadSlice(src_rank=dst_rank, src_head=0, dst_head=0, num_heads=len(wanted))]
    slices: list[HeadSlice] = []
    head = wanted.start
    while head < wanted.stop:
        src_rank = next(r for r in range(src_tp) if head in owned_heads(r, src_tp, num_kv_heads))
        owned = owned_heads(src_rank, src_tp, num_kv_heads)
        count = min(owned.stop, wanted.stop) - head
        slices.append(
            HeadSlice(src_rank=src_rank, src_head=head - owned.start, dst_head=head - wanted.start, num_heads=count)
        )
        head += count
    return slices
