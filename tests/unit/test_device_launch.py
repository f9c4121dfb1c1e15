"""Which ways there are to the CUDA kernels, and that NVRTC, which cupy calls, takes the source as it is."""

import ctypes
import ctypes.util
import shutil
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_pd_connector.engine.connector import PDConnector
from vllm_pd_connector.engine.word_signal import make_signals
from vllm_pd_connector.kernels import device_launch, native


class TestWhatIsAvailable:
    @pytest.mark.parametrize(
        ("extension", "has_cupy", "expected"),
        [
            (None, False, False),
            (None, True, False),  # nobody would read the words
            (SimpleNamespace(has_cuda=False), False, False),
            (SimpleNamespace(has_cuda=False), True, True),
            (SimpleNamespace(has_cuda=True), False, True),
            (SimpleNamespace(has_cuda=True), True, True),
        ],
    )
    def test_kernels_need_the_extension_and_nvcc_or_cupy(
        self, monkeypatch: pytest.MonkeyPatch, extension: object, has_cupy: bool, expected: bool
    ) -> None:
        monkeypatch.setattr(native, "_native", extension)
        monkeypatch.setattr(device_launch, "find_spec", lambda name: name if has_cupy and name == "cupy" else None)
        assert device_launch.is_available() is expected
        assert PDConnector.requires_piecewise_for_cudagraph({"full_cuda_graphs": True}) is not expected

    def test_without_the_extension_a_gpu_has_events(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whole steps as graphs would then tell of no layer before their end."""
        monkeypatch.setattr(native, "_native", None)
        monkeypatch.setattr(device_launch, "find_spec", lambda name: name)
        assert not make_signals(torch.device("cuda"), 2, None).is_capturing


def nvrtc() -> Path | None:
    """NVRTC's library: of the system, of a CUDA toolkit, or of a wheel."""
    if name := ctypes.util.find_library("nvrtc"):
        return Path(name)
    wheels = find_spec("nvidia")
    folders = [Path(folder) for folder in (wheels.submodule_search_locations or ())] if wheels else []
    folders += Path("/usr/local").glob("cuda*/lib64")
    if compiler := shutil.which("nvcc"):
        folders.append(Path(compiler).resolve().parents[1])
    return next((file for folder in folders for file in sorted(folder.rglob("libnvrtc.so*"))), None)


class Program:
    """A source under NVRTC, whose calls answer 0 when they have worked."""

    def __init__(self, library: Path, source: str) -> None:
        for builtins in library.parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins))  # NVRTC opens it by its name and knows no folder
        self._library = ctypes.CDLL(str(library))
        self._program = ctypes.c_void_p()
        created = self._library.nvrtcCreateProgram(
            ctypes.byref(self._program), source.encode(), b"layer_signal.cu", 0, None, None
        )
        assert created == 0

    def compile(self, *options: str) -> str:
        """Its PTX; fails with NVRTC's log."""
        texts = (ctypes.c_char_p * len(options))(*map(str.encode, options))
        code = self._library.nvrtcCompileProgram(self._program, len(options), texts)
        assert code == 0, self._text("ProgramLog")
        return self._text("PTX")

    def _text(self, what: str) -> str:
        size = ctypes.c_size_t()
        assert getattr(self._library, f"nvrtcGet{what}Size")(self._program, ctypes.byref(size)) == 0
        text = ctypes.create_string_buffer(size.value)
        assert getattr(self._library, f"nvrtcGet{what}")(self._program, text) == 0
        return text.value.decode()

    def close(self) -> None:
        self._library.nvrtcDestroyProgram(ctypes.byref(self._program))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_nvrtc_takes_the_source_as_it_is(arch: str) -> None:
    """With the options cupy is given. No driver and no GPU is needed for that."""
    library = nvrtc()
    if library is None:
        pytest.skip("no libnvrtc: it comes with a CUDA toolkit, or with the wheel nvidia-cuda-nvrtc")
    program = Program(library, device_launch.SOURCE.read_text())
    try:
        ptx = program.compile(f"--gpu-architecture=compute_{arch}", *device_launch.OPTIONS)
    finally:
        program.close()
    assert f".target sm_{arch}" in ptx
    for kernel in ("pd_begin_step", "pd_signal_layer", "pd_finish_step"):
        assert f".entry {kernel}(" in ptx  # by the name cupy asks for
    assert "st.release.sys.global.u64" in ptx
