"""What every page of a server holds and who may write it, checked when bytes land and when blocks change hands.

A page is made of cells, and the content of a cell is a number that says which head of which tokens of which prompt it
stands for; so a wrong, stale, torn or missing write is seen as what it would be for a client: tokens computed from
another prompt's KV.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_pd_connector.testing.simulation.world import Process

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vllm.v1.core.block_pool import BlockPool

    from vllm_pd_connector.testing.simulation.scenario import Scenario

GRANULE = 4
"""Tokens that move at once: those of the smallest page."""

NUM_LAYERS = 2
HEAD_SIZE = 16
CELL_BYTES = GRANULE * 2 * HEAD_SIZE * 4
"""A cell is a granule of one head in one layer of one rank: K and V in float32."""

MAX_GRANULES = 256
"""Granules of one prompt with its output."""

MAX_HEADS = 2


class Layout(NamedTuple):
    """The pages of every rank of a server. A page is its cells, head after head, as in HND pages."""

    num_ranks: int
    block_size: int
    num_heads: int
    num_blocks: int

    @classmethod
    def of(cls, scenario: Scenario, role: str) -> Layout:
        """The pages of a server of this role."""
        shape = scenario.shape
        side = shape.prefiller if role == "kv_producer" else shape.decoder
        num_blocks = scenario.num_blocks * GRANULE // side.block_size
        return cls(side.num_ranks, side.block_size, shape.num_heads, num_blocks)

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.num_heads // self.num_ranks)

    @property
    def spots(self) -> int:
        """Granules of a page."""
        return self.block_size // GRANULE

    def heads(self, rank: int) -> list[int]:
        """As vLLM shares them out; with fewer heads than ranks neighbours hold the same."""
        first = rank * self.num_heads // self.num_ranks
        return list(range(first, first + self.heads_per_rank))


def content(family: int, position: int, head: int, filled: int) -> int:
    """A cell of the granule at `position` of a prompt of `family`, whose first `filled` tokens are computed."""
    return ((family * MAX_GRANULES + position) * MAX_HEADS + head) * (GRANULE + 1) + filled


def holds(value: int, wanted: int) -> bool:
    """Whether a content is that of the wanted cell with at least as many tokens."""
    return value // (GRANULE + 1) == wanted // (GRANULE + 1) and value >= wanted


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
        layout: how many ranks there are, and what each holds of every page.
    """

    def __init__(self, process: Process, pool: BlockPool, layout: Layout) -> None:
        self.process = process
        self.pool = pool
        self._layout = layout
        self._heads = [layout.heads(rank) for rank in range(layout.num_ranks)]
        self._cells_per_page = layout.heads_per_rank * layout.spots
        size = NUM_LAYERS * len(pool.blocks) * self._cells_per_page
        self.contents = [[0] * size for _ in self._heads]
        self.transfers: dict[str, Transfer] = {}
        self.by_request: dict[str, list[Transfer]] = {}
        self.may_preempt = False
        self.freed_under_a_read: set[int] = set()
        self.given_up: set[int] = set()
        self._stamps = [0] * len(pool.blocks)
        self._readers = [[0] * len(pool.blocks) for _ in self._heads]
        self._cells_read: list[Counter[int]] = [Counter() for _ in self._heads]
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

    def cells_of_pieces(self, pieces: Sequence[tuple[int, int]]) -> list[range]:
        """The cells within a page that each of its pieces, (offset, length) in bytes, is made of."""
        found = [range(offset // CELL_BYTES, (offset + length) // CELL_BYTES) for offset, length in pieces]
        assert [(c.start * CELL_BYTES, len(c) * CELL_BYTES) for c in found] == list(pieces), pieces
        return found

    def cells(self, pieces: Sequence[range], numbers: Sequence[int]) -> Sequence[int]:
        """Places in `contents` of the pieces with these numbers, as `PageView` counts them."""
        if len(pieces) == self._cells_per_page == 1:
            return numbers
        places: list[int] = []
        for number in numbers:
            row, block = divmod(number, len(self.pool.blocks))
            layer, piece = divmod(row, len(pieces))
            first = self.first_cell(layer, block)
            places.extend(first + cell for cell in pieces[piece])
        return places

    def first_cell(self, layer: int, block: int) -> int:
        return (layer * len(self.pool.blocks) + block) * self._cells_per_page

    def page(self, rank: int, layer: int, block: int) -> bytes:
        """Bytes that differ wherever the cells of a page do."""
        first = self.first_cell(layer, block)
        values = self.contents[rank][first : first + self._cells_per_page]
        return b"".join(value.to_bytes(8, "little") * (CELL_BYTES // 8) for value in values)

    def compute(self, layer: int, first_token: int, stop: int, family: int, blocks: Sequence[int]) -> None:
        """A forward pass fills the slots of these tokens in one layer of every rank."""
        spots = self._layout.spots
        for position in range(first_token // GRANULE, -(-stop // GRANULE)):
            filled = min(GRANULE, stop - position * GRANULE)
            cell = self.first_cell(layer, blocks[position // spots]) + position % spots
            for heads, contents in zip(self._heads, self.contents, strict=True):
                for number, head in enumerate(heads):
                    contents[cell + number * spots] = content(family, position, head, filled)

    def expect(self, request_id: str, family: int, num_tokens: int, blocks: Sequence[int]) -> None:
        """The KV of a request's first tokens must be in its pages, in every layer of every rank."""
        spots = self._layout.spots
        for position in range(-(-num_tokens // GRANULE)):
            filled, block = min(GRANULE, num_tokens - position * GRANULE), blocks[position // spots]
            for rank, (heads, contents) in enumerate(zip(self._heads, self.contents, strict=True)):
                for number, head in enumerate(heads):
                    wanted = content(family, position, head, filled)
                    for layer in range(NUM_LAYERS):
                        value = contents[self.first_cell(layer, block) + position % spots + number * spots]
                        if not holds(value, wanted):
                            self._break(
                                5,
                                f"wrong tokens: granule {position}, head {head} of {request_id} (rank {rank}, layer "
                                f"{layer}, block {block}) holds {value}, wanted {wanted}",
                            )

    def check_land(self, transfer_id: str, rank: int, cells: Iterable[int]) -> None:
        """Bytes of a transfer arrive in these cells of a rank now (laws 1 and 3)."""
        transfer = self.transfers.get(transfer_id)
        for block in self._blocks(cells):
            where = f"block {block} of {self.process}, rank {rank}, transfer {transfer_id[:6]}"
            if transfer is None or block not in transfer.stamps:
                self._break(3, f"a page is written that was not reserved for it, or is shared: {where}")
            elif self.pool.blocks[block].ref_cnt == 0:
                self._break(1, f"a free page is written: {where}")
            elif self._stamps[block] != transfer.stamps[block]:
                self._break(1, f"a page is written after it was given to another request: {where}")
            elif transfer.is_loaded:
                self._break(1, f"a page is written although its request runs already: {where}")
            elif self.pool.blocks[block].block_hash is not None:
                self._break(1, f"a page is written although the prefix cache has it already: {where}")

    def check_posted_once(self, transfer_id: str, rank: int, cells: Iterable[int]) -> None:
        """Law 4, on the decoder's books: a prefiller posts a write of these cells of one rank."""
        transfer = self.transfers.get(transfer_id)
        for cell in cells if transfer is not None else ():
            if (rank, cell) in transfer.posted:  # type: ignore[union-attr]
                block = next(self._blocks([cell]))
                self._break(4, f"a part of block {block} of rank {rank} is sent twice for transfer {transfer_id[:6]}")
            transfer.posted.add((rank, cell))  # type: ignore[union-attr]

    def start_read(self, rank: int, cells: Sequence[int]) -> None:
        """A posted write reads these cells until `end_read` (law 2)."""
        self._cells_read[rank].update(cells)
        for block in self._blocks(cells):
            self._readers[rank][block] += 1
            if self.pool.blocks[block].ref_cnt == 0:
                self._read_while_free(block)

    def end_read(self, rank: int, cells: Sequence[int]) -> None:
        self._cells_read[rank].subtract(cells)
        for block in self._blocks(cells):
            self._readers[rank][block] -= 1

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

    def check_overwrite(self, first_token: int, stop: int, blocks: Sequence[int]) -> None:
        """A forward pass is about to write the slots of these tokens."""
        for position in range(first_token // GRANULE, -(-stop // GRANULE)):
            block = blocks[position // self._layout.spots]
            if self.is_read(block) and block not in self.given_up and self._is_granule_read(position, block):
                self._break(2, f"block {block} of {self.process} is overwritten while a posted write reads it")

    def _is_granule_read(self, position: int, block: int) -> bool:
        """A larger page may be filled behind tokens that are being sent."""
        spots = self._layout.spots
        cells = [
            self.first_cell(layer, block) + number * spots + position % spots
            for layer in range(NUM_LAYERS)
            for number in range(self._layout.heads_per_rank)
        ]
        return any(read[cell] > 0 for read in self._cells_read for cell in cells)

    def _blocks(self, cells: Iterable[int]) -> Iterator[int]:
        """The block each cell is in."""
        per_page, num_blocks = self._cells_per_page, len(self.pool.blocks)
        return (cell // per_page % num_blocks for cell in cells)

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
