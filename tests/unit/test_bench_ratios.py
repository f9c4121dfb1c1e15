"""The quotient of what two pairs add to the first token: its interval, and its history over runs."""

import math
from typing import Any

import pytest

from benchmarks import bars, history, ratios
from benchmarks.report import replace_between
from benchmarks.summary import OURS, OURS_PREFILLER, PULL, PULL_PREFILLER


def asked(arm: str, s: float, rep: int, *, tokens: int = 8000, session: str = "x", disturbed: bool = False) -> Any:
    place = {"arm": arm, "tokens": tokens, "session": session, "rep": rep}
    return {"kind": "ttft", "s": s, "disturbed": disturbed, **place}


def run(ours_ms: list[float], theirs_ms: list[float], *, alone_s: float = 1.0, **place: Any) -> list[Any]:
    """Both pairs with these differences to their prefillers, round by round."""
    return [
        record
        for pair, alone, added in ((OURS, OURS_PREFILLER, ours_ms), (PULL, PULL_PREFILLER, theirs_ms))
        for rep, ms in enumerate(added)
        for record in (asked(alone, alone_s, rep, **place), asked(pair, alone_s + ms / 1000, rep, **place))
    ]


class TestInterval:
    def test_equal_measurements_leave_no_doubt(self) -> None:
        assert ratios.of_medians([2.0] * 6, [4.0] * 6) == ratios.Ratio(0.5, (0.5, 0.5))

    def test_it_is_the_middle_of_what_either_side_allows(self) -> None:
        found = ratios.of_medians([1.0, 2.0, 3.0, 4.0, 5.0], [10.0] * 5)
        assert found.value == pytest.approx(0.3)
        # A median of five drawn is the least of them in 5.8 % of draws, the greatest as often.
        assert found.interval == pytest.approx((0.1, 0.5))

    def test_it_leaves_out_the_odd_draws_at_either_end(self) -> None:
        interval = ratios.of_medians([float(v) for v in range(1, 22)], [1.0] * 21).interval
        assert interval is not None
        assert 5 <= interval[0] <= 8  # by the sign test's ranks: 6 and 16
        assert 14 <= interval[1] <= 17

    def test_it_grows_with_the_divisors_spread_and_holds_the_value(self) -> None:
        above = [float(v) for v in range(40, 61)]
        narrow, wide = (ratios.of_medians(above, [100 + w * v for v in range(-10, 11)]) for w in (0.1, 5.0))
        assert narrow.interval is not None
        assert wide.interval is not None
        assert wide.interval[0] < narrow.interval[0] < 0.5 < narrow.interval[1] < wide.interval[1]

    def test_a_divisor_that_may_be_nothing_leaves_no_upper_end(self) -> None:
        found = ratios.of_medians([1.0] * 9, [-1.0, -1.0, -1.0, -1.0, 4.0, 4.0, 4.0, 4.0, 4.0])
        assert found == ratios.Ratio(0.25, (0.25, math.inf))
        assert ratios.text(found) == "0.25 (0.25 … ∞)"

    def test_one_that_adds_nothing_is_never_in_our_favour(self) -> None:
        assert ratios.of_medians([-3.0] * 5, [-1.0] * 5).value == math.inf

    def test_the_same_measurements_give_the_same_interval(self) -> None:
        values = [0.3, 4.0, 1.0, 8.0, 2.0, 3.5], [5.0, 9.0, 2.0, 7.0, 6.0, 1.0]
        assert ratios.of_medians(*values) == ratios.of_medians(*values)

    def test_below_five_rounds_there_is_none(self) -> None:
        assert ratios.of_medians([1.0] * 4, [2.0] * 9) == ratios.Ratio(0.5, None)
        assert ratios.text(ratios.Ratio(0.5, None)) == "0.50"

    def test_the_table_of_bars_has_it_for_differences_within_rounds(self) -> None:
        row = bars.rows(run([10.0] * 5, [40.0] * 5))[1]
        assert row.value.startswith("0.25 (95 % interval 0.25 … 0.25): 10.0 against 40.0")


class TestHistory:
    def test_a_row_for_each_run_and_one_for_all_that_went_as_far_as_the_last(self) -> None:
        runs = {
            "first": run([1.0] * 5, [100.0] * 5, tokens=7000),
            "idle": [{"kind": "idle", "arm": "x", "cores": 0.1}],
            "second": run([30.0] * 5, [40.0] * 5),
            "third": run([10.0] * 7, [40.0] * 7),
        }
        assert history.markdown(history.rows_of(runs)).splitlines() == [
            "| run | 7,000 tokens | 8,000 tokens |",
            "|---|---|---|",
            "| first | 0.01 (0.01 … 0.01), n=5/5 | – |",
            "| second | – | 0.75 (0.75 … 0.75), n=5/5 |",
            "| third | – | 0.25 (0.25 … 0.25), n=7/7 |",
            "| the runs to 8,000 tokens, pooled | – | 0.25 (0.25 … 0.75), n=12/12 |",
        ]

    def test_rounds_of_two_runs_are_not_compared_with_each_other(self) -> None:
        slow_and_fast = (("a", 10.0, 9.0), ("b", 20.0, 1.0))
        runs = {name: run([add] * 5, [50.0] * 5, alone_s=alone_s) for name, add, alone_s in slow_and_fast}
        (ratio, ours, _) = history.quotients(history.pooled(runs))[8000]
        assert (ratio.value, ours) == (pytest.approx(0.3), 10)

    def test_what_was_disturbed_in_its_run_stays_out(self) -> None:
        disturbed = [asked(OURS, 9.0, 5, disturbed=True), asked(OURS_PREFILLER, 1.0, 5)]
        runs = {"a": [*run([10.0] * 5, [50.0] * 5), *disturbed]}
        assert history.quotients(history.pooled(runs))[8000][1] == 5

    def test_without_runs_there_is_no_table(self) -> None:
        assert history.markdown(history.rows_of({"idle": []})) == ""

    def test_a_page_may_have_several_parts(self) -> None:
        page = "".join(f"<!-- {what}: begin -->\n{what}\n<!-- {what}: end -->\n" for what in ("a", "b"))
        assert replace_between(page, "b", "new") == (
            "<!-- a: begin -->\na\n<!-- a: end -->\n<!-- b: begin -->\n\nnew\n\n<!-- b: end -->\n"
        )
