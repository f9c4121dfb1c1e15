"""What a check found, and how that is printed. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

MAX_CHARS = 4000
"""Of one finding: what a server says of itself may be long."""


class State(Enum):
    OK = "ok"
    WARNING = "warning"  # it will run, perhaps not as meant
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """Attributes:
    name: what was looked at.
    seen: the value, or what happened; may have several lines.
    advice: what to do; empty when all is well.
    """

    name: str
    state: State
    seen: str
    advice: str = ""


def ok(name: str, seen: str) -> Finding:
    return Finding(name, State.OK, seen)


def warning(name: str, seen: str, advice: str) -> Finding:
    return Finding(name, State.WARNING, seen, advice)


def failed(name: str, seen: str, advice: str) -> Finding:
    return Finding(name, State.FAILED, seen, advice)


def render(finding: Finding) -> str:
    """One line, further lines of `seen` and the advice indented below. Nothing in it can steer a terminal."""
    first, *more = (_printable(line) for line in finding.seen[:MAX_CHARS].splitlines() or [""])
    lines = [f"{finding.state.value:<8} {_printable(finding.name)}: {first}", *(f"{'':9}{line}" for line in more)]
    return "\n".join([*lines, f"{'':9}-> {_printable(finding.advice)}"] if finding.advice else lines)


def summary(findings: Iterable[Finding]) -> str:
    states = [finding.state for finding in findings]
    return ", ".join(f"{states.count(state)} {state.value}" for state in State)


def exit_status(findings: Sequence[Finding]) -> int:
    return int(any(finding.state is State.FAILED for finding in findings))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
