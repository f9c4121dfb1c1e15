"""What every page of a server holds and who may write it, checked when bytes land and when blocks change hands.

A page's content is a number that says which tokens of which prompt it stands for; so a wrong, stale, torn or missing
write is seen as what it would be for a client: tokens computed from another prompt's KV.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.testing.simulation.world import Process

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.core.block_pool import BlockPool

BLOCK_SIZE = 4
NUM_LAYERS = 2
MAX_PAGES = 256
"""Pages of one prompt with its output."""


def content(family: int, position: int, filled: int) -> int:
    """The content of page `position` of a prompt of `family` whose first `filled` slots are computed."""
    return (family * MAX_PAGES + position) * (BLOCK_SIZE + 1) + filled


def holds(value: int, wanted: int) -> bool:
    """Whether a content is that of the wanted page with at least as many slots."""
    return value // (BLOCK_SIZE + 1) == wanted // (BLOCK_SIZE + 1) and value >= wanted


@dataclass(slots=True)
class Transfer:
    """A reservation as vLLM's books show it, not as our code says.

    Attributes:
        stamps: for each block that may be written, how often it had been allocated when it was reserved.
        is_loaded: vLLM was told that all pages arrived.
    """

    transfer_id: str
    request_id: str
    opened_at: float
    stamps: dict[int, int]
    is_loaded: bool = False
    posted: set[tuple[int, int]] = field(default_factory=set)


class Pages:
    """The pages of one server process, over all ranks. One instance for each incarnation.

    Attributes:
        may_preempt: vLLM may take blocks from requests now; the workers have not been told yet.
        freed_under_a_read: blocks so taken while a posted write reads them.
        given_up: those of a transfer that was failed because its writes outlasted the wait.

    Args:
        process: whose memory this is.
        pool: vLLM's; its calls are watched from now on.
        num_ranks: tensor-parallel ranks, each with its own part of every page.
    """

    def __init__(self, process: Process, pool: BlockPool, num_ranks: int) -> None:
        self.process = process
        self.pool = pool
        self.num_ranks = num_ranks
        size = NUM_LAYERS * len(pool.blocks)
        self.contents = [[0] * size for _ in range(num_ranks)]
        self.transfers: dict[str, Transfer] = {}
        self.by_request: dict[str, list[Transfer]] = {}
        self.may_preempt = False
        self.freed_under_a_read: set[int] = set()
        self.given_up: set[int] = set()
        self._stamps = [0] * len(pool.blocks)
        self._readers = [[0] * len(pool.blocks) for _ in range(num_ranks)]
        self._watch_pool()

    @property
    def num_in_use(self) -> int:
        return len(self.pool.blocks) - 1 - self.pool.get_num_free_blocks()

    def open(self, transfer_id: str, request_id: str, blocks: Sequence[int]) -> None:
        """vLLM has allocated these blocks and holds the request. Those with a hash are shared: prefix hits (law 3)."""
        own = {b: self._stamps[b] for b in blocks if self.pool.blocks[b].block_hash is None}
        transfer = Transfer(transfer_id, request_id, self.process.world.now, own)
        self.transfers[transfer_id] = transfer
        self.by_request.setdefault(request_id, []).append(transfer)

    def compute(self, layer: int, first_token: int, stop: int, family: int, blocks: Sequence[int]) -> None:
        """A forward pass fills the slots of these tokens in one layer of every rank."""
        base = layer * len(self.pool.blocks)
        for position in range(first_token // BLOCK_SIZE, -(-stop // BLOCK_SIZE)):
            value = content(family, position, min(BLOCK_SIZE, stop - position * BLOCK_SIZE))
            for contents in self.contents:
                contents[base + blocks[position]] = value

    def expect(self, request_id: str, family: int, num_tokens: int, blocks: Sequence[int]) -> None:
        """The KV of a request's first tokens must be in its pages, in every layer of every rank."""
        for position in range(-(-num_tokens // BLOCK_SIZE)):
            wanted = content(family, position, min(BLOCK_SIZE, num_tokens - position * BLOCK_SIZE))
            for rank, contents in enumerate(self.contents):
                for layer in range(NUM_LAYERS):
                    value = contents[layer * len(self.pool.blocks) + blocks[position]]
                    if not holds(value, wanted):
                        self._break(
                            5,
                            f"wrong tokens: page {position} of {request_id} (rank {rank}, layer {layer}, block "
                            f"{blocks[position]}) holds {value}, wanted {wanted}",
                        )

    def check_land(self, transfer_id: str, rank: int, pages: Iterable[int]) -> None:
        """Bytes of a transfer arrive in these pages of a rank now (laws 1 and 3)."""
        transfer = self.transfers.get(transfer_id)
        for page in pages:
            block = page % len(self.pool.blocks)
            where = f"block {block} of {self.process}, rank {rank}, transfer {transfer_id[:6]}"
            if transfer is None or block not in transfer.stamps:
                self._break(3, f"a page is written that was not reserved for it, or is shared: {where}")
            elif self.pool.blocks[block].ref_cnt == 0:
                self._break(1, f"a free page is written: {where}")
            elif self._stamps[block] != transfer.stamps[block]:
                self._break(1, f"a page is written after it was given to another request: {where}")
            elif transfer.is_loaded:
                self._break(1, f"a page is written although its request runs already: {where}")

    def check_posted_once(self, transfer_id: str, rank: int, pages: Iterable[int]) -> None:
        """Law 4, on the decoder's books: a prefiller posts a write of these pages of one rank."""
        transfer = self.transfers.get(transfer_id)
        for page in pages if transfer is not None else ():
            if (rank, page) in transfer.posted:  # type: ignore[union-attr]
                self._break(4, f"page {page} of rank {rank} is sent twice for transfer {transfer_id[:6]}")
            transfer.posted.add((rank, page))  # type: ignore[union-attr]

    def start_read(self, rank: int, pages: Iterable[int]) -> None:
        """A posted write reads these pages until `end_read` (law 2)."""
        for page in pages:
            block = page % len(self.pool.blocks)
            self._readers[rank][block] += 1
            if self.pool.blocks[block].ref_cnt == 0:
                self._read_while_free(block)

    def end_read(self, rank: int, pages: Iterable[int]) -> None:
        for page in pages:
            self._readers[rank][page % len(self.pool.blocks)] -= 1

    def is_read(self, block: int) -> bool:
        return any(readers[block] for readers in self._readers)

    def end_preemption(self, *, has_waited: bool) -> None:
        """The workers have waited for reads of preempted blocks, if need be for as long as they may."""
        self.may_preempt = False
        self.given_up = {block for block in self.given_up if self.is_read(block)}
        still = {block for block in self.freed_under_a_read if self.is_read(block)}
        if still and not has_waited:
            self._break(2, f"{self.process} goes on although a posted write reads preempted blocks {still}")
        self.given_up |= still
        self.freed_under_a_read.clear()

    def check_overwrite(self, blocks: Iterable[int]) -> None:
        """A forward pass is about to write these blocks."""
        for block in blocks:
            if self.is_read(block) and block not in self.given_up:
                self._break(2, f"block {block} of {self.process} is overwritten while a posted write reads it")

    def _watch_pool(self) -> None:
        allocate, free = self.pool.get_new_blocks, self.pool.free_blocks

        def get_new_blocks(num_blocks: int, *args: Any, **kwargs: Any) -> Any:
            blocks = allocate(num_blocks, *args, **kwargs)
            for block in blocks:
                self._stamps[block.block_id] += 1
            return blocks

        def free_blocks(ordered_blocks: Iterable[Any], *args: Any, **kwargs: Any) -> None:
            blocks = list(ordered_blocks)
            free(blocks, *args, **kwargs)
            for block in blocks:
                if block.ref_cnt < 0:
                    self._break(7, f"block {block.block_id} of {self.process} is given back twice")
                if block.ref_cnt == 0 and self.is_read(block.block_id):
                    self._read_while_free(block.block_id)

        self.pool.get_new_blocks = get_new_blocks  # type: ignore[method-assign]
        self.pool.free_blocks = free_blocks  # type: ignore[method-assign]

    def _read_while_free(self, block: int) -> None:
        """Allowed to a preemption only: the workers wait for the read before anything is overwritten."""
        if not self.may_preempt:
            self._break(2, f"block {block} of {self.process} is free while a posted write reads it")
        self.freed_under_a_read.add(block)

    def _break(self, law: int, text: str) -> None:
        self.process.world.break_law(law, text)
