"""The benchmarks' arithmetic: what is paired, what is left out, what a percentile is."""

import json
from typing import Any

import pytest

from benchmarks import report, timeline
from benchmarks.summary import (
    OURS,
    SHARED,
    Spread,
    added,
    failed_sessions,
    first_token,
    gaps,
    idle,
    median_interval,
    percentile,
    spread,
)


def timed(arm: str, s: float, *, rep: int = 0, tokens: int = 200, session: str = "a", disturbed: bool = False) -> Any:
    return {
        "kind": "ttft",
        "session": session,
        "arm": arm,
        "tokens": tokens,
        "rep": rep,
        "s": s,
        "disturbed": disturbed,
    }


class TestFigures:
    def test_a_spread_is_median_least_and_greatest(self) -> None:
        assert spread([3.0, 1.0, 2.0, 10.0]) == Spread(4, 2.5, 1.0, 10.0)

    def test_nothing_measured_is_an_error_not_a_zero(self) -> None:
        with pytest.raises(ValueError, match="no measurement"):
            spread([])

    @pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
    def test_percentile_is_a_value_that_was_measured(self, share: float, value: int) -> None:
        assert percentile(range(100, 0, -1), share) == value

    @pytest.mark.parametrize(
        ("n", "ranks"), [(5, None), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (12, (3, 10)), (20, (6, 15)), (25, (8, 18))]
    )
    def test_an_interval_of_the_median_has_the_ranks_of_the_sign_test(
        self, n: int, ranks: tuple[float, float] | None
    ) -> None:
        assert median_interval([float(v) for v in range(n, 0, -1)]) == ranks

    def test_disturbed_measurements_are_left_out_where_others_exist(self) -> None:
        calm = [timed(OURS, 1.0), timed(OURS, 9.0, rep=1, disturbed=True)]
        assert first_token(calm)[200, OURS] == Spread(1, 1.0, 1.0, 1.0)
        assert first_token(calm[1:])[200, OURS].median == 9.0


class TestAdded:
    def test_arms_of_one_session_are_compared_within_rounds(self) -> None:
        records = [timed(SHARED, s, rep=rep) for rep, s in enumerate([1.0, 2.0, 3.0])]
        records += [timed(OURS, s + 0.5, rep=rep) for rep, s in enumerate([1.0, 2.0, 3.0])]
        (row,) = added(records, OURS, SHARED)
        assert row.is_paired
        assert row.seconds == Spread(3, 0.5, 0.5, 0.5)
        assert row.ratio == 1.25

    def test_arms_of_different_sessions_get_the_widest_spread(self) -> None:
        records = [timed(SHARED, s, rep=r) for r, s in enumerate([1.0, 2.0])]
        records += [timed(OURS, s, rep=r, session="b") for r, s in enumerate([4.0, 6.0])]
        (row,) = added(records, OURS, SHARED)
        assert not row.is_paired
        assert row.seconds == Spread(2, 3.5, 2.0, 5.0)

    def test_the_interval_is_of_the_differences_within_rounds(self) -> None:
        base = [1.0, 5.0, 2.0, 9.0, 4.0, 7.0]
        records = [timed(SHARED, s, rep=rep) for rep, s in enumerate(base)]
        records += [timed(OURS, s + rep, rep=rep) for rep, s in enumerate(base)]
        assert added(records, OURS, SHARED)[0].interval == (0.0, 5.0)
        assert added(records[1:], OURS, SHARED)[0].interval is None  # five rounds are too few
        other = [{**r, "session": "b"} if r["arm"] == OURS else r for r in records]
        assert added(other, OURS, SHARED)[0].interval is None  # there are no rounds with both

    def test_a_length_measured_on_one_side_only_is_not_reported(self) -> None:
        assert added([timed(OURS, 1.0), timed(SHARED, 1.0, tokens=300)], OURS, SHARED) == []


class TestReport:
    RECORDS = (
        {
            "kind": "gaps",
            "arm": "x",
            "gaps_ms": [5.0] * 95 + [500.0],
            "prompt_first_token_s": [2.0],
            "disturbed": False,
        },
        {"kind": "gaps", "arm": "x", "gaps_ms": [5.0] * 100, "prompt_first_token_s": [3.0], "disturbed": False},
        {"kind": "idle", "arm": "y", "cores": 0.01},
        {"kind": "idle", "arm": "y", "cores": 0.03},
    )

    def test_gaps_are_spread_over_answers(self) -> None:
        (row,) = gaps(self.RECORDS)
        assert row.longest == Spread(2, 252.5, 5.0, 500.0)
        assert row.stalled_share.high == pytest.approx(500 / 975)
        assert row.prompt_first_token_s == Spread(2, 2.5, 2.0, 3.0)

    def test_idle_is_spread_over_windows(self) -> None:
        assert idle(self.RECORDS)["y"] == Spread(2, 0.02, 0.01, 0.03)

    def test_only_the_last_run_of_a_session_counts(self) -> None:
        ran = [{"kind": "session", "servers": name, "failure": why} for name, why in (("a", "x"), ("b", ""), ("c", ""))]
        assert failed_sessions([*ran, {"kind": "session", "servers": "b", "failure": "y"}]) == {"a": "x", "b": "y"}
        assert failed_sessions([*ran, {"kind": "session", "servers": "a", "failure": ""}]) == {}

    def test_the_summary_has_only_what_was_measured(self) -> None:
        text = report.markdown(self.RECORDS)
        assert "CPU while idle" in text
        assert "first token |" not in text
        assert "NixlPushConnector" not in text

    @pytest.mark.parametrize(
        ("value", "text"), [(0.0, ""), (1e-9, "▏"), (5.0, "█" * 10), (10.0, "█" * 20), (99.0, "█" * 20)]
    )
    def test_bars_fill_twenty_cells(self, value: float, text: str) -> None:
        assert report.bar(value, 10.0) == text


class TestTimeline:
    def test_an_interval_runs_from_a_first_or_last_moment(self) -> None:
        events = [
            ("reserved", 0),
            ("layer_computed", 2_000_000),
            ("layer_computed", 5_000_000),
            ("released", 9_000_000),
        ]
        lines = [json.dumps({"transfer": "t", "moment": m, "at_ns": at, "tokens": 199}) for m, at in events]
        rows = timeline.intervals(timeline.collect(lines))[199]
        assert rows["reserved → released"] == Spread(1, 9.0, 9.0, 9.0)
        assert "complete → released (decoder's next step)" not in rows
