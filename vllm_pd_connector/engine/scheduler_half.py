"""The scheduler half: builds what its role needs at start, then routes vLLM's calls to the decode and prefill sides.

owned by: EngineCore's main thread; nothing here blocks.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.control.dispatcher import Dispatcher
from vllm_pd_connector.control.keys import load_key
from vllm_pd_connector.engine import vllm_cache, vllm_compat
from vllm_pd_connector.engine.decode_side import DecodeSide
from vllm_pd_connector.engine.decoder_identity import DecoderIdentity
from vllm_pd_connector.engine.prefill_side import PrefillSide
from vllm_pd_connector.engine.step import RankHandshake, StepMetadata, WorkerReport
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import open_timeline
from vllm_pd_connector.wire.messages import ControlEndpoint, DecoderRank, HelloReply
from vllm_pd_connector.wire.transfer_params import HELLO, RESERVATION

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_pd_connector.config import PDConfig


class SchedulerHalf:
    """Without a handshake from the workers (dummy engines) it does nothing, like a server without the plugin.

    Args:
        config: validated.
        vllm_config: the engine's.
        kv_cache_config: the engine's.
        open_dispatcher: makes the dispatcher, from the arguments of `Dispatcher`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: PDConfig,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        open_dispatcher: Callable[..., Dispatcher] = Dispatcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._open_dispatcher = open_dispatcher
        self._clock = clock
        self._vllm_config = vllm_config
        self._groups = vllm_cache.check_engine(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._transfer = transfer
        # vLLM reads this right after the connector is made. Under "fail" there would be no second attempt;
        # `on_failure` is ours to carry out, when none is left.
        transfer.kv_load_failure_policy = "recompute"
        self._engine_id = str(transfer.engine_id)
        self._tally = Tally()
        self._gauges: dict[str, int] = {}
        self._timeline = open_timeline(config.timeline_dir, "scheduler-" + str(transfer.kv_role).removeprefix("kv_"))
        self._manager: KVCacheManager | None = None
        self._dispatcher: Dispatcher | None = None
        self._decode: DecodeSide | None = None
        self._prefill: PrefillSide | None = None

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def greet_workers(self, handshakes: dict[tuple[int, int], RankHandshake]) -> None:
        """All workers, by (pipeline stage, rank), have registered their pages: all that a role needs is known now.

        Raises:
            ConfigError: a key file cannot be read.
        """
        ranks = [handshakes[rank] for rank in sorted(handshakes)]
        shape = vllm_cache.join_stages(
            [handshakes[stage, rank].shape for stage, rank in sorted(handshakes) if not rank]
        )
        assert self._manager is not None
        if self._transfer.is_kv_producer:
            hello = HelloReply(
                engine=self._engine_id,
                generation=secrets.token_hex(8),
                shape=shape,
                controls=[ControlEndpoint(endpoint=rank.control, generation=rank.generation) for rank in ranks],
                data_parallel_rank=vllm_compat.data_parallel_rank(self._engine_id),
            )
            self._prefill = PrefillSide(hello, self._groups, self._tally, self._timeline, self._clock)
            self._prefill.bind(self._manager)
        if self._transfer.is_kv_consumer and self._config.prefillers:
            model = vllm_compat.served_name(self._vllm_config)
            self._dispatcher = self._open_dispatcher(
                self._config,
                engine_id=self._engine_id,
                model=model,
                shape=shape,
                key=load_key(self._config.control_key_file),
                timeline=self._timeline,
            )
            self._dispatcher.start()
            identity = DecoderIdentity(
                engine_id=self._engine_id,
                generation=secrets.token_hex(8),
                model=model,
                geometry=shape.geometry(),
                windows=[group.window for group in self._groups],
                ranks=[
                    DecoderRank(descriptor=base64.b64encode(rank.descriptor).decode(), pages=rank.pages)
                    for rank in ranks
                ],
            )
            self._decode = DecodeSide(
                self._config, identity, self._dispatcher, self._tally, self._timeline, self._clock
            )
            self._decode.bind(self._manager)

    def new_request(self, request: Request) -> None:
        if not isinstance(request.kv_transfer_params, dict | None):
            # `vllm_xargs` brings any value here, and vLLM's scheduler calls `.get` on it right after this.
            kind = type(request.kv_transfer_params).__name__
            request.kv_transfer_params = None
            self._tally.add("refused_params")
            vllm_compat.fail_request(request, f"kv_transfer_params is a {kind}: it must be an object")
            return
        if self._prefill is not None and self._prefill.new_request(request):
            return
        if self._decode is not None:
            self._decode.new_request(request)

    def match(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._decode is None or self._is_prefill(request):
            return 0, False
        num_remote_tokens = self._decode.match(request, num_computed_tokens)
        return num_remote_tokens, bool(num_remote_tokens)

    def allocated(self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int) -> None:
        if self._decode is None or self._is_prefill(request):
            return
        if num_external_tokens > 0:
            self._decode.reserve(request, self._moving(block_ids), num_external_tokens)
        else:
            self._decode.prefill_here(request)

    def build_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        orders = self._decode.orders() if self._decode is not None else StepMetadata()
        if self._prefill is not None:
            self._prefill.plan(scheduler_output, orders)
        return orders

    def workers_reported(self, output: KVConnectorOutput) -> None:
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            for transfer_id, reason in report.failures.items():
                for side in (self._decode, self._prefill):
                    if side is not None:
                        side.spoiled(transfer_id, reason)
            if self._decode is not None:
                self._decode.partly_arrived(report.whole)
        failed = output.failed_recving or set()
        if self._decode is not None:
            for request_id in output.finished_recving or ():
                self._decode.reported(request_id, failed=request_id in failed)
        if self._prefill is not None:
            for request_id in output.finished_sending or ():
                self._prefill.sent(request_id)

    def finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        if self._decode is not None:
            self._decode.finished(request)
        if self._prefill is not None:
            return self._prefill.finished(request)
        return False, None

    @property
    def is_pending(self) -> bool:
        return any(side is not None and side.is_pending for side in (self._decode, self._prefill))

    def take_stats(self) -> dict[str, dict[str, int]] | None:
        """Counters since the last call, and gauges when they have changed; None when neither."""
        gauges: dict[str, int] = {}
        for side in (self._decode, self._prefill):
            gauges.update(side.gauges() if side is not None else {})
        changed = gauges if gauges != self._gauges else {}
        self._gauges = gauges
        counters = self._tally.take()
        return {"counters": counters, "gauges": changed} if counters or changed else None

    def shutdown(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.close()
        self._timeline.close()

    def _moving(self, block_ids: tuple[list[int], ...]) -> list[list[int]]:
        """The blocks of the groups whose pages move."""
        return [block_ids[group.index] for group in self._groups]

    def _is_prefill(self, request: Request) -> bool:
        """Whether another engine's dispatch or greeting is being served here: never dispatched on."""
        params = request.kv_transfer_params
        return isinstance(params, dict) and any(key in params for key in (RESERVATION, HELLO))
