"""One release of NIXL in a folder of its own, put before the installed one by PYTHONPATH."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_pd_connector.doctor.finding import Finding, failed
from vllm_pd_connector.doctor.probe import MARK, WRITE

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "build" / "nixl"
INSTALL_S, TRIAL_S, CONTRACT_S, ACROSS_S = 600, 120, 600, 150
NATIVE = "native posting"


@dataclass(frozen=True, slots=True)
class Release:
    """`version`: of NIXL; empty: the one that is installed."""

    version: str = ""

    @property
    def env(self) -> dict[str, str]:
        """Where its processes find it first."""
        paths = [str(FOLDER / self.version)] if self.version else []
        return {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(ROOT / "tests")])}

    def install(self) -> None:
        """Raises:
        RuntimeError: the index has no such release for this Python, in uv's words.
        """
        target = FOLDER / self.version
        if not self.version or (target / "complete").exists():
            return
        wheels = [f"{name}=={self.version}" for name in ("nixl", "nixl-cu12", "nixl-cu13")]
        into = ["--quiet", "--no-deps", "--target", str(target)]
        done = self._run(["-m", "uv", "pip", "install", *into, *wheels], INSTALL_S)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        (target / "complete").touch()

    def found(self) -> str:
        """The version that its processes really import."""
        code = "import importlib.metadata as m, nixl._api; print('FOUND', m.version('nixl'))"
        return _said(self._run(["-c", code], TRIAL_S), "FOUND")

    def native_posting(self) -> Finding:
        """What the doctor finds."""
        done = self._run(["-m", "vllm_pd_connector.doctor.trial", WRITE, "UCX"], TRIAL_S)
        lines = [line.encode() for line in done.stdout.splitlines()]
        found = [msgspec.json.decode(line[len(MARK) :], type=Finding) for line in lines if line.startswith(MARK)]
        seen = f"exit status {done.returncode}: {_last_line(done.stdout + done.stderr)}"
        return next((finding for finding in found if finding.name == NATIVE), failed(NATIVE, seen, ""))

    def contract(self, *, is_native: bool) -> tuple[int, list[str]]:
        """Tests of the contract that passed, and the names of those that did not.

        Args:
            is_native: those of native posting too.
        """
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "nixl", f"--junitxml={report}"]
            command += [] if is_native else ["--ignore=tests/contract/test_arming.py"]
            done = self._run([*command, "tests/contract"], CONTRACT_S)
            if not report.exists():
                return 0, [f"pytest broke off with status {done.returncode}: {done.stdout[-300:]}"]
            cases = list(ET.parse(report).getroot().iter("testcase"))
        bad = [str(c.get("name")) for c in cases if c.find("failure") is not None or c.find("error") is not None]
        skipped = [case for case in cases if case.find("skipped") is not None]
        return len(cases) - len(bad) - len(skipped), bad

    def writes_to(self, other: "Release") -> str:
        """ok, or what became of a write from an agent of this release to one of the other."""
        with tempfile.TemporaryDirectory() as folder:
            script = str(Path(__file__).parent / "across.py")
            owner = subprocess.Popen(
                [sys.executable, script, "own", folder],
                env=other.env,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            try:
                sent = _said(self._run([script, "write", folder], ACROSS_S), "OUTCOME")
                if sent != "ok":
                    owner.kill()
                got = _said_in(owner.communicate(timeout=ACROSS_S)[0], "OUTCOME")
            finally:
                owner.kill()
                owner.wait()
        return "ok" if (sent, got) == ("ok", "ok") else f"writer: {sent}; owner: {got}"

    def _run(self, args: list[str], limit_s: float) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, *args],
            env=self.env,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )


def _said(done: "subprocess.CompletedProcess[str]", mark: str) -> str:
    return _said_in(done.stdout, mark) or f"exit status {done.returncode}: {_last_line(done.stderr)}"


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["it printed nothing"])[-1]


def _said_in(output: str, mark: str) -> str:
    return next((line.partition(" ")[2] for line in output.splitlines() if line.startswith(mark)), "")
