"""The benchmarks' arithmetic for single transfers and operations, and which bars are met."""

import json
from typing import Any

import pytest

from benchmarks import bars, costs, report
from benchmarks.profile import shares
from benchmarks.summary import (
    BY_LAYER,
    NOT_BY_LAYER,
    OURS,
    OURS_PREFILLER,
    PULL,
    PULL_PREFILLER,
    PUSH,
    PUSH_PREFILLER,
    THREADLESS,
    THREADLESS_PREFILLER,
    Spread,
)
from benchmarks.transfers import collect


def moment(name: str, at_ms: float) -> dict[str, Any]:
    return {"moment": name, "at_ns": round(at_ms * 1e6)}


def transfer(arm: str, moments: list[tuple[str, float]], *, tokens: int = 8000, disturbed: bool = False) -> Any:
    return {
        "kind": "transfer",
        "arm": arm,
        "tokens": tokens,
        "disturbed": disturbed,
        "moments": [moment(*m) for m in moments],
    }


LAYERED = [
    ("reserved", 0),
    ("layer_computed", 100),
    ("write_posted", 101),
    ("note_arrived", 110),
    ("write_done", 111),
    ("layer_computed", 200),
    ("write_posted", 201),
    ("note_arrived", 205),
    ("write_done", 206),
    ("complete", 208),
    ("released", 210),
]


class TestExposure:
    def test_it_counts_from_the_last_layer_and_against_the_time_pages_were_under_way(self) -> None:
        (e,) = costs.exposures([transfer(BY_LAYER, LAYERED)])
        assert e.exposed.median == 10.0
        assert e.whole.median == 109.0
        assert e.under_way.median == 10 + 10  # the first flight, and what is exposed: the second one is part of it
        assert e.share.median == pytest.approx(10 / 109)
        assert e.busy_share.median == 0.5
        assert (e.landed.median, e.noted.median) == (4.0, 5.0)

    def test_until_the_release_counts_from_the_last_of_a_moment_whoever_saw_it(self) -> None:
        moments = transfer(BY_LAYER, [*LAYERED, ("write_done", 213)])["moments"]
        assert costs.until_released(moments, "write_done") == -3.0  # the prefiller's writer looks later
        assert costs.until_released(moments, "note_arrived") == 5.0

    @pytest.mark.parametrize("lost", ["note_arrived", "released"])
    def test_a_timeline_without_the_moment_is_an_error(self, lost: str) -> None:
        moments = [m for m in LAYERED if m[0] != lost]
        with pytest.raises(ValueError, match="empty"):
            costs.until_released(transfer(BY_LAYER, moments)["moments"], "note_arrived")

    def test_writes_that_overlap_are_counted_once(self) -> None:
        together = [
            ("write_posted", 0),
            ("write_posted", 5),
            ("write_done", 10),
            ("write_done", 12),
            ("note_arrived", 12),
            ("layer_computed", 20),
            ("released", 25),
        ]
        (e,) = costs.exposures([transfer(NOT_BY_LAYER, together)])
        assert e.under_way.median == 12 + 5

    def test_a_transfer_that_begins_after_the_last_layer_is_wholly_exposed(self) -> None:
        late = [("layer_computed", 0), ("write_posted", 3), ("note_arrived", 9), ("write_done", 10), ("released", 12)]
        (e,) = costs.exposures([transfer(NOT_BY_LAYER, late)])
        assert (e.share.median, e.busy_share.median) == (1.0, 1.0)

    def test_a_write_whose_end_was_never_seen_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="zip"):
            costs.exposures([transfer(BY_LAYER, [m for m in LAYERED if m != ("write_done", 206)])])

    def test_timelines_of_several_files_make_whole_transfers_in_the_order_of_their_begin(self) -> None:
        lines = [
            json.dumps({"transfer": name, "moment": m, "at_ns": at, **fields})
            for name, m, at, fields in (
                ("b", "released", 90, {}),
                ("b", "reserved", 50, {"tokens": 7}),
                ("a", "reserved", 10, {"tokens": 5}),
                ("a", "write_posted", 30, {"seq": 0, "rank": 3}),
                ("c", "write_posted", 40, {}),  # its reservation is not in these files
            )
        ]
        assert collect(lines) == [
            (5, [{"moment": "reserved", "at_ns": 0}, {"moment": "write_posted", "at_ns": 20, "seq": 0}]),
            (7, [{"moment": "reserved", "at_ns": 0}, {"moment": "released", "at_ns": 40}]),
        ]


class TestPosted:
    def test_rounds_spread_the_median_and_all_samples_give_the_tail(self) -> None:
        rounds = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]
        arm = {"writer": "pure Python", "load": "idle", "switch_s": 0.005, "cores": "one core", "is_default": True}
        (p,) = costs.posted([{"kind": "posted", **arm, "rep": i, "samples_us": s} for i, s in enumerate(rounds)])
        assert (p.p50.n, p.p50.low, p.p50.high) == (2, 2.0, 20.0)
        assert (p.p99, p.greatest, p.n) == (30.0, 30.0, 6)

    def test_the_bar_is_for_a_busy_interpreter_at_the_interval_our_worker_sets(self) -> None:
        records = [
            {"kind": "posted", "writer": w, "load": load, "switch_s": 0.005, "cores": "x", "is_default": d, "rep": 0}
            | {"samples_us": [90.0]}
            for w in ("native", "pure Python")
            for load in ("pure Python", "idle")
            for d in (True, False)
        ]
        assert [row.is_met for row in bars.rows(records)] == [False, None, None, None, True, None, None, None]


class TestGrowth:
    def test_the_ratio_is_of_one_unit_at_the_ends(self) -> None:
        cells = [(256, [10.0]), (1, [8.0, 9.0, 7.0]), (16, [50.0])]
        records = [{"kind": "growth", "what": "x", "unit": "peer", "in": "B", "size": n, "each": v} for n, v in cells]
        (g,) = costs.growths(records)
        assert list(g.cells) == [1, 16, 256]
        assert g.ratio == 10 / 8
        (row,) = bars.rows(records)
        assert row.is_met is False
        assert "| peers | 1 | 16 | 256 | last ÷ first |" in report.markdown(records)


class TestParts:
    @staticmethod
    def rounds(*values: float, tokens: int = 8000, disturbed: bool = False) -> list[Any]:
        place = {"kind": "parts", "tokens": tokens, "disturbed": disturbed}
        return [{**place, "rep": rep, "ms": {"added": value}} for rep, value in enumerate(values)]

    def test_each_part_is_the_median_of_undisturbed_rounds_with_its_interval(self) -> None:
        (part,) = costs.parts([*self.rounds(6, 1, 2, 5, 3, 4), *self.rounds(1000, disturbed=True)])
        assert part == costs.Part("added", Spread(6, 3.5, 1, 6), (1, 6))

    def test_prompts_of_two_lengths_are_two_tables(self) -> None:
        text = report.markdown([*self.rounds(30), *self.rounds(9, 11, tokens=200)])
        assert "## What a first token consists of" in text
        assert "| added | 10.00 | 9.00 … 11.00 | – | 2 |" in text
        assert "| added | 30.00 | 30.00 … 30.00 | – | 1 |" in text


class TestGpu:
    def test_what_was_skipped_stands_there_with_the_reason(self) -> None:
        records = [
            {"kind": "gpu", "at": "12:00:00", "what": "WRITE of 1 MiB", "n": 20, "GB/s": [5.1, 4.0, 6.2]},
            {"kind": "gpu", "at": "12:00:00", "what": "beside a matmul", "skipped": "no CUDA device"},
        ]
        text = report.markdown(records)
        assert "| WRITE of 1 MiB | n 20; GB/s 5.1, 4.0, 6.2 |" in text
        assert "| beside a matmul | skipped: no CUDA device |" in text


class TestProfile:
    LINES = (
        "thread (7): MainThread;run (vllm/worker.py);hook (vllm_pd_connector/engine/a.py) 3",
        "thread (7): MainThread;run (vllm/worker.py) 17",
        "thread (8): pd-messenger;turn (vllm_pd_connector/engine/messenger.py) 5",
    )

    def test_samples_are_the_threads_and_those_with_a_frame_of_ours(self) -> None:
        assert shares(self.LINES) == {"MainThread": (20, 3), "pd-messenger": (5, 5)}

    def test_only_the_main_thread_is_in_the_table(self) -> None:
        records = [
            {"kind": "profile", "process": "p", "thread": thread, "busy": busy, "plugin": ours, "samples": 100}
            for thread, (busy, ours) in shares(self.LINES).items()
        ]
        (row,) = bars.rows(records)
        assert "3.00 % of all its time, 15.00 % of the 20 % it ran" in row.value


def asked(arm: str, s: float, *, session: str, rep: int = 0, tokens: int = 1000) -> Any:
    place = {"arm": arm, "tokens": tokens, "session": session, "rep": rep}
    return {"kind": "ttft", "s": s, "disturbed": False, **place}


class TestBars:
    @pytest.mark.parametrize(("ours_adds", "is_short", "is_half"), [(0.021, True, True), (0.031, False, False)])
    def test_first_token_bars(self, ours_adds: float, is_short: bool, is_half: bool) -> None:
        records = [
            asked(OURS_PREFILLER, 0.2, session="a"),
            asked(OURS, 0.2 + ours_adds, session="a"),
            asked(PULL_PREFILLER, 0.5, session="b"),
            asked(PULL, 0.56, session="b"),
        ]
        limit, ratio = bars.rows(records)
        assert limit.bar == "≤ 20 ms + 1 % of the shared time = 22 ms"
        assert (limit.is_met, ratio.is_met) == (is_short, is_half)

    def test_every_connector_that_completed_is_compared_with(self) -> None:
        arms = {OURS_PREFILLER: 0.2, OURS: 0.21, PULL_PREFILLER: 0.5, PULL: 0.6, PUSH_PREFILLER: 0.5, PUSH: 0.504}
        rows = bars.rows([asked(arm, s, session=arm.split("'")[0]) for arm, s in arms.items()])
        assert [(row.figure, row.value[:4], row.is_met) for row in rows[1:]] == [
            ("the same ÷ NixlConnector's (pull), 1,000 tokens", "0.10", True),
            ("the same ÷ NixlPushConnector's, 1,000 tokens", "2.50", False),
        ]

    def test_a_connector_that_was_changed_is_beside_the_bar(self) -> None:
        arms = {OURS_PREFILLER: 0.2, OURS: 0.21, THREADLESS_PREFILLER: 0.2, THREADLESS: 0.204}
        row = bars.rows([asked(arm, s, session=str("its" in arm or "without" in arm)) for arm, s in arms.items()])[-1]
        assert (row.bar, row.value[:4], row.is_met) == ("–", "2.50", None)

    def test_from_six_rounds_on_the_interval_of_the_median_is_said(self) -> None:
        records = [
            asked(arm, s + 0.001 * rep, session="a", rep=rep)
            for arm, s in ((OURS_PREFILLER, 0.2), (OURS, 0.21))
            for rep in range(6)
        ]
        assert "95 % interval of the median 10.0 … 10.0" in bars.rows(records)[0].value
        assert "interval" not in bars.rows(records[1:])[0].value

    def test_a_connector_that_did_not_complete_has_its_row(self) -> None:
        tried = {"kind": "attempt", "what": "NixlPushConnector, 200 tokens", "outcome": "not completed", "s": 60.04}
        (row,) = bars.rows([{**tried, "outcome": "completed"}, tried])
        assert (row.figure, row.value) == ("a request to NixlPushConnector, 200 tokens", "not completed (60.0 s)")
        assert row.is_met is None

    def test_gaps_of_running_answers_have_rows(self) -> None:
        answer = {"kind": "gaps", "prompt_first_token_s": [2.0], "disturbed": False}
        records = [
            {**answer, "arm": "ours", "gaps_ms": [5.0, 18.0]},
            {**answer, "arm": "two", "gaps_ms": [5.0, 1400.0]},
        ]
        assert [row.value for row in bars.rows(records)] == [
            f"{gap} ({gap} … {gap}), n=1 ms; p99 {gap.replace(',', '')} ms" for gap in ("18.0", "1,400.0")
        ]

    def test_a_session_that_failed_is_a_bar_that_was_missed(self) -> None:
        ended = {"kind": "session", "servers": "pull", "failure": "failed: TimeoutError: a | b"}
        (row,) = bars.rows([ended, {**ended, "servers": "ours", "failure": ""}])
        assert (row.is_met, row.value) == (False, "failed: TimeoutError: a / b")

    def test_a_bar_that_is_missed_is_seen_in_the_table(self) -> None:
        records = [{"kind": "idle", "arm": "our decoder", "cores": 0.04}, {"kind": "idle", "arm": "x", "cores": 1.0}]
        ours, other = bars.rows(records)
        assert (ours.is_met, other.is_met) == (False, None)
        assert "| **no** |" in "\n".join(bars.table(records))

    def test_small_layers_have_no_throughput_bar(self) -> None:
        rounds = [{"kind": "throughput", "writer": "native", "carrier": "tcp", "layers": 4, "raw": 1.0, "ours": 2.0}]
        small, large = bars.rows([{**r, "layer_mib": mib} for r in rounds for mib in (1, 4)])
        assert (small.is_met, large.is_met) == (None, False)
        assert costs.throughput([{**rounds[0], "layer_mib": 4}])[0].ours_mib_per_s == Spread(1, 8.0, 8.0, 8.0)

    def test_every_load_of_a_hook_is_measured_against_the_bar_of_its_writer(self) -> None:
        hook = {"kind": "micro", "n": 1, "low_ns": 3000, "high_ns": 3000, "median_ns": 3000}
        whats = [
            f"layer hook, {writer} writer, {load}"
            for writer in ("pure Python", "native")
            for load in ("nobody has anything to post", "64 pages of each layer are posted")
        ]
        records = [{**hook, "what": what} for what in whats]
        records += [{**hook, "what": "a wake", "is_baseline": True}, {**hook, "what": "plan"}]
        assert [row.is_met for row in bars.rows(records)] == [True, True, False, False, None]

    def test_rounds_of_a_hook_are_one_row_with_the_median_of_their_medians(self) -> None:
        medians = (1000, 1800, 9000)
        rounds = [
            {"kind": "micro", "what": "layer hook, native writer, x", "rep": rep, "n": 10}
            | {"median_ns": ns, "low_ns": ns - 500, "high_ns": ns + 1000}
            for rep, ns in enumerate(medians)
        ]
        (row,) = bars.rows(rounds)
        assert row.is_met is True
        assert row.value == "p50 1.80 (1.00 … 9.00), n=3 rounds; least 0.50, max 10.00 µs of 30"
        rounds[2]["disturbed"] = True
        assert bars.rows(rounds)[0].value == "p50 1.40 (1.00 … 1.80), n=2 rounds; least 0.50, max 2.80 µs of 20"
        assert bars.rows(rounds[2:])[0].value.startswith("p50 9.00")

    def test_the_layer_wise_bar_is_for_the_longest_prompt(self) -> None:
        records = [transfer(arm, LAYERED, tokens=t) for arm in (BY_LAYER, NOT_BY_LAYER) for t in (200, 8000)]
        marked = [row.figure for row in bars.rows(records) if row.is_met is not None]
        assert marked == [
            f"exposed transfer ÷ {what}, 8,000 tokens, {BY_LAYER}"
            for what in ("whole transfer time", "time with pages under way")
        ]


class TestPage:
    RECORDS = ({"kind": "idle", "arm": "our decoder", "cores": 0.01},)

    def test_only_what_stands_between_the_marks_is_replaced(self) -> None:
        text = "before\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nafter\n"
        page = report.page(text, self.RECORDS, "benchmarks/results/x")
        assert page.startswith("before\n")
        assert page.endswith("after\n")
        assert "old" not in page
        assert "| CPU while idle, our decoder |" in page
        assert report.page(page, self.RECORDS, "benchmarks/results/x") == page

    def test_a_page_without_marks_is_not_overwritten(self) -> None:
        with pytest.raises(ValueError, match="lacks"):
            report.page("nothing", self.RECORDS, "x")
