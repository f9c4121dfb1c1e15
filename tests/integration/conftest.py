"""A scheduler for one role; a module about the prefiller overrides `role`."""

from pathlib import Path

import pytest
from scheduler_rig import MakeRig, Rig, make_rig


@pytest.fixture
def role() -> str:
    return "kv_consumer"


@pytest.fixture
def make(tmp_path: Path, role: str) -> MakeRig:
    return lambda **extra: make_rig(tmp_path, role=role, **extra)


@pytest.fixture
def rig(make: MakeRig) -> Rig:
    return make()
