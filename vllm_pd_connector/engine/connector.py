"""The facade vLLM sees. Every method delegates to one half; see ARCHITECTURE.md for the order of the calls.

Imported by API server processes too: nothing here needs a device or NIXL until a worker is made.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_pd_connector.config import PDConfig, parse
from vllm_pd_connector.engine import vllm_cache, vllm_compat
from vllm_pd_connector.engine.scheduler_half import SchedulerHalf
from vllm_pd_connector.engine.stats import PDPromMetrics, PDStats
from vllm_pd_connector.engine.step import RankHandshake, StepMetadata, WorkerReport
from vllm_pd_connector.engine.worker_half import WorkerHalf
from vllm_pd_connector.telemetry.log import adopt_vllm_logging

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_pd_connector.topology.placement import Placement
    from vllm_pd_connector.transport.base import Transport

vllm_compat.check_version()


class PDConnector(KVConnectorBase_V1, SupportsHMA):
    """Named by `--kv-transfer-config '{"kv_connector": "PDConnector", ...}'`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert vllm_config.kv_transfer_config is not None
        adopt_vllm_logging()
        config = parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(config, vllm_config, kv_cache_config)
        else:
            from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

            self._worker = WorkerHalf(
                config,
                vllm_config,
                kv_cache_config,
                rank=get_tensor_model_parallel_rank(),
                pp_rank=get_pp_group().rank_in_group,
                open_transport=partial(_open_transport, config),
            )

    @property
    def _s(self) -> SchedulerHalf:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _w(self) -> WorkerHalf:
        assert self._worker is not None
        return self._worker

    # Before either half exists

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return vllm_cache.NEEDED_LAYOUT

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # The replay of a full graph runs no layer hook. A decoder needs none, but vLLM does not tell the role here,
        # so that the operator has to; what a prefiller lacks for it `make_signals` says.
        return not extra_config.get("full_cuda_graphs")

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        return False  # asked by vLLM 0.33: waking maps the cache anew, and peers would write to where it was

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PDStats:
        return PDStats(data=data) if data is not None else PDStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PDPromMetrics:
        return PDPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Scheduler half

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._s.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], RankHandshake]) -> None:
        self._s.greet_workers(metadata)

    def on_new_request(self, request: Request) -> None:
        self._s.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._s.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._s.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids  # a page that is zeroed late would lose what was written early

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._s.build_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._s.workers_reported(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._s.finished(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._s.finished(request)

    def has_pending_push_work(self) -> bool:
        return self._s.is_pending

    # Worker half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._w.register(kv_caches)

    def get_handshake_metadata(self) -> RankHandshake:
        return self._w.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._w.handle_preemptions(kv_connector_metadata.preempted)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._w.start_step(connector_metadata)

    def has_connector_metadata(self) -> bool:
        # vLLM skips the layer hooks without it, and binds none while it captures a graph.
        return super().has_connector_metadata() or (self._worker is not None and self._worker.is_capturing)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        if super().has_connector_metadata():
            self._w.layer_done(layer_name)
        else:
            self._w.layer_captured(layer_name)

    def wait_for_save(self) -> None:
        self._w.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._w.take_results()
        return KVConnectorTransferResults(
            finished_sending=sent or None, finished_recving=received or None, failed_recving=failed
        )

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._w.take_report()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        pass  # pages arrive by themselves

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass  # a request runs only when all its layers have arrived

    # Both

    def get_kv_connector_stats(self) -> PDStats | None:
        half = self._scheduler or self._worker
        data = half.take_stats() if half is not None else None
        return PDStats(data=data) if data is not None else None

    def shutdown(self) -> None:
        half = self._scheduler or self._worker
        if half is not None:
            half.shutdown()


def _open_transport(config: PDConfig, name: str, placement: Placement) -> Transport:
    from vllm_pd_connector.transport.nixl import NixlTransport

    transport: Transport = NixlTransport(name, config.nixl_backend, [nic.ucx_name for nic in placement.nics])
    if config.faults:
        from vllm_pd_connector.transport.scripted import ScriptedFault, ScriptedTransport

        faults = [ScriptedFault(fault.action, fault.nth, fault.count) for fault in config.faults]
        transport = ScriptedTransport(transport, faults)
    return transport
