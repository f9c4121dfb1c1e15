"""The transport contract once more where NIXL has to use sockets: writes are really in flight there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The process needs 10 s on a quiet machine, most of them for imports.
pytestmark = [pytest.mark.nixl, pytest.mark.slow, pytest.mark.timeout(180)]

HERE = Path(__file__).parent
SCRIPT = """
import sys
import pytest

if pytest.main(["-q", "-p", "no:cacheprovider", "-m", "nixl", "test_transport.py", "test_arming.py"]):
    sys.exit("the contract does not hold")
print("THE CONTRACT HOLDS", flush=True)

from test_transport import NUM_LAYERS, WriteStatus, bound, make_pair, post_write
from vllm_pd_connector.transport.nixl import NixlTransport

names = iter(range(9))
pair = make_pair(lambda: NixlTransport(f"tcp-{next(names)}"), page_bytes=1 << 20)
lane = pair.lane()
blocks = list(range(1, 16))
handle = post_write(pair.src, lane, bound(pair, blocks, blocks, list(range(NUM_LAYERS))), b"n")
first = pair.src.poll(handle)
assert not pair.src.release(handle), "a write in flight cannot be called back"
assert pair.drive(handle) == [WriteStatus.DONE]
assert pair.wait_for_notes(1) == [b"n"]
for layer in range(NUM_LAYERS):
    for block in blocks:
        assert (pair.dst_kv.page(layer, block) == pair.src_kv.page(layer, block)).all()
assert first is WriteStatus.POSTED, first
print("POSTED WAS SEEN", flush=True)

handle = post_write(pair.src, lane, bound(pair, blocks, blocks, list(range(NUM_LAYERS))), b"n")
assert pair.src.poll(handle) is WriteStatus.POSTED
handle.handle.release()  # what NIXL calls a release
pair.dst_kv.array[:] = 0
for _ in range(2000):
    pair.src.notifications()
    pair.dst.notifications()
print("BYTES AFTER NIXL'S RELEASE:", int((pair.dst_kv.array != 0).sum()), flush=True)
"""


@pytest.fixture(scope="module")
def output() -> str:
    """What one process said that had nothing but sockets (UCX reads its setting at start)."""
    pytest.importorskip("nixl._api")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=HERE,
        env={**os.environ, "UCX_TLS": "tcp"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    # The first lines say what ended a process that crashed, the last ones what a test said.
    return f"exit status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[:2000]}\n…\n{done.stderr[-2000:]}"


def test_the_contract_holds_over_sockets(output: str) -> None:
    assert "THE CONTRACT HOLDS" in output, output


def test_nixl_goes_on_writing_after_its_release(output: str) -> None:
    """Why `release` refuses a write in flight. A NIXL that fails this test can cancel: then ADR 8 is to be revised."""
    assert int(output.partition("BYTES AFTER NIXL'S RELEASE: ")[2].split()[0]) > 0, output


def test_a_large_write_is_in_flight_after_it_was_posted(output: str) -> None:
    assert "POSTED WAS SEEN" in output, output
