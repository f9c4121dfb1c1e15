"""A write from an agent of one NIXL release to an agent of another: python across.py own|write FOLDER.

The owner of the pages leaves its descriptor in the folder; the writer, a process with its own NIXL, writes all of them.
"""

import os
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from vllm_pd_connector.geometry.page_table import PageTable, whole_pages
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.shapes import bound_pieces
from vllm_pd_connector.transport.base import WriteStatus, post_write
from vllm_pd_connector.transport.nixl import NixlTransport

NUM_PAGES, PAGE_BYTES = 64, 1 << 16
NOTE = b"across"
LIMIT_S = 60.0
SEED = 11


def own(folder: Path) -> str:
    """Wait for the note, then compare every byte."""
    kv = KvBuffer(num_layers=1, num_blocks=NUM_PAGES, page_bytes=PAGE_BYTES)
    transport = NixlTransport("owner")
    transport.register(kv.table)
    (folder / "pages").write_bytes(msgspec.json.encode(kv.table))
    (folder / "written").write_bytes(transport.descriptor())
    (folder / "written").rename(folder / "descriptor")  # the writer must not read half of it
    notes: list[bytes] = []
    end = time.monotonic() + LIMIT_S
    while not notes and time.monotonic() < end:
        notes += transport.notifications()
        time.sleep(0.0005)
    wrong = int((kv.array != _source().array).sum())
    return "ok" if notes == [NOTE] and not wrong else f"notes {notes}, {wrong} bytes wrong"


def write(folder: Path) -> str:
    """Write every page and poll until it is over."""
    end = time.monotonic() + LIMIT_S
    while not (folder / "descriptor").exists() and time.monotonic() < end:
        time.sleep(0.01)
    kv = _source()
    transport = NixlTransport("writer")
    transport.register(kv.table)
    pages = msgspec.json.decode((folder / "pages").read_bytes(), type=PageTable)
    peer = transport.connect((folder / "descriptor").read_bytes(), pages)
    lane = transport.open_lane(peer, whole_pages(kv.table), whole_pages(pages))
    handle = post_write(transport, lane, bound_pieces(np.arange(NUM_PAGES), np.arange(NUM_PAGES)), NOTE)
    while (status := transport.poll(handle)) is WriteStatus.POSTED and time.monotonic() < end:
        time.sleep(0.0005)
    return "ok" if status is WriteStatus.DONE else status.name


def _source() -> KvBuffer:
    kv = KvBuffer(num_layers=1, num_blocks=NUM_PAGES, page_bytes=PAGE_BYTES)
    kv.fill_random(SEED)
    return kv


if __name__ == "__main__":
    print("OUTCOME", {"own": own, "write": write}[sys.argv[1]](Path(sys.argv[2])), flush=True)
    os._exit(0)  # an agent whose peer is gone may take long to end
