"""Fake sysfs trees, laid out like machines that people run (tests/data/topology)."""

from pathlib import Path

MACHINES = Path(__file__).parents[1] / "data" / "topology"


def build(machine: str, root: Path) -> Path:
    """A sysfs tree with the links the kernel makes, from a table of devices."""
    for line in (MACHINES / f"{machine}.txt").read_text().splitlines():
        kind, *words = line.split()
        if kind == "gpu":
            _pci(root, words[0], words[1], vendor="0x10de", device_class="0x030200")
        elif kind == "nic":
            name, path, node, state, rate, layer = words
            device = _pci(root, path, node, vendor="0x15b3", device_class="0x020700")
            port = root / "class/infiniband" / name / "ports/1"
            port.mkdir(parents=True)
            (port.parent.parent / "device").symlink_to(device)
            (port / "state").write_text(f"4: {state}\n" if state == "ACTIVE" else f"1: {state}\n")
            (port / "rate").write_text(f"{rate} Gb/sec (4X NDR)\n")
            (port / "link_layer").write_text(f"{layer}\n")
        elif kind == "node":
            folder = root / "devices/system/node" / f"node{words[0]}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{words[1]}\n")
    return root


def _pci(root: Path, path: str, node: str, *, vendor: str, device_class: str) -> Path:
    device = root / "devices" / path
    device.mkdir(parents=True)
    for name, text in (("numa_node", node), ("vendor", vendor), ("class", device_class)):
        (device / name).write_text(f"{text}\n")
    listed = root / "bus/pci/devices"
    listed.mkdir(parents=True, exist_ok=True)
    (listed / device.name).symlink_to(device)
    return device
