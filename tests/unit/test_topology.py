"""Which RDMA ports and cores a GPU gets, on sysfs trees laid out like machines that people run."""

from pathlib import Path

import pytest
from sysfs_trees import build

from vllm_pd_connector.topology.device import Distance
from vllm_pd_connector.topology.placement import Placement, place
from vllm_pd_connector.topology.sysfs import parse_cpulist, read_device, read_gpus, read_nics, read_node_cpus
from vllm_pd_connector.topology.table import describe


def placements(root: Path) -> list[Placement]:
    return [place(gpu, read_nics(root), read_node_cpus(root)) for gpu in read_gpus(root)]


def names(placement: Placement) -> list[str]:
    return [nic.ucx_name for nic in placement.nics]


def test_dgx_h100_pairs_each_gpu_with_the_adapter_behind_its_switch(tmp_path: Path) -> None:
    found = placements(build("dgx_h100", tmp_path))
    assert [names(p) for p in found] == [[f"mlx5_{i}:1"] for i in range(8)]
    assert {p.distance for p in found} == {Distance.PIX}
    assert found[0].cpus == parse_cpulist("0-55,112-167")
    assert found[7].cpus == parse_cpulist("56-111,168-223")


def test_a_dead_link_gives_way_to_the_fastest_of_the_same_node(tmp_path: Path) -> None:
    """Not to the far node, and not to the slower storage adapter."""
    found = placements(build("dgx_h100_dead_link", tmp_path))
    assert names(found[3]) == ["mlx5_0:1", "mlx5_1:1", "mlx5_2:1"]
    assert found[3].distance is Distance.NODE
    assert names(found[2]) == ["mlx5_2:1"]


def test_hgx_shares_an_adapter_between_two_gpus(tmp_path: Path) -> None:
    found = placements(build("hgx_cx7", tmp_path))
    assert [names(p) for p in found] == [[f"mlx5_{i // 2}:1"] for i in range(8)]
    assert {p.distance for p in found} == {Distance.PXB}


def test_p5_gives_each_gpu_its_four_adapters(tmp_path: Path) -> None:
    found = placements(build("p5_efa", tmp_path))
    assert [len(p.nics) for p in found] == [4] * 8
    used = [nic.name for p in found for nic in p.nics]
    assert len(set(used)) == 32


def test_a_far_port_is_not_preferred_to_the_transports_own_choice(tmp_path: Path) -> None:
    root = build("dgx_h100", tmp_path)
    far = [nic for nic in read_nics(root) if nic.device.numa_node == 1]
    placement = place(read_gpus(root)[0], far, read_node_cpus(root))
    assert placement.nics == ()
    assert placement.cpus


def test_a_machine_without_any_of_it(tmp_path: Path) -> None:
    assert (read_gpus(tmp_path), read_nics(tmp_path), read_node_cpus(tmp_path)) == ([], [], {})
    assert read_device("0000:18:00.0", tmp_path) is None


def test_odd_entries_are_left_out(tmp_path: Path) -> None:
    """A software RDMA device has no place on the bus; firmware may name no node; a rate may be no number."""
    root = build("dgx_h100", tmp_path)
    (root / "class/infiniband/rxe0/ports/1").mkdir(parents=True)
    (root / "class/infiniband/mlx5_0/ports/1/rate").write_text("unknown\n")
    gpu = root / "bus/pci/devices/0000:18:00.0"
    (gpu / "numa_node").write_text("-1\n")
    assert [nic.rate_gbps for nic in read_nics(root) if nic.name in ("mlx5_0", "rxe0")] == [0.0]
    device = read_device("0000:18:00.0", root)
    assert device is not None
    assert device.numa_node is None
    assert place(device, read_nics(root), read_node_cpus(root)).cpus == frozenset()


def test_one_node_needs_no_pinning(tmp_path: Path) -> None:
    root = build("dgx_h100", tmp_path)
    assert place(read_gpus(root)[0], read_nics(root), {0: frozenset({0, 1})}).cpus == frozenset()


@pytest.mark.parametrize(
    ("text", "cpus"), [("", set()), ("3", {3}), ("0-2,5", {0, 1, 2, 5}), ("0-1,8-9", {0, 1, 8, 9})]
)
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpulist(text) == cpus


def test_the_table_names_every_gpu_and_the_dead_link(tmp_path: Path) -> None:
    lines = describe(build("dgx_h100_dead_link", tmp_path)).splitlines()
    assert lines[0] == "GPU 0  0000:18:00.0  node 0  mlx5_0:1 400 Gb/s InfiniBand (PIX), 112 cores"
    assert "not used: mlx5_3:1 10 Gb/s InfiniBand, its link is down" in lines
    assert len(lines) == 8 + 3


def test_the_table_of_a_plain_machine_says_what_is_missing(tmp_path: Path) -> None:
    assert "no NVIDIA GPU" in describe(tmp_path)
    assert "no RDMA port" in describe(tmp_path)
