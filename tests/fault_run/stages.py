"""Servers for each kind of fault, and which faults they are for. A stage that this machine cannot have says why."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from fault_run import engine_scenarios as engine
from fault_run import net_scenarios as net
from fault_run import scenarios as plain
from fault_run.cast import Cast
from fault_run.link import open_link, why_not
from fault_run.scenarios import Scenario
from vllm_pd_connector.kernels import native as native_part

DRAINS = ("--shutdown-timeout", "30")
FEW_BLOCKS = ("--num-gpu-blocks-override", "256", "--max-model-len", "4096")
SMALL_DISK_MIB = 48
CLOCKS_APART_S = 100_000
SHIM = Path(__file__).parent / "shift_clock.c"

OpenStage = Callable[[Path], AbstractContextManager[Cast]]


@contextmanager
def ordinary(folder: Path) -> Iterator[Cast]:
    with Cast(folder / "ordinary", args=DRAINS) as cast:
        yield cast


@contextmanager
def native(folder: Path) -> Iterator[Cast]:
    """As ordinary, but a native thread posts the prefillers' writes."""
    with Cast(folder / "native", args=DRAINS, prefiller={"native_posting": True}) as cast:
        for prefiller in cast.prefillers:
            prefiller.wait_log("event=native_posting_on", 1.0)
        yield cast


@contextmanager
def networked(folder: Path) -> Iterator[Cast]:
    """One prefiller behind a link; few blocks, so that pages have new owners soon."""
    with (
        open_link() as link,
        Cast(folder / "networked", 1, args=("--num-gpu-blocks-override", "640"), link=link) as cast,
    ):
        yield cast


@contextmanager
def lossy(folder: Path) -> Iterator[Cast]:
    """The same over a link that can lose and delay packets."""
    with (
        open_link(can_lose=True) as link,
        Cast(folder / "lossy", 1, args=("--num-gpu-blocks-override", "640"), link=link) as cast,
    ):
        yield cast


@contextmanager
def tiny(folder: Path) -> Iterator[Cast]:
    """256 blocks on each side; developers' endpoints are open."""
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    with Cast(folder / "tiny", 1, args=FEW_BLOCKS, env=env) as cast:
        yield cast


@contextmanager
def on_small_disk(folder: Path) -> Iterator[Cast]:
    """Logs and timelines on a file system of a few MiB."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m", "tmpfs", disk], check=True)
    try:
        with Cast(disk, 1) as cast:
            yield cast
    finally:
        subprocess.run(["umount", disk], check=True)


@contextmanager
def with_odd_clocks(folder: Path) -> Iterator[Cast]:
    """Prefillers whose monotonic clock is another one, and a wall clock that can be shifted everywhere."""
    library, shift = folder / "shift_clock.so", folder / "shift"
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, SHIM, "-ldl"], check=True)
    shift.write_text("0")
    env = {"LD_PRELOAD": str(library), "SHIFT_CLOCK_FILE": str(shift)}
    apart = ["unshare", "--time", "--fork", "--monotonic", str(CLOCKS_APART_S), "--boottime", str(CLOCKS_APART_S)]
    with Cast(folder / "clocks", 1, env=env, prefix=apart) as cast:
        cast.clock = shift
        yield cast


def _needs_root() -> str:
    return "" if os.geteuid() == 0 else "it needs root"


def _needs_compiler() -> str:
    return _needs_root() or ("" if shutil.which("cc") else "there is no C compiler (cc)")


STAGES: dict[str, tuple[OpenStage, Callable[[], str], dict[str, Scenario]]] = {
    "ordinary": (
        ordinary,
        lambda: "",
        {
            "kill-prefiller": plain.kill_prefiller,
            "kill-decoder": plain.kill_decoder,
            "stop-prefiller": plain.stop_prefiller,
            "stop-decoder": plain.stop_decoder,
            "restart-prefiller": plain.restart_prefiller,
            "restart-decoder": plain.restart_decoder,
            "terminate-prefiller": plain.terminate_prefiller,
            "terminate-decoder": plain.terminate_decoder,
            "cancel": plain.cancel,
            "kill-proxy": plain.kill_proxy,
        },
    ),
    "native": (
        native,
        lambda: native_part.WHY_MISSING,
        {
            "native-kill-prefiller": plain.kill_prefiller,
            "native-kill-decoder": plain.kill_decoder,
            "native-stop-prefiller": plain.stop_prefiller,
            "native-stop-decoder": plain.stop_decoder,
            "native-cancel": plain.cancel,
        },
    ),
    "networked": (
        networked,
        why_not,
        {
            "blip-network": net.blip_network,
            "cut-network": net.cut_network,
            "bad-network": net.bad_network,
            "stop-in-write": net.stop_in_write,
        },
    ),
    "lossy": (lossy, why_not, {"lose-packets": net.bad_network}),
    "tiny": (
        tiny,
        lambda: "",
        {
            "preempt": engine.preempt,
            "head-of-line": engine.head_of_line,
            "reset-cache": engine.reset_cache,
            "pause": engine.pause,
            "sleep": engine.sleep,
        },
    ),
    "small disk": (on_small_disk, _needs_root, {"fill-disk": engine.fill_disk}),
    "odd clocks": (with_odd_clocks, _needs_compiler, {"jump-clock": engine.jump_clock}),
}
NAMES = [name for _, _, scenarios in STAGES.values() for name in scenarios]
REPEATED = {"kill-prefiller": 20}
