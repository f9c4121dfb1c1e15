"""Fixtures of the server tier, the order in which its tests run, and the totals printed at the end."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from server_tier.ask import Score, Waits
from server_tier.reference import Reference, record
from server_tier.shape_sets import Row
from server_tier.stage import SETS, Stage
from vllm_pd_connector.testing.servers import Server

FLOAT32_TIE, FLOAT32_TOLERANCE = 1e-4, 5e-4
# Two steps of a bfloat16 logit between 16 and 32. The last prompt token is computed alone, so sums are rounded
# otherwise; how far an ordinary server is from itself with prefix hits is printed beside it.
BFLOAT16_TIE, BFLOAT16_TOLERANCE = 0.26, 0.6

SUMMARY: list[str] = []
"""Lines that are printed after the last test."""


@dataclass(frozen=True, slots=True)
class Pair:
    prefiller: Server
    decoder: Server


@pytest.fixture(scope="session")
def references(request: pytest.FixtureRequest, stage: Stage) -> dict[str, Reference]:
    """What ordinary servers answered; they run and end before any other server starts."""
    items = request.session.items
    names = {name for item in items for name in getattr(item, "fixturenames", ())}
    wanted = {row.reference for item in items if (row := _row(item))}
    wanted |= {name.removesuffix("_reference") for name in names if name.endswith("_reference")}
    stage.close()
    found = record(wanted, stage.folder / "reference")
    Waits.forget()
    return found


@pytest.fixture(scope="session")
def random_reference(references: dict[str, Reference]) -> Reference:
    return references["random"]


@pytest.fixture(scope="session")
def smollm_reference(references: dict[str, Reference]) -> Reference:
    return references["smollm"]


@pytest.fixture(scope="session")
def bf16_reference(references: dict[str, Reference]) -> Reference:
    return references["bf16"]


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """All servers of the session; they are gone at its end."""
    stage = Stage()
    yield stage
    stage.close()
    started = ", ".join(f"{name} {seconds:.0f}" for name, seconds in stage.started.items())
    SUMMARY.append(f"servers were ready after (s): {started}; logs in {stage.folder}")
    assert not stage.alarms


@pytest.fixture
def main_pair(random_reference: Reference, stage: Stage) -> Pair:
    return Pair(*stage.use("main"))


@pytest.fixture
def smollm_pair(smollm_reference: Reference, stage: Stage) -> Pair:
    return Pair(*stage.use("smollm"))


@pytest.fixture
def bf16_pair(bf16_reference: Reference, stage: Stage) -> Pair:
    return Pair(*stage.use("bf16"))


@pytest.fixture
def tp2_pair(random_reference: Reference, stage: Stage) -> Pair:
    return Pair(*stage.use("tp2"))


@pytest.fixture
def dp_servers(random_reference: Reference, stage: Stage) -> list[Server]:
    """A prefiller and a decoder of two data-parallel ranks."""
    return stage.use("dp")


@pytest.fixture
def both_servers(random_reference: Reference, stage: Stage) -> list[Server]:
    """kv_both with on_failure=error, kv_both with on_failure=local, a decoder without prefillers."""
    return stage.use("both")


@pytest.fixture
def faulty_servers(random_reference: Reference, stage: Stage) -> list[Server]:
    """Prefillers "wrong", "checked" and "stuck", and their decoder."""
    return stage.use("faulty")


@pytest.fixture
def score(request: pytest.FixtureRequest) -> Iterator[Score]:
    """For float32; printed and added to the totals when the test ends."""
    yield from _score(request, Score(FLOAT32_TIE, FLOAT32_TOLERANCE))


@pytest.fixture
def bf16_score(request: pytest.FixtureRequest) -> Iterator[Score]:
    yield from _score(request, Score(BFLOAT16_TIE, BFLOAT16_TOLERANCE))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests with servers take longer than `faulthandler_timeout` allows the others."""
    if item.get_closest_marker("server"):
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one set of servers run one after another; those that kill servers come last."""
    order = [*(f"{name}_servers" for name in SETS), *(f"{name}_pair" for name in SETS)]
    order.sort(key=lambda fixture: list(SETS).index(fixture.partition("_")[0]))

    def rank(item: pytest.Item) -> tuple[int, bool]:
        used = getattr(item, "fixturenames", ())
        row = _row(item)
        used = [*used, f"{row.servers}_servers"] if row else used
        place = next((i for i, fixture in enumerate(order) if fixture in used), -1)
        return place, place >= 0 and "kill" in item.name

    items.sort(key=rank)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not SUMMARY:
        return
    terminalreporter.section("server tier")
    for line in SUMMARY:
        terminalreporter.write_line(line)
    tokens, equal, ties = (sum(getattr(s, f) for s in _SCORES) for f in ("tokens", "equal", "near_ties"))
    terminalreporter.write_line(f"total: {tokens} tokens compared, {equal} equal, {ties} near ties")
    terminalreporter.write_line(f"longest client wait: {Waits.longest_s:.1f} s ({Waits.longest_name})")


_SCORES: list[Score] = []


def _row(item: pytest.Item) -> Row | None:
    """The line of the table of shapes that a test is about, if it is about one."""
    row = getattr(item, "callspec", None) and item.callspec.params.get("row")
    return row if isinstance(row, Row) else None


def note_score(score: Score) -> None:
    """Add a score to the totals."""
    _SCORES.append(score)


def _score(request: pytest.FixtureRequest, score: Score) -> Iterator[Score]:
    yield score
    if not score.tokens:
        return
    note_score(score)
    if request.node.path.parent.name == "e2e":  # the others compare one answer each: in the total only
        SUMMARY.append(f"{request.node.name}: {score}")
