"""The machine as a table: each GPU, the ports and cores it is given, and the ports nobody is given."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_pd_connector.topology.device import Nic, PciDevice
from vllm_pd_connector.topology.placement import Placement, place
from vllm_pd_connector.topology.sysfs import SYSFS, read_gpus, read_nics, read_node_cpus


def describe(root: Path = SYSFS) -> str:
    """The table of the machine whose sysfs this is."""
    return table(read_gpus(root), read_nics(root), read_node_cpus(root))


def table(gpus: Sequence[PciDevice], nics: Sequence[Nic], node_cpus: Mapping[int, frozenset[int]]) -> str:
    """Lines for a person; says so when there is no GPU or no RDMA port."""
    placements = [place(gpu, nics, node_cpus) for gpu in gpus]
    lines = [
        f"GPU {index}  {gpu.address}  node {'?' if gpu.numa_node is None else gpu.numa_node}  {_given(placement)}"
        for index, (gpu, placement) in enumerate(zip(gpus, placements, strict=True))
    ]
    given = {nic for placement in placements for nic in placement.nics}
    lines += [
        f"not used: {_port(nic)}{'' if nic.is_active else ', its link is down'}" for nic in nics if nic not in given
    ]
    if not gpus:
        lines.append("no NVIDIA GPU: ranks run on the CPU and are not placed")
    if not nics:
        lines.append("no RDMA port: pages travel over TCP, or over shared memory within the machine")
    return "\n".join(lines)


def _given(placement: Placement) -> str:
    cores = f"{len(placement.cpus)} cores" if placement.cpus else "any core"
    if not placement.nics:
        return f"ports of the transport's choice, {cores}"
    return f"{', '.join(map(_port, placement.nics))} ({placement.distance.name}), {cores}"


def _port(nic: Nic) -> str:
    return f"{nic.ucx_name} {nic.rate_gbps:g} Gb/s {nic.link_layer}"
