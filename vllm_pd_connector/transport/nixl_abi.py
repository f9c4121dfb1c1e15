"""NIXL's C ABI, tried out before it is trusted: what lets a native thread post an agent's requests.

The library is found beside the one the binding has loaded; the agent's address comes from pybind11's own conduit. Both
may be missing or mean something else in another release of NIXL, so a write of scratch memory has to work first.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from vllm_pd_connector.errors import UnsupportedEngine
from vllm_pd_connector.kernels import native
from vllm_pd_connector.kernels.poller import Poller, Trigger

LIBRARY = "libnixl_capi.so"
SCRATCH_BYTES = 4096
NOTE = b"probe"
PROBE_S = 5.0


def tried_abi(agent: Any, probe: Any) -> Any:
    """`_native.NixlAbi` of an agent, after it has written scratch memory to another agent.

    Args:
        agent: `nixl_agent` whose requests are to be posted; it locks (STRICT).
        probe: another `nixl_agent` with the same backend, for the trial only.

    Raises:
        UnsupportedEngine: it does not work here; the text says at which point.
        ImportError: there is no compiled extension.
    """
    extension = native.extension()
    address = extension.agent_address(agent.agent)
    if not address:
        raise UnsupportedEngine("native_posting: NIXL's binding does not give its agent's address to this compiler")
    try:
        abi = extension.NixlAbi(str(_library()), address)
    except RuntimeError as error:
        raise UnsupportedEngine(f"native_posting: {error}") from error
    _try(abi, agent, probe)
    return abi


def _library() -> Path:
    """The C ABI beside the libnixl that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libnixl.so") and (path.parent / LIBRARY).exists():
            return path.parent / LIBRARY
    raise UnsupportedEngine(f"native_posting: {LIBRARY} is not beside the loaded libnixl")


def _try(abi: Any, agent: Any, probe: Any) -> None:
    source = np.random.default_rng().integers(1, 255, SCRATCH_BYTES, dtype=np.uint8)
    target = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
    words, step = native.extension().LayerWords(1), 1
    words.bump(step, 0)
    with ExitStack() as ends:
        request = _request(agent, probe, source, target, ends)
        poller = Poller(native.extension().Bell(), abi)
        ends.callback(poller.close)  # before what it posts is given back
        armed = poller.arm(Trigger(words, [0], step, 2**62), request._handle)
        notes: list[bytes] = []
        end = time.monotonic() + PROBE_S
        while time.monotonic() < end and (armed.state.name == "POSTED" or not notes):
            notes += [note for some in probe.get_new_notifs().values() for note in some]
            time.sleep(0.0005)
        if armed.state.name != "DONE" or notes != [NOTE] or not np.array_equal(source, target):
            raise UnsupportedEngine(
                f"native_posting: a trial write of {SCRATCH_BYTES} B ended as {armed.state.name} with notes {notes}, "
                f"{int((source == target).sum())} B right"
            )


def _request(agent: Any, probe: Any, source: Any, target: Any, ends: ExitStack) -> Any:
    """A WRITE of scratch memory, and how everything it needs is given back."""
    for side, memory in ((agent, source), (probe, target)):
        ends.callback(
            side.deregister_memory, side.register_memory([(memory.ctypes.data, SCRATCH_BYTES, 0, "")], "DRAM")
        )
    name = agent.add_remote_agent(probe.get_agent_metadata())
    name = name.decode() if isinstance(name, bytes) else name
    ends.callback(agent.remove_remote_agent, name)
    request = agent.initialize_xfer(
        "WRITE",
        agent.get_xfer_descs([(source.ctypes.data, SCRATCH_BYTES, 0)], "DRAM"),
        agent.get_xfer_descs([(target.ctypes.data, SCRATCH_BYTES, 0)], "DRAM"),
        name,
        NOTE,
    )
    ends.callback(request.release)
    return request
