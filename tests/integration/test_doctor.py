"""The doctor asks servers that answer anything, writes through real agents, and runs as a command."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from server_tier.fake_prefiller import FakePrefiller, Reply, fake_prefiller

from vllm_pd_connector import cli
from vllm_pd_connector.config import PDConfig
from vllm_pd_connector.control.fence_server import FenceServer
from vllm_pd_connector.control.keys import load_key, write_key
from vllm_pd_connector.control.prefiller_client import MAX_ANSWER_BYTES
from vllm_pd_connector.doctor import probe, trial
from vllm_pd_connector.doctor.finding import Finding, State, failed, ok
from vllm_pd_connector.doctor.servers import Rounds
from vllm_pd_connector.kernels import native
from vllm_pd_connector.testing.machine import HOST, free_ports
from vllm_pd_connector.testing.shapes import some_shape
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport
from vllm_pd_connector.transport.scripted import Action, ScriptedFault, ScriptedTransport
from vllm_pd_connector.wire.messages import ControlEndpoint, DispatchReply, HelloReply, Standing
from vllm_pd_connector.wire.transfer_params import parse_reply

GENERATION = "a" * 16
MODELS = Reply.json({"data": [{"id": "m", "max_model_len": 8192}]})
ANSWER = Reply.json({"choices": [{"text": "x"}], "kv_transfer_params": None})
LIMIT_S, SHORT_S = 20.0, 2.0
"""Seconds for a question; the second where a test waits for it."""


def listen(key: Path | None = None) -> FenceServer:
    server = FenceServer(
        HOST,
        0,
        generation=GENERATION,
        key=load_key(str(key)) if key else None,
        on_fence=lambda *_: None,
        on_inquiry=lambda transfer_id, answer: answer(Standing(transfer_id=transfer_id, is_over=True)),
    )
    server.start()
    return server


def greeting(*endpoints: str, clock: float | None = 7.0, **shape: Any) -> Reply:
    controls = [ControlEndpoint(endpoint=endpoint, generation=GENERATION) for endpoint in endpoints]
    hello = HelloReply(engine="e", generation=GENERATION, shape=some_shape(**shape), controls=controls)
    return Reply.params(msgspec.to_builtins(DispatchReply(hello=hello, clock=clock)))


def metrics(**counts: float) -> Reply:
    return Reply(
        200, "".join(f'vllm:pd_{name}_total{{engine="0"}} {value}\n' for name, value in counts.items()).encode()
    )


@dataclass
class Pool:
    """A prefiller and a decoder that answer as they should until a test says otherwise."""

    prefiller: FakePrefiller
    decoder: FakePrefiller

    def visit(self, *more: str, limit_s: float = LIMIT_S, **config: Any) -> list[Finding]:
        """What is found; `more`: further prefillers."""
        return visit([self.prefiller.url, *more], [self.decoder.url], limit_s, **config)


def visit(prefillers: list[str], decoders: list[str], limit_s: float = LIMIT_S, **config: Any) -> list[Finding]:
    async def run() -> list[Finding]:
        rounds = Rounds.start(PDConfig(**config), limit_s)
        try:
            return await rounds.visit(prefillers, decoders)
        finally:
            await rounds.close()

    return asyncio.run(run())


def troubles(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.state.value, finding.name.split()[0]) for finding in findings if finding.state is not State.OK]


@pytest.fixture
def rank() -> Iterator[FenceServer]:
    server = listen()
    yield server
    server.close()


@pytest.fixture
def pool(rank: FenceServer) -> Iterator[Pool]:
    with ExitStack() as stack:
        prefiller, decoder = (stack.enter_context(fake_prefiller(port, "")) for port in free_ports(2))
        for server in (prefiller, decoder):
            server.pages["/v1/models"] = lambda: MODELS
            server.on_dispatch = ANSWER
        prefiller.on_hello = greeting(rank.endpoint)
        decoder.on_hello = ANSWER  # a kv_consumer takes a greeting for an ordinary request
        decoder.pages["/health"] = lambda: Reply(200, b"")
        decoder.pages["/metrics"] = lambda: metrics(
            dispatched=decoder.num_dispatches, released=decoder.num_dispatches, pages_arrived=8 * decoder.num_dispatches
        )
        yield Pool(prefiller, decoder)


class TestServers:
    def test_a_pool_as_it_should_be(self, pool: Pool, rank: FenceServer) -> None:
        findings = pool.visit()
        assert troubles(findings) == []
        told = {finding.name.split()[0]: finding.seen for finding in findings}
        assert "generation " + GENERATION in told["prefiller"]
        assert told["control"] == f"all 1 answer, the first at {rank.endpoint}"
        assert told["trial"] == "dispatched +1, released +1, pages_arrived +8"
        assert pool.decoder.last_dispatch["kv_transfer_params"] == {"prefiller": pool.prefiller.url}
        assert len(pool.decoder.last_dispatch["prompt"]) == 256
        assert pool.prefiller.num_dispatches == 0  # it was greeted, nothing else

    def test_a_trial_is_longer_than_what_is_always_prefilled_locally(self, pool: Pool) -> None:
        pool.visit(min_remote_tokens=1000)
        assert len(pool.decoder.last_dispatch["prompt"]) == 1001

    def test_a_decoder_that_prefills_itself(self, pool: Pool) -> None:
        pool.decoder.pages["/metrics"] = lambda: metrics(dispatched=0, prefilled_locally=pool.decoder.num_dispatches)
        assert troubles(pool.visit()) == [("failed", "trial")]

    def test_a_prefiller_that_is_not_in_the_decoders_pool(self, pool: Pool) -> None:
        pool.decoder.on_dispatch = Reply.json({"error": "internal"}, 500)
        pool.decoder.pages["/metrics"] = lambda: metrics(dispatched=0, refused_params=pool.decoder.num_dispatches)
        (found,) = (finding for finding in pool.visit() if finding.state is State.FAILED)
        assert "HTTP 500" in found.seen
        assert "Not in the decoder's pool" in found.advice

    def test_pages_of_another_kind(self, pool: Pool, rank: FenceServer) -> None:
        pool.decoder.on_hello = greeting(rank.endpoint, dtype="float16")  # a kv_both greets back
        (found,) = (finding for finding in pool.visit() if finding.state is State.FAILED)
        assert found.seen == "dtype: float16 against x"

    def test_two_prefillers_that_no_decoder_fits(self, pool: Pool, rank: FenceServer) -> None:
        with fake_prefiller(free_ports(1)[0], "") as other:
            other.pages["/v1/models"] = lambda: MODELS
            other.on_hello = greeting(rank.endpoint, dtype="float16")
            assert ("failed", other.url) in troubles(pool.visit(other.url))

    def test_an_old_release_that_sends_no_readings(self, pool: Pool, rank: FenceServer) -> None:
        pool.prefiller.on_hello = greeting(rank.endpoint, clock=None)
        assert troubles(pool.visit()) == [("warning", "prefiller")]

    def test_nobody_there(self) -> None:
        first, second = (f"http://{HOST}:{port}" for port in free_ports(2))
        findings = visit([first], [second])
        assert troubles(findings) == [("failed", "decoder"), ("failed", "prefiller")]
        assert all("refused" in finding.seen or "Connect call failed" in finding.seen for finding in findings)


class TestControlPorts:
    @pytest.mark.parametrize("endpoint", ["tcp://[::1", "tcp://x:99999", "ipc:///tmp/none", "\x1b[2J"])
    def test_an_endpoint_may_be_anything(self, pool: Pool, rank: FenceServer, endpoint: str) -> None:
        pool.prefiller.on_hello = greeting(rank.endpoint, endpoint)
        assert troubles(pool.visit(limit_s=SHORT_S)) == [("failed", "control")]

    def test_more_ranks_than_sockets(self) -> None:
        """ZMQ gives a context 1,023 of them; each of these takes the connection and says nothing."""
        with socket.create_server((HOST, 0), backlog=2048) as mute:
            endpoint = f"tcp://{HOST}:{mute.getsockname()[1]}"
            reply = parse_reply(json.loads(greeting(*[endpoint] * 1024).body)["kv_transfer_params"]).hello
            assert reply is not None

            async def run() -> Finding:
                rounds = Rounds.start(PDConfig(), 0.1)
                try:
                    return await rounds._controls("http://p", reply)
                finally:
                    await rounds.close()

            found = asyncio.run(run())
        assert found.state is State.FAILED
        assert found.seen.startswith(f"1024 of 1024 do not answer: {endpoint}: no answer")

    def test_a_key_on_one_side_only(self, pool: Pool, rank: FenceServer, tmp_path: Path) -> None:
        write_key(str(tmp_path / "key"))
        with ExitStack() as stack:
            secured = listen(tmp_path / "key")
            stack.callback(secured.close)
            pool.prefiller.on_hello = greeting(secured.endpoint)
            key = str(tmp_path / "key")
            assert troubles(pool.visit(limit_s=SHORT_S)) == [("failed", "control")]
            assert troubles(pool.visit(control_key_file=key)) == []
            pool.prefiller.on_hello = greeting(rank.endpoint)
            assert troubles(pool.visit(limit_s=SHORT_S, control_key_file=key)) == [("failed", "control")]

    def test_an_address_that_only_its_own_machine_reaches(self, pool: Pool, rank: FenceServer) -> None:
        pool.prefiller.on_hello = greeting(rank.endpoint.replace(HOST, "0.0.0.0"))
        assert troubles(pool.visit()) == [("warning", "control")]


HOSTILE = {
    "HTML": Reply(200, b"<html>welcome</html>"),
    "broken JSON": Reply(200, b'{"data": ['),
    "JSON of another kind": Reply.json([1, {"data": 7}]),
    "null": Reply.json(None),
    "no models": Reply.json({"data": []}),
    "half a character": Reply(200, b'{"data": [{"id": "\xed\xa0\x80"}]}'),
    "half a character, escaped": Reply(200, b'{"data": [{"id": "\\ud800"}]}'),
    "nested": Reply(200, b"[" * 200_000),
    "nested further in": Reply(200, b'{"x": ' + b'{"a":' * 200_000),
    "huge": Reply(200, b" " * (MAX_ANSWER_BYTES + 1)),
    "an error": Reply(500, b"\xff\xfe\x00"),
    "not found": Reply(404, b"{}"),
    "unauthorised": Reply.json({"error": "who are you"}, 401),
    "busy": Reply(503, b"", retry_after="Thu, 01 Jan 2026 00:00:00 GMT"),
    "nothing": Reply(200, b""),
    "silence": Reply(0, b""),
}


class TestHostileAnswers:
    @pytest.mark.parametrize("answer", HOSTILE.values(), ids=list(HOSTILE))
    def test_cost_a_finding_of_the_server_that_gave_them(self, pool: Pool, answer: Reply) -> None:
        good = pool.prefiller.on_hello
        pool.prefiller.on_hello = answer
        assert troubles(pool.visit()) == [("failed", "prefiller")]
        pool.prefiller.on_hello, pool.prefiller.pages["/v1/models"] = good, lambda: answer
        assert troubles(pool.visit()) == [("failed", "prefiller")]
        pool.decoder.pages["/metrics"] = lambda: answer
        assert ("failed", "decoder") in troubles(pool.visit())

    @pytest.mark.parametrize("answer", [HOSTILE[name] for name in ("an error", "not found", "busy", "silence", "huge")])
    def test_to_a_trial_fail_it(self, pool: Pool, answer: Reply) -> None:
        pool.decoder.on_dispatch = answer
        assert troubles(pool.visit()) == [("failed", "trial")]

    def test_counters_that_are_no_numbers(self, pool: Pool) -> None:
        pool.decoder.pages["/metrics"] = lambda: Reply(200, b"vllm:pd_dispatched_total{} many\n")
        assert ("failed", "decoder") in troubles(pool.visit())

    def test_a_server_that_never_answers_costs_the_time_limit(self, pool: Pool) -> None:
        never = threading.Event()
        pool.prefiller.on_hello = Reply(200, b"", wait_for=never)
        started = time.monotonic()
        (found,) = (finding for finding in pool.visit(limit_s=SHORT_S) if finding.state is State.FAILED)
        elapsed_s = time.monotonic() - started
        never.set()
        assert found.seen == f"no answer in {SHORT_S:g} s"
        assert elapsed_s < 30


class TestTrialWrite:
    def write(self, *faults: ScriptedFault, polls: int = 1) -> Finding:
        fabric = MemoryFabric()
        src = ScriptedTransport(MemoryTransport(fabric, "s", polls), faults)
        return trial.try_write("w", src, MemoryTransport(fabric, "t"))

    def test_every_byte_is_compared(self) -> None:
        assert self.write(polls=3) == ok("w", "4 MiB of host memory, every byte and the note arrived")

    @pytest.mark.parametrize("action", ["wrong_page", "drop", "fail", "hang"])
    def test_a_write_that_went_wrong_fails(self, action: Action, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vllm_pd_connector.doctor.trial.WRITE_S", 0.2)
        found = self.write(ScriptedFault(action, 0))
        assert found.state is State.FAILED
        assert ", 0 bytes wrong" not in found.seen


OTHERWISE = failed("w", "", "advice")


def run(module: str, *args: str, **options: Any) -> probe.Outcome:
    return asyncio.run(probe.run(module, *args, otherwise=OTHERWISE, **options))


@pytest.mark.nixl
class TestProbe:
    def test_real_agents_write_to_each_other(self) -> None:
        outcome = run("trial", "w", "UCX", "lo", env={"UCX_TLS": "tcp", "UCX_PROTO_INFO": "y"})
        assert outcome.findings[0] == ok("w", "4 MiB of host memory, every byte and the note arrived")
        assert [finding.state for finding in outcome.findings[1:]] == [State.OK] * native.is_built()
        assert probe.write_path(outcome.log) == "tcp/lo"

    @pytest.mark.parametrize(
        ("args", "named"),
        [(("NOSUCH",), "NIXL backend NOSUCH does not start"), (("UCX", "mlx5_9:1"), "NIXL backend UCX does not start")],
    )
    def test_what_does_not_start_is_named(self, args: tuple[str, ...], named: str) -> None:
        (found,) = run("trial", "w", *args).findings
        assert found.state is State.FAILED
        assert named in found.seen

    def test_a_nixl_that_is_too_old_is_no_question_of_the_backend(
        self, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
    ) -> None:
        monkeypatch.setattr("vllm_pd_connector.transport.nixl.version", lambda _package: "1.4.1")
        trial.main("w", "UCX")
        (line,) = [line for line in capfdbinary.readouterr().out.splitlines() if line.startswith(probe.MARK)]
        found = msgspec.json.decode(line.removeprefix(probe.MARK), type=Finding)
        assert "1.4.1 is installed" in found.seen
        assert "backend" not in found.advice

    def test_one_that_hangs_is_ended(self) -> None:
        (found,) = run("trial", "w", "UCX", limit_s=0.05).findings
        assert found == failed("w", "broke off (not done in 0.05 s): it printed nothing", "advice")

    def test_one_that_breaks_off_gives_its_last_word(self) -> None:
        (found,) = run("no_such_module").findings
        assert found.seen.startswith("broke off (status 1)")
        assert found.seen.endswith("No module named vllm_pd_connector.doctor.no_such_module")


def test_the_command_on_a_machine_with_two_mistakes() -> None:
    """The plugin is left out by VLLM_PLUGINS, and a key of vLLM's own is mistyped; all else is well."""
    script = "import sys; from vllm_pd_connector.cli import main; sys.exit(main())"
    config = '{"kv_connector": "PDConnector", "kv_role": "kv_producer", "kv_bufer_device": "cpu"}'
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", script, "doctor", "--config", config],
        env=env | {"VLLM_PLUGINS": "other"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if not line.startswith(("ok ", "warning ", " "))]
    assert done.returncode == 1, done.stdout + done.stderr
    assert not done.stderr
    assert [line.partition(":")[0] for line in wrong[:-1]] == ["failed   plugin", "failed   kv-transfer-config"]
    assert "kv_bufer_device" in wrong[1]
    assert wrong[-1].endswith("2 failed")
    assert any(line.startswith("ok       NIXL write") for line in lines)


def test_the_exit_status_is_1_when_a_server_fails(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def nothing(*_: str) -> list[Finding]:
        return []

    monkeypatch.setattr("vllm_pd_connector.doctor.run._probes", nothing)
    arguments = ["doctor", "--prefiller", pool.prefiller.url, "--decoder", pool.decoder.url + "/"]
    assert cli.main(arguments) == 0
    pool.prefiller.on_hello = Reply(404, b"{}")
    assert cli.main(arguments) == 1
    assert capsys.readouterr().out.splitlines()[-1].endswith("1 failed")
