"""What a host's name or address says of where it is."""

import asyncio
import socket

PROBE_S = 1.0
"""Seconds to wait for an answer that only shows whether anybody answers."""


async def is_own(host: str) -> bool:
    """Whether a name or an address, loopback included, leads to this machine. Not if it cannot be looked up."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except (OSError, ValueError):
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


async def is_refused(host: str, port: int) -> bool:
    """Whether every address of a host refuses connections.

    Args:
        host: name or address.
        port: TCP; no answer within `PROBE_S` is no refusal.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), PROBE_S)
        for _, _, _, _, address in found:
            try:
                _, writer = await asyncio.wait_for(asyncio.open_connection(*address[:2]), PROBE_S)
            except ConnectionRefusedError:
                continue
            writer.close()
            return False
    except (OSError, TimeoutError, ValueError):  # the last: no address
        return False
    return bool(found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
