"""Writes scratch pages from one agent of the configured backend to another and compares them; then natively.

    python -m vllm_pd_connector.doctor.trial TITLE BACKEND [DEVICE ...]

A process of its own (see `probe`): a transport that hangs or crashes must not take the doctor with it.
"""

import sys
import time
from typing import cast

import numpy as np

from vllm_pd_connector.doctor.finding import Finding, failed, ok, warning
from vllm_pd_connector.doctor.probe import report
from vllm_pd_connector.errors import PDConnectorError
from vllm_pd_connector.geometry.page_table import whole_pages
from vllm_pd_connector.kernels import native
from vllm_pd_connector.plan.write import BoundWrite
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.transport.base import Transport, WriteStatus, post_write
from vllm_pd_connector.transport.nixl import NixlTransport, check_release

PAGES, PAGE_BYTES = 64, 1 << 16
NOTE = b"doctor"
WRITE_S = 10.0


def try_write(title: str, src: Transport, dst: Transport) -> Finding:
    """Register pages on both sides, write all of them, and compare every byte."""
    source, target = (KvBuffer(num_layers=1, num_blocks=PAGES, page_bytes=PAGE_BYTES) for _ in range(2))
    source.fill_random(time.monotonic_ns())
    src.register(source.table)
    dst.register(target.table)
    peer = src.connect(dst.descriptor(), target.table)
    lane = src.open_lane(peer, whole_pages(source.table), whole_pages(target.table))
    numbers = np.arange(PAGES, dtype=np.int32)
    write = BoundWrite(src_pieces=numbers, dst_pieces=numbers, units=PAGES, num_pages=PAGES)
    started = time.monotonic()
    handle = post_write(src, lane, write, NOTE)
    notes: list[bytes] = []
    while (status := src.poll(handle)) is WriteStatus.POSTED or not notes:
        notes += dst.notifications()
        if status is WriteStatus.FAILED or time.monotonic() - started > WRITE_S:
            break
    wrong = int((source.array != target.array).sum())
    if status is not WriteStatus.DONE or notes != [NOTE] or wrong:
        seen = f"ended as {status.name} after {time.monotonic() - started:.1f} s, notes {notes}, {wrong} bytes wrong"
        return failed(title, seen, "Look at nixl_backend, UCX_TLS and UCX_NET_DEVICES; UCX_LOG_LEVEL=info says more.")
    src.close()
    dst.close()
    return ok(title, f"{source.array.nbytes >> 20} MiB of host memory, every byte and the note arrived")


def try_native(transport: NixlTransport) -> Finding:
    """Whether a native thread can post this agent's writes."""
    try:
        transport.open_poller(native.extension().Bell()).close()
    except PDConnectorError as error:
        return warning("native posting", str(error), "Leave native_posting off; Python posts.")
    return ok("native posting", "a trial write from a native thread arrived")


def main(title: str, backend: str, *devices: str) -> None:
    try:
        check_release()
    except PDConnectorError as error:
        report(failed(title, str(error), "Into vLLM's environment, on every machine of the pool."))
        return
    try:
        src, dst = (NixlTransport(f"doctor-{side}", backend, devices) for side in ("src", "dst"))
        report(try_write(title, cast("Transport", src), cast("Transport", dst)))
    except PDConnectorError as error:
        report(failed(title, str(error), "Look at nixl_backend, UCX_TLS and UCX_NET_DEVICES."))
        return
    if native.is_built():
        report(try_native(src))


if __name__ == "__main__":
    main(*sys.argv[1:])
