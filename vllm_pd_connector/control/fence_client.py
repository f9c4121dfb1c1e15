"""A decoder asks every rank of a prefiller to stop a transfer, and learns whether all are quiet."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

import zmq
import zmq.asyncio

from vllm_pd_connector.control import addresses
from vllm_pd_connector.control.keys import ControlKey
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.wire.codec import MAX_CONTROL_BYTES, decode_control, encode
from vllm_pd_connector.wire.messages import Control, ControlEndpoint, Fence, Inquiry, Quiet, Refused, Standing

MARGIN_S = 4 * addresses.PROBE_S + 1.0
"""Seconds beyond its time-out within which `FenceClient.ask` has answered, unless others are asked before it."""

END_S, MAX_LOOK_PAUSE_S = 30.0, 2.0
"""Seconds in which a process ends that has begun to, and between two looks at it; the first ones come sooner."""

MAX_PER_RANK, MAX_AT_ONCE = 64, 256
"""Questions under way. Each takes three files of the process, and ZMQ opens 1,023 sockets at most."""

IsServing = Callable[[str, str], Awaitable[bool]]
"""Whether a vLLM server answers for a base URL at a host's address: `PrefillerClient.is_serving`."""


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
    firewall that refuses for a host that lives, or to a proxy that takes any connection (docs/adr/0008). A refusal
    counts when a vLLM server answers at that host's address, or when it follows at once on an end (`see_end`).

    Args:
        key: of the control channel.
        is_serving: asks an API server.
        context: opens its sockets; None: a new one of ZMQ's.
    """

    def __init__(
        self, key: ControlKey | None, is_serving: IsServing, context: zmq.asyncio.Context | None = None
    ) -> None:
        self._key = key
        self._is_serving = is_serving
        self._context = context or zmq.asyncio.Context()
        self._gate = asyncio.Semaphore(MAX_AT_ONCE)
        self._gates: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._ending: dict[ControlEndpoint, float] = {}
        self._ended: set[ControlEndpoint] = set()

    async def see_end(self, controls: list[ControlEndpoint], url: str) -> None:
        """A prefiller has just ended an exchange as one does whose process ends: see which ranks stop listening.

        Those are gone for good. Only now: it may have been something else, and what is refused a minute later may be
        so by a router.

        Args:
            controls: of every rank.
            url: the prefiller's API server.
        """
        ends_at = asyncio.get_running_loop().time() + END_S
        alive = dict.fromkeys((control for control in controls if control not in self._ended), ends_at)
        fresh = [control for control in alive if control not in self._ending]
        self._ending.update(alive)
        await asyncio.gather(*(self._see_end(control, url) for control in fresh))

    async def _see_end(self, control: ControlEndpoint, url: str) -> None:
        now, pause_s = asyncio.get_running_loop().time, 0.1
        try:
            if await self._leads_home(control.endpoint, url):
                return
            while not await self._is_refused(control.endpoint):
                if now() >= self._ending[control]:  # later if another exchange has ended since
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_LOOK_PAUSE_S)
            self._ended.add(control)
        finally:
            del self._ending[control]

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
            is_dead = control in self._ended or await self._refuses_itself(endpoint, url)
            reason += "" if is_dead else "; but nothing shows that its own host says so, and it may live behind a cut"
        return FenceOutcome(is_quiet=False, is_dead=is_dead, reason=reason)

    async def _exchange(self, endpoint: str, question: Fence | Inquiry, timeout_s: float) -> Control | _NoAnswer:
        """A rank's answer about the transfer asked for, or why there is none."""
        async with self._gates.setdefault(endpoint, asyncio.Semaphore(MAX_PER_RANK)), self._gate:
            if await self._is_refused(endpoint):
                return _NoAnswer("nobody listens there any more", is_refused=True)
            try:
                answer = decode_control(await self._converse(endpoint, encode(question), timeout_s))
                if isinstance(answer, Fence | Inquiry) or answer.transfer_id != question.transfer_id:
                    raise ProtocolError(f"{answer} does not answer {question}")
                return answer
            except TimeoutError:
                is_refused = await self._is_refused(endpoint)
                reason = "nobody listens there since it was asked" if is_refused else f"no answer in {timeout_s:g} s"
                return _NoAnswer(reason, is_refused)
            except (ProtocolError, zmq.ZMQError, ValueError) as error:  # the last: an endpoint that is no text
                return _NoAnswer(str(error))

    async def _converse(self, endpoint: str, frame: bytes, timeout_s: float) -> bytes:
        """Raises:
        TimeoutError: no answer.
        zmq.ZMQError, ValueError: no such address, or no more sockets.
        """
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.linger = 0
            socket.ipv6 = "[" in endpoint  # as `FenceServer`, which takes a name's IPv4
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
            if self._key is not None:
                self._key.secure_client(socket)
            socket.connect(endpoint)
            await socket.send(frame)
            return await asyncio.wait_for(socket.recv(), timeout_s)
        finally:
            socket.close()

    async def _refuses_itself(self, endpoint: str, url: str) -> bool:
        """Whether it is a rank's own host that refuses: a vLLM server answers there, and then it still refuses."""
        host = urlsplit(endpoint).hostname
        return (
            bool(host)
            and not await self._leads_home(endpoint, url)
            and await self._is_serving(url, host)
            and await self._is_refused(endpoint)
        )

    @staticmethod
    async def _leads_home(endpoint: str, url: str) -> bool:
        """Whether a rank's address is this machine's and its prefiller's is not.

        Its `advertise_host` is not set, or both machines have a network of the same numbers; what is refused here, and
        who serves here, then says nothing of it.
        """
        host, elsewhere = urlsplit(endpoint).hostname or "", urlsplit(url).hostname or ""
        return await addresses.is_own(host) and not await addresses.is_own(elsewhere)

    @staticmethod
    async def _is_refused(endpoint: str) -> bool:
        """ZMQ hides a refused connection behind its retries, and a refusal is how a dead process shows."""
        try:
            parts = urlsplit(endpoint)
            host, port = parts.hostname, parts.port
        except ValueError:  # no address, which ZMQ then refuses
            return False
        return bool(host and port) and await addresses.is_refused(host, port)

    def close(self) -> None:
        self._context.destroy(linger=0)
