"""Where the native poller's thread runs: its cores, its GPU's context, and what happens when they cannot be had."""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

from vllm_pd_connector.config import PDConfig
from vllm_pd_connector.engine.native_posting import open_native_thread
from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.kernels import native
from vllm_pd_connector.kernels.cuda_context import primary_context
from vllm_pd_connector.kernels.poller import Poller, ThreadPlace, Trigger
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport

pytestmark = pytest.mark.skipif(not native.is_built(), reason=native.WHY_MISSING)

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
LIMIT_S = 20.0
MINE = os.sched_getaffinity(0)
ONE = frozenset({max(MINE)})
NO_SUCH_CORES = [frozenset({1 << 14}), frozenset({-1, 0})]

DRIVER = """
#define _GNU_SOURCE
#include <unistd.h>
static char contexts[8];  /* their addresses are the contexts */
static unsigned retained;
int set_calls, set_thread; void *set_context;
int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int ordinal) { if (ordinal > 7) return 101; *device = 7 - ordinal; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &contexts[device]; retained |= 1u << device; return 0;
}
int cuCtxSetCurrent(void *context) {
    ++set_calls; set_thread = gettid(); set_context = context;
    return retained & 1u << ((char *)context - contexts) ? 0 : 201;
}
void *context_of(int device) { return &contexts[device]; }
"""


def tasks(name: str) -> dict[int, set[int]]:
    """Threads of this process with a name, and the cores each may use."""
    found: dict[int, set[int]] = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended just now
            if (task / "comm").read_text().strip() == name:
                found[int(task.name)] = os.sched_getaffinity(int(task.name))
    return found


def new_task(before: dict[int, set[int]]) -> tuple[int, set[int]]:
    """The poller that was started since."""
    ((thread, cores),) = (item for item in tasks("pd-poller").items() if item[0] not in before)
    return thread, cores


def sees_a_layer(poller: Poller, bell: object) -> bool:
    words = native.extension().LayerWords(1)
    poller.watch(Trigger(words, [0], 1, 2**62))
    words.bump(1, 0)
    return bool(bell.wait_for(LIMIT_S))  # type: ignore[attr-defined]


needs_cores = pytest.mark.skipif(len(MINE) < 2, reason="one core: nothing to choose from")


@needs_cores
def test_the_thread_keeps_to_its_cores_and_this_one_does_not() -> None:
    before = tasks("pd-poller")
    with closing(Poller(native.extension().Bell(), place=ThreadPlace(ONE))):
        assert new_task(before)[1] == ONE
        assert os.sched_getaffinity(0) == MINE


def test_without_cores_it_runs_where_its_maker_does() -> None:
    before = tasks("pd-poller")
    with closing(Poller(native.extension().Bell())):
        assert new_task(before)[1] == MINE


@pytest.mark.parametrize("cpus", NO_SUCH_CORES)
def test_cores_that_cannot_be_had_are_logged_and_it_works(
    cpus: frozenset[int], caplog: pytest.LogCaptureFixture
) -> None:
    before, bell = tasks("pd-poller"), native.extension().Bell()
    with closing(Poller(bell, place=ThreadPlace(cpus))) as poller:
        assert f"event=poller_not_pinned cpus={sorted(cpus)} reason=Invalid argument" in caplog.text
        assert new_task(before)[1] == MINE
        assert sees_a_layer(poller, bell)


@needs_cores
def test_a_list_of_cores_may_be_longer_than_a_cpu_set() -> None:
    """More than 1,024 cores; those that are not there do not count."""
    before = tasks("pd-poller")
    with closing(Poller(native.extension().Bell(), place=ThreadPlace(ONE | {5000}))):
        assert new_task(before)[1] == ONE


def selection(answer: int) -> tuple[Callable[..., int], list[tuple[int, int]]]:
    """A function for `select_device`, and its calls: thread and argument."""
    calls: list[tuple[int, int]] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
    def select(device: int) -> int:
        calls.append((threading.get_native_id(), device))
        return answer

    return select, calls


@pytest.mark.parametrize("answer", [0, 201])
def test_the_device_is_selected_once_on_that_thread(answer: int, caplog: pytest.LogCaptureFixture) -> None:
    select, calls = selection(answer)
    address = ctypes.cast(select, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
    before, bell = tasks("pd-poller"), native.extension().Bell()
    with closing(Poller(bell, place=ThreadPlace(select_device=address, device=0xC0DE))) as poller:
        thread, _ = new_task(before)
        assert calls == [(thread, 0xC0DE)]  # before anything can be armed
        assert sees_a_layer(poller, bell)
        poller.wake()
    assert calls == [(thread, 0xC0DE)]
    assert ("event=poller_without_device reason=error 201" in caplog.text) is (answer != 0)


@needs_cores
def test_a_thread_that_only_watches_is_placed_as_well() -> None:
    """As beside a GPU without `native_posting`."""
    select, calls = selection(0)
    address = ctypes.cast(select, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
    transport: Transport = MemoryTransport(MemoryFabric(), "s")
    before = tasks("pd-poller")
    place = ThreadPlace(ONE, address, 7)
    with closing(open_native_thread(transport, torch.device("cuda", 0), place, PDConfig())) as thread:
        assert thread.arming is None
        number, cores = new_task(before)
        assert (cores, calls) == (ONE, [(number, 7)])


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with the calls of CUDA's driver. It has eight devices, which its ordinals count from the last."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    command = [COMPILER, "-Wall", "-Werror", "-shared", "-fPIC", folder / "driver.c", "-o", folder / "libcuda.so.1"]
    subprocess.run(command, check=True, timeout=60)
    return folder / "libcuda.so.1"


class TestPrimaryContext:
    def test_the_thread_makes_the_ranks_gpu_current_through_the_driver(
        self, driver: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        library = ctypes.CDLL(str(driver))
        library.context_of.restype = ctypes.c_void_p
        place = ThreadPlace(frozenset(), *primary_context(2, str(driver)))
        assert place.device == library.context_of(5)
        before = tasks("pd-poller")
        with closing(Poller(native.extension().Bell(), place=place)):
            thread, _ = new_task(before)
        set_calls, set_thread = (ctypes.c_int.in_dll(library, name).value for name in ("set_calls", "set_thread"))
        assert (set_calls, set_thread) == (1, thread)
        assert ctypes.c_void_p.in_dll(library, "set_context").value == place.device
        assert "poller_without_device" not in caplog.text

    def test_a_device_that_is_none_is_named(self, driver: Path) -> None:
        with pytest.raises(UnsupportedEngine, match="cuDeviceGet of CUDA's driver returned 101"):
            primary_context(8, str(driver))

    def test_a_machine_without_a_driver(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedEngine, match="CUDA's driver cannot be used"):
            primary_context(0, str(tmp_path / "libcuda.so.1"))
        with pytest.raises(UnsupportedEngine, match="cuInit"):
            primary_context(0, "libc.so.6")
