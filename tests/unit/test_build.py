"""What the build makes of an nvcc that cannot compile the kernels: it must cost the kernels only, not the extension."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHOICE = Path(__file__).parents[2] / "csrc" / "cuda_architectures.cmake"
CMAKE = shutil.which("cmake")
pytestmark = pytest.mark.skipif(CMAKE is None, reason="no cmake")

NVCC = """#!/bin/sh
for argument; do
    case "$argument" in
        {refused}) echo "nvcc fatal   : Unsupported gpu architecture" >&2; exit 1;;
        -c) compiles=yes;;
        *layer_signal.cu) test -f "$argument" && source=yes;;
    esac
done
test "$compiles$source" = yesyes
"""


def choice(nvcc: Path) -> str:
    """What the build would compile for, and what it says."""
    assert CMAKE is not None
    done = subprocess.run(
        [CMAKE, f"-DNVCC={nvcc}", "-P", CHOICE], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("refused", "usable"),
    [
        ("nothing", "80-real;90-real;100"),
        ("*sm_100", "80-real;90"),  # CUDA 11.8 to 12.7
        ("*sm_100|*sm_90", "80"),  # older ones
        ("*sm_80", "90-real;100"),  # one that has dropped it
        ("-std=c++17", ""),
    ],
)
def test_an_nvcc_is_asked_for_what_it_can_compile(tmp_path: Path, refused: str, usable: str) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(NVCC.format(refused=refused))
    nvcc.chmod(0o755)
    said = choice(nvcc)
    assert said.splitlines()[-1] == f"architectures: {usable}"
    assert said.count("Unsupported gpu architecture") == 3 - len([*filter(None, usable.split(";"))])


def test_an_nvcc_that_does_not_start_compiles_for_none(tmp_path: Path) -> None:
    assert choice(tmp_path / "nvcc").splitlines()[-1] == "architectures: "
