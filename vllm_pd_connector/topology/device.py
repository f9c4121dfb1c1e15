"""PCI devices as sysfs names them, and how far two of them are from each other. Pure."""

from dataclasses import dataclass
from enum import IntEnum


class Distance(IntEnum):
    """What lies between two devices, nearest first; the names are those that `nvidia-smi topo -m` prints."""

    PIX = 0  # one PCIe switch
    PXB = 1  # several PCIe bridges, but not the processor
    PHB = 2  # the processor's PCIe host bridge
    NODE = 3  # several host bridges of one NUMA node
    SYS = 4  # the link between NUMA nodes, or nothing is known


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """Attributes:
    path: components of its real path below /sys/devices: host bridge, bridges, and last its own address.
    numa_node: None where the firmware names none.
    """

    path: tuple[str, ...]
    numa_node: int | None

    @property
    def address(self) -> str:
        return self.path[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """One port of an RDMA device.

    Attributes:
        name: "mlx5_0".
        port: from 1.
        device: where it is.
        is_active: the port's link is up.
        rate_gbps: of the link, Gbit/s; 0 where unknown.
        link_layer: "InfiniBand" or "Ethernet" (RoCE, EFA).
    """

    name: str
    port: int
    device: PciDevice
    is_active: bool
    rate_gbps: float
    link_layer: str

    @property
    def ucx_name(self) -> str:
        """As `UCX_NET_DEVICES` lists it."""
        return f"{self.name}:{self.port}"


# Between two devices behind one switch lie its upstream port and one downstream port each.
_SWITCH_HOPS = 4


def distance(one: PciDevice, other: PciDevice) -> Distance:
    """What lies between two devices."""
    shared = 0
    for here, there in zip(one.path, other.path, strict=False):
        if here != there:
            break
        shared += 1
    if shared > 1:
        hops = len(one.path) + len(other.path) - 2 * shared
        return Distance.PIX if hops <= _SWITCH_HOPS else Distance.PXB
    if shared == 1:
        return Distance.PHB
    if one.numa_node is not None and one.numa_node == other.numa_node:
        return Distance.NODE
    return Distance.SYS
