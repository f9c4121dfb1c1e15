"""What the demo prints: sections, progress while servers start, the closing advice."""

import sys
import textwrap
from collections.abc import Sequence

from vllm_pd_connector.testing.servers import Server

WIDTH = 100
QUIET_STEP_S = 10.0  # between progress lines when the output is not a terminal


def section(title: str) -> None:
    print(f"\n── {title} {'─' * max(0, WIDTH - len(title) - 4)}", flush=True)


def paragraph(text: str, indent: str = "   ") -> None:
    """Wrapped text, its line breaks kept."""
    for line in text.strip().splitlines():
        print(textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=indent) if line.strip() else "")
    sys.stdout.flush()


def shortened(text: str, limit: int = 300) -> str:
    """The beginning and the end of a long text."""
    return text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"


class StartProgress:
    """A line per server with elapsed seconds: rewritten in place on a terminal, else printed now and then.

    Args:
        what: for each server, what it is.
    """

    def __init__(self, what: Sequence[str]) -> None:
        self._what = what
        self._is_live = sys.stdout.isatty()
        self._num_drawn = 0
        self._told: set[str] = set()
        self._next_s = QUIET_STEP_S

    def __call__(self, servers: Sequence[Server], elapsed_s: float) -> None:
        if self._is_live:
            self._redraw(servers, elapsed_s)
        else:
            self._report(servers, elapsed_s)

    def _redraw(self, servers: Sequence[Server], elapsed_s: float) -> None:
        up = f"\x1b[{self._num_drawn}A" if self._num_drawn else ""
        lines = [f"\x1b[2K{self._line(*pair, elapsed_s)}\n" for pair in zip(servers, self._what, strict=True)]
        print(up + "".join(lines), end="", flush=True)
        self._num_drawn = len(lines)

    def _report(self, servers: Sequence[Server], elapsed_s: float) -> None:
        is_due = elapsed_s >= self._next_s
        self._next_s += QUIET_STEP_S if is_due else 0
        for server, what in zip(servers, self._what, strict=True):
            is_new = server.ready_after_s is not None and server.name not in self._told
            if is_new or (is_due and server.ready_after_s is None):
                print(self._line(server, what, elapsed_s), flush=True)
            if server.ready_after_s is not None:
                self._told.add(server.name)

    @staticmethod
    def _line(server: Server, what: str, elapsed_s: float) -> str:
        is_ready = server.ready_after_s is not None
        state = f"ready after {server.ready_after_s:4.0f} s" if is_ready else f"loading   {elapsed_s:6.0f} s"
        return f"   {'●' if is_ready else '○'} {server.name:<12} {state}   {what}"
