"""What the layer hook costs the model thread: `WorkerHalf.layer_done`, the real one, with a running messenger.

The worker half is made without an engine around it: only what the hook touches is there.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.micro.timing import clock_ns, per_call, summarise
from vllm_pd_connector.config import parse
from vllm_pd_connector.engine.layer_signal import HostLayerSignal
from vllm_pd_connector.engine.messenger import Duty, Messenger
from vllm_pd_connector.engine.step import BeginTransfer
from vllm_pd_connector.engine.worker_half import WorkerHalf
from vllm_pd_connector.engine.worker_rank import WorkerRank
from vllm_pd_connector.engine.writer import Writer
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import NoTimeline
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.shapes import plain_geometry, whole_blocks
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport
from vllm_pd_connector.wire.messages import DecoderRank, Reservation
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

NUM_LAYERS = 8
NUM_PAGES = 64
PAGE_BYTES = 32_768
NUM_STEPS = 200
LAYER_S = 0.002  # a layer of the small test model takes milliseconds; the messenger has long fallen asleep
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(NUM_LAYERS)]
TRANSFER = "0123456789abcdef" * 2


def measure() -> list[dict[str, Any]]:
    return [_without_transfer(), _too_little_to_wake(), *_sleeping_messenger(), *_posting_messenger()]


def _half(messenger: Messenger) -> WorkerHalf:
    half = object.__new__(WorkerHalf)
    half._layers = {name: layer for layer, name in enumerate(NAMES)}
    half._messenger = messenger
    half._signal = None
    half._config = parse({})
    half._layer_bytes = NUM_PAGES * PAGE_BYTES
    half._ready_bytes = 0
    return half


def _without_transfer() -> dict[str, Any]:
    half = _half(Messenger([], 0.0005))
    name = NAMES[3]
    return per_call("layer hook, no transfer in the step", lambda: half.layer_done(name), calls=10_000, repeats=30)


def _too_little_to_wake() -> dict[str, Any]:
    """Layers below `min_write_bytes`: the hook only notes them."""
    half = _half(Messenger([], 0.0005))
    half._layer_bytes = 1
    samples: list[float] = []
    for _ in range(NUM_STEPS):
        half._signal = HostLayerSignal(NUM_LAYERS)
        start = time.perf_counter_ns()
        for name in NAMES:
            half.layer_done(name)
        samples.append((time.perf_counter_ns() - start) / NUM_LAYERS)
    return summarise("layer hook, too few bytes to wake the messenger", samples)


def _sleeping_messenger() -> list[dict[str, Any]]:
    """The messenger is woken each time, and has nothing to do."""
    messenger = Messenger([], 0.0005)
    messenger.start()
    try:
        half = _half(messenger)
        samples: list[float] = []
        overhead = clock_ns()
        for _ in range(NUM_STEPS):
            half._signal = HostLayerSignal(NUM_LAYERS)
            samples += _one_step(half, overhead)
        return [summarise("layer hook, waking an idle messenger", samples)]
    finally:
        messenger.stop()


def _posting_messenger() -> list[dict[str, Any]]:
    """The messenger posts 64 pages of 32 KiB of each layer through the in-memory transport, sharing the interpreter."""
    fabric = MemoryFabric()
    sides = [KvBuffer(num_layers=NUM_LAYERS, num_blocks=NUM_PAGES + 1, page_bytes=PAGE_BYTES) for _ in range(2)]
    source, target = (MemoryTransport(fabric, name) for name in ("source", "target"))
    source.register(sides[0].table)
    target.register(sides[1].table)
    rank = WorkerRank(
        tp_rank=0,
        pages=sides[0].table,
        geometry=plain_geometry(PAGE_BYTES),
        layers=NAMES,
        groups=[0] * NUM_LAYERS,
    )
    writer = Writer(source, rank, verify=False, tally=Tally(), timeline=NoTimeline())
    duties: list[Duty] = [writer]
    messenger = Messenger(duties, 0.0005)
    messenger.start()
    try:
        half = _half(messenger)
        begin = BeginTransfer(reservation=_reservation(sides[1]), lease_s=600.0)
        messenger.submit(lambda: writer.begin(begin))
        blocks = tuple(range(1, NUM_PAGES + 1))
        overhead = clock_ns()
        samples: list[float] = []
        for _ in range(NUM_STEPS):
            signal = HostLayerSignal(NUM_LAYERS)
            write = whole_blocks(TRANSFER, blocks, blocks)
            messenger.submit(lambda write=write, signal=signal: writer.start_step([write], signal))
            time.sleep(LAYER_S)
            half._signal = signal
            samples += _one_step(half, overhead)
        posted = len(target.notifications())
        if posted < NUM_STEPS * NUM_LAYERS * 0.9:
            raise RuntimeError(f"{posted} writes for {NUM_STEPS * NUM_LAYERS} layers: this measured something else")
        return [summarise("layer hook, messenger posts 64 pages of each layer", samples)]
    finally:
        messenger.stop()


def _one_step(half: WorkerHalf, overhead: float) -> list[float]:
    samples: list[float] = []
    for name in NAMES:
        start = time.perf_counter_ns()
        half.layer_done(name)
        samples.append(time.perf_counter_ns() - start - overhead)
        time.sleep(LAYER_S)
    return samples


def _reservation(target: KvBuffer) -> Reservation:
    # MemoryTransport's descriptor is its name.
    rank = DecoderRank(descriptor="dGFyZ2V0", pages=target.table)  # "target"
    return Reservation(
        protocol=PROTOCOL_VERSION,
        transfer_id=TRANSFER,
        decoder="bench",
        decoder_generation="0" * 16,
        prefiller_generation="0" * 16,
        local_tokens=0,
        blocks=[list(range(1, NUM_PAGES + 1))],
        lease_s=600.0,
        geometry=plain_geometry(PAGE_BYTES),
        ranks=[rank],
    )
