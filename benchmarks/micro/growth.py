"""How costs grow: with the pages of a write, the requests in flight, the decoders a prefiller is connected to.

Records hold the cost of one unit (page, request, peer) at each size; "linear or better" is a cost that stays or falls.
Times are CPU time of the one thread that does the work: what else runs on the machine is not in them.
"""

from __future__ import annotations

import base64
import gc
import random
import time
import tracemalloc
from typing import Any

import msgspec

from benchmarks.micro.engine import LEASE_S
from benchmarks.micro.schedulers import MAX_STEPS, BusyEngine, StepCost
from vllm_pd_connector.engine.posting import Posting
from vllm_pd_connector.engine.step import BeginTransfer, CloseTransfer
from vllm_pd_connector.engine.worker_rank import WorkerRank
from vllm_pd_connector.engine.writer import Writer
from vllm_pd_connector.geometry.page_table import PageView
from vllm_pd_connector.plan.extent import Span
from vllm_pd_connector.plan.grain import Grain
from vllm_pd_connector.plan.route import routes
from vllm_pd_connector.plan.write import GroupWrite, bind, select
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import NoTimeline
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.shapes import BLOCK_TOKENS, plain_geometry
from vllm_pd_connector.transport.base import WriteStatus, post_write
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport
from vllm_pd_connector.transport.nixl import NixlTransport
from vllm_pd_connector.wire.messages import DecoderRank, Reservation
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

NUM_PAGES = (100, 256, 1024, 4096, 8192)
NUM_REQUESTS = (1, 4, 16, 64, 256)
NUM_PEERS = (1, 4, 16, 64, 256)
PAGE_BYTES = 4096
REPEATS = 20
TRANSFER = "0123456789abcdef" * 2


def measure() -> list[dict[str, Any]]:
    """Records: what, size, ns or bytes for one unit of it, of every repetition."""
    return [
        *_plan_and_post(),
        *_steps("kv_producer", "a prefill of a page in each step"),
        *_steps("kv_consumer", "held requests"),
        *_peers(),
    ]


def _plan_and_post() -> list[dict[str, Any]]:
    """Planning and posting one layer's pages, scattered, by NIXL within this process; UCX copies inside the post."""
    most = max(NUM_PAGES)
    sides = [KvBuffer(num_layers=1, num_blocks=2 * most, page_bytes=PAGE_BYTES) for _ in range(2)]
    sender, receiver = NixlTransport("growth-sender"), NixlTransport("growth-receiver")
    for transport, kv in zip((sender, receiver), sides, strict=True):
        transport.register(kv.table)
    src, dst = sides[0].table, sides[1].table
    peer = sender.connect(receiver.descriptor(), dst)
    (route,) = routes(0, plain_geometry(PAGE_BYTES), plain_geometry(PAGE_BYTES))
    lane = sender.open_lane(peer, PageView(src, route.src_pieces), PageView(dst, route.dst_pieces))
    plan_ns: dict[int, list[float]] = {size: [] for size in NUM_PAGES}
    post_ns: dict[int, list[float]] = {size: [] for size in NUM_PAGES}
    for rep in range(-2, REPEATS):
        for size in NUM_PAGES:
            blocks = tuple(random.Random(size).sample(range(1, 2 * most), size))
            write = GroupWrite(span=Span(0, size * BLOCK_TOKENS), src_blocks=blocks, dst_blocks=blocks)
            start = time.thread_time_ns()
            granules = select(write.as_arrays(), route, TRANSFER, src, dst)
            bound = bind(granules, route, src, dst, src_layers=[0], dst_layers=[0])
            planned = time.thread_time_ns()
            handle = post_write(sender, lane, bound, b"n")
            posted = time.thread_time_ns()
            while sender.poll(handle) is WriteStatus.POSTED:
                receiver.notifications()
            sender.release(handle)
            receiver.notifications()
            if rep >= 0:
                plan_ns[size].append((planned - start) / size)
                post_ns[size].append((posted - planned) / size)
    sender.disconnect(peer)
    sender.close()
    receiver.close()
    return [
        _record(what, "page", "ns", size, samples)
        for what, cells in (("plan", plan_ns), ("post over NIXL, copy included", post_ns))
        for size, samples in cells.items()
    ]


def _steps(role: str, load: str) -> list[dict[str, Any]]:
    """A step's cost for each request in flight: what vLLM waits for, and the messenger's turns."""
    engine_ns: dict[int, list[float]] = {}
    messenger_ns: dict[int, list[float]] = {}
    for size in NUM_REQUESTS:
        engine = BusyEngine(role, size)
        costs: list[StepCost] = []
        num_held = 0
        for number in range(MAX_STEPS - 2):
            cost, orders = engine.step()
            if role == "kv_producer" and len(orders.writes) != size:
                raise RuntimeError(f"{len(orders.writes)} of {size} requests have a page in step {number}")
            num_held += len(orders.expects)
            if number >= 4:
                costs.append(cost)
        engine.close()
        if role == "kv_consumer" and num_held != size:
            raise RuntimeError(f"{num_held} of {size} requests are held")
        engine_ns[size] = [(cost.scheduler + cost.worker) / size for cost in costs]
        messenger_ns[size] = [cost.messenger / size for cost in costs]
    return [
        _record(f"step, {load}: {what}", "request", "ns", size, samples)
        for what, cells in (("scheduler and worker halves", engine_ns), ("messenger", messenger_ns))
        for size, samples in cells.items()
    ]


def _peers() -> list[dict[str, Any]]:
    """Python memory that a writer keeps for each decoder it has written to, over the in-memory transport."""
    records: list[dict[str, Any]] = []
    for size in NUM_PEERS:
        fabric = MemoryFabric()
        frames = [_peer(fabric, number) for number in range(size)]
        kv = KvBuffer(num_layers=32, num_blocks=4, page_bytes=128)
        source = MemoryTransport(fabric, "source")
        source.register(kv.table)
        rank = WorkerRank(
            tp_rank=0,
            pages=kv.table,
            geometry=plain_geometry(128),
            layers=[f"l{i}" for i in range(32)],
            groups=[0] * 32,
        )
        grain, told = Grain(1.0), {"tally": Tally(), "timeline": NoTimeline()}
        writer = Writer(source, rank, Posting(source, rank, verify=False, grain=grain, **told), grain, **told)
        gc.collect()
        tracemalloc.start()
        for number, frame in enumerate(frames):
            transfer = f"{number:032x}"
            reservation = msgspec.json.decode(frame, type=Reservation)
            writer.begin(BeginTransfer(reservation=reservation, lease_s=LEASE_S))
            writer.close(CloseTransfer(transfer_id=transfer, request_id=transfer, cancel=False, report=False))
            writer.advance()
            del reservation
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        if writer.failures:
            raise RuntimeError(f"peers were not reached: {writer.failures[0]}")
        records.append(_record("memory of a connected peer", "peer", "B", size, [held / size]))
    return records


def _peer(fabric: MemoryFabric, number: int) -> bytes:
    """A decoder on the fabric, and a reservation of it as it comes over the wire."""
    kv = KvBuffer(num_layers=32, num_blocks=4, page_bytes=128)
    name = f"peer{number}"
    MemoryTransport(fabric, name).register(kv.table)
    return msgspec.json.encode(
        Reservation(
            protocol=PROTOCOL_VERSION,
            transfer_id=f"{number:032x}",
            decoder=name,
            decoder_generation="0" * 16,
            prefiller_generation="0" * 16,
            local_tokens=0,
            blocks=[[1]],
            lease_s=LEASE_S,
            geometry=plain_geometry(128),
            ranks=[DecoderRank(descriptor=base64.b64encode(name.encode()).decode(), pages=kv.table)],
        )
    )


def _record(what: str, unit: str, measure: str, size: int, samples: list[float]) -> dict[str, Any]:
    return {"what": what, "unit": unit, "in": measure, "size": size, "each": [round(sample, 1) for sample in samples]}
