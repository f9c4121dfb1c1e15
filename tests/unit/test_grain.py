"""How many layers one write carries: the cost lines it is computed from, the choice, and the portions."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.plan.grain import BestRate, CostLine, Grain, portions

MIB = 1 << 20


def learned(fixed: float, per_unit: float, sizes: list[int], *, noise: float = 0.0) -> CostLine:
    line, dice = CostLine(100e-6, 1 / 4e9, 1e6), random.Random(1)
    for _ in range(100):
        for size in sizes:
            line.add(size, (fixed + per_unit * size) * dice.uniform(1 - noise, 1 + noise))
    return line


class TestCostLine:
    def test_before_anything_was_seen_it_is_what_was_expected(self) -> None:
        assert CostLine(2.0, 3.0, 10.0).line == (2.0, 3.0)

    def test_it_finds_both_parts_through_noise(self) -> None:
        fixed, per_unit = learned(40e-6, 1 / 20e9, [0, 64 * 1024, MIB, 16 * MIB], noise=0.3).line
        assert fixed == pytest.approx(40e-6, rel=0.2)
        assert per_unit == pytest.approx(1 / 20e9, rel=0.2)

    @pytest.mark.parametrize(("fixed", "per_unit"), [(5e-3, 1 / 4e9), (1e-6, 1 / 400e9), (0.0, 1e-6), (1e-3, 0.0)])
    def test_equal_sizes_give_a_line_that_is_right_there(self, fixed: float, per_unit: float) -> None:
        line = learned(fixed, per_unit, [2 * MIB])
        assert line.at(2 * MIB) == pytest.approx(fixed + 2 * MIB * per_unit, rel=0.1)
        assert min(line.line) >= 0

    def test_it_follows_a_change_and_forgets(self) -> None:
        line = learned(100e-6, 1 / 4e9, [MIB, 8 * MIB])
        for _ in range(200):
            line.add(MIB, 1e-3 + MIB / 1e9)
            line.add(8 * MIB, 1e-3 + 8 * MIB / 1e9)
        assert line.at(8 * MIB) == pytest.approx(1e-3 + 8 * MIB / 1e9, rel=0.1)

    def test_one_thread_that_was_not_scheduled_teaches_little(self) -> None:
        line = learned(100e-6, 1 / 4e9, [MIB, 8 * MIB])
        before = line.at(MIB)
        line.add(MIB, 30.0)
        assert line.at(MIB) < 1.5 * before

    @given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(-1, 1e6)), max_size=60))
    def test_no_history_makes_it_negative_or_undefined(self, samples: list[tuple[int, float]]) -> None:
        line = CostLine(100e-6, 1 / 4e9, 1e6)
        for size, seconds in samples:
            line.add(size, seconds)
        assert all(math.isfinite(part) and part >= 0 for part in line.line)


class TestBestRate:
    def test_slow_writes_teach_little_and_a_better_one_is_taken_at_once(self) -> None:
        rate = BestRate(1 / 4e9)
        for _ in range(5):
            rate.add(MIB, 10.0)
        assert rate.per_unit < 1.2 / 4e9
        rate.add(MIB, MIB / 50e9)
        assert rate.per_unit == pytest.approx(1 / 50e9)

    def test_small_writes_say_nothing_of_it(self) -> None:
        rate = BestRate(1 / 4e9)
        for _ in range(200):
            rate.add(4096, 50e-6)
        assert rate.per_unit == 1 / 4e9

    def test_a_wire_that_has_become_slower_is_learnt(self) -> None:
        rate = BestRate(1 / 50e9)
        for _ in range(200):
            rate.add(MIB, MIB / 1e9)
        assert rate.per_unit == pytest.approx(1 / 1e9)

    @given(st.lists(st.tuples(st.integers(0, 1 << 40), st.floats(-1, 1e6)), max_size=60))
    def test_no_history_makes_it_useless(self, samples: list[tuple[int, float]]) -> None:
        rate = BestRate(1 / 4e9)
        for size, seconds in samples:
            rate.add(size, seconds)
        assert 0 < rate.per_unit < math.inf


def test_long_chunks_stay_layer_by_layer_after_small_writes_that_were_slow() -> None:
    """As on a busy pair of cores: a short prompt's writes took 6 and 16 ms, and a line through all sizes was flat."""
    measured = Grain(1.0)
    for size, seconds in [(458_752, 0.016), (458_752, 0.006), *[(4_096_000, 0.0009)] * 8, *[(917_504, 0.001)] * 20]:
        measured.posting.add(size, 0.0003)
        measured.wire.add(size, seconds)
        measured.layer.add(4_096_000, 0.57)
    assert measured.layers_per_write(8, 4_096_000, 1) == 1


def grain(*, share: float = 1.0, post_s: float, bytes_per_s: float, layer_s: float) -> Grain:
    """One that has seen just this."""
    made = Grain(share)
    made.posting.line, made.wire.per_unit, made.layer.line = (post_s, 0.0), 1 / bytes_per_s, (layer_s, 0.0)
    return made


class TestGrain:
    def test_a_long_chunk_travels_layer_by_layer_and_a_short_prompt_in_one_write(self) -> None:
        measured = grain(post_s=100e-6, bytes_per_s=4e9, layer_s=5e-3)
        assert measured.layers_per_write(32, 32 * MIB, 1) == 1
        assert measured.layers_per_write(32, 4096, 1) == 32

    @pytest.mark.parametrize("layer_bytes", [10_000, 100_000, 1 << 20, 1 << 23])
    def test_no_other_grain_adds_less(self, layer_bytes: int) -> None:
        post_s, bytes_per_s, layers = 100e-6, 4e9, 32

        def added(k: int) -> float:
            return post_s * layers / k + post_s + k * layer_bytes / bytes_per_s

        chosen = grain(post_s=post_s, bytes_per_s=bytes_per_s, layer_s=1.0).layers_per_write(layers, layer_bytes, 1)
        assert added(chosen) <= 1.05 * min(map(added, range(1, layers + 1)))

    def test_posts_that_cost_more_make_larger_writes(self) -> None:
        sizes = [
            grain(post_s=s, bytes_per_s=4e9, layer_s=1.0).layers_per_write(64, MIB, 1) for s in (1e-6, 1e-3, 1e-2, 1.0)
        ]
        assert sizes == sorted(sizes)
        assert sizes[0] == 1
        assert sizes[-1] == 64

    def test_more_transfers_share_fewer_posts(self) -> None:
        measured = grain(post_s=100e-6, bytes_per_s=4e9, layer_s=1.0)
        assert measured.layers_per_write(32, MIB, 64) > measured.layers_per_write(32, MIB, 1)

    def test_posts_keep_pace_with_layers_even_where_they_cost_the_model_nothing(self) -> None:
        quick = grain(share=0.0, post_s=1e-3, bytes_per_s=1e12, layer_s=0.3e-3)
        assert quick.layers_per_write(32, MIB, 1) == 4  # 1 ms of posting in 4 layers of 0.3 ms

    def test_a_wire_slower_than_compute_is_kept_busy_from_the_first_layer(self) -> None:
        slow = grain(share=0.0, post_s=1e-4, bytes_per_s=1e8, layer_s=1e-3)
        assert slow.layers_per_write(32, MIB, 1) == 1

    def test_an_operators_choice_is_taken(self) -> None:
        fixed = Grain(1.0, min_write_bytes=3 * MIB)
        assert [fixed.layers_per_write(8, size, 1) for size in (MIB // 2, MIB, 2 * MIB, 4 * MIB)] == [6, 3, 2, 1]
        assert Grain(1.0, min_write_bytes=1 << 50).layers_per_write(8, 1, 1) == 8

    @given(st.integers(1, 200), st.integers(0, 1 << 40), st.integers(1, 1000), st.floats(0, 1))
    def test_it_is_always_possible(self, layers: int, layer_bytes: int, transfers: int, share: float) -> None:
        assert 1 <= Grain(share).layers_per_write(layers, layer_bytes, transfers) <= layers


@given(st.integers(1, 300), st.integers(1, 300))
def test_portions_are_all_layers_in_order_and_as_equal_as_can_be(num_layers: int, size: int) -> None:
    parts = portions(num_layers, size)
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    lengths = [len(part) for part in parts]
    assert len(parts) == math.ceil(num_layers / size)
    assert max(lengths) <= size
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
