"""The layer hook while a CUDA graph is captured: vLLM calls it only if the connector says that metadata is bound."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from vllm_pd_connector.engine.connector import PDConnector
from vllm_pd_connector.engine.step import StepMetadata
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


@pytest.mark.parametrize(
    ("extra", "has_kernels", "piecewise"),
    [
        ({}, True, True),
        ({"full_cuda_graphs": True}, True, False),
        ({"full_cuda_graphs": True}, False, True),
    ],
)
def test_full_graphs_need_the_operators_word_and_the_kernels(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], has_kernels: bool, piecewise: bool
) -> None:
    monkeypatch.setattr(device_launch, "is_available", lambda: has_kernels)
    assert PDConnector.requires_piecewise_for_cudagraph(extra) is piecewise
