"""One worker as the writer and the receiver see it: its number, its pages, and which layers and groups those are of."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_pd_connector.errors import InvariantBroken
from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.geometry.page_table import PageTable


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRank:
    """Attributes:
    tp_rank: tensor-parallel rank.
    pp_rank: pipeline stage.
    pages: the rank's own pages.
    geometry: the engine's.
    layers: names of the rank's layers, row by row of `pages`.
    groups: cache group of each of them, counted over the groups whose pages move.
    num_groups: how many there are; a pipeline stage may have no layer of one.
    """

    tp_rank: int
    pages: PageTable
    geometry: CacheGeometry
    layers: Sequence[str]
    groups: Sequence[int]
    num_groups: int = 1
    pp_rank: int = 0
    _rows: dict[tuple[str, ...], list[int]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The rank among all workers of its engine, stage after stage."""
        return self.pp_rank * self.geometry.tp_size + self.tp_rank

    @property
    def layers_of_groups(self) -> list[int]:
        """Number of layers of each group."""
        return [self.groups.count(group) for group in range(self.num_groups)]

    def layers_among(self, names: tuple[str, ...]) -> list[int]:
        """Position of each of this rank's layers in an engine-wide list of names; its own list if that is empty.

        Raises:
            InvariantBroken: the list lacks one of them.
        """
        if names not in self._rows:
            rows = {name: row for row, name in enumerate(names or self.layers)}
            if missing := [name for name in self.layers if name not in rows]:
                raise InvariantBroken(f"layers {missing} of rank {self.number} are not among the engine's")
            self._rows[names] = [rows[name] for name in self.layers]
        return self._rows[names]
