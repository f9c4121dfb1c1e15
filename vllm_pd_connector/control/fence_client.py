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

HTTP_PORT = 80

MARGIN_S = 3 * PROBE_S + 1.0
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
        is_gone: because a rank's process is, as far as a refused connection shows.
    """

    is_over: bool
    error: str = ""
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class _NoAnswer:
    """`is_refused`: so were connections. The process is gone, if it was its own host that refused."""

    reason: str
    is_refused: bool = False

    def __str__(self) -> str:
        return self.reason


class FenceClient:
    """owned by: the dispatcher's event loop.

    A refused connection alone proves nothing: where a link is down, packets may take another way, to a router or
    firewall that refuses for a host that lives (seen with `scripts/faults cut-network`; pages were given back, and
    written). It counts when the host shows that it is the one that refuses: its API server takes a connection, or has
    ended one.

    Args:
        key: of the control channel.
        context: opens its sockets; None: a new one of ZMQ's.
    """

    def __init__(self, key: ControlKey | None, context: zmq.asyncio.Context | None = None) -> None:
        self._key = key
        self._context = context or zmq.asyncio.Context()
        self._hung_up: set[str] = set()

    def hung_up(self, controls: list[ControlEndpoint]) -> None:
        """A prefiller has ended a connection of ours: what is refused at its addresses from now on is gone."""
        self._hung_up.update(control.generation for control in controls)

    async def ask(
        self, controls: list[ControlEndpoint], transfer_id: str, timeout_s: float, url: str = ""
    ) -> FenceOutcome:
        """Quiet when every rank says so within `timeout_s`; dead when every rank that did not is certainly gone.

        Args:
            controls: of every rank.
            transfer_id: to be stopped.
            timeout_s: for each answer.
            url: the prefiller's API server.
        """
        asked = (self._fence(control, transfer_id, timeout_s, url) for control in controls)
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
            if isinstance(answer, Refused) or (isinstance(answer, _NoAnswer) and answer.is_refused):
                return TransferOutlook(is_over=True, error=f"{control.endpoint} is gone", is_gone=True)
        return TransferOutlook(is_over=all(isinstance(a, Standing) and a.is_over for a in answers))

    async def _fence(self, control: ControlEndpoint, transfer_id: str, timeout_s: float, url: str) -> FenceOutcome:
        endpoint = control.endpoint
        answer = await self._exchange(endpoint, Fence(transfer_id, control.generation), timeout_s)
        if isinstance(answer, Quiet):
            # It posts nothing more; only what a failed write had on the wire is left, as of a dead process.
            reason = "" if answer.is_clean else f"{endpoint}: a write failed and may still land"
            return FenceOutcome(is_quiet=answer.is_clean, is_dead=not answer.is_clean, reason=reason)
        # A refusal that names the transfer comes from another generation: whoever could write is gone.
        is_dead, reason = isinstance(answer, Refused), f"{endpoint}: {answer}"
        if isinstance(answer, _NoAnswer) and answer.is_refused:
            is_dead = control.generation in self._hung_up or await self._is_up(endpoint, url)
            reason += "" if is_dead else "; but nothing shows that its own host says so, and it may live behind a cut"
        return FenceOutcome(is_quiet=False, is_dead=is_dead, reason=reason)

    async def _exchange(self, endpoint: str, question: Fence | Inquiry, timeout_s: float) -> Control | _NoAnswer:
        """A rank's answer about the transfer asked for, or why there is none."""
        if await self._is_refused(endpoint):
            return _NoAnswer("nobody listens there any more", is_refused=True)
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
            is_refused = await self._is_refused(endpoint)
            reason = "nobody listens there since it was asked" if is_refused else f"no answer in {timeout_s:g} s"
            return _NoAnswer(reason, is_refused)
        except (ProtocolError, zmq.ZMQError) as error:
            return _NoAnswer(str(error))
        finally:
            socket.close()

    @staticmethod
    async def _is_refused(endpoint: str) -> bool:
        """ZMQ hides a refused connection behind its retries, and a refusal is how a dead process shows."""
        try:
            parts = urlsplit(endpoint)
            await _connect(parts.hostname, parts.port)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError, ValueError):  # the last: no address, which ZMQ then refuses
            return False
        return False

    async def _is_up(self, endpoint: str, url: str) -> bool:
        """Whether the host of an endpoint takes connections for its API server."""
        try:
            await _connect(urlsplit(endpoint).hostname, urlsplit(url).port or HTTP_PORT)
        except (OSError, TimeoutError, ValueError):
            return False
        return True

    def close(self) -> None:
        self._context.destroy(linger=0)


async def _connect(host: str | None, port: int | None) -> None:
    """Open a connection and close it.

    Raises:
        OSError, TimeoutError: there is none to be had, within `PROBE_S`.
    """
    _, writer = await asyncio.wait_for(asyncio.open_connection(host, port), PROBE_S)
    writer.close()
