"""A process group ends whole: also children that outlive the command, and those that ignore SIGTERM."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from vllm_pd_connector.testing.process_group import ProcessGroup, exit_on_signal, stop_all

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PARENT = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {CHILD!r}]); time.sleep(60)"


@pytest.fixture
def group(tmp_path: Path) -> ProcessGroup:
    group = ProcessGroup([sys.executable, "-c", PARENT], env=os.environ, log=tmp_path / "log", cores=[0])
    deadline = time.monotonic() + 20
    while (tmp_path / "log").read_text() != "up\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    return group


@pytest.mark.slow
def test_stopping_leaves_no_child(group: ProcessGroup) -> None:
    stop_all([group])
    assert not group.is_alive
    assert group.wait_gone(0.0)
    stop_all([group])  # again: no effect


@pytest.mark.slow
def test_pinning_reaches_the_children_and_killing_is_quick(group: ProcessGroup) -> None:
    core = max(os.sched_getaffinity(0))
    group.pin([core])
    assert os.sched_getaffinity(group.process.pid) == {core}
    group.kill()
    assert group.process.returncode == -signal.SIGKILL
    assert group.wait_gone(0.0)


def test_a_term_signal_runs_finally_blocks() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised, exit_on_signal():
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    assert raised.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
