"""`native_posting` where it does not work: the log says why, and Python posts the same pages."""

import logging
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scheduler_rig import LAYERS
from test_worker_threads import WRITE, Side, begin, close, expect, until

from vllm_pd_connector.engine import worker_half
from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.kernels import native
from vllm_pd_connector.topology.placement import Placement
from vllm_pd_connector.transport import nixl_abi
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport

needs_extension = pytest.mark.skipif(not native.is_built(), reason=native.WHY_MISSING)
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
OFF, ON = "event=native_posting_off reason=", "event=native_posting_on"

C_ABI = """
#include <stdbool.h>
bool nixl_capi_is_stub(void) { return IS_STUB; }
#ifdef POST
int nixl_capi_post_xfer_req(void *agent, void *request, void *options) { return POST; }
#endif
int nixl_capi_get_xfer_status(void *agent, void *request) { return STATUS; }
"""


@pytest.fixture
def nixl_transport() -> Callable[[str], Transport]:
    pytest.importorskip("nixl._api")
    from vllm_pd_connector.transport.nixl import NixlTransport

    return NixlTransport


@pytest.fixture
def move(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., str]]:
    """A request's pages from a prefiller that is asked to post natively to a decoder; the prefiller's log at start."""
    sides: list[Side] = []

    def run(transport: Callable[[str], Transport], **settings: Any) -> str:
        with caplog.at_level(logging.INFO):
            prefiller = Side(tmp_path, "kv_producer", transport, 0.0, native_posting=True, **settings)
        sides.append(prefiller)
        log = caplog.text
        decoder = Side(tmp_path, "kv_consumer", transport, 0.0, **settings)
        sides.append(decoder)
        for layer in LAYERS:
            prefiller.kv[layer].copy_(torch.randn_like(prefiller.kv[layer]))
        expect(decoder)
        begin(prefiller, decoder, WRITE)
        for layer in LAYERS:
            prefiller.half.layer_done(layer)
        prefiller.half.end_step()
        close(prefiller)

        def is_over() -> bool:
            prefiller.results()
            decoder.results()
            return bool(prefiller.sent and decoder.received)

        until(is_over, "not reported")
        assert (prefiller.sent, decoder.received) == (["r"], ["r"])
        for layer in LAYERS:
            assert torch.equal(decoder.kv[layer][4:6], prefiller.kv[layer][1:3])
            assert not decoder.kv[layer][:4].any()
            assert not decoder.kv[layer][6:].any()
        return log

    yield run
    for side in sides:
        side.half.shutdown()


def threads(name: str) -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended just now
            if (task / "comm").read_text().strip() == name:
                found.append(int(task.name))
    return found


def assert_off(log: str, reason: str) -> None:
    assert log.count(OFF) == 1
    assert reason in log.partition(OFF)[2].splitlines()[0]
    assert ON not in log
    assert not threads("pd-poller")


def test_a_transport_whose_writes_nobody_can_arm(move: Callable[..., str]) -> None:
    log = move(partial(MemoryTransport, MemoryFabric()))
    assert_off(log, "MemoryTransport has no writes that a native thread could post")


def test_verified_pages_are_posted_by_python_and_the_log_says_so(move: Callable[..., str]) -> None:
    log = move(partial(MemoryTransport, MemoryFabric()), verify_pages=True)
    assert_off(log, "verify_pages is set")


@pytest.mark.nixl
class TestOverNixl:
    def test_where_it_works_both_threads_keep_to_the_ranks_cores(
        self,
        move: Callable[..., str],
        nixl_transport: Callable[[str], Transport],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        if not native.is_built():
            pytest.skip(native.WHY_MISSING)
        cores = frozenset({max(os.sched_getaffinity(0))})
        monkeypatch.setattr(worker_half, "rank_placement", lambda _device: Placement(cpus=cores))
        log = move(nixl_transport)
        assert ON in log
        assert OFF not in log
        (poller,) = threads("pd-poller")
        messengers = [thread.native_id for thread in threading.enumerate() if thread.name == "pd-messenger"]
        assert {frozenset(os.sched_getaffinity(thread or 0)) for thread in (poller, *messengers)} == {cores}

    def test_nothing_compiled(
        self,
        move: Callable[..., str],
        nixl_transport: Callable[[str], Transport],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(native, "_native", None)
        assert_off(move(nixl_transport), "no compiled extension")

    @needs_extension
    def test_no_c_abi_beside_nixl(
        self,
        move: Callable[..., str],
        nixl_transport: Callable[[str], Transport],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(nixl_abi, "LIBRARY", "libnixl_of_another_release.so")
        assert_off(move(nixl_transport), "libnixl_of_another_release.so is not beside the loaded libnixl")

    @needs_extension
    def test_a_binding_that_does_not_give_its_agents_address(
        self,
        move: Callable[..., str],
        nixl_transport: Callable[[str], Transport],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(native.extension(), "agent_address", lambda _agent: 0)
        assert_off(move(nixl_transport), "does not give its agent's address")

    @needs_extension
    @pytest.mark.skipif(COMPILER is None, reason="no C compiler")
    @pytest.mark.parametrize(
        ("meanings", "reason"),
        [
            ({"IS_STUB": "true", "POST": "0"}, "is a stub"),
            ({"IS_STUB": "false"}, "has no function nixl_capi_post_xfer_req"),
            ({"IS_STUB": "false", "POST": "-3"}, "ended as FAILED with notes [], 0 B right"),
            ({"IS_STUB": "false", "POST": "0"}, "ended as DONE with notes [], 0 B right"),
            ({"IS_STUB": "false", "POST": "1", "STATUS": "1"}, "ended as POSTED with notes [], 0 B right"),
        ],
        ids=["stub", "lacks a function", "fails", "says done and writes nothing", "never ends"],
    )
    def test_a_c_abi_that_does_not_pass_the_trial(
        self,
        move: Callable[..., str],
        nixl_transport: Callable[[str], Transport],
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        meanings: dict[str, str],
        reason: str,
    ) -> None:
        assert COMPILER is not None
        library = tmp_path / "libnixl_capi.so"
        (tmp_path / "capi.c").write_text(C_ABI)
        defines = [f"-D{name}={value}" for name, value in {"STATUS": "0", **meanings}.items()]
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", *defines, tmp_path / "capi.c", "-o", library], check=True, timeout=60
        )
        monkeypatch.setattr(nixl_abi, "_library", lambda: library)
        monkeypatch.setattr(nixl_abi, "PROBE_S", 0.1)
        assert_off(move(nixl_transport), reason)

    @needs_extension
    @pytest.mark.parametrize("kind", ["nixl", "binding"])
    def test_a_trial_that_nixl_refuses(
        self,
        move: Callable[..., str],
        nixl_transport: Callable[[str], Transport],
        monkeypatch: pytest.MonkeyPatch,
        kind: str,
    ) -> None:
        from vllm_pd_connector.transport.nixl import NIXL_ERRORS

        def refuse(*_: object) -> None:
            raise NIXL_ERRORS[0]("no scratch memory") if kind == "nixl" else AttributeError("_handle")

        monkeypatch.setattr(nixl_abi, "_try", refuse)
        assert_off(move(nixl_transport), "NIXL's binding is not as expected")


@needs_extension
@pytest.mark.nixl
def test_a_trial_gives_back_what_it_took(nixl_transport: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it ends in its middle: the agent goes on to carry pages."""
    agent = nixl_transport("a")._agent
    taken: list[object] = []
    register, deregister = agent.register_memory, agent.deregister_memory

    def counted(*arguments: Any) -> Any:
        taken.append(register(*arguments))
        return taken[-1]

    monkeypatch.setattr(agent, "register_memory", counted)
    monkeypatch.setattr(agent, "deregister_memory", lambda some: (taken.remove(some), deregister(some)))
    monkeypatch.setattr(agent, "initialize_xfer", lambda *_: None)
    with pytest.raises((AttributeError, UnsupportedEngine)):
        nixl_abi.tried_abi(agent, nixl_transport("b")._agent)
    assert not taken
