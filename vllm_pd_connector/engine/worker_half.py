"""The worker half of one rank: registers the pages, hands each step's orders to the messenger, reports what is done.

owned by: the worker's model thread, which never waits here except, within a bound, in `handle_preemptions`.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections import deque
from functools import partial
from logging import getLogger
from typing import TYPE_CHECKING, TypeVar

import torch

from vllm_pd_connector.control.fence_server import FenceServer
from vllm_pd_connector.control.keys import load_key
from vllm_pd_connector.engine import vllm_cache
from vllm_pd_connector.engine.layer_signal import LayerSignal, LayerSignals, PlainSignals
from vllm_pd_connector.engine.messenger import Messenger
from vllm_pd_connector.engine.native_posting import NativeThread, open_native_thread
from vllm_pd_connector.engine.posting import Posting
from vllm_pd_connector.engine.rank_placement import native_place, rank_placement, settle_this_thread
from vllm_pd_connector.engine.receiver import Receiver
from vllm_pd_connector.engine.step import RankHandshake, StepMetadata, WorkerReport
from vllm_pd_connector.engine.word_signal import make_signals
from vllm_pd_connector.engine.worker_rank import WorkerRank
from vllm_pd_connector.engine.writer import Writer
from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.plan.grain import Grain, portions
from vllm_pd_connector.plan.write import layer_bytes
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import open_timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_pd_connector.config import PDConfig
    from vllm_pd_connector.topology.placement import Placement
    from vllm_pd_connector.transport.base import Transport

logger = getLogger(__name__)

SWITCH_S = 5e-5
"""Seconds after which a thread that computes in Python gives the GIL to one that waits for it. With CPython's 5 ms a
ready layer waits 2 to 10 ms for the messenger, with this under 0.2 ms (ADR 12)."""

HOST_SHARE, DEVICE_SHARE = 1.0, 0.1
"""Of the time of a post, what the model thread loses: all of it where both compute on the same cores; beside a GPU only
what it waits for the GIL, while its kernels are enqueued ahead (assumed, not measured)."""

T = TypeVar("T")

PREEMPTION_WAIT_S = 2.0
"""Seconds a step may wait for writes that read preempted pages; after that the transfer is failed, not the step."""


class WorkerHalf:
    """Args:
    config: validated.
    vllm_config: the engine's.
    kv_cache_config: the engine's.
    rank: tensor-parallel rank.
    pp_rank: pipeline stage.
    open_transport: makes the rank's transport from a unique name and the place of the rank's GPU.
    open_messenger: makes the messenger, from the arguments of `Messenger`.
    open_fence_server: makes the fence server, from the arguments of `FenceServer`.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        config: PDConfig,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        rank: int,
        pp_rank: int = 0,
        open_transport: Callable[[str, Placement], Transport],
        open_messenger: Callable[..., Messenger] = Messenger,
        open_fence_server: Callable[..., FenceServer] = FenceServer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._tp_rank = rank
        self._pp_rank = pp_rank
        self._rank = pp_rank * vllm_config.parallel_config.tensor_parallel_size + rank
        self._generation = secrets.token_hex(8)
        self._open_transport = open_transport
        self._open_messenger = open_messenger
        self._open_fence_server = open_fence_server
        self._clock = clock
        self._tally = Tally()
        role = str(vllm_config.kv_transfer_config.kv_role).removeprefix("kv_")
        self._timeline = open_timeline(config.timeline_dir, f"worker-{role}-{self._rank}")
        self._layers: dict[str, int] = {}
        self._native = NativeThread()
        self._signals: LayerSignals = PlainSignals("cpu", 0)
        self._has_warned = False
        self._signal: LayerSignal | None = None
        self._hooks: dict[str, Callable[[], None]] = {}
        self._fences: FenceServer | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the pages, open the control port, start the messenger.

        Raises:
            UnsupportedEngine: the pages cannot be moved by this transport.
            ConfigError: the control address or key is unusable.
        """
        groups = vllm_cache.check_engine(self._vllm_config, self._kv_cache_config)
        pages = vllm_cache.page_table(kv_caches, self._kv_cache_config)
        self._pages = pages.table
        if self._config.verify_pages:
            vllm_cache.check_readable(self._pages)
        self._shape = vllm_cache.cache_shape(self._vllm_config, self._kv_cache_config, pages, groups)
        rank = WorkerRank(
            tp_rank=self._tp_rank,
            pp_rank=self._pp_rank,
            pages=pages.table,
            geometry=self._shape.geometry(),
            layers=pages.names,
            groups=pages.groups,
            num_groups=len(groups),
        )
        if rank.geometry.page(rank.tp_rank).page_bytes != self._pages.page_bytes:
            raise UnsupportedEngine(
                f"pages of {self._pages.page_bytes} B, but {self._shape.num_kv_heads} KV heads over "
                f"{self._shape.tensor_parallel_size} ranks make {rank.geometry.page(rank.tp_rank).page_bytes} B"
            )
        self._open_duties(rank, next(iter(kv_caches.values())).device)
        self._layers = {name: index for index, name in enumerate(pages.names)}
        if self._vllm_config.kv_transfer_config.is_kv_producer:
            self._fences = self._listen()
            self._fences.start()
        sys.setswitchinterval(min(SWITCH_S, sys.getswitchinterval()))
        self._messenger.start()
        logger.info(
            "event=pages_registered rank=%d layers=%d blocks=%d page_bytes=%d bytes=%d control=%s",
            self._rank,
            self._pages.num_layers,
            self._pages.num_blocks,
            self._pages.page_bytes,
            self._pages.size_bytes,
            self._fences.endpoint if self._fences else "none",
        )

    def _open_duties(self, rank: WorkerRank, device: torch.device) -> None:
        """Transport, signals, writer, receiver, and the messenger that drives them."""
        placement = rank_placement(device)
        self._transport = self._open_transport(f"pd-{self._generation}-{self._rank}", placement)
        self._transport.register(self._pages)
        self._native = open_native_thread(self._transport, device, native_place(device, placement), self._config)
        if self._vllm_config.kv_transfer_config.is_kv_producer:  # a decoder's graphs are to stay free of signals
            self._signals = make_signals(
                device, self._pages.num_layers, self._native.poller, has_full_graphs=self._config.full_cuda_graphs
            )
        self._grain = Grain(
            HOST_SHARE if device.type == "cpu" else DEVICE_SHARE, min_write_bytes=self._config.min_write_bytes
        )
        posting = Posting(
            self._transport,
            rank,
            verify=self._config.verify_pages,
            grain=self._grain,
            tally=self._tally,
            timeline=self._timeline,
            clock=self._clock,
            arming=self._native.arming,
        )
        self._writer = Writer(
            self._transport,
            rank,
            posting,
            self._grain,
            tally=self._tally,
            timeline=self._timeline,
            clock=self._clock,
        )
        self._receiver = Receiver(
            self._transport,
            rank,
            max_parked=self._config.max_parked,
            verify=self._config.verify_pages,
            tally=self._tally,
            timeline=self._timeline,
        )
        self._messenger = self._open_messenger(
            [self._writer, self._receiver],
            self._config.poll_pause_s,
            on_start=partial(settle_this_thread, device, placement),
            bell=self._native.bell,
        )
        self._wake = self._messenger.bell.ring
        if self._native.arming is not None and self._native.poller is not None:
            self._wake = self._native.poller.wake

    def handshake(self) -> RankHandshake:
        return RankHandshake(
            descriptor=self._transport.descriptor(),
            pages=self._pages,
            shape=self._shape,
            control=self._fences.endpoint if self._fences else "",
            generation=self._generation,
        )

    def start_step(self, orders: StepMetadata) -> None:
        """Hand the step's orders over, before its forward pass."""
        self.end_step()  # V1 with a drafter does not end the steps of its early pipeline stages
        layers: list[range] = []
        if orders.writes:
            self._signal = self._signals.begin_step()
            layers = self._portions(orders)
            self._hooks = self._make_hooks(self._signal, layers)
        for action in self._actions(orders, self._signal, layers):
            self._messenger.submit(action)

    def layer_done(self, layer_name: str) -> None:
        """The layer hook. Aliases that share another layer's cache are not in the table and are passed over."""
        hook = self._hooks.get(layer_name)
        if hook is not None:
            hook()

    @property
    def is_capturing(self) -> bool:
        """Hooks must run although no step is bound: what they enqueue becomes part of a CUDA graph."""
        return self._signals.is_capturing

    def layer_captured(self, layer_name: str) -> None:
        """The layer hook while a CUDA graph is captured."""
        layer = self._layers.get(layer_name)
        if layer is not None:
            self._signals.capture(layer)

    def end_step(self) -> None:
        """The forward pass, drafter included, is over: what no hook announced goes out now."""
        if self._signal is not None:
            num_unannounced = self._signal.finish()
            self._wake()
            if num_unannounced:
                self._note_unannounced(num_unannounced)
            self._signal, self._hooks = None, {}

    def _note_unannounced(self, num_layers: int) -> None:
        """Layers seen against layers expected, each step. Their pages went out, but only at the step's end."""
        self._tally.add("layers_unannounced", num_layers)
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "event=layers_unannounced rank=%d layers=%d of %d had no hook in a step; their pages left at its end",
                self._rank,
                num_layers,
                self._pages.num_layers,
            )

    def handle_preemptions(self, transfer_ids: list[str]) -> None:
        """Wait, within a bound, until nothing in flight reads the pages that this step may overwrite (law 2)."""
        if not transfer_ids:
            return
        drained = threading.Event()
        started = self._clock()
        self._messenger.submit(lambda: self._writer.drain(transfer_ids, drained.set))
        is_drained = self._messenger.wait(drained, PREEMPTION_WAIT_S)
        waited_s = self._clock() - started
        self._tally.add("preemption_waits")
        self._tally.add("preemption_wait_us", round(waited_s * 1e6))
        for transfer_id in transfer_ids:
            self._timeline.mark(transfer_id, "preempted", waited_s=waited_s, is_drained=is_drained, rank=self._rank)
        if not is_drained:
            self._abandon(transfer_ids)

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """(sent, received, failed among the received), each request once."""
        failed = _drain(self._receiver.failed)
        return _drain(self._writer.sent), _drain(self._receiver.finished), failed

    def take_report(self) -> WorkerReport | None:
        failures = dict(_drain_pairs(self._writer.failures) + _drain_pairs(self._receiver.failures))
        whole = {transfer_id: [stop] for transfer_id, stop in _drain_pairs(self._receiver.whole)}
        return WorkerReport(failures=failures, whole=whole) if failures or whole else None

    def take_stats(self) -> dict[str, dict[str, int]] | None:
        counters = self._tally.take()
        return {"counters": counters, "gauges": {}} if counters else None

    def shutdown(self) -> None:
        """Stop posting, then listening, then give the memory back. Idempotent.

        In this order: decoders take a closed control port for a sign that nothing is posted any more.
        """
        if self._layers:
            if not self._messenger.stop():
                return  # the process's end stops it, and closes the rest
            self._native.close()
        if self._fences is not None:
            self._fences.close()
            self._fences = None
        if self._layers:
            self._transport.close()
            self._layers = {}
        self._timeline.close()

    def _abandon(self, transfer_ids: list[str]) -> None:
        """Fail transfers before their pages are overwritten: decoders keep nothing of what they hear of afterwards."""
        abandoned = threading.Event()
        reason = f"its pages were preempted while a write of them took more than {PREEMPTION_WAIT_S:g} s"

        def abandon() -> None:
            self._writer.abandon(transfer_ids, reason)
            abandoned.set()

        self._messenger.submit(abandon)
        self._messenger.wait(abandoned, PREEMPTION_WAIT_S)

    def _portions(self, orders: StepMetadata) -> list[range]:
        """The layers that travel together in this step."""
        size = self._grain.layers_per_write(
            self._pages.num_layers, layer_bytes(orders.writes, self._pages.page_bytes), len(orders.writes)
        )
        return portions(self._pages.num_layers, size)

    def _make_hooks(self, signal: LayerSignal, layers: list[range]) -> dict[str, Callable[[], None]]:
        """What is left to do for each layer: its bump, and a wake after the last of a portion if nobody watches."""
        is_watched = signal.is_watched or self._native.arming is not None
        waking = frozenset() if is_watched else frozenset(some[-1] for some in layers)
        return {
            name: partial(_bump_and_wake, signal.bump, layer, self._wake)
            if layer in waking
            else partial(signal.bump, layer)
            for name, layer in self._layers.items()
        }

    def _actions(
        self, orders: StepMetadata, signal: LayerSignal | None, layers: list[range]
    ) -> Iterator[Callable[[], None]]:
        """One action for each order, in order: one that fails must not take the others with it."""
        for expect in orders.expects:
            yield partial(self._receiver.expect, expect)
        for hand_back in orders.hand_backs:
            yield partial(self._receiver.hand_back, hand_back)
        for transfer_id in orders.forgets:
            yield partial(self._receiver.forget, transfer_id)
        for begin in orders.begins:
            yield partial(self._writer.begin, begin)
        if signal is not None:
            yield partial(self._writer.start_step, orders.writes, signal, layers)
        for close in orders.closes:
            yield partial(self._writer.close, close)

    def _listen(self) -> FenceServer:
        parallel = self._vllm_config.parallel_config
        port = self._config.control_port
        if port:
            port += parallel.data_parallel_index * parallel.world_size + self._rank
        key = load_key(self._config.control_key_file)
        if key is None and not self._config.advertise_host.startswith(("127.", "localhost", "::1")):
            logger.warning(
                "event=control_open host=%s anyone who reaches this port can stop transfers; set control_key_file",
                self._config.advertise_host,
            )
        return self._open_fence_server(
            self._config.advertise_host,
            port,
            generation=self._generation,
            key=key,
            on_fence=lambda transfer_id, answer: self._messenger.submit(
                lambda: self._writer.fence(transfer_id, answer)
            ),
            on_inquiry=lambda transfer_id, answer: self._messenger.submit(
                lambda: answer(self._writer.standing(transfer_id))
            ),
        )


def _bump_and_wake(bump: Callable[[int], None], layer: int, wake: Callable[[], None]) -> None:
    bump(layer)
    wake()


def _drain(queue: deque[str]) -> set[str]:
    taken: set[str] = set()
    while queue:
        taken.add(queue.popleft())
    return taken


def _drain_pairs(queue: deque[tuple[str, T]]) -> list[tuple[str, T]]:
    taken: list[tuple[str, T]] = []
    while queue:
        taken.append(queue.popleft())
    return taken
