"""The benchmarks' course: rounds by time, sets of servers that fail, the parts of one first token."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as bench
from benchmarks import parts, threads, ttft
from benchmarks.records import RecordFile, read_records
from benchmarks.sessions import WITHOUT_THREAD
from benchmarks.threads import Thread


class NobodyElse:
    """A machine that others leave alone."""

    def __init__(self, leaders: object) -> None:
        pass

    def cores(self) -> float:
        return 0.0


class Watch:
    """Time that passes only while an arm is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.asked: list[tuple[str, int]] = []
        monkeypatch.setattr(ttft, "time", self)
        monkeypatch.setattr(ttft, "wait_calm", lambda leaders: True)
        monkeypatch.setattr(ttft, "ForeignCpu", NobodyElse)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        pass

    def strftime(self, _format: str) -> str:
        return "12:00:00"

    def arm(self, name: str, s_per_token: float) -> ttft.Ask:
        def ask(prompt: list[int]) -> list[float]:
            self.asked.append((name, len(prompt)))
            begun = self.now
            self.now += s_per_token * len(prompt)
            return [begun, self.now]

        return ask


class Nothing:
    """A set of servers that is asked for nothing."""

    serves = frozenset({"ttft"})


class TestRounds:
    def test_after_the_rounds_only_the_two_longest_prompts_go_on(self) -> None:
        found = list(itertools.islice(ttft.rounds((2, 9, 5), 1), 9))
        assert found == [(-1, 2), (-1, 9), (-1, 5), (0, 2), (0, 9), (0, 5), (1, 5), (1, 9), (2, 5)]

    def test_time_that_is_left_goes_to_the_longest_prompts_without_spare_arms(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        watch = Watch(monkeypatch)
        arms = {name: watch.arm(name, 0.1) for name in ("shared", "direct", "pair")}
        # Two rounds of every length take 2 * 3 * (1 + 4) s; further ones 2 * 1 and 2 * 4 s, the slowest so far 3 * 4 s.
        ttft.measure(
            RecordFile(tmp_path), "s", arms, [], lengths=(10, 40), reps=1, budget_s=30 + 2 + 12, spare={"shared"}
        )
        assert len(watch.asked) == 12 + 4
        assert watch.asked[12:] == [("pair", 10), ("direct", 10), ("pair", 40), ("direct", 40)]
        records = read_records(tmp_path / "raw.jsonl")
        assert [r["rep"] for r in records if r["kind"] == "ttft" and r["tokens"] == 40] == [0, 0, 0, 1, 1]

    def test_no_round_begins_after_the_end(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        watch = Watch(monkeypatch)
        ttft.measure(RecordFile(tmp_path), "s", {"a": watch.arm("a", 1.0)}, [], lengths=(10, 40), reps=5, budget_s=55)
        assert [tokens for _, tokens in watch.asked] == [10, 40, 10]

    def test_over_a_long_prompt_little_foreign_work_is_allowed_and_ticks_are_over_a_short_one(self) -> None:
        assert ttft.limit_cores(4.4) * 4.4 < 0.3
        assert ttft.limit_cores(0.03) * 0.03 >= 0.03


class TestSessions:
    def test_a_failure_is_recorded_and_goes_no_further(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        records = RecordFile(tmp_path)
        with bench._recorded("pull", records):
            raise TimeoutError("up for 900 s\nmore")
        with bench._recorded("micro", records):
            pass
        ends = [r for r in read_records(records.path) if r["kind"] == "session"]
        assert [(r["servers"], r["failure"]) for r in ends] == [
            ("pull", "failed: TimeoutError: up for 900 s"),
            ("micro", ""),
        ]
        assert "Traceback" in capsys.readouterr().err

    def test_ctrl_c_is_not_a_failure_to_go_on_after(self, tmp_path: Path) -> None:
        with pytest.raises(KeyboardInterrupt), bench._recorded("pull", RecordFile(tmp_path)):
            raise KeyboardInterrupt


class TestWithoutServers:
    """What `python -m benchmarks` runs in processes of their own."""

    @pytest.fixture
    def ran(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """`python -m benchmarks OPTIONS`: the modules it has run, without their time."""
        modules: list[str] = []
        monkeypatch.setattr(bench, "SESSIONS", {name: Nothing() for name in bench.DEFAULT})
        monkeypatch.setattr(bench, "_run", lambda *args: None)
        monkeypatch.setattr(bench, "_run_process", lambda command: modules.append(command[0]))
        return modules

    @pytest.mark.parametrize(
        ("options", "modules"),
        [
            ([], ["benchmarks.micro", "benchmarks.gpu"]),
            (["--only", "gpu"], ["benchmarks.gpu"]),
            (["--only", "hook"], ["benchmarks.micro"]),
            (["--only", "ttft"], []),
        ],
    )
    def test_all_of_them_run_unless_one_is_asked_for(
        self, ran: list[str], options: list[str], modules: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["benchmarks", "--results", str(tmp_path), *options])
        assert bench.main() == 0
        assert ran == modules


class TestWithoutThread:
    def test_agents_have_no_progress_thread_unless_it_is_asked_for(self) -> None:
        code = (
            "from nixl._api import nixl_agent_config as config\n"
            "made = config(), config(num_threads=4), config(True), config(enable_prog_thread=True)\n"
            "print([made.enable_pthread for made in made])"
        )
        env = {**os.environ, "PYTHONPATH": str(WITHOUT_THREAD)}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
        assert done.stdout.split("\n")[-2] == "[False, False, True, True]", done.stderr


def at(moment: str, *times_ms: float) -> list[dict[str, Any]]:
    return [{"moment": moment, "at_ns": round(ms * 1e6)} for ms in times_ms]


class TestParts:
    def test_they_add_up_to_the_whole_and_leave_earlier_transfers_out(self) -> None:
        earlier = at("reserved", 1) + at("write_posted", 2) + at("write_done", 50)
        events = [
            *earlier,
            *at("reserved", 105),
            *at("dispatched", 106),
            *at("received", 112),
            *at("chunk_scheduled", 113, 150),
            *at("layer_computed", 140, 190),
            *at("write_posted", 141, 191),
            *at("write_done", 144, 195),
            *at("note_arrived", 145, 193),
            *at("complete", 194),
            *at("released", 196),
        ]
        found = parts.parts(100e6, 215e6, events)
        assert found.pop("pair: writes under way") == 3 + 4
        assert found["pair: chunk_scheduled → layer_computed"] == 190 - 113
        assert found["pair: released → first token"] == 19
        assert sum(found.values()) == pytest.approx(115)

    def test_cpu_time_is_told_apart_by_whose_it_is(self) -> None:
        def after(name: str, core: int, ran_ms: float, waited_ms: float = 0.0) -> Thread:
            return Thread(name, core, 1000 + ran_ms, 500 + waited_ms)

        now = {
            (10, 10): after("python", 0, 3),
            (11, 11): after("VLLM::EngineCor", 0, 20),
            (12, 12): after("VLLM::Worker", 0, 400, 60),
            (12, 13): after("VLLM::Worker", 0, 25, 7),
            (12, 14): after("gloo_tcp_loop", 0, 2),
            (99, 99): after("kdamond.0", 0, 16),
            (98, 98): after("python", 1, 70),
        }
        before = {key: Thread(t.name, 1, 1000, 500) for key, t in now.items()}
        server = {10: "python", 11: "VLLM::EngineCore", 12: "VLLM::Worker"}
        assert threads.shares(before, now, server, core=0) == {
            threads.MODEL: 400,
            threads.MODEL_WAITED: 60,
            threads.MESSENGER: 25,
            threads.GLOO: 2,
            threads.ENGINE: 20,
            threads.API: 3,
            threads.OTHERS: 16,
        }

    def test_a_thread_that_is_new_counts_from_its_begin(self) -> None:
        found = threads.shares({}, {(9, 9): Thread("cc1plus", 0, 33, 1)}, {}, core=0)
        assert found[threads.OTHERS] == 33
