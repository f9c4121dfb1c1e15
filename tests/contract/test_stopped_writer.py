"""A writer that stands still in mid-write (SIGSTOP) and then goes on: what still lands, and what revokes it (ADR 8)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from vllm_pd_connector.geometry.page_table import PageTable, whole_pages
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.shapes import bound_pieces
from vllm_pd_connector.transport.base import WriteStatus, post_write

# Two processes of 10 s on a quiet machine, most of them for imports.
pytestmark = [pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(180)]

NUM_PAGES, PAGE_BYTES = 64, 1 << 20
WRITTEN, OWNED = 7, 1
START_S, LATE_S = 60.0, 3.0


def write(folder: Path) -> None:
    """The writer: one write of many pages, polled until it is over."""
    from vllm_pd_connector.transport.nixl import NixlTransport

    kv = KvBuffer(num_layers=1, num_blocks=NUM_PAGES, page_bytes=PAGE_BYTES, fill=WRITTEN)
    transport = NixlTransport("writer")
    transport.register(kv.table)
    pages = msgspec.json.decode((folder / "pages").read_bytes(), type=PageTable)
    peer = transport.connect((folder / "descriptor").read_bytes(), pages)
    lane = transport.open_lane(peer, whole_pages(kv.table), whole_pages(pages))
    handle = post_write(transport, lane, bound_pieces(range(1, NUM_PAGES), range(1, NUM_PAGES)), b"note")
    while transport.poll(handle) is WriteStatus.POSTED:
        time.sleep(0.001)
    print("THE WRITE IS", transport.poll(handle).name, flush=True)
    os._exit(0)


def own(folder: Path, *, closes: bool) -> None:
    """The owner of the pages: stops the writer in mid-write, gives the pages to somebody else, and lets it go on."""
    from vllm_pd_connector.transport.nixl import NixlTransport

    kv = KvBuffer(num_layers=1, num_blocks=NUM_PAGES, page_bytes=PAGE_BYTES)
    transport = NixlTransport("owner")
    transport.register(kv.table)
    (folder / "pages").write_bytes(msgspec.json.encode(kv.table))
    (folder / "descriptor").write_bytes(transport.descriptor())
    writer = subprocess.Popen([sys.executable, __file__, "write", str(folder)])
    try:
        end = time.monotonic() + START_S
        while kv.page(0, 1)[0] != WRITTEN and time.monotonic() < end:
            transport.notifications()  # nothing lands without: over TCP the target copies
        os.kill(writer.pid, signal.SIGSTOP)
        _listen(transport)
        print("BYTES BEFORE:", int((kv.array == WRITTEN).sum()), flush=True)
        kv.array[:] = OWNED
        if closes:
            transport.close()
            transport = NixlTransport("successor")  # the agent before goes with its last reference
            transport.register(kv.table)
        os.kill(writer.pid, signal.SIGCONT)
        _listen(transport)
        print("BYTES OF OTHERS OVERWRITTEN:", int((kv.array == WRITTEN).sum()), flush=True)
    finally:
        writer.kill()
    os._exit(0)


def _listen(transport: object) -> None:
    end = time.monotonic() + LATE_S
    while time.monotonic() < end:
        transport.notifications()  # type: ignore[attr-defined]
        time.sleep(0.001)


def overwritten(folder: Path, what: str) -> int:
    """Bytes that landed after the writer, stopped in the middle, went on. UCX reads its setting at start: a process."""
    pytest.importorskip("nixl._api")
    command = [sys.executable, __file__, what, str(folder)]
    env = {**os.environ, "UCX_TLS": "tcp"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=170, check=False)
    said = dict(line.split(": ") for line in done.stdout.splitlines() if line.startswith("BYTES"))
    assert len(said) == 2, done.stdout[-2000:] + done.stderr[-3000:]
    assert 0 < int(said["BYTES BEFORE"]) < (NUM_PAGES - 1) * PAGE_BYTES, said
    return int(said["BYTES OF OTHERS OVERWRITTEN"])


def test_the_rest_of_a_write_lands_when_its_writer_goes_on(tmp_path: Path) -> None:
    """Why the pages of a silent prefiller wait for its word. If this fails, UCX can forget a write: revise ADR 8."""
    assert overwritten(tmp_path, "own") > 0


def test_nothing_lands_after_the_agent_was_closed(tmp_path: Path) -> None:
    """The one thing that revokes a peer's right to write, at the price of every other peer's."""
    assert overwritten(tmp_path, "close") == 0


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    own(Path(sys.argv[2]), closes=sys.argv[1] == "close")
