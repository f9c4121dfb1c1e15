"""Deadlines, compatibility report, configuration errors, keys, counters, timeline, page tables: one fact each."""

import dataclasses
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.config import PDConfig, explain, parse
from vllm_pd_connector.control.keys import load_key, write_key
from vllm_pd_connector.errors import ConfigError, IncompatiblePeer, OutOfRegion
from vllm_pd_connector.geometry.page_table import PageView
from vllm_pd_connector.lifecycle.deadline import Deadlines
from vllm_pd_connector.telemetry.counters import Tally
from vllm_pd_connector.telemetry.timeline import FileTimeline, NoTimeline, open_timeline
from vllm_pd_connector.testing.buffers import KvBuffer
from vllm_pd_connector.testing.shapes import bind_whole, some_shape, whole_blocks
from vllm_pd_connector.wire.compatibility import MAY_DIFFER, CacheShape, differences

SHAPE = some_shape()


class TestDeadlines:
    def test_expire_in_order_of_time_and_once(self) -> None:
        deadlines: Deadlines[str] = Deadlines()
        for key, when in (("late", 30.0), ("early", 10.0), ("middle", 20.0)):
            deadlines.arm(key, when)
        assert deadlines.expired(9.9) == []
        assert deadlines.expired(25.0) == ["early", "middle"]
        assert deadlines.expired(25.0) == []
        assert len(deadlines) == 1

    def test_arming_again_replaces(self) -> None:
        deadlines: Deadlines[str] = Deadlines()
        deadlines.arm("a", 10.0)
        deadlines.arm("a", 20.0)
        assert deadlines.next_in(5.0) == 15.0
        assert deadlines.expired(15.0) == []
        assert deadlines.expired(20.0) == ["a"]

    def test_disarmed_never_expires(self) -> None:
        deadlines: Deadlines[str] = Deadlines()
        deadlines.arm("a", 10.0)
        deadlines.disarm("a")
        deadlines.disarm("never armed")
        assert deadlines.next_in(0.0) is None
        assert deadlines.expired(100.0) == []

    @given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 20)), max_size=20), st.integers(0, 20))
    def test_agree_with_a_dictionary(self, arms: list[tuple[str, int | None]], now: int) -> None:
        deadlines: Deadlines[str] = Deadlines()
        model: dict[str, int] = {}
        for key, when in arms:
            if when is None:
                deadlines.disarm(key)
                model.pop(key, None)
            else:
                deadlines.arm(key, when)
                model[key] = when
        assert deadlines.next_in(now) == (max(0, min(model.values()) - now) if model else None)
        due = deadlines.expired(now)
        assert sorted(due) == sorted(key for key, when in model.items() if when <= now)
        assert [model[key] for key in due] == sorted(model[key] for key in due)


class TestCompatibility:
    def test_equal_shapes_do_not_differ(self) -> None:
        assert differences(SHAPE, SHAPE) == []

    @pytest.mark.parametrize("field", [f.name for f in msgspec.structs.fields(CacheShape) if f.name not in MAY_DIFFER])
    def test_every_field_is_compared_and_named_with_both_values(self, field: str) -> None:
        value: object = 16 if isinstance(getattr(SHAPE, field), int) else "y"
        other = msgspec.structs.replace(SHAPE, **{field: ((1, 4),) if field == "planes" else value})
        found = differences(SHAPE, other)
        assert found == [(field, *(str(getattr(s, field)) for s in (SHAPE, other)))] or field == "layers"
        assert [name for name, _, _ in found] == [field]
        assert f"{field}: here {found[0][1]}, there {found[0][2]}" in str(IncompatiblePeer("http://p", found))

    @pytest.mark.parametrize(
        "changes",
        [
            {"tensor_parallel_size": 2},
            {"tensor_parallel_size": 8},
            {"pipeline_parallel_size": 2},
            {"block_size": 64},
            {"block_size": 16},
            {"layout": "LBNHC"},
            {"layout": "LBNHC", "block_size": 128, "tensor_parallel_size": 4},
        ],
        ids=str,
    )
    def test_what_can_be_bridged_may_differ(self, changes: dict[str, Any]) -> None:
        assert differences(SHAPE, msgspec.structs.replace(SHAPE, **changes)) == []
        assert differences(msgspec.structs.replace(SHAPE, **changes), SHAPE) == []

    @pytest.mark.parametrize(
        ("both", "changes", "field"),
        [
            ({}, {"block_size": 48}, "block_size"),
            ({"planes": ()}, {"block_size": 64}, "block_size"),
            ({"planes": ()}, {"layout": "LBNHC"}, "layout"),
            ({"planes": ((2, 2), (1, 4))}, {"layout": "LBNHC"}, "layout"),
            ({"kernel_blocks": 2, "planes": ()}, {"tensor_parallel_size": 2}, "kernel_blocks"),
        ],
        ids=str,
    )
    def test_what_cannot_be_bridged_is_named(self, both: dict[str, Any], changes: dict[str, Any], field: str) -> None:
        here = msgspec.structs.replace(SHAPE, **both)
        there = msgspec.structs.replace(here, **changes)
        for one, other in ((here, there), (there, here)):
            (found,) = [d for d in differences(one, other) if d[0] == field]
            assert str(getattr(one, field)) in found[1]
            assert str(getattr(other, field)) in found[2]

    def test_the_numbers_of_a_model_are_named_one_by_one(self) -> None:
        here = msgspec.structs.replace(SHAPE, model_config='{"rope_theta": 1e4, "layers": 8}')
        there = msgspec.structs.replace(SHAPE, model_config='{"rope_theta": 5e5, "layers": 8, "window": 128}')
        assert differences(here, there) == [
            ("model_config.rope_theta", "10000.0", "500000.0"),
            ("model_config.window", "none", "128"),
        ]

    @pytest.mark.parametrize("theirs", ["[" * 100_000, "7", "{", ""], ids=lambda text: f"{len(text)} of {text[:1]}")
    def test_numbers_that_are_none_are_given_as_they_came(self, theirs: str) -> None:
        """A prefiller says them of itself; the first is nested deeper than Python parses."""
        here = msgspec.structs.replace(SHAPE, model_config='{"layers": 8}')
        there = msgspec.structs.replace(SHAPE, model_config=theirs)
        assert differences(here, there) == [("model_config", here.model_config, theirs)]

    def test_layers_that_only_one_side_has_are_named(self) -> None:
        here = msgspec.structs.replace(SHAPE, layers="l0 l1 draft")
        (found,) = differences(here, msgspec.structs.replace(SHAPE, layers="l0 l1"))
        assert found == ("layers", "3 names, own ['draft']", "2 names, own []")


class TestConfig:
    def test_the_defaults_parse(self) -> None:
        assert parse({}) == PDConfig()

    def test_an_unknown_key_is_named_with_the_known_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"kv_connector_extra_config\.prefilers .* prefillers"):
            parse({"prefilers": []})

    def test_a_value_out_of_range_is_named_with_its_range(self) -> None:
        with pytest.raises(ConfigError) as caught:
            parse({"poll_pause_s": 5})
        for part in ("kv_connector_extra_config.poll_pause_s", "5", "<= 0.1", "default 0.0005"):
            assert part in str(caught.value)

    def test_a_wrong_choice_lists_the_choices(self) -> None:
        with pytest.raises(ConfigError, match="'local' or 'error'"):
            parse({"on_failure": "retry"})

    @pytest.mark.parametrize("url", ["10.0.0.7:8100", "ftp://p", "http://", "http://p?x=1", "http://p#x", ""])
    def test_a_prefiller_that_is_no_base_url_is_named(self, url: str) -> None:
        with pytest.raises(ConfigError, match=r"prefillers\[1\]"):
            parse({"prefillers": ["http://ok:1", url]})

    def test_trailing_slashes_do_not_matter(self) -> None:
        assert parse({"prefillers": ["http://p:1/"]}).prefillers == ["http://p:1"]

    def test_every_key_is_explained_with_a_meaning(self) -> None:
        lines = explain().splitlines()
        assert [line.split(":")[0] for line in lines] == [f.name for f in msgspec.structs.fields(PDConfig)]
        assert all(line.rstrip().endswith(".") for line in lines)


class TestKeys:
    def test_a_key_file_is_private_and_never_overwritten(self, tmp_path: Path) -> None:
        path = tmp_path / "pool.key"
        write_key(str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        before = path.read_bytes()
        with pytest.raises(FileExistsError):
            write_key(str(path))
        assert path.read_bytes() == before
        key = load_key(str(path))
        assert key is not None
        assert key.callback("*", key.public)
        assert not key.callback("*", key.secret)

    def test_no_path_no_key(self) -> None:
        assert load_key(None) is None

    def test_a_missing_file_says_how_to_make_one(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="keygen"):
            load_key(str(tmp_path / "none"))

    @pytest.mark.parametrize("content", [b"", b"a b", b"x" * 40, b" ".join([b"x" * 40] * 3), b"\xff" * 10])
    def test_a_file_without_two_keys_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "bad.key"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="40 characters"):
            load_key(str(path))

    @pytest.mark.parametrize("keep", [0, 1])
    def test_keys_that_do_not_belong_together_are_refused(self, tmp_path: Path, keep: int) -> None:
        """Otherwise the channel would stay silent, and say nothing."""
        path = tmp_path / "mixed.key"
        write_key(str(path))
        words = path.read_bytes().split()
        words[keep] = b"\xff" * 40 if keep else zmq.curve_keypair()[0]
        path.write_bytes(b" ".join(words))
        with pytest.raises(ConfigError, match="belong together"):
            load_key(str(path))


class TestTally:
    def test_taking_starts_from_zero(self) -> None:
        tally = Tally()
        tally.add("writes")
        tally.add("bytes_written", 10)
        assert tally.take() == {"writes": 1, "bytes_written": 10}
        assert tally.take() == {}

    def test_nothing_is_lost_between_threads(self) -> None:
        tally = Tally()
        threads = [threading.Thread(target=lambda: [tally.add("writes") for _ in range(2_000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        taken = 0
        while any(thread.is_alive() for thread in threads):
            taken += tally.take().get("writes", 0)
        assert taken + tally.take().get("writes", 0) == 8_000


class _Short:
    """A file on a disk with room for one byte."""

    closed = False
    written = 0

    def write(self, _line: bytes) -> int:
        self.written += 1
        return 1


class TestTimeline:
    def test_one_json_line_for_each_moment(self, tmp_path: Path) -> None:
        timeline = open_timeline(str(tmp_path / "new"), "worker-0")
        assert isinstance(timeline, FileTimeline)
        timeline.mark("t1", "reserved", pages=3)
        timeline.mark("t1", "layer_computed", at_ns=17)
        timeline.close()
        timeline.mark("t1", "after close")
        (file,) = (tmp_path / "new").iterdir()
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [line["moment"] for line in lines] == ["reserved", "layer_computed"]
        assert lines[0]["pages"] == 3
        assert lines[0]["role"] == "worker-0"
        assert lines[1]["at_ns"] == 17

    def test_a_full_disk_costs_moments_and_is_said_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / f"worker-0-{os.getpid()}.jsonl").symlink_to("/dev/full")
        timeline = open_timeline(str(tmp_path), "worker-0")
        with caplog.at_level("WARNING", logger="vllm_pd_connector"):
            for _ in range(3):
                timeline.mark("t1", "reserved")
        timeline.close()
        assert caplog.text.count("event=timeline_lost") == 1

    def test_a_torn_line_does_not_spoil_the_next(self, tmp_path: Path) -> None:
        timeline = open_timeline(str(tmp_path), "worker-0")
        assert isinstance(timeline, FileTimeline)
        whole, timeline._file = timeline._file, _Short()  # type: ignore[assignment]
        timeline.mark("t1", "torn")
        torn, timeline._file = timeline._file, whole
        timeline.mark("t1", "whole")
        timeline.close()
        (file,) = tmp_path.iterdir()
        assert torn.written == 1  # type: ignore[attr-defined]
        assert [json.loads(line)["moment"] for line in file.read_text().split("\n") if line] == ["whole"]
        assert file.read_text().startswith("\n")

    def test_without_a_directory_nothing_is_recorded(self) -> None:
        assert isinstance(open_timeline(None, "x"), NoTimeline)


class TestPageTable:
    TABLE = KvBuffer(num_layers=2, num_blocks=4, page_bytes=16, gap=8).table

    def test_a_sound_table_passes(self) -> None:
        self.TABLE.check()

    @pytest.mark.parametrize(
        "change",
        [
            {"num_blocks": 0},
            {"page_bytes": 0},
            {"block_stride": 15},
            {"layer_offsets": []},
            {"layer_offsets": [-1]},
            {"layer_offsets": [0, 10_000]},
            {"num_blocks": 400},
            {"size_bytes": 50},
        ],
        ids=lambda change: next(iter(change)),
    )
    def test_pages_that_overlap_or_leave_the_region_are_refused(self, change: dict[str, object]) -> None:
        with pytest.raises(OutOfRegion):
            msgspec.structs.replace(self.TABLE, **change).check()

    @pytest.mark.parametrize(("layer", "block"), [(-1, 0), (2, 0), (0, -1), (0, 4)])
    def test_a_page_that_is_not_there_has_no_address(self, layer: int, block: int) -> None:
        with pytest.raises(OutOfRegion):
            self.TABLE.address(layer, block)

    @pytest.mark.parametrize(
        ("src", "dst", "layers"),
        [
            ((0,), (1,), [0]),
            ((1,), (0,), [0]),
            ((4,), (1,), [0]),
            ((1,), (4,), [0]),
            ((-1,), (1,), [0]),
            ((1, 2), (1,), [0]),
            ((1,), (1,), [2]),
            ((1,), (1,), [-1]),
        ],
    )
    def test_a_write_outside_either_table_is_never_bound(
        self, src: tuple[int, ...], dst: tuple[int, ...], layers: list[int]
    ) -> None:
        with pytest.raises(OutOfRegion):
            bind_whole(whole_blocks("t", src, dst), layers, self.TABLE, self.TABLE)

    @pytest.mark.parametrize("pieces", [((-1, 4),), ((0, 0),), ((12, 5),), ((0, 4), (16, 1))])
    def test_pieces_that_leave_the_page_are_refused(self, pieces: tuple[tuple[int, int], ...]) -> None:
        with pytest.raises(OutOfRegion):
            PageView(self.TABLE, pieces).check()

    def test_more_pieces_than_can_be_numbered_are_refused(self) -> None:
        table = msgspec.structs.replace(self.TABLE, num_blocks=2**27)
        PageView(table, ((0, 1),) * 7).check()
        with pytest.raises(OutOfRegion):
            PageView(table, ((0, 1),) * 8).check()


def test_bound_writes_are_immutable() -> None:
    write = whole_blocks("t", (1,), (1,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        write.transfer_id = "u"  # type: ignore[misc]
