"""docs/protocol.md is what the tables say, or this fails."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_protocol_page_is_generated_from_the_current_tables() -> None:
    check = subprocess.run([sys.executable, "scripts/protocol.py", "--check"], cwd=ROOT, timeout=30)
    assert check.returncode == 0, "docs/protocol.md is stale: run `python scripts/protocol.py`"
