"""Where the rank's GPU is, and what is near it."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from logging import getLogger

import torch

from vllm_pd_connector.topology.placement import Placement, place
from vllm_pd_connector.topology.sysfs import read_device, read_nics, read_node_cpus

logger = getLogger(__name__)

PR_SET_TIMERSLACK = 29  # linux/prctl.h


def rank_placement(device: torch.device) -> Placement:
    """The ports and cores for a rank's GPU; an empty one without a GPU, or where the machine does not show its bus.

    Called once at start.
    """
    if device.type != "cuda":
        return Placement()
    properties = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    gpu = read_device(address)
    if gpu is None:
        logger.info("event=placement_unknown gpu=%s not in sysfs; the transport chooses its ports", address)
        return Placement()
    allowed = os.sched_getaffinity(0)
    node_cpus = {node: cpus & allowed for node, cpus in read_node_cpus().items()}
    placement = place(gpu, read_nics(), node_cpus)
    logger.info(
        "event=placed gpu=%s nics=%s distance=%s cpus=%d",
        address,
        ",".join(nic.ucx_name for nic in placement.nics) or "any",
        placement.distance.name,
        len(placement.cpus),
    )
    return placement


def pin_this_thread(placement: Placement) -> None:
    """Keep the calling thread on the cores of its GPU's NUMA node."""
    if placement.cpus:
        os.sched_setaffinity(0, placement.cpus)


def sharpen_this_thread() -> None:
    """Have the calling thread's waits end in time: Linux lets each last 50 us longer, waits for the GIL among them."""
    with suppress(OSError, AttributeError):  # another system: its waits are as they are
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)
