"""Which RDMA ports and which CPU cores serve a GPU. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vllm_pd_connector.topology.device import Distance, Nic, PciDevice, distance


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Attributes:
    nics: ports a rank should use, by name; empty: no choice is better than the transport's own.
    cpus: cores its writer thread should run on; empty: any.
    distance: of the chosen ports from the GPU.
    """

    nics: tuple[Nic, ...] = ()
    cpus: frozenset[int] = frozenset()
    distance: Distance = Distance.SYS


def place(gpu: PciDevice, nics: Iterable[Nic], node_cpus: Mapping[int, frozenset[int]]) -> Placement:
    """The nearest active ports, all of the fastest among equally near ones, and the cores of the GPU's NUMA node.

    Ports on the far side of the link between NUMA nodes are never preferred to what the transport would choose.

    Args:
        gpu: of this rank.
        nics: of the machine.
        node_cpus: cores of each NUMA node that this process may use.
    """
    cpus = (
        node_cpus.get(gpu.numa_node, frozenset()) if gpu.numa_node is not None and len(node_cpus) > 1 else frozenset()
    )
    near = [(distance(gpu, nic.device), nic) for nic in nics if nic.is_active]
    nearest = min((d for d, _ in near), default=Distance.SYS)
    if nearest is Distance.SYS:
        return Placement(cpus=cpus)
    equal = [nic for d, nic in near if d is nearest]
    fastest = max(nic.rate_gbps for nic in equal)
    chosen = sorted((nic for nic in equal if nic.rate_gbps == fastest), key=lambda nic: (nic.name, nic.port))
    return Placement(nics=tuple(chosen), cpus=cpus, distance=nearest)
