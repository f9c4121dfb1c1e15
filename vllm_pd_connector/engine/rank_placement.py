"""Where the rank's GPU is, and what is near it."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from logging import getLogger
from typing import TYPE_CHECKING

import torch

from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.kernels.cuda_context import primary_context
from vllm_pd_connector.kernels.poller import ThreadPlace
from vllm_pd_connector.topology.placement import Placement, place
from vllm_pd_connector.topology.sysfs import SYSFS, read_device, read_nics, read_node_cpus

if TYPE_CHECKING:
    from pathlib import Path

logger = getLogger(__name__)

PR_SET_TIMERSLACK = 29  # linux/prctl.h


def rank_placement(device: torch.device, root: Path = SYSFS) -> Placement:
    """The ports and cores for a rank's GPU; an empty one without a GPU, or where the machine does not show its bus.

    Called once at start.
    """
    if device.type != "cuda":
        return Placement()
    properties = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    gpu = read_device(address, root)
    if gpu is None:
        logger.info("event=placement_unknown gpu=%s not in sysfs; the transport chooses its ports", address)
        return Placement()
    allowed = os.sched_getaffinity(0)
    node_cpus = {node: cpus & allowed for node, cpus in read_node_cpus(root).items()}
    placement = place(gpu, read_nics(root), node_cpus)
    logger.info(
        "event=placed gpu=%s nics=%s distance=%s cpus=%d",
        address,
        ",".join(nic.ucx_name for nic in placement.nics) or "any",
        placement.distance.name,
        len(placement.cpus),
    )
    return placement


def settle_this_thread(device: torch.device, placement: Placement) -> None:
    """Give the calling thread its GPU and its cores, and have its waits end in time."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pin_this_thread(placement)
    sharpen_this_thread()


def native_place(device: torch.device, placement: Placement) -> ThreadPlace:
    """The same GPU and cores for a native thread, which has no Python to select a device with.

    Args:
        device: where the KV cache is.
        placement: of the rank.
    """
    if device.type != "cuda":
        return ThreadPlace(placement.cpus)
    try:
        return ThreadPlace(
            placement.cpus, *primary_context(torch.cuda.current_device() if device.index is None else device.index)
        )
    except UnsupportedEngine as error:
        logger.warning("event=poller_without_device reason=%s", error)
        return ThreadPlace(placement.cpus)


def pin_this_thread(placement: Placement) -> None:
    """Keep the calling thread on the cores of its GPU's NUMA node. Refused, it goes on and the log says so."""
    if placement.cpus:
        try:
            os.sched_setaffinity(0, placement.cpus)
        except (OSError, ValueError, OverflowError) as error:
            logger.warning("event=messenger_not_pinned cpus=%s reason=%s", sorted(placement.cpus), error)


def sharpen_this_thread() -> None:
    """Have the calling thread's waits end in time: Linux lets each last 50 us longer, waits for the GIL among them."""
    with suppress(OSError, AttributeError):  # another system: its waits are as they are
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)
