"""Two network devices and a relay between them that can lose and delay packets, for kernels without netem. As root.

`Relay` starts this file as a process, so that no other thread delays the packets.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from contextlib import suppress
from itertools import count

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MAX_PACKET_BYTES = 1 << 16


class Relay:
    """The process, and what it does to packets. It ends with `stop`, or with us.

    Args:
        devices: names of the two devices; they are there when this returns.
    """

    def __init__(self, *devices: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *devices], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def set(self, *, loss: float = 0.0, delay_s: float = 0.0, jitter_s: float = 0.0) -> None:
        """From now on: share of packets that are lost, seconds the others take, and how much that varies."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([loss, delay_s, jitter_s]) + "\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _open(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def _forward(near: int, far: int) -> None:
    """Pass packets on until the other end of our standard input is gone."""
    chance, order = random.Random(0), count()
    across = {near: far, far: near}
    waiting: list[tuple[float, int, int, bytes]] = []
    loss = delay_s = jitter_s = 0.0
    while True:
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([near, far, sys.stdin], [], [], pause_s)
        if sys.stdin in readable:
            line = sys.stdin.readline()
            if not line:
                return
            loss, delay_s, jitter_s = json.loads(line)
        now = time.monotonic()
        for device in (d for d in (near, far) if d in readable):
            packet = os.read(device, MAX_PACKET_BYTES)
            if chance.random() >= loss:
                due = now + delay_s + chance.uniform(-jitter_s, jitter_s)
                heapq.heappush(waiting, (due, next(order), across[device], packet))
        while waiting and waiting[0][0] <= now:
            _, _, device, packet = heapq.heappop(waiting)
            _send(device, packet)


def _send(device: int, packet: bytes) -> None:
    with suppress(OSError):  # the device is down, or its queue is full: the packet is lost
        os.write(device, packet)


if __name__ == "__main__":
    ends = [_open(name) for name in sys.argv[1:]]
    print("ready", flush=True)
    _forward(*ends)
