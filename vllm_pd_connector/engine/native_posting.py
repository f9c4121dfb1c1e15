"""Whether a native thread posts the writes of a rank, or only watches its layers, or is not needed."""

from __future__ import annotations

from dataclasses import dataclass
from logging import getLogger
from typing import TYPE_CHECKING, cast

from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.kernels import native
from vllm_pd_connector.kernels.poller import Poller

if TYPE_CHECKING:
    import torch

    from vllm_pd_connector.config import PDConfig
    from vllm_pd_connector.kernels.bell import Bell
    from vllm_pd_connector.kernels.poller import ThreadPlace
    from vllm_pd_connector.transport.base import ArmingTransport, Transport

logger = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativeThread:
    """Attributes:
    poller: the thread; None when there is none.
    arming: the transport whose writes it posts; None when the messenger posts them.
    bell: what it rings, for the messenger to sleep on.
    """

    poller: Poller | None = None
    arming: ArmingTransport | None = None
    bell: Bell | None = None

    def close(self) -> None:
        """Nothing is posted after this returns. Idempotent."""
        if self.poller is not None:
            self.poller.close()


def open_native_thread(
    transport: Transport, device: torch.device, place: ThreadPlace, config: PDConfig
) -> NativeThread:
    """Start what can be started.

    Args:
        transport: with its pages registered.
        device: where the KV cache is.
        place: where the thread runs.
        config: where its `native_posting` does not work the messenger posts, and the log says why.
    """
    if config.native_posting:
        try:
            if config.verify_pages:
                raise UnsupportedEngine("verify_pages is set, and Python takes the digests when it posts")
            if not hasattr(transport, "arm"):
                raise UnsupportedEngine(f"{type(transport).__name__} has no writes that a native thread could post")
            if not native.is_built():
                raise UnsupportedEngine(native.describe())
            arming, bell = cast("ArmingTransport", transport), native.extension().Bell()
            thread = NativeThread(arming.open_poller(bell, place), arming, bell)
        except UnsupportedEngine as error:
            logger.warning("event=native_posting_off reason=%s", error)
        else:
            logger.info("event=native_posting_on")
            return thread
    if device.type == "cuda" and native.is_built():
        bell = native.extension().Bell()
        return NativeThread(Poller(bell, place=place), bell=bell)
    return NativeThread()
