"""A bounded part of `scripts/faults`: one fault of each kind, with the checks that follow every fault."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_run.cast import Cast, reference
from fault_run.clients import Want
from fault_run.stages import STAGES
from server_tier.fixtures import SUMMARY
from server_tier.reference import Reference
from server_tier.stage import Stage

pytestmark = [pytest.mark.server, pytest.mark.extended, pytest.mark.timeout(900)]

BOUNDED = {
    "ordinary": ["kill-prefiller", "terminate-prefiller"],
    "native": ["native-kill-decoder"],
    "networked": ["cut-network"],
    "tiny": ["preempt", "reset-cache"],
}


@pytest.fixture(scope="module")
def folder(stage: Stage) -> Path:
    stage.close()  # one set of servers at a time
    return stage.folder / "faults"


@pytest.fixture(scope="module")
def want(folder: Path, references: dict[str, Reference]) -> Want:
    return reference(folder)


@pytest.fixture(scope="module", params=BOUNDED)
def cast(request: pytest.FixtureRequest, want: Want, folder: Path, stage: Stage) -> Iterator[tuple[str, Cast]]:
    open_stage, why_not, _ = STAGES[request.param]
    if reason := why_not():
        pytest.skip(reason)
    stage.close()
    with open_stage(folder) as cast:
        yield request.param, cast


def test_faults_leave_nothing_behind(cast: tuple[str, Cast], want: Want) -> None:
    stage, servers = cast
    for name in BOUNDED[stage]:
        outcome = STAGES[stage][2][name](servers, want, random.Random(name))
        SUMMARY.append(f"{outcome.fault}: longest wait {outcome.longest_wait_s:.1f} s")
        assert not outcome.complaints, outcome.fault
        servers.wait_started()
