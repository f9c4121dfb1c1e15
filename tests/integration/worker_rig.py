"""Prefiller ranks and decoder ranks in one process: real writers and receivers over a memory fabric, turned by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_pd_connector.engine.layer_signal import LayerSignal, PlainSignals
from vllm_pd_connector.engine.messenger import Messenger
from vllm_pd_connector.engine.posting import Posting
from vllm_pd_connector.engine.receiver import Receiver
from vllm_pd_connector.engine.step import BeginTransfer, CloseTransfer, ExpectTransfer, HandBack
from vllm_pd_connector.engine.word_signal import HostWords
from vllm_pd_connector.engine.worker_rank import WorkerRank
from vllm_pd_connector.engine.writer import Writer
from vllm_pd_connector.geometry.cache_geometry import CacheGeometry
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.plan.grain import Grain, portions
from vllm_pd_connector.plan.write import ChunkWrite
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import NoTimeline
from vllm_pd_connector.testing.arming import ArmingByPoll
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.clock import FakeClock
from vllm_pd_connector.testing.shapes import BLOCK_TOKENS, plain_geometry, reservation, whole_blocks
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport
from vllm_pd_connector.transport.scripted import ScriptedFault, ScriptedTransport
from vllm_pd_connector.wire.codec import encode
from vllm_pd_connector.wire.messages import Note

NUM_LAYERS = 3
PAGE_BYTES = 32
UNITS_PER_PAGE = BLOCK_TOKENS
LEASE_S = 60.0
A, B = "a" * 32, "b" * 32


@dataclass
class Rank:
    """One worker: its memory, its endpoint, its duties, and its messenger without a thread."""

    rank: WorkerRank
    kv: KvBuffer
    transport: Transport
    writer: Writer
    receiver: Receiver
    messenger: Messenger
    tally: Tally
    grain: Grain

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.messenger.turn()


class Cluster:
    """Args:
    tp: ranks of each side, when they are equal.
    src: the prefiller's geometry.
    dst: the decoder's.
    stages: pipeline stages of the prefiller; each owns as many layers.
    groups: cache group of each layer; names are l0, l1 and so on.
    polls_per_write: turns a write stays in flight.
    verify: digests.
    faults: on every prefiller rank's transport.
    wrap: around every prefiller rank's transport.
    layers_per_write: how many travel together.

    Attributes:
        is_arming: writes are armed when their step begins, as for a native thread, instead of posted by the messenger.
    """

    is_arming = False

    def __init__(
        self,
        *,
        tp: int = 1,
        src: CacheGeometry | None = None,
        dst: CacheGeometry | None = None,
        stages: int = 1,
        groups: Sequence[int] = (0,) * NUM_LAYERS,
        polls_per_write: int = 1,
        verify: bool = False,
        faults: Sequence[ScriptedFault] = (),
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
        layers_per_write: int = 1,
    ) -> None:
        self.layers_per_write = layers_per_write
        self.clock = FakeClock()
        self.src = src or plain_geometry(PAGE_BYTES, tp_size=tp)
        self.dst = dst or plain_geometry(PAGE_BYTES, tp_size=tp)
        self.groups = groups
        self.stages = stages
        self.fabric = MemoryFabric()
        self.names = [f"l{layer}" for layer in range(len(groups))]
        self.prefillers = [
            self._rank(
                self._worker(self.src, rank, stage),
                wrap(
                    ScriptedTransport(
                        MemoryTransport(self.fabric, f"p{stage}.{rank}", polls_per_write), faults, self.clock
                    )
                ),
                verify,
            )
            for stage in range(stages)
            for rank in range(self.src.tp_size)
        ]
        self.decoders = [
            self._rank(self._worker(self.dst, rank), MemoryTransport(self.fabric, f"d{rank}"), verify)
            for rank in range(self.dst.tp_size)
        ]
        for index, prefiller in enumerate(self.prefillers):
            prefiller.kv.fill_random(index)

    @property
    def p(self) -> Rank:
        return self.prefillers[0]

    @property
    def d(self) -> Rank:
        return self.decoders[0]

    def _worker(self, geometry: CacheGeometry, rank: int, stage: int | None = None) -> tuple[WorkerRank, KvBuffer]:
        """A prefiller's stage has its share of the layers, a decoder's rank all of them."""
        share = len(self.groups) // self.stages
        own = slice(None) if stage is None else slice(stage * share, (stage + 1) * share)
        is_prefiller = stage is not None
        kv = KvBuffer(
            num_layers=len(self.groups[own]),
            num_blocks=10 if is_prefiller else 14,
            page_bytes=geometry.page(rank).page_bytes,
            gap=8 if is_prefiller else 0,
        )
        worker = WorkerRank(
            tp_rank=rank,
            pp_rank=stage or 0,
            pages=kv.table,
            geometry=geometry,
            layers=self.names[own],
            groups=self.groups[own],
            num_groups=max(self.groups) + 1,
        )
        return worker, kv

    def _rank(self, worker: tuple[WorkerRank, KvBuffer], transport: Transport, verify: bool) -> Rank:
        rank, kv = worker
        transport.register(kv.table)
        tally = Tally()
        arming = ArmingByPoll(transport, self.clock) if self.is_arming and not verify else None
        transport = arming or transport
        grain = Grain(1.0)
        told: dict[str, Any] = {"tally": tally, "timeline": NoTimeline(), "clock": self.clock}
        posting = Posting(transport, rank, verify=verify, grain=grain, arming=arming, **told)
        writer = Writer(transport, rank, posting, grain, **told)
        receiver = Receiver(transport, rank, max_parked=4, verify=verify, tally=tally, timeline=NoTimeline())
        return Rank(rank, kv, transport, writer, receiver, Messenger([writer, receiver], 0.001), tally, grain)

    def begin(
        self, transfer: str = A, blocks: Sequence[int] = (5, 6), *, lease_s: float = LEASE_S, local_tokens: int = 0
    ) -> None:
        """All prefiller ranks get a reservation of these decoder blocks, one cache group."""
        self.begin_groups([list(blocks)], transfer, lease_s=lease_s, local_tokens=local_tokens)

    def begin_groups(
        self, blocks: list[list[int]], transfer: str = A, *, lease_s: float = LEASE_S, local_tokens: int = 0
    ) -> None:
        """The same with the blocks of several cache groups."""
        ranks = [(d.transport.descriptor(), d.kv.table) for d in self.decoders]
        reserved = reservation(transfer, blocks, self.dst, ranks, lease_s=lease_s, local_tokens=local_tokens)
        for rank in self.prefillers:
            layers = tuple(self.names) if self.stages > 1 else ()
            rank.writer.begin(BeginTransfer(reservation=reserved, lease_s=lease_s, layers=layers))

    def start_step(self, *writes: tuple[str, Sequence[int], Sequence[int]]) -> list[LayerSignal]:
        """A forward pass that completes whole (transfer, source blocks, destination blocks); a signal for each rank."""
        return self.start_chunks(*(whole_blocks(*write) for write in writes))

    def start_chunks(self, *chunks: ChunkWrite) -> list[LayerSignal]:
        """A forward pass that completes these; one signal for each prefiller rank."""
        sizes = [rank.kv.table.num_layers for rank in self.prefillers]
        signals = [(HostWords(n) if self.is_arming else PlainSignals("cpu", n)).begin_step() for n in sizes]
        for rank, signal in zip(self.prefillers, signals, strict=True):
            layers = portions(rank.kv.table.num_layers, self.layers_per_write)
            rank.writer.start_step(list(chunks), signal, layers)
        return signals

    def close(self, transfer: str = A, *, cancel: bool = False, report: bool = True) -> None:
        for rank in self.prefillers:
            rank.writer.close(
                CloseTransfer(transfer_id=transfer, request_id=f"req-{transfer[0]}", cancel=cancel, report=report)
            )

    def expect(self, transfer: str = A, num_pages: int = 2, *, spans: Sequence[Span] = ()) -> None:
        """Every decoder rank expects so many whole pages, or the tokens of each group."""
        order = ExpectTransfer(
            transfer_id=transfer,
            request_id=f"req-{transfer[0]}",
            spans=tuple(spans) or (Span(0, num_pages * self.dst.block_size),),
        )
        for rank in self.decoders:
            rank.receiver.expect(order)

    def hand_back(self, transfer: str = A, *, failed: bool = True) -> None:
        for rank in self.decoders:
            rank.receiver.hand_back(HandBack(transfer_id=transfer, request_id=f"req-{transfer[0]}", failed=failed))

    def settle(self, turns: int = 12) -> None:
        for _ in range(turns):
            for rank in (*self.prefillers, *self.decoders):
                rank.turn()

    def has_landed(self, layer: int, src: int, dst: int, rank: int = 0) -> bool:
        """Whether the decoder's page holds the prefiller's bytes."""
        return bytes(self.decoders[rank].kv.page(layer, dst)) == bytes(self.prefillers[rank].kv.page(layer, src))

    def is_blank(self) -> bool:
        return not any(rank.kv.array.any() for rank in self.decoders)


def deliver(cluster: Cluster, note: Note | bytes) -> None:
    """A note that no write sent reaches the decoder."""
    peer = cluster.p.transport.connect(b"d0", cluster.d.kv.table)
    cluster.p.transport.notify(peer, note if isinstance(note, bytes) else encode(note))
