"""Our counters and gauges in vLLM's stats pipeline: from both halves through the engine to /metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_pd_connector.telemetry.counters import COUNTERS, GAUGES

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class PDStats(KVConnectorStats):
    """`data`: {"counters": {name: increase}, "gauges": {name: latest value}}."""

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data = {"counters": {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> PDStats:
        counters = self.data["counters"]
        for name, increase in other.data["counters"].items():
            counters[name] = counters.get(name, 0) + increase
        self.data["gauges"].update(other.data["gauges"])
        return self

    def reduce(self) -> dict[str, int | float]:
        return {**self.data["counters"], **self.data["gauges"]}

    def is_empty(self) -> bool:
        return not self.data["counters"] and not self.data["gauges"]


class PDPromMetrics(KVConnectorPromMetrics):
    """`vllm:pd_<name>` for every name in `telemetry.counters`, labelled as vLLM labels its own."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        self._counters = {
            name: counter(name=f"vllm:pd_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: gauge(
                name=f"vllm:pd_{name}", documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for name, text in GAUGES.items()
        }
        for values in per_engine_labelvalues.values():
            for metric in (*self._counters.values(), *self._gauges.values()):
                metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, increase in transfer_stats_data["counters"].items():
            self._counters[name].labels(*values).inc(increase)
        for name, value in transfer_stats_data["gauges"].items():
            self._gauges[name].labels(*values).set(value)
