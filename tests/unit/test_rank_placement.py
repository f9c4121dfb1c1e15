"""Which ports and cores a rank takes, on fake sysfs trees, and that its threads really keep to those cores."""

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sysfs_trees import build

from vllm_pd_connector.engine import rank_placement as placing
from vllm_pd_connector.engine.rank_placement import native_place, pin_this_thread, rank_placement, settle_this_thread
from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.kernels.poller import ThreadPlace
from vllm_pd_connector.topology.device import Distance
from vllm_pd_connector.topology.placement import Placement
from vllm_pd_connector.topology.sysfs import parse_cpulist

GPU, CPU = torch.device("cuda", 3), torch.device("cpu")
PR_GET_TIMERSLACK = 30
NO_SUCH_CORE = frozenset({1 << 14})


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Say at which address of the bus CUDA's devices are, on a machine whose cores are all ours."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(256)))

    def at(address: str) -> None:
        domain, bus_id, rest = address.split(":")
        found = SimpleNamespace(
            pci_domain_id=int(domain, 16), pci_bus_id=int(bus_id, 16), pci_device_id=int(rest.split(".")[0], 16)
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: found)

    return at


@pytest.mark.parametrize(
    ("machine", "address", "ports", "distance", "cores"),
    [
        ("dgx_h100", "0000:18:00.0", ["mlx5_0:1"], Distance.PIX, "0-55,112-167"),
        ("dgx_h100", "0000:da:00.0", ["mlx5_7:1"], Distance.PIX, "56-111,168-223"),
        ("dgx_h100_dead_link", "0000:5c:00.0", ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"], Distance.NODE, "0-55,112-167"),
    ],
)
def test_a_rank_takes_what_is_near_its_gpu(
    tmp_path: Path,
    bus: Callable[[str], None],
    machine: str,
    address: str,
    ports: list[str],
    distance: Distance,
    cores: str,
) -> None:
    bus(address)
    found = rank_placement(GPU, build(machine, tmp_path))
    assert [nic.ucx_name for nic in found.nics] == ports
    assert found.distance is distance
    assert found.cpus == parse_cpulist(cores)


def test_only_cores_that_the_process_may_use(
    tmp_path: Path, bus: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's or an operator's own choice of cores stands."""
    bus("0000:18:00.0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5, 60, 61})
    root = build("dgx_h100", tmp_path)
    assert rank_placement(GPU, root).cpus == {3, 5}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {60, 61})
    assert rank_placement(GPU, root).cpus == frozenset()  # none of them is near: any


def test_a_gpu_that_the_machine_does_not_show_is_not_placed(
    tmp_path: Path, bus: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    bus("0001:ff:00.0")
    with caplog.at_level(logging.INFO):
        assert rank_placement(GPU, build("dgx_h100", tmp_path)) == Placement()
    assert "event=placement_unknown gpu=0001:ff:00.0" in caplog.text


def test_a_rank_on_the_cpu_is_not_placed(tmp_path: Path) -> None:
    assert rank_placement(CPU, build("dgx_h100", tmp_path)) == Placement()


def on_a_thread(action: Callable[[], object]) -> list[object]:
    """What a thread of its own returned, and its cores afterwards."""
    seen: list[object] = []

    def run() -> None:
        seen.append(action())
        seen.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    return seen


def timer_slack_ns() -> int:
    return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: nothing to choose from")
def test_a_pinned_thread_keeps_to_its_cores_and_the_others_do_not() -> None:
    mine = os.sched_getaffinity(0)
    one = frozenset({max(mine)})
    assert on_a_thread(lambda: pin_this_thread(Placement(cpus=one))) == [None, one]
    assert os.sched_getaffinity(0) == mine
    assert on_a_thread(lambda: pin_this_thread(Placement())) == [None, mine]


@pytest.mark.parametrize("cpus", [NO_SUCH_CORE, frozenset({-1}), frozenset({1 << 40})])
def test_cores_that_cannot_be_had_are_logged_and_the_thread_goes_on(
    cpus: frozenset[int], caplog: pytest.LogCaptureFixture
) -> None:
    """What comes after the pinning is done as well."""

    def settle() -> int:
        settle_this_thread(CPU, Placement(cpus=cpus))
        return timer_slack_ns()

    assert on_a_thread(settle) == [1000, os.sched_getaffinity(0)]
    assert "event=messenger_not_pinned" in caplog.text


def test_a_settled_thread_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    selected: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: selected.append((device, threading.get_native_id())))

    def settle() -> int:
        settle_this_thread(GPU, Placement())
        return threading.get_native_id()

    thread, _ = on_a_thread(settle)
    assert selected == [(GPU, thread)]


class TestNativePlace:
    def test_a_native_thread_gets_the_cores_and_the_gpus_context(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placing, "primary_context", lambda ordinal: (0x5E1, 0xC0 + ordinal))
        place = native_place(GPU, Placement(cpus=frozenset({4, 5})))
        assert place == ThreadPlace(frozenset({4, 5}), select_device=0x5E1, device=0xC3)

    def test_without_an_index_it_is_the_present_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(placing, "primary_context", lambda ordinal: (0x5E1, 0xC0 + ordinal))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 6)
        assert native_place(torch.device("cuda"), Placement()).device == 0xC6

    def test_the_cpu_has_none(self) -> None:
        assert native_place(CPU, Placement(cpus=frozenset({1}))) == ThreadPlace(frozenset({1}))

    def test_without_a_driver_it_goes_on_and_the_log_says_so(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuse(_ordinal: int) -> tuple[int, int]:
            raise UnsupportedEngine("no driver here")

        monkeypatch.setattr(placing, "primary_context", refuse)
        assert native_place(GPU, Placement(cpus=frozenset({1}))) == ThreadPlace(frozenset({1}))
        assert "event=poller_without_device reason=no driver here" in caplog.text
