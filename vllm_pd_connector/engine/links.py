"""The decoder ranks a writer is connected to, and the prepared way to each of them."""

import base64
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_pd_connector.errors import PeerLost
from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.geometry.page_table import PageTable, PageView
from vllm_pd_connector.plan.route import Route, routes
from vllm_pd_connector.transport.base import Lane, Peer, Transport
from vllm_pd_connector.wire.messages import DecoderRank, Reservation

MAX_GEOMETRIES = 64
"""Shapes of decoders whose routes are remembered. A pool has one or two."""

IDLE_S = 600.0
"""Seconds without a new transfer after which a decoder rank is disconnected, when another one connects. A restarted
decoder comes under a new name, so nobody says that the old one is gone."""


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A connected decoder rank. `route` says what goes there, `lane` is how."""

    route: Route
    peer: Peer
    lane: Lane


@dataclass(slots=True, eq=False)
class _Target:
    """A connected decoder rank and the links to it.

    Attributes:
        used_at: seconds on the writer's clock when a transfer last began.
        is_leaving: nothing new is linked to it; it is dropped once nothing uses it.
    """

    peer: Peer
    used_at: float
    links: dict[tuple[CacheGeometry, int], Link] = field(default_factory=dict)
    is_leaving: bool = False


class Links:
    """owned by: Writer, on the messenger thread.

    Args:
        transport: the rank's endpoint.
        pages: the rank's own pages.
        geometry: the prefiller's.
        rank: tensor-parallel rank.
        clock: monotonic seconds.

    Attributes:
        may_drop: `drop_unused` may find something.
    """

    def __init__(
        self, transport: Transport, pages: PageTable, geometry: CacheGeometry, rank: int, clock: Callable[[], float]
    ) -> None:
        self._transport = transport
        self._pages = pages
        self._geometry = geometry
        self._rank = rank
        self._clock = clock
        self._routes: dict[CacheGeometry, list[Route]] = {}
        self._targets: dict[str, _Target] = {}
        self.may_drop = False

    def to(self, reservation: Reservation) -> list[Link]:
        """Links to the decoder ranks that need something of this rank; the first transfer connects them.

        Raises:
            PeerLost: one cannot be reached.
            OutOfRegion: its page table is inconsistent or does not fit the geometry.
            ConfigError: the geometry is impossible.
            IndexError: there are fewer ranks than the geometry has.
            ValueError: a descriptor is not base64.
        """
        return [
            self._link(route, reservation.ranks[route.dst_rank], reservation.geometry)
            for route in self._routes_to(reservation.geometry)
        ]

    def distrust(self, peer: Peer) -> None:
        """A write to this peer has failed: drop it as soon as nothing uses it, and connect afresh."""
        for target in self._targets.values():
            if target.peer is peer:
                self._leave(target)

    def drop_unused(self, in_use: set[int]) -> None:
        """Disconnect peers that are to leave, or that no transfer has begun to for `IDLE_S`.

        Args:
            in_use: `id` of each peer that a write is made for and not over, or that a transfer may still write to.
        """
        now = self._clock()
        unused = {key: target for key, target in self._targets.items() if id(target.peer) not in in_use}
        for descriptor, target in unused.items():
            if target.is_leaving or now - target.used_at > IDLE_S:
                del self._targets[descriptor]
                self._transport.disconnect(target.peer)
        self.may_drop = any(target.is_leaving for target in self._targets.values())

    def _routes_to(self, geometry: CacheGeometry) -> list[Route]:
        if geometry not in self._routes:
            while len(self._routes) >= MAX_GEOMETRIES:
                self._routes.pop(next(iter(self._routes)))
            self._routes[geometry] = routes(self._rank, self._geometry, geometry)
        return self._routes[geometry]

    def _link(self, route: Route, rank: DecoderRank, geometry: CacheGeometry) -> Link:
        target = self._target(rank)
        key = (geometry, route.dst_rank)
        if key not in target.links:
            source, destination = PageView(self._pages, route.src_pieces), PageView(rank.pages, route.dst_pieces)
            source.check()
            destination.check()
            target.links[key] = Link(route, target.peer, self._transport.open_lane(target.peer, source, destination))
        return target.links[key]

    def _target(self, rank: DecoderRank) -> _Target:
        """The rank, connected. One peer for each descriptor: two of one agent would end together."""
        target = self._targets.get(rank.descriptor)
        if target is None:
            rank.pages.check()
            peer = self._transport.connect(base64.b64decode(rank.descriptor, validate=True), rank.pages)
            target = self._targets[rank.descriptor] = _Target(peer, 0.0)
            self.may_drop = True  # what connects may have come in the place of one that is gone
        elif target.is_leaving:
            raise PeerLost(
                "a write to it failed, or its pages changed; it is connected again when nothing is under way"
            )
        elif target.peer.pages != rank.pages:
            self._leave(target)
            raise PeerLost("its page table is not the one that this descriptor came with before")
        target.used_at = self._clock()
        return target

    def _leave(self, target: _Target) -> None:
        target.is_leaving = self.may_drop = True
