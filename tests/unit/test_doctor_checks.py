"""What the doctor makes of values: this machine's, a configuration's, two servers'; and how it tells them."""

import json
from pathlib import Path
from typing import Any

import pytest
from sysfs_trees import build

from vllm_pd_connector import cli
from vllm_pd_connector.control.keys import write_key
from vllm_pd_connector.doctor import configuration, machine
from vllm_pd_connector.doctor.finding import Finding, State, exit_status, failed, ok, render, summary, warning
from vllm_pd_connector.doctor.pair import Model, Server, check_controls, compare, verdict
from vllm_pd_connector.doctor.probe import write_path
from vllm_pd_connector.testing.shapes import some_shape
from vllm_pd_connector.topology.sysfs import read_gpus, read_nics, read_node_cpus
from vllm_pd_connector.topology.table import describe
from vllm_pd_connector.wire.messages import ControlEndpoint, HelloReply


def states(findings: list[Finding]) -> list[str]:
    return [finding.state.value for finding in findings]


class TestFinding:
    def test_a_line_for_the_value_and_one_for_what_to_do(self) -> None:
        assert render(ok("a", "1\n2")) == "ok       a: 1\n         2"
        assert render(failed("b", "3", "Do it.")) == "failed   b: 3\n         -> Do it."

    def test_nothing_a_server_says_steers_the_terminal_or_fakes_a_line(self) -> None:
        text = render(warning("x\nok y", "\x1b[2J\ud800\u202e\nok       all is well", "z"))
        assert text.encode()  # no half surrogate pair is left
        assert text.isascii()
        assert "\x1b" not in text
        assert [line[:3] for line in text.splitlines()] == ["war", "   ", "   "]
        assert len(render(ok("a", "long " * 100_000))) < 5_000

    def test_only_a_failure_fails(self) -> None:
        fine = [ok("a", ""), warning("b", "", "c")]
        assert exit_status(fine) == 0
        assert exit_status([*fine, failed("d", "", "e")]) == 1
        assert summary(fine) == "1 ok, 1 warning, 0 failed"


class TestTopology:
    def check(self, name: str, root: Path) -> list[Finding]:
        build(name, root)
        findings = machine.check_topology(read_gpus(root), read_nics(root), read_node_cpus(root))
        assert findings[0] == ok("topology", describe(root))
        return findings[1:]

    @pytest.mark.parametrize("name", ["dgx_h100", "hgx_cx7", "p5_efa"])
    def test_machines_on_which_every_gpu_has_its_port(self, name: str, tmp_path: Path) -> None:
        assert self.check(name, tmp_path) == []

    def test_a_dead_link_is_told_for_the_gpu_beside_it(self, tmp_path: Path) -> None:
        """The other ports that are down, of storage adapters, would not be given to any GPU."""
        (found,) = self.check("dgx_h100_dead_link", tmp_path)
        assert (found.state, found.name) == (State.WARNING, "GPU 3")
        assert found.seen == "its nearest port mlx5_3:1 has no link; it is given mlx5_0:1, mlx5_1:1, mlx5_2:1"

    def test_a_gpu_without_a_port_on_its_node(self, tmp_path: Path) -> None:
        root = build("dgx_h100", tmp_path)
        far = [nic for nic in read_nics(root) if nic.device.numa_node == 1]
        findings = machine.check_topology(read_gpus(root), far, read_node_cpus(root))[1:]
        assert [finding.name for finding in findings] == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
        assert machine.check_topology(read_gpus(root), [], {})[1:] == []  # no RDMA at all is told in the table

    def test_trial_writes_take_the_ports_that_ranks_are_given(self, tmp_path: Path) -> None:
        root = build("hgx_cx7", tmp_path)
        sets = machine.port_sets(read_gpus(root), read_nics(root), read_node_cpus(root))
        assert len(sets) == len(set(sets)) > 1
        assert machine.port_sets([], read_nics(root), {}) == [()]


class TestMachine:
    @pytest.mark.parametrize(
        ("limit", "has_port", "state"),
        [(None, True, "ok"), (8 << 20, False, "ok"), (8 << 20, True, "warning"), (0, True, "warning")],
    )
    def test_locked_memory_matters_to_rdma_ports(
        self, limit: int | None, has_port: bool, state: str, tmp_path: Path
    ) -> None:
        nics = read_nics(build("hgx_cx7", tmp_path)) if has_port else []
        assert machine.check_locked_memory(limit, nics).state.value == state

    @pytest.mark.parametrize(
        ("is_built", "has_cuda", "has_gpu", "state"),
        [(False, False, False, "warning"), (True, False, False, "ok"), (True, False, True, "warning")],
    )
    def test_the_extension(self, is_built: bool, has_cuda: bool, has_gpu: bool, state: str) -> None:
        found = machine.check_extension("as it is", is_built=is_built, has_cuda=has_cuda, has_gpu=has_gpu)
        assert (found.state.value, found.seen) == (state, "as it is")

    def test_a_distribution_that_is_missing_fails(self) -> None:
        assert machine.check_versions({"Python": "3.12.1", "nixl": "1.5.1"}) == ok(
            "versions", "Python 3.12.1, nixl 1.5.1"
        )
        found = machine.check_versions({"Python": "3.12.1", "nixl": None})
        assert (found.state, found.seen) == (State.FAILED, "Python 3.12.1, nixl missing")

    def test_what_ucx_is_told(self) -> None:
        assert machine.check_environment({"UCX_TLS": "tcp", "HOME": "/"}).seen == "UCX_TLS=tcp"
        assert "not set" in machine.check_environment({}).seen

    def test_a_write_that_leaves_the_ports_aside(self, tmp_path: Path) -> None:
        nics = read_nics(build("dgx_h100_dead_link", tmp_path))
        assert machine.check_path("w", "rc_mlx5/mlx5_0:1", nics) == []
        assert machine.check_path("w", "", nics) == machine.check_path("w", "tcp/eth0", []) == []
        assert states(machine.check_path("w", "tcp/eth0", nics)) == ["warning"]
        assert states(machine.check_path("w", "rc_mlx5/mlx5_3:1", nics)) == ["warning"]  # that one is down


UCX_LOG = """
[1796011787.229006] [vm:24108:0]   +--------+-------------+-----------------------------------+
[1796011787.229006] [vm:24108:0]   | a-0 self cfg#0                                            |
[1796011787.229006] [vm:24108:0]   | remote memory write by ucp_put* from host memory to host  |
[1796011787.229006] [vm:24108:0]   +--------+-------------+-----------------------------------+
[1796011787.229006] [vm:24108:0]   | 0..inf | zero-copy   | self/memory                       |
[1796011794.124535] [vm:24121:0]   | a-0 intra-node cfg#1                                      |
[1796011794.124535] [vm:24121:0]   | remote memory write by ucp_put* from host memory to host  |
[1796011794.124535] [vm:24121:0]   +--------+-------------+-----------------------------------+
[1796011794.124535] [vm:24121:0]   | Range  | Description |              Config               |
[1796011794.124535] [vm:24121:0]   | 0..inf | zero-copy   | 52% on tcp/lo and 48% on tcp/eth0 |
[1796011794.125837] [vm:24121:0]   | a-0 intra-node cfg#1                            |
[1796011794.125837] [vm:24121:0]   | active message by ucp_am_send* from host memory |
[1796011794.125837] [vm:24121:0]   |          0 | short              | cma/memory    |
"""


def test_the_path_of_a_write_is_what_ucx_says_of_puts_to_others() -> None:
    """Recorded from UCX 1.23 but for the first table's transport."""
    assert write_path(UCX_LOG) == "52% on tcp/lo and 48% on tcp/eth0"
    assert write_path("") == write_path("|||\n| remote memory write by ucp_put\n|") == ""


def transfer(role: str = "kv_consumer", **extra: Any) -> str:
    return json.dumps({"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra})


class TestConfiguration:
    @pytest.mark.parametrize(
        ("text", "named"),
        [
            (transfer(prefilers=[]), "kv_connector_extra_config.prefilers is not a key"),
            (transfer(max_held_share=2), "kv_connector_extra_config.max_held_share = 2 is refused"),
            (transfer(prefillers=["10.0.0.7:8100"]), "kv_connector_extra_config.prefillers[0]"),
            ('{"kv_connector": "NixlConnector"}', "kv_connector is 'NixlConnector'"),
            ('{"kv_connector_extra_config": []}', "must be JSON objects"),
            ("{", "Expecting property name"),
            ('{"a": ' + "[" * 100_000, "recursion"),
        ],
        ids=lambda text: text[:40],
    )
    def test_what_is_wrong_is_named(self, text: str, named: str) -> None:
        (found,) = configuration.read(text).findings
        assert found.state is State.FAILED
        assert named in found.seen

    def test_a_file_is_read_like_its_content(self, tmp_path: Path) -> None:
        text = transfer(prefillers=["http://10.0.0.7:8100"])
        file = tmp_path / "transfer.json"
        file.write_text(text)
        assert configuration.read(str(file)) == configuration.read(text)
        assert states(configuration.read(text).findings) == ["ok"]
        file.write_bytes(b"\xff[1]")
        assert states(configuration.read(str(file)).findings) == ["failed"]

    @pytest.mark.parametrize(
        ("role", "extra", "expected"),
        [
            ("kv_producer", {}, {"advertise_host": "ok"}),
            ("kv_producer", {"prefillers": ["http://p"]}, {"prefillers": "warning", "advertise_host": "warning"}),
            ("kv_consumer", {}, {"prefillers": "warning"}),
            ("kv_consumer", {"prefillers": ["http://10.0.0.7"]}, {}),
            ("kv_both", {"prefillers": ["http://10.0.0.7"]}, {"advertise_host": "warning"}),
            ("kv_both", {"prefillers": ["http://localhost:1"]}, {"advertise_host": "ok"}),
            ("kv_both", {"advertise_host": "192.0.2.1"}, {"advertise_host": "failed"}),  # of no machine
            ("kv_both", {"advertise_host": "0.0.0.0"}, {"advertise_host": "failed"}),
            ("kv_both", {"advertise_host": "no such host"}, {"advertise_host": "failed"}),
            ("kv_consumer", {"prefillers": ["http://p"], "faults": [{"action": "drop"}]}, {"faults": "warning"}),
        ],
    )
    def test_what_a_role_needs(self, role: str, extra: dict[str, Any], expected: dict[str, str]) -> None:
        first, *rest = configuration.read(transfer(role, **extra)).findings
        assert first.state is State.OK
        assert {finding.name: finding.state.value for finding in rest} == expected

    def test_key_files_are_readable_and_kept_from_others(self, tmp_path: Path) -> None:
        key, api_key = tmp_path / "key", tmp_path / "api"
        write_key(str(key))
        api_key.write_text("secret")
        api_key.chmod(0o644)
        text = transfer(prefillers=["http://p"], control_key_file=str(key), prefiller_api_key_file=str(api_key))

        def found() -> dict[str, str]:
            return {finding.name: finding.state.value for finding in configuration.read(text).findings[1:]}

        assert found() == {"control_key_file": "ok", "prefiller_api_key_file": "warning"}
        key.chmod(0o640)
        api_key.unlink()
        assert found() == {"control_key_file": "warning", "prefiller_api_key_file": "failed"}
        key.write_text("no key")
        assert found()["control_key_file"] == "failed"


def server(*models: Model, **shape: Any) -> Server:
    hello = HelloReply(
        engine="e",
        generation="a" * 16,
        shape=some_shape(**shape),
        controls=[ControlEndpoint(endpoint="tcp://127.0.0.1:1", generation="a" * 16)],
    )
    return Server("http://s", list(models) or [Model("m", 8192)], hello)


class TestPair:
    def test_two_that_fit(self) -> None:
        assert states(compare(server(), server(Model("other"), Model("m")))) == ["ok"]

    def test_a_shape_that_differs_is_named_with_both_values(self) -> None:
        (found,) = compare(server(), server(dtype="float16"))
        assert (found.state, found.seen) == (State.FAILED, "dtype: x against float16")

    def test_nothing_is_said_of_a_shape_that_is_not_known(self) -> None:
        decoder = server()
        assert compare(Server(decoder.url, decoder.models, None), server(dtype="float16")) == []

    def test_the_models_name_and_length(self) -> None:
        assert states(compare(server(), server(Model("other")))) == ["failed", "ok"]
        assert states(compare(server(), server(Model("m", 4096)))) == ["warning", "ok"]
        assert states(compare(server(Model("m", 4096)), server())) == ["ok"]

    @pytest.mark.parametrize(
        ("rise", "refusal", "state"),
        [
            ({"dispatched": 1, "released": 1, "pages_arrived": 64}, "", "ok"),
            ({"dispatched": 1, "failed": 1}, "", "failed"),
            ({"dispatched": 2, "released": 1, "failed": 1}, "", "failed"),
            ({"prefilled_locally": 1}, "", "failed"),
            ({"refused_params": 1}, "HTTP 500", "failed"),
            ({}, "HTTP 500", "failed"),
            ({"released": 0}, "", "warning"),
        ],
        ids=str,
    )
    def test_counters_say_how_a_trial_went(self, rise: dict[str, float], refusal: str, state: str) -> None:
        found = verdict("trial", rise, refusal)
        assert found.state.value == state
        assert refusal in found.seen

    @pytest.mark.parametrize(
        ("url", "endpoint", "why", "state"),
        [
            ("http://127.0.0.1:8100", "tcp://127.0.0.1:5000", "", "ok"),
            ("http://10.0.0.7:8100", "tcp://10.0.0.7:5000", "", "ok"),
            ("http://10.0.0.7:8100", "tcp://127.0.0.1:5000", "", "warning"),  # asked on its own machine
            ("http://10.0.0.7:8100", "tcp://[::1]:5000", "", "warning"),
            ("http://10.0.0.7:8100", "tcp://0.0.0.0:5000", "", "warning"),
            ("http://10.0.0.7:8100", "tcp://127.0.0.1:5000", "nobody listens", "failed"),
        ],
    )
    def test_control_ports_are_where_decoders_look(self, url: str, endpoint: str, why: str, state: str) -> None:
        control = ControlEndpoint(endpoint=endpoint, generation="a" * 16)
        assert check_controls(url, [control], [why]).state.value == state


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prefiller", "10.0.0.7:8100"],
        ["--decoder", "http://d:0"],
        ["--timeout", "0"],
        ["--timeout", "nan"],
        ["--unknown"],
        ["--config", "/no/such/file"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_have_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(["doctor", *arguments])
    except SystemExit as end:  # argparse's way
        status = int(end.code or 0)
    assert status == 2
    assert arguments[-1] in capsys.readouterr().err
