"""Reads devices from sysfs. What is missing or odd there is left out: a machine without RDMA devices is no error."""

from pathlib import Path

from vllm_pd_connector.topology.device import Nic, PciDevice

SYSFS = Path("/sys")
NVIDIA = "0x10de"
DISPLAY_CLASS = "0x03"


def read_gpus(root: Path = SYSFS) -> list[PciDevice]:
    """NVIDIA GPUs in the order of their addresses, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    folders = sorted((root / "bus/pci/devices").glob("*"))
    return [
        _device(folder, root)
        for folder in folders
        if _text(folder / "vendor") == NVIDIA and _text(folder / "class").startswith(DISPLAY_CLASS)
    ]


def read_device(address: str, root: Path = SYSFS) -> PciDevice | None:
    """The PCI device at "0000:1b:00.0"; None if there is none."""
    folder = root / "bus/pci/devices" / address.lower()
    return _device(folder, root) if folder.exists() else None


def read_nics(root: Path = SYSFS) -> list[Nic]:
    """Every port of every RDMA device, those that are down included."""
    found: list[Nic] = []
    for device in sorted((root / "class/infiniband").glob("*")):
        if not (device / "device").exists():
            continue  # a software device has no place on the bus
        place = _device(device / "device", root)
        for port in sorted((device / "ports").glob("*")):
            found.append(
                Nic(
                    name=device.name,
                    port=int(port.name),
                    device=place,
                    is_active=_text(port / "state").endswith("ACTIVE"),
                    rate_gbps=_leading_number(_text(port / "rate")),
                    link_layer=_text(port / "link_layer"),
                )
            )
    return found


def read_node_cpus(root: Path = SYSFS) -> dict[int, frozenset[int]]:
    """CPU cores of each NUMA node that has any."""
    nodes: dict[int, frozenset[int]] = {}
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        cpus = parse_cpulist(_text(folder / "cpulist"))
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes


def parse_cpulist(text: str) -> frozenset[int]:
    """The kernel's "0-3,8,10-11"."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _device(folder: Path, root: Path) -> PciDevice:
    real = folder.resolve()
    node = _text(real / "numa_node")
    return PciDevice(
        path=real.relative_to((root / "devices").resolve()).parts,
        numa_node=int(node) if node and int(node) >= 0 else None,  # -1: the firmware does not say
    )


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _leading_number(text: str) -> float:
    """Of "400 Gb/sec (4X NDR)"."""
    number = text.partition(" ")[0]
    try:
        return float(number)
    except ValueError:
        return 0.0
