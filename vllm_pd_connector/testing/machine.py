"""What this machine has, and the environment a vLLM server needs on it."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HOST = "127.0.0.1"
FIRST_PORT = 10_000
GPU_SHARE = 0.85  # of a GPU's memory, divided among the servers on it
ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "UCX_LOG_LEVEL": "error"}
CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # GiB of KV; we pin, not vLLM
FEW_CORES = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent / "few_cores")}
"""For servers whose processes share cores; see `few_cores/sitecustomize.py`."""
SECOND_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(Path(__file__).parent / "second_runner")}
"""For servers with vLLM's V2 model runner on a CPU, which also need `SECOND_RUNNER_ARGS`."""
SECOND_RUNNER_ARGS = ("--worker-cls", "vllm_pd_connector.testing.second_runner_worker.SecondRunnerWorker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """GPUs of one server and the share of their memory it may use; none on a machine without."""

    gpus: Sequence[int] = ()
    memory_share: float | None = None


@cache
def num_gpus() -> int:
    """NVIDIA GPUs that `nvidia-smi` lists; 0 without it."""
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return done.stdout.count("GPU ") if done.returncode == 0 else 0


def assign_gpus(wanted: Sequence[Sequence[int]]) -> list[Devices]:
    """GPUs for each server of a set: those it wants, else the servers take turns."""
    total = num_gpus()
    if not total:
        return [Devices() for _ in wanted]
    chosen = [list(gpus) or [index % total] for index, gpus in enumerate(wanted)]
    return [
        Devices(gpus=gpus, memory_share=GPU_SHARE / max(sum(gpu in other for other in chosen) for gpu in gpus))
        for gpus in chosen
    ]


def environment(*, cores: Sequence[int], gpus: Sequence[int], extra: Mapping[str, str]) -> dict[str, str]:
    """Our environment with what a server on these cores or GPUs needs; `extra` wins.

    PYTHONDONTWRITEBYTECODE is left out: where it is set each of a server's processes compiles vLLM and PyTorch anew,
    which takes longer than loading the model.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | ENV
    env |= (
        {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        if gpus
        else CPU_ENV | {"OMP_NUM_THREADS": str(len(cores) or 1)}
    )
    return env | dict(extra)


def free_ports(number: int) -> list[int]:
    """Different TCP ports that were free a moment ago, below those that the kernel hands out itself.

    As operators choose them: firewalls and proxies may treat the two kinds differently.
    """
    first_of_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = iter(random.sample(range(FIRST_PORT, first_of_kernel), 50 + 2 * number))
    with ExitStack() as holders:
        ports: list[int] = []
        while len(ports) < number:
            with suppress(OSError):
                port = next(candidates)
                holders.enter_context(socket.create_server((HOST, port)))
                ports.append(port)
    return ports
