"""The layer hook while a CUDA graph is captured: vLLM calls it only if the connector says that metadata is bound."""

import inspect
import logging
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm_pd_connector.engine.connector import PDConnector
from vllm_pd_connector.engine.layer_signal import EventLayerSignal
from vllm_pd_connector.engine.step import StepMetadata
from vllm_pd_connector.engine.word_signal import make_signals
from vllm_pd_connector.kernels import device_launch


@dataclass
class Worker:
    """What the facade calls of a worker half."""

    is_capturing: bool = False
    calls: list[tuple[str, str]] = field(default_factory=list)

    def start_step(self, orders: StepMetadata) -> None:
        pass

    def layer_done(self, name: str) -> None:
        self.calls.append(("done", name))

    def layer_captured(self, name: str) -> None:
        self.calls.append(("captured", name))


@pytest.fixture
def connector() -> Any:
    made: Any = object.__new__(PDConnector)
    made._connector_metadata = None
    made._worker = Worker()
    return made


def hook(connector: Any) -> list[tuple[str, str]]:
    """As `maybe_transfer_kv_layer` does after a layer's attention."""
    if connector.has_connector_metadata():
        connector.save_kv_layer("l0", torch.empty(0), None)
    return connector._worker.calls


def test_warm_ups_and_dummy_batches_run_no_hook(connector: Any) -> None:
    assert hook(connector) == []


def test_a_capture_enqueues_the_signal_although_no_step_is_bound(connector: Any) -> None:
    connector._worker.is_capturing = True
    assert hook(connector) == [("captured", "l0")]


def test_a_step_announces_its_layers(connector: Any) -> None:
    connector.bind_connector_metadata(StepMetadata())
    assert hook(connector) == [("done", "l0")]
    connector.clear_connector_metadata()
    assert hook(connector) == [("done", "l0")]


@pytest.mark.parametrize(("extra", "piecewise"), [({}, True), ({"full_cuda_graphs": True}, False)])
def test_full_graphs_need_the_operators_word(extra: dict[str, Any], piecewise: bool) -> None:
    assert PDConnector.requires_piecewise_for_cudagraph(extra) is piecewise


def test_vllm_asks_for_graphs_without_telling_the_role() -> None:
    """Why a decoder, which announces nothing, needs the word too. Where this fails, the role can be looked at."""
    asked = inspect.signature(KVConnectorBase_V1.requires_piecewise_for_cudagraph)
    assert list(asked.parameters) == ["extra_config"]


@pytest.mark.parametrize("has_full_graphs", [True, False])
def test_a_prefiller_that_cannot_announce_from_inside_a_graph_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_full_graphs: bool
) -> None:
    monkeypatch.setattr(device_launch, "is_available", lambda: False)
    monkeypatch.setattr(logging.getLogger("vllm_pd_connector"), "propagate", True)
    signals = make_signals(torch.device("cuda"), 2, None, has_full_graphs=has_full_graphs)
    assert isinstance(signals.begin_step(), EventLayerSignal)  # at the step's end it announces what no hook did
    assert ("event=graphs_without_signals" in caplog.text) is has_full_graphs
