"""Checks that run in a process of their own, within a time limit: vLLM and UCX may hang, crash or print anything."""

import asyncio
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from vllm_pd_connector.doctor.finding import Finding

MARK = b"doctor-finding "
VLLM, WRITE = "vLLM", "NIXL write"
PROBE_S = 180.0
"""vLLM's import alone takes 20 s on a busy core."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`log`: what the process printed besides."""

    findings: list[Finding]
    log: str


def report(finding: Finding) -> None:
    """Hand a finding to the parent. Flushed at once: what follows may crash."""
    sys.stdout.buffer.write(b"\n" + MARK + msgspec.json.encode(finding) + b"\n")
    sys.stdout.buffer.flush()


async def run(
    module: str,
    *args: str,
    otherwise: Finding,
    text: str = "",
    env: Mapping[str, str] | None = None,
    limit_s: float = PROBE_S,
) -> Outcome:
    """Run a module of this room.

    Args:
        module: below `vllm_pd_connector.doctor`.
        args: its arguments.
        otherwise: the finding if it breaks off or says nothing; what was seen is filled in.
        text: for its stdin.
        env: added to the environment.
        limit_s: seconds; it is killed then.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"vllm_pd_connector.doctor.{module}", *args),
        env={**os.environ, **(env or {})},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(text.encode()), limit_s)
        ended = f"status {process.returncode}"
    except TimeoutError:
        output, ended = b"", f"not done in {limit_s:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = output.splitlines()
    findings = [msgspec.json.decode(line[len(MARK) :], type=Finding) for line in lines if line.startswith(MARK)]
    log = b"\n".join(line for line in lines if line.strip() and not line.startswith(MARK)).decode(errors="replace")
    if process.returncode or not findings:
        last = log.splitlines()[-1:] or ["it printed nothing"]
        findings.append(replace(otherwise, seen=f"broke off ({ended}): {last[0]}"))
    return Outcome(findings, log)


def write_path(log: str) -> str:
    """Transports and devices of a remote write, from what UCX prints with UCX_PROTO_INFO=y; empty if it did not."""
    paths: dict[str, None] = {}
    to_itself = is_write = False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].split("|")]
        if (title := re.fullmatch(r"\S+ (self|intra-node|inter-node) cfg#\d+", cells[0])) is not None:
            to_itself, is_write = title[1] == "self", False
        elif cells[0].startswith("remote memory write by ucp_put"):
            is_write = not to_itself
        elif is_write and len(cells) >= 3 and ".." in cells[0]:
            paths[cells[2]] = None
    return "; ".join(paths)
