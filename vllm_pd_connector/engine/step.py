"""What the scheduler half tells the workers each step, and what they tell it. One object for all ranks; pickled."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_pd_connector.geometry.page_table import PageTable
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.plan.write import ChunkWrite
from vllm_pd_connector.wire.compatibility import CacheShape
from vllm_pd_connector.wire.messages import Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginTransfer:
    """Prefiller: a reservation whose first pages are about to be computed.

    Attributes:
        lease_s: what is left of its lease.
        layers: names of all the engine's layers, in the order of the decoder's tables; empty when each rank has all.
    """

    reservation: Reservation
    lease_s: float
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseTransfer:
    """Prefiller: nothing more will be planned. Each rank reports `request_id` as sent once the transfer is quiet.

    Attributes:
        cancel: drop what is not yet posted (abort); otherwise post it all.
        report: the request's blocks wait for the report.
    """

    transfer_id: str
    request_id: str
    cancel: bool
    report: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectTransfer:
    """Decoder: pages for this request may arrive from now on; `spans` are the wanted tokens of each cache group."""

    transfer_id: str
    request_id: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandBack:
    """Decoder: report the request to vLLM although not all pages arrived."""

    transfer_id: str
    request_id: str
    failed: bool


@dataclass
class StepMetadata(KVConnectorMetadata):
    """One step's orders, in the order in which they are carried out."""

    expects: list[ExpectTransfer] = field(default_factory=list)
    hand_backs: list[HandBack] = field(default_factory=list)
    forgets: list[str] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    begins: list[BeginTransfer] = field(default_factory=list)
    writes: list[ChunkWrite] = field(default_factory=list)
    closes: list[CloseTransfer] = field(default_factory=list)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What ranks have seen of transfers that fail. Merged over ranks.

    Attributes:
        failures: the reason.
        whole: of those handed back, the token after the last that arrived without a gap: a number from each rank.
    """

    failures: dict[str, str] = field(default_factory=dict)
    whole: dict[str, list[int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "WorkerReport":
        assert isinstance(other, WorkerReport)
        transfers = {**self.whole, **other.whole}
        return WorkerReport(
            failures={**other.failures, **self.failures},
            whole={t: self.whole.get(t, []) + other.whole.get(t, []) for t in transfers},
        )


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells its scheduler half at start.

    Attributes:
        control: endpoint of its fence server, empty on a decoder.
        generation: this worker process.
    """

    descriptor: bytes
    pages: PageTable
    shape: CacheShape
    control: str
    generation: str
