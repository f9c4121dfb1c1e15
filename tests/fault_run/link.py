"""A network between two hosts on one machine: two devices, one in a namespace; it can be cut or made bad. As root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from fault_run.relay import Relay
from vllm_pd_connector.testing.servers import ServerSpec

NAMESPACE = "pdfaults"
NEAR, FAR = "pdfaults-d", "pdfaults-p"
NEAR_ADDRESS, FAR_ADDRESS = "10.77.13.1", "10.77.13.2"
IN_NAMESPACE = ("ip", "netns", "exec", NAMESPACE)
NARROW = "tbf rate 100mbit burst 32k latency 3ms"
"""A queue so short that it drops what TCP sends in a burst."""

LOSS, DELAY_S, JITTER_S = 0.03, 0.02, 0.005
MTU = 9000

SLOW = "tbf rate 20mbit burst 32k latency 400ms"
"""A layer of 512 tokens of the model takes 0.2 s."""

SEND_BUFFER = "64k"
"""Most of a write stays in UCX, which sends it from the prefiller's polls: it is in flight for long."""

ONLY_SOCKETS = {"UCX_TLS": "tcp", "GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}


def why_not() -> str:
    """Why there can be no such network here; empty if there can."""
    if os.geteuid():
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{', '.join(missing)} is missing (package iproute2)" if missing else ""


@dataclass(frozen=True, slots=True)
class Link:
    """The decoder's end is in our namespace, the prefillers' in `NAMESPACE`. Made by `open_link`.

    `relay`: what passes packets on, if it is not the kernel.
    """

    relay: Relay | None = None
    near_env: ClassVar[dict[str, str]] = {**ONLY_SOCKETS, "UCX_NET_DEVICES": NEAR}

    def behind(self, spec: ServerSpec) -> ServerSpec:
        """A prefiller on the far side."""
        return replace(
            spec,
            host=FAR_ADDRESS,
            prefix=IN_NAMESPACE,
            env={**spec.env, **ONLY_SOCKETS, "UCX_NET_DEVICES": FAR, "UCX_TCP_SNDBUF": SEND_BUFFER},
            extra={**spec.extra, "advertise_host": FAR_ADDRESS},
        )

    def cut(self) -> None:
        """Nothing passes any more, and nobody is told."""
        _run("ip", "link", "set", NEAR, "down")

    def mend(self) -> None:
        _run("ip", "link", "set", NEAR, "up")

    def spoil(self) -> str:
        """Make both ways bad; says how."""
        if self.relay is not None:
            self.relay.set(loss=LOSS, delay_s=DELAY_S, jitter_s=JITTER_S)
            return (
                f"{LOSS:.0%} of packets lost, the others {DELAY_S * 1e3:g} ms late, more or less {JITTER_S * 1e3:g} ms,"
            )
        _run("tc", "qdisc", "replace", "dev", NEAR, "root", *NARROW.split())
        _run(*IN_NAMESPACE, "tc", "qdisc", "replace", "dev", FAR, "root", *NARROW.split())
        return f"tc {NARROW}"

    def heal(self) -> None:
        if self.relay is not None:
            self.relay.set()
            return
        _run("tc", "qdisc", "del", "dev", NEAR, "root")
        _run(*IN_NAMESPACE, "tc", "qdisc", "del", "dev", FAR, "root")

    def num_received(self) -> int:
        """Bytes that have come from the prefillers so far."""
        return int(Path(f"/sys/class/net/{NEAR}/statistics/rx_bytes").read_text())

    def slow_down(self) -> None:
        """What the prefillers send takes long."""
        _run(*IN_NAMESPACE, "tc", "qdisc", "replace", "dev", FAR, "root", *SLOW.split())

    def speed_up(self) -> None:
        _run(*IN_NAMESPACE, "tc", "qdisc", "del", "dev", FAR, "root")


@contextmanager
def open_link(*, can_lose: bool = False) -> Iterator[Link]:
    """Two ends that reach each other; `can_lose`: by way of a `Relay`, else as a veth pair.

    Raises:
        subprocess.CalledProcessError: the kernel does not allow it.
    """
    _run("ip", "netns", "add", NAMESPACE)
    relay: Relay | None = None
    try:
        if can_lose:
            relay = Relay(NEAR, FAR)
            _run("ip", "link", "set", FAR, "netns", NAMESPACE)
            _run("ip", "link", "set", NEAR, "mtu", str(MTU))
            _run("ip", "-n", NAMESPACE, "link", "set", FAR, "mtu", str(MTU))
        else:
            _run("ip", "link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", NAMESPACE)
        _run("ip", "addr", "add", f"{NEAR_ADDRESS}/24", "dev", NEAR)
        _run("ip", "link", "set", NEAR, "up")
        for command in (f"addr add {FAR_ADDRESS}/24 dev {FAR}", f"link set {FAR} up", "link set lo up"):
            _run("ip", "-n", NAMESPACE, *command.split())
        yield Link(relay)
    finally:
        if relay is not None:
            relay.stop()  # takes its devices with it
        _run("ip", "netns", "del", NAMESPACE)  # takes the veth pair with it


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
