"""A decoder asks every rank of a prefiller to stop a transfer, and learns whether all are quiet."""

import asyncio
from dataclasses import dataclass
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from vllm_pd_connector.control.keys import ControlKey
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.wire.codec import MAX_CONTROL_BYTES, decode_control, encode
from vllm_pd_connector.wire.messages import Control, ControlEndpoint, Fence, Inquiry, Quiet, Refused, Standing

PROBE_S = 1.0
"""Seconds to wait for a connection that only shows whether anybody listens."""

MARGIN_S = 2 * PROBE_S + 1.0
"""Seconds beyond its time-out within which `FenceClient.ask` has answered for certain."""


@dataclass(frozen=True, slots=True)
class FenceOutcome:
    """`is_dead`: nothing more is posted for certain; what is on the wire may still land."""

    is_quiet: bool
    is_dead: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TransferOutlook:
    """How a transfer stands over all ranks.

    Attributes:
        is_over: no rank will write more of it.
        error: why its pages will not all come; empty if they may.
        is_gone: because the process of a rank is gone for certain.
    """

    is_over: bool
    error: str = ""
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """`is_gone`: the process that was asked is gone for certain."""

    reason: str
    is_gone: bool = False

    def __str__(self) -> str:
        return self.reason


class FenceClient:
    """owned by: the dispatcher's event loop."""

    def __init__(self, key: ControlKey | None) -> None:
        self._key = key
        self._context = zmq.asyncio.Context()

    async def ask(self, controls: list[ControlEndpoint], transfer_id: str, timeout_s: float) -> FenceOutcome:
        """Quiet when every rank says so within `timeout_s`; dead when every rank that did not is certainly gone."""
        asked = (self._fence(c.endpoint, Fence(transfer_id, c.generation), timeout_s) for c in controls)
        troubled = [o for o in await asyncio.gather(*asked) if not o.is_quiet]
        if not troubled:
            return FenceOutcome(is_quiet=True)
        return FenceOutcome(is_quiet=False, is_dead=all(o.is_dead for o in troubled), reason=troubled[0].reason)

    async def inquire(self, controls: list[ControlEndpoint], transfer_id: str, timeout_s: float) -> TransferOutlook:
        """Whether pages of a transfer can still be expected. Ranks that say nothing are given the benefit."""
        asked = (self._exchange(c.endpoint, Inquiry(transfer_id, c.generation), timeout_s) for c in controls)
        answers = await asyncio.gather(*asked)
        for control, answer in zip(controls, answers, strict=True):
            if isinstance(answer, Standing) and answer.error:
                return TransferOutlook(is_over=True, error=answer.error)
            if _is_gone(answer):
                return TransferOutlook(is_over=True, error=f"{control.endpoint} is gone", is_gone=True)
        return TransferOutlook(is_over=all(isinstance(a, Standing) and a.is_over for a in answers))

    async def _fence(self, endpoint: str, fence: Fence, timeout_s: float) -> FenceOutcome:
        answer = await self._exchange(endpoint, fence, timeout_s)
        if isinstance(answer, Quiet):
            # It posts nothing more; only what a failed write had on the wire is left, as of a dead process.
            reason = "" if answer.is_clean else f"{endpoint}: a write failed and may still land"
            return FenceOutcome(is_quiet=answer.is_clean, is_dead=not answer.is_clean, reason=reason)
        return FenceOutcome(is_quiet=False, is_dead=_is_gone(answer), reason=f"{endpoint}: {answer}")

    async def _exchange(self, endpoint: str, question: Fence | Inquiry, timeout_s: float) -> Control | _NoAnswer:
        """A rank's answer about the transfer asked for, or why there is none."""
        if await self._is_refused(endpoint):
            return _NoAnswer("nobody listens there any more", is_gone=True)
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        if self._key is not None:
            self._key.secure_client(socket)
        try:
            socket.connect(endpoint)
            await socket.send(encode(question))
            answer = decode_control(await asyncio.wait_for(socket.recv(), timeout_s))
            if isinstance(answer, Fence | Inquiry) or answer.transfer_id != question.transfer_id:
                raise ProtocolError(f"{answer} does not answer {question}")
            return answer
        except TimeoutError:
            is_gone = await self._is_refused(endpoint)
            return _NoAnswer("it died while it was asked" if is_gone else f"no answer in {timeout_s:g} s", is_gone)
        except (ProtocolError, zmq.ZMQError) as error:
            return _NoAnswer(str(error))
        finally:
            socket.close()

    @staticmethod
    async def _is_refused(endpoint: str) -> bool:
        """ZMQ hides a refused connection behind its retries, and a refusal is how a dead process shows."""
        try:
            parts = urlsplit(endpoint)
            _, writer = await asyncio.wait_for(asyncio.open_connection(parts.hostname, parts.port), PROBE_S)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError, ValueError):  # the last: no address, which ZMQ then refuses
            return False
        writer.close()
        return False

    def close(self) -> None:
        self._context.destroy(linger=0)


def _is_gone(answer: Control | _NoAnswer) -> bool:
    """A refusal that names the transfer comes from another generation: whoever could write is gone."""
    return answer.is_gone if isinstance(answer, _NoAnswer) else isinstance(answer, Refused)
