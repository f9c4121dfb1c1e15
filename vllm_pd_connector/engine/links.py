"""The decoder ranks a writer is connected to, and the prepared way to each of them."""

import base64
from dataclasses import dataclass

from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.geometry.page_table import PageTable, PageView
from vllm_pd_connector.plan.route import Route, routes
from vllm_pd_connector.transport.base import Lane, Peer, Transport
from vllm_pd_connector.wire.messages import DecoderRank, Reservation

MAX_GEOMETRIES = 64
"""Shapes of decoders whose routes are remembered. A pool has one or two."""


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A connected decoder rank. `route` says what goes there, `lane` is how."""

    route: Route
    peer: Peer
    lane: Lane


class Links:
    """owned by: Writer, on the messenger thread.

    Args:
        transport: the rank's endpoint.
        pages: the rank's own pages.
        geometry: the prefiller's.
        rank: tensor-parallel rank.
    """

    def __init__(self, transport: Transport, pages: PageTable, geometry: CacheGeometry, rank: int) -> None:
        self._transport = transport
        self._pages = pages
        self._geometry = geometry
        self._rank = rank
        self._routes: dict[CacheGeometry, list[Route]] = {}
        self._peers: dict[tuple[str, int], Peer] = {}
        self._links: dict[tuple[str, int, CacheGeometry, int], Link] = {}
        self._distrusted: list[Peer] = []

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
        """A write to this peer has failed: drop it as soon as nothing is in flight to it, and connect afresh."""
        if peer not in self._distrusted:
            self._distrusted.append(peer)

    def take_distrusted(self, in_flight: set[int]) -> list[Peer]:
        """Distrusted peers without a write in flight (given by object id); they are forgotten here."""
        gone = [peer for peer in self._distrusted if id(peer) not in in_flight]
        if gone:
            self._distrusted = [peer for peer in self._distrusted if id(peer) in in_flight]
            self._peers = {key: peer for key, peer in self._peers.items() if peer not in gone}
            self._links = {key: link for key, link in self._links.items() if link.peer not in gone}
        return gone

    def _routes_to(self, geometry: CacheGeometry) -> list[Route]:
        if geometry not in self._routes:
            while len(self._routes) >= MAX_GEOMETRIES:
                self._routes.pop(next(iter(self._routes)))
            self._routes[geometry] = routes(self._rank, self._geometry, geometry)
        return self._routes[geometry]

    def _link(self, route: Route, target: DecoderRank, geometry: CacheGeometry) -> Link:
        key = (target.descriptor, target.pages.base, geometry, route.dst_rank)
        if key not in self._links:
            peer = self._peer(target)
            source, destination = PageView(self._pages, route.src_pieces), PageView(peer.pages, route.dst_pieces)
            source.check()
            destination.check()
            self._links[key] = Link(route, peer, self._transport.open_lane(peer, source, destination))
        return self._links[key]

    def _peer(self, target: DecoderRank) -> Peer:
        key = (target.descriptor, target.pages.base)
        if key not in self._peers:
            target.pages.check()
            self._peers[key] = self._transport.connect(base64.b64decode(target.descriptor, validate=True), target.pages)
        return self._peers[key]
