"""Launches of the kernels in csrc/layer_signal.cu: compiled with the extension, or at run time with the cupy extra.

All calls are asynchronous. Addresses are of 64-bit words, streams are handles as in `torch.cuda.Stream.cuda_stream`.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.kernels import native

SOURCE = Path(__file__).with_name("layer_signal.cu")
OPTIONS = ("-std=c++17",)
"""What NVRTC is told."""


class DeviceLaunch(Protocol):
    """The three kernels. Called by the model thread; `signal_layer` may be captured in a CUDA graph, the others not."""

    def begin_step(self, stream: int, epoch: int, step: int) -> None:
        """From here on, signals on this stream carry `step`."""
        ...

    def signal_layer(self, stream: int, epoch: int, word: int) -> None:
        """When the stream gets here, all it wrote before is in memory and the layer's word says so."""
        ...

    def finish_step(self, stream: int, epoch: int, words: int, num_layers: int, unannounced: int) -> None:
        """Announce the layers that were not announced in this step, and add their number to a word."""
        ...


class RuntimeCompiled:
    """The same source, compiled by NVRTC through cupy. owned by: the model thread.

    Raises:
        ImportError: cupy is not installed.
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        module = cupy.RawModule(code=SOURCE.read_text(), options=OPTIONS)
        self._begin, self._signal, self._finish = (
            module.get_function(name) for name in ("pd_begin_step", "pd_signal_layer", "pd_finish_step")
        )

    def begin_step(self, stream: int, epoch: int, step: int) -> None:
        self._launch(self._begin, stream, self._word(epoch), self._word(step))

    def signal_layer(self, stream: int, epoch: int, word: int) -> None:
        self._launch(self._signal, stream, self._word(epoch), self._word(word))

    def finish_step(self, stream: int, epoch: int, words: int, num_layers: int, unannounced: int) -> None:
        count = self._cupy.int32(num_layers)
        self._launch(self._finish, stream, self._word(epoch), self._word(words), count, self._word(unannounced))

    def _word(self, value: int) -> Any:
        return self._cupy.uint64(value)

    def _launch(self, kernel: Any, stream: int, *arguments: Any) -> None:
        with self._cupy.cuda.ExternalStream(stream):
            kernel((1,), (1,), arguments)


def is_available() -> bool:
    """Whether layers can be announced by kernels on a machine with a GPU. Imports nothing, needs no GPU.

    Cupy alone is not enough: the words that kernels write are read by the extension.
    """
    return native.is_built() and (native.extension().has_cuda or find_spec("cupy") is not None)


def make_launch() -> DeviceLaunch:
    """The compiled kernels, else those compiled here and now.

    Raises:
        UnsupportedEngine: there are neither.
    """
    if native.is_built() and native.extension().has_cuda:
        return native.extension()
    try:
        return RuntimeCompiled()
    except ImportError as error:
        raise UnsupportedEngine(
            f"no CUDA kernels for the layer signal: {native.describe()}, and {error}. "
            "Install with nvcc on PATH, or install the extra vllm-pd-connector[cupy]."
        ) from error
