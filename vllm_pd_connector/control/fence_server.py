"""A prefiller rank's ear: decoders ask it to stop a transfer and are told when nothing is in flight.

Runs beside the model thread, so the answer does not wait for a forward pass. It sleeps in a poll; one bad frame costs
one refusal.
"""

import threading
from collections.abc import Callable
from logging import getLogger

import zmq
from zmq.auth.thread import ThreadAuthenticator

from vllm_pd_connector.control.keys import ControlKey
from vllm_pd_connector.errors import ConfigError, ProtocolError
from vllm_pd_connector.wire.codec import MAX_CONTROL_BYTES, decode_control, encode
from vllm_pd_connector.wire.messages import Control, Fence, Inquiry, Quiet, Refused, Standing

logger = getLogger(__name__)

Answer = Callable[[Quiet], None]
FenceHandler = Callable[[str, Answer], None]
"""Called with (transfer id, answer); `answer` may be called later, from one other thread only."""

InquiryHandler = Callable[[str, Callable[[Standing], None]], None]
"""The same for an inquiry, from that same thread."""

STOP_TIMEOUT_S = 2.0


class FenceServer:
    """Listens from construction on; `start` begins to answer.

    Args:
        host: address to bind, also told to peers.
        port: 0 for any free one.
        generation: this process; fences for another one are refused.
        key: CURVE key, None for an open channel.
        on_fence: what to do with a fence.
        on_inquiry: what to do with an inquiry.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        generation: str,
        key: ControlKey | None,
        on_fence: FenceHandler,
        on_inquiry: InquiryHandler,
    ) -> None:
        self._generation = generation
        self._on_fence = on_fence
        self._on_inquiry = on_inquiry
        self._context = zmq.Context()
        self._authenticator = self._authenticate(key)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        self._router.linger = 0
        if key is not None:
            key.secure_server(self._router)
        self._answers = self._context.socket(zmq.PULL)
        self._answers.bind("inproc://answers")
        self._answering: zmq.Socket[bytes] | None = None
        bind_host = f"[{host}]" if ":" in host else host
        try:
            self._router.ipv6 = ":" in host
            self._router.bind(f"tcp://{bind_host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"cannot listen on advertise_host {host!r}, control_port {port}: {error}. "
                "Choose an address of this machine and a free port."
            ) from None
        bound_port = self._router.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0").rsplit(":", 1)[1]
        self.endpoint = f"tcp://{bind_host}:{bound_port}"
        self._thread = threading.Thread(target=self._run, name="pd-fence-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop listening; unanswered fences stay unanswered and run into the decoder's time-out."""
        stop = self._context.socket(zmq.PUSH)
        stop.connect("inproc://answers")
        stop.send(b"")
        stop.close(linger=0)
        self._thread.join(STOP_TIMEOUT_S)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _authenticate(self, key: ControlKey | None) -> ThreadAuthenticator | None:
        if key is None:
            return None
        authenticator = ThreadAuthenticator(self._context)
        authenticator.start()
        authenticator.configure_curve_callback(domain="*", credentials_provider=key)
        return authenticator

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._answers, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._answers in ready:
                frames = self._answers.recv_multipart()
                if frames == [b""]:
                    return
                self._router.send_multipart(frames)
            if self._router in ready:
                self._receive(self._router.recv_multipart())

    def _receive(self, frames: list[bytes]) -> None:
        identity, body = frames[0], frames[-1]
        try:
            if len(frames) != 2:
                raise ProtocolError(f"{len(frames) - 1} frames; a control message is one frame")
            message = decode_control(body)
            if not isinstance(message, Fence | Inquiry):
                raise ProtocolError(f"a {type(message).__name__} is not a request")
        except ProtocolError as error:
            logger.warning("event=control_refused reason=%s", error)
            self._router.send_multipart([identity, encode(Refused(reason=str(error)[:4096]))])
            return
        if message.generation != self._generation:
            refusal = Refused(reason="another process answers here now", transfer_id=message.transfer_id)
            self._router.send_multipart([identity, encode(refusal)])
            return
        transfer_id = message.transfer_id
        if isinstance(message, Fence):
            self._on_fence(transfer_id, lambda quiet: self._answer(identity, quiet))
        else:
            self._on_inquiry(transfer_id, lambda standing: self._answer(identity, standing))

    def _answer(self, identity: bytes, answer: Control) -> None:
        # The messenger thread's own socket: ZMQ sockets do not move between threads.
        if self._answering is None:
            self._answering = self._context.socket(zmq.PUSH)
            self._answering.connect("inproc://answers")
        self._answering.send_multipart([identity, encode(answer)])
