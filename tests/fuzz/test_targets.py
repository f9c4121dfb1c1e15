"""Each target of the fuzzer for a few hundred cases: a bounded part of `scripts/fuzz`, the same cases every time."""

import logging
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))

from fuzz.targets import Target, targets

CASES = 300


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Target]]:
    logging.disable(logging.CRITICAL)
    with ExitStack() as stack:
        yield targets(stack)
    logging.disable(logging.NOTSET)


NAMES = ["notes", "controls", "parameters", "replies", "configuration", "key_files", "bodies", "middleware"]
NAMES += ["receiver", "writer", "prefiller_engine", "decoder_engine", "fence_frames"]


def test_every_target_is_run_here(made: dict[str, Target]) -> None:
    assert list(made) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_hostile_input_ends_as_documented(made: dict[str, Target], name: str) -> None:
    for case in range(CASES):
        made[name](random.Random(f"ci:{name}:{case}"))
