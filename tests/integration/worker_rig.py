"""Prefiller ranks and decoder ranks in one process: real writers and receivers over a memory fabric, turned by hand."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_pd_connector.engine.layer_signal import HostLayerSignal
from vllm_pd_connector.engine.messenger import Messenger
from vllm_pd_connector.engine.receiver import Receiver
from vllm_pd_connector.engine.step import BeginTransfer, CloseTransfer, ExpectTransfer, HandBack
from vllm_pd_connector.engine.writer import Writer
from vllm_pd_connector.plan.write import ChunkWrite
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import NoTimeline
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.clock import FakeClock
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport
from vllm_pd_connector.transport.scripted import ScriptedFault, ScriptedTransport
from vllm_pd_connector.wire.codec import encode
from vllm_pd_connector.wire.messages import DecoderRank, Note, Reservation

NUM_LAYERS = 3
LEASE_S = 60.0
A, B = "a" * 32, "b" * 32


@dataclass
class Rank:
    """One worker: its memory, its endpoint, its duties, and its messenger without a thread."""

    kv: KvBuffer
    transport: Transport
    writer: Writer
    receiver: Receiver
    messenger: Messenger
    tally: Tally

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.messenger.turn()


class Cluster:
    """Args:
    tp: ranks of each side.
    polls_per_write: turns a write stays in flight.
    verify: digests.
    faults: on every prefiller rank's transport.
    wrap: around every prefiller rank's transport.
    """

    def __init__(
        self,
        *,
        tp: int = 1,
        polls_per_write: int = 1,
        verify: bool = False,
        faults: Sequence[ScriptedFault] = (),
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
    ) -> None:
        self.clock = FakeClock()
        self.tp = tp
        self.fabric = MemoryFabric()
        self.prefillers = [
            self._rank(
                rank,
                wrap(ScriptedTransport(MemoryTransport(self.fabric, f"p{rank}", polls_per_write), faults)),
                verify,
                KvBuffer(num_layers=NUM_LAYERS, num_blocks=10, page_bytes=32, gap=8),
            )
            for rank in range(tp)
        ]
        self.decoders = [
            self._rank(
                rank,
                MemoryTransport(self.fabric, f"d{rank}"),
                verify,
                KvBuffer(num_layers=NUM_LAYERS, num_blocks=14, page_bytes=32),
            )
            for rank in range(tp)
        ]
        for index, prefiller in enumerate(self.prefillers):
            prefiller.kv.fill_random(index)

    @property
    def p(self) -> Rank:
        return self.prefillers[0]

    @property
    def d(self) -> Rank:
        return self.decoders[0]

    def _rank(self, rank: int, transport: Transport, verify: bool, kv: KvBuffer) -> Rank:
        transport.register(kv.table)
        tally = Tally()
        writer = Writer(
            transport, kv.table, rank=rank, verify=verify, tally=tally, timeline=NoTimeline(), clock=self.clock
        )
        receiver = Receiver(
            transport,
            kv.table,
            rank=rank,
            dst_tp=self.tp,
            num_kv_heads=self.tp,
            max_parked=4,
            tally=tally,
            timeline=NoTimeline(),
        )
        return Rank(kv, transport, writer, receiver, Messenger([writer, receiver], 0.001), tally)

    def begin(self, transfer: str = A, blocks: Sequence[int] = (5, 6), *, lease_s: float = LEASE_S) -> None:
        """All prefiller ranks get a reservation of these decoder blocks."""
        reservation = Reservation(
            protocol=1,
            transfer_id=transfer,
            decoder="d",
            decoder_generation="d" * 16,
            prefiller_generation="e" * 16,
            first_page=0,
            blocks=list(blocks),
            lease_s=lease_s,
            ranks=[
                DecoderRank(
                    descriptor=base64.b64encode(d.transport.descriptor()).decode(),
                    pages=d.kv.table,
                )
                for d in self.decoders
            ],
        )
        for rank in self.prefillers:
            rank.writer.begin(BeginTransfer(reservation=reservation, lease_s=lease_s))

    def start_step(self, *writes: tuple[str, Sequence[int], Sequence[int]]) -> list[HostLayerSignal]:
        """A forward pass that completes (transfer, source blocks, destination blocks); one signal for each rank."""
        chunks = [ChunkWrite(transfer_id=t, src_blocks=tuple(s), dst_blocks=tuple(d)) for t, s, d in writes]
        signals = [HostLayerSignal(NUM_LAYERS) for _ in self.prefillers]
        for rank, signal in zip(self.prefillers, signals, strict=True):
            rank.writer.start_step(chunks, signal)
        return signals

    def close(self, transfer: str = A, *, cancel: bool = False, report: bool = True) -> None:
        for rank in self.prefillers:
            rank.writer.close(
                CloseTransfer(transfer_id=transfer, request_id=f"req-{transfer[0]}", cancel=cancel, report=report)
            )

    def expect(self, transfer: str = A, num_pages: int = 2) -> None:
        for rank in self.decoders:
            rank.receiver.expect(
                ExpectTransfer(
                    transfer_id=transfer, request_id=f"req-{transfer[0]}", num_pages=num_pages, src_tp=self.tp
                )
            )

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
