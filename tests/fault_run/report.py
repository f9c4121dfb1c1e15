"""A fault run as faults.json and faults.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fault_run.checks import Outcome

COLUMNS = (
    "fault",
    "clients: answered + errors (wrong)",
    "longest wait (limit), s",
    "pages back, s",
    "next right",
    "idle cores",
    "held",
)


def write(folder: Path, outcomes: Sequence[Outcome], machine: dict[str, Any], took_s: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "took_s": round(took_s), "outcomes": [o.as_dict() for o in outcomes]}
    (folder / "faults.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / "faults.md").write_text(page(outcomes, machine, took_s))


def page(outcomes: Sequence[Outcome], machine: dict[str, Any], took_s: float) -> str:
    """One row for each fault, and one for each complaint below them."""
    totals = {name: sum(getattr(o, name) for o in outcomes) for name in ("clients", "answers", "errors", "wrong")}
    summary = (
        f"{len(outcomes)} faults in {took_s:.0f} s; {totals['clients']} clients, {totals['answers']} answered, "
        f"{totals['errors']} errors, {totals['wrong']} wrong; longest wait "
        f"{max((o.longest_wait_s for o in outcomes), default=0):.1f} s."
    )
    lines = [
        "# Fault run",
        "",
        summary,
        "",
        ", ".join(f"{name} {value}" for name, value in machine.items()),
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]
    for o in outcomes:
        cells = (
            o.fault,
            f"{o.answers} + {o.errors} ({o.wrong})",
            f"{o.longest_wait_s:.1f} ({o.limit_s:g})",
            f"{o.quiet_after_s:.1f}",
            f"{o.next_right} of {o.next_asked}",
            f"{o.idle_cores:.3f}",
            "none" if not o.complaints else "**see below**",
        )
        lines.append("| " + " | ".join(cells) + " |")
    complaints = [f"* {o.fault}: {c}" for o in outcomes for c in o.complaints]
    return "\n".join([*lines, "", *(["## Complaints", "", *complaints] if complaints else ["No complaint."]), ""])
