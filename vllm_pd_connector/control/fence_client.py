"""A decoder asks every rank of a prefiller to stop a transfer, and learns whether all are quiet."""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from vllm_pd_connector.control.keys import ControlKey
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.wire.codec import MAX_CONTROL_BYTES, decode_control, encode
from vllm_pd_connector.wire.messages import ControlEndpoint, Fence, Quiet

PROBE_S = 1.0
"""Seconds to wait for a connection that only shows whether anybody listens."""

MARGIN_S = 2 * PROBE_S + 1.0
"""Seconds beyond its time-out within which `FenceClient.ask` has answered for certain."""


@dataclass(frozen=True, slots=True)
class FenceOutcome:
    """`is_dead`: the process that could still write is gone for certain."""

    is_quiet: bool
    is_dead: bool = False
    reason: str = ""


class FenceClient:
    """owned by: the dispatcher's event loop."""

    def __init__(self, key: ControlKey | None) -> None:
        self._key = key
        self._context = zmq.asyncio.Context()

    async def ask(self, controls: list[ControlEndpoint], transfer_id: str, timeout_s: float) -> FenceOutcome:
        """Quiet when every rank says so within `timeout_s`; dead when every rank that did not is certainly gone."""
        asked = (self._ask_one(c.endpoint, Fence(transfer_id, c.generation), timeout_s) for c in controls)
        outcomes = await asyncio.gather(*asked)
        troubled = [o for o in outcomes if not o.is_quiet]
        if not troubled:
            return FenceOutcome(is_quiet=True)
        return FenceOutcome(is_quiet=False, is_dead=all(o.is_dead for o in troubled), reason=troubled[0].reason)

    async def _ask_one(self, endpoint: str, fence: Fence, timeout_s: float) -> FenceOutcome:
        if await self._is_refused(endpoint):
            return FenceOutcome(is_quiet=False, is_dead=True, reason=f"nobody listens at {endpoint} any more")
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        if self._key is not None:
            self._key.secure_client(socket)
        try:
            socket.connect(endpoint)
            await socket.send(encode(fence))
            answer = decode_control(await asyncio.wait_for(socket.recv(), timeout_s))
            if isinstance(answer, Fence) or answer.transfer_id != fence.transfer_id:
                raise ProtocolError(f"{answer} does not answer {fence}")
        except TimeoutError:
            if await self._is_refused(endpoint):
                return FenceOutcome(is_quiet=False, is_dead=True, reason=f"{endpoint} died while it was asked")
            return FenceOutcome(is_quiet=False, reason=f"no answer from {endpoint} in {timeout_s:g} s")
        except (ProtocolError, zmq.ZMQError) as error:
            return FenceOutcome(is_quiet=False, reason=f"{endpoint}: {error}")
        finally:
            socket.close()
        if isinstance(answer, Quiet):
            return FenceOutcome(is_quiet=True)
        # Refused: another generation listens there, so the one that could write is gone.
        return FenceOutcome(is_quiet=False, is_dead=True, reason=f"{endpoint}: {answer}")

    @staticmethod
    async def _is_refused(endpoint: str) -> bool:
        """ZMQ hides a refused connection behind its retries, and a refusal is how a dead process shows."""
        parts = urlsplit(endpoint)
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, parts.port), PROBE_S)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        writer.close()
        return False

    def close(self) -> None:
        self._context.destroy(linger=0)
