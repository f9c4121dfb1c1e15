"""A network between two hosts on one machine: a veth pair into a namespace, which can be cut or made bad. As root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from vllm_pd_connector.testing.servers import ServerSpec

NAMESPACE = "pdfaults"
NEAR, FAR = "pdfaults-d", "pdfaults-p"
NEAR_ADDRESS, FAR_ADDRESS = "10.77.13.1", "10.77.13.2"
IN_NAMESPACE = ("ip", "netns", "exec", NAMESPACE)
LOSSY = "netem delay 20ms 5ms loss 3%"
NARROW = "tbf rate 100mbit burst 32k latency 3ms"
"""A queue so short that it drops what TCP sends in a burst, for kernels without netem."""

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
    """The decoder's end is in our namespace, the prefillers' in `NAMESPACE`. Made by `open_link`."""

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
        """Loss and delay on both ends, by what the kernel has; says what that was."""
        complaint = ""
        for discipline in (LOSSY, NARROW):
            try:
                _run("tc", "qdisc", "replace", "dev", NEAR, "root", *discipline.split())
                _run(*IN_NAMESPACE, "tc", "qdisc", "replace", "dev", FAR, "root", *discipline.split())
            except subprocess.CalledProcessError as error:
                complaint = error.stderr.strip()
                continue
            return f"tc {discipline}" + (f" (no netem here: {complaint})" if complaint else "")
        raise RuntimeError(complaint)

    def heal(self) -> None:
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
def open_link() -> Iterator[Link]:
    """Two ends that reach each other.

    Raises:
        subprocess.CalledProcessError: the kernel does not allow it.
    """
    _run("ip", "netns", "add", NAMESPACE)
    try:
        _run("ip", "link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", NAMESPACE)
        _run("ip", "addr", "add", f"{NEAR_ADDRESS}/24", "dev", NEAR)
        _run("ip", "link", "set", NEAR, "up")
        for command in (f"addr add {FAR_ADDRESS}/24 dev {FAR}", f"link set {FAR} up", "link set lo up"):
            _run("ip", "-n", NAMESPACE, *command.split())
        yield Link()
    finally:
        _run("ip", "netns", "del", NAMESPACE)  # takes the pair with it


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
