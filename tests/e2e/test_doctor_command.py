"""The doctor examines servers that run: a pair that is well, roles that were confused, two kv_both servers."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from server_tier.fixtures import SUMMARY, Pair
from server_tier.probe import Since

from vllm_pd_connector.config import PDConfig
from vllm_pd_connector.doctor.finding import Finding, State
from vllm_pd_connector.doctor.servers import Rounds
from vllm_pd_connector.testing.servers import Server

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


def visit(prefiller: Server, decoder: Server) -> list[Finding]:
    async def run() -> list[Finding]:
        rounds = Rounds.start(PDConfig(), 30.0)
        try:
            return await rounds.visit([prefiller.url], [decoder.url])
        finally:
            await rounds.close()

    return asyncio.run(run())


def test_the_command_finds_a_pair_well(main_pair: Pair) -> None:
    since = Since(main_pair.decoder)
    command = [str(Path(sys.executable).parent / "vllm-pd"), "doctor", "--timeout", "30"]
    servers = ["--prefiller", main_pair.prefiller.url, "--decoder", main_pair.decoder.url]
    done = subprocess.run([*command, *servers], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    (trial,) = (line for line in lines if line.startswith("ok       trial"))
    assert trial.endswith("dispatched +1, released +1, pages_arrived +64")  # 8 layers of 255 tokens in blocks of 32
    assert any(line.startswith(f"ok       control ports of {main_pair.prefiller.url}: all 1 answer") for line in lines)
    assert since("dispatched", "released", "failed") == [1, 1, 0]
    SUMMARY.append(f"vllm-pd doctor: {lines[-1]}")


def test_roles_that_were_confused(main_pair: Pair) -> None:
    decoder, prefiller = visit(prefiller=main_pair.decoder, decoder=main_pair.prefiller)
    assert decoder.state is State.OK  # it is healthy, and has our counters
    assert prefiller.state is State.FAILED
    assert "kv_role kv_producer or kv_both" in prefiller.seen


def test_kv_both_servers_are_compared(both_servers: list[Server]) -> None:
    first, second, alone = both_servers
    findings = visit(first, second)
    assert {finding.state for finding in findings} == {State.OK}
    assert [finding.seen for finding in findings if finding.name.startswith(first.url)] == ["their pages fit"]
    (trial,) = (finding for finding in visit(first, alone) if finding.name.startswith("trial"))
    assert (trial.state, trial.seen) == (State.WARNING, "answered, but the decoder counted nothing")
