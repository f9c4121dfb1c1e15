"""Law 6: whatever the order, doubling or lateness of notes, a transfer completes once, when all its units are there."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_pd_connector.ids import TransferId
from vllm_pd_connector.lifecycle.completion import Arrival, CompletionTable
from vllm_pd_connector.plan.extent import Span

TRANSFERS = [TransferId(letter * 32) for letter in "abc"]
Note = tuple[int, int, int]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=8), st.data())
def test_a_transfer_completes_exactly_once_with_its_last_distinct_note(units: list[int], data: st.DataObject) -> None:
    notes = [(seq % 2, seq // 2, count) for seq, count in enumerate(units)]
    doubled = notes + data.draw(st.lists(st.sampled_from(notes), max_size=6))
    deliveries: list[Note | None] = data.draw(st.permutations([*doubled, None]))  # None: the transfer becomes known
    table = CompletionTable(max_parked=4)
    seen: set[Note] = set()
    is_known = False
    completions = 0
    for note in deliveries:
        was_complete = is_known and seen == set(notes)
        if note is None:
            is_known = True
            completed = table.expect(TRANSFERS[0], sum(units)) is Arrival.REACHED
        else:
            arrival = table.arrive(TRANSFERS[0], sender=note[0], seq=note[1], units=note[2])
            assert (arrival is Arrival.DUPLICATE) == (note in seen)
            seen.add(note)
            completed = arrival is Arrival.REACHED
        completions += completed
        assert completed == (not was_complete and is_known and seen == set(notes))
    assert completions == 1
    assert table.arrived(TRANSFERS[0]) == sum(units)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=5), st.integers(0, 7), st.data())
def test_what_is_whole_ends_where_the_first_note_is_missing(
    steps: list[tuple[int, int]], start: int, data: st.DataObject
) -> None:
    """Steps of some tokens; what each token is made of is spread over notes of two senders; any of them may be lost."""
    units_per_token = 3
    notes: list[tuple[int, int, int, Span]] = []
    at, seqs = start, [0, 0]
    for length, num_notes in steps:
        span = Span(at, at + length)
        parts = [1] * (num_notes - 1) + [units_per_token - num_notes + 1]
        for part in parts:
            sender = data.draw(st.integers(0, 1))
            notes.append((sender, seqs[sender], part * length, span))
            seqs[sender] += 1
        at += length
    arrived = data.draw(st.lists(st.sampled_from(notes), max_size=3 * len(notes)))
    arrived += notes if data.draw(st.booleans()) else []
    known_after = data.draw(st.integers(0, len(arrived)))
    table = CompletionTable(max_parked=4)
    for number, (sender, seq, units, span) in enumerate([*arrived, *arrived[:2]]):
        if number == known_after:
            table.expect(TRANSFERS[0], units_per_token * (at - start))
        table.arrive(TRANSFERS[0], sender=sender, seq=seq, units=units, step=span)
    if known_after >= len(arrived) + len(arrived[:2]):
        table.expect(TRANSFERS[0], units_per_token * (at - start))
    missing = [span.start for *_, span in set(notes) - set(arrived)]
    assert table.whole_stop(TRANSFERS[0], start=start, units_per_token=units_per_token) == min([at, *missing])


def test_nothing_is_whole_of_notes_that_name_no_step_or_of_an_unknown_transfer() -> None:
    table = CompletionTable(max_parked=4)
    table.arrive(TRANSFERS[0], sender=0, seq=0, units=8, step=Span(0, 4))
    assert table.whole_stop(TRANSFERS[0], start=0, units_per_token=2) == 0
    table.expect(TRANSFERS[1], 8)
    table.arrive(TRANSFERS[1], sender=0, seq=0, units=8)
    assert table.whole_stop(TRANSFERS[1], start=0, units_per_token=2) == 0


def test_a_step_with_more_units_than_it_has_is_not_whole() -> None:
    table = CompletionTable(max_parked=4)
    table.expect(TRANSFERS[0], 100)
    table.arrive(TRANSFERS[0], sender=0, seq=0, units=8, step=Span(0, 4))
    assert table.whole_stop(TRANSFERS[0], start=0, units_per_token=2) == 4
    table.arrive(TRANSFERS[0], sender=1, seq=0, units=1, step=Span(0, 4))
    assert table.whole_stop(TRANSFERS[0], start=0, units_per_token=2) == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 9)), max_size=9))
def test_steps_that_make_no_sense_end_the_search(steps: list[tuple[int, int, int]]) -> None:
    table = CompletionTable(max_parked=4)
    table.expect(TRANSFERS[0], 1000)
    for seq, (start, stop, units) in enumerate(steps):
        table.arrive(TRANSFERS[0], sender=0, seq=seq, units=units, step=Span(start, stop))
    assert 0 <= table.whole_stop(TRANSFERS[0], start=0, units_per_token=1) <= 5


class Counting(RuleBasedStateMachine):
    """Three transfers at once against a set of what was delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.table = CompletionTable(max_parked=2)
        self.seen: dict[TransferId, dict[tuple[int, int], int]] = {}
        self.expected: dict[TransferId, int] = {}
        self.forgotten: set[TransferId] = set()
        self.parked: list[TransferId] = []

    @rule(transfer=st.sampled_from(TRANSFERS), sender=st.integers(0, 2), seq=st.integers(0, 3), units=st.integers(1, 3))
    def arrive(self, transfer: TransferId, sender: int, seq: int, units: int) -> None:
        arrival = self.table.arrive(transfer, sender=sender, seq=seq, units=units)
        if transfer in self.forgotten:
            assert arrival is Arrival.LATE
            return
        seen = self.seen.setdefault(transfer, {})
        if (sender, seq) in seen:
            assert arrival is Arrival.DUPLICATE
            return
        seen[sender, seq] = units
        total = sum(seen.values())
        if transfer in self.expected:
            reached, excess = total == self.expected[transfer], total > self.expected[transfer]
            assert arrival is (Arrival.EXCESS if excess else Arrival.REACHED if reached else Arrival.COUNTED)
        elif transfer in self.parked or len(self.parked) < 2:
            assert arrival is Arrival.PARKED
            if transfer not in self.parked:
                self.parked.append(transfer)
        else:
            assert arrival is Arrival.OVERFLOW
            self.seen.pop(self.parked.pop(0))
            self.parked.append(transfer)

    @rule(transfer=st.sampled_from(TRANSFERS), units=st.integers(1, 8))
    def expect(self, transfer: TransferId, units: int) -> None:
        if transfer in self.expected or transfer in self.forgotten:
            return  # ids are fresh: told once, and never again after they are over
        already = sum(self.seen.get(transfer, {}).values())
        reached, excess = already == units, already > units
        arrival = self.table.expect(transfer, units)
        assert arrival is (Arrival.EXCESS if excess else Arrival.REACHED if reached else Arrival.COUNTED)
        self.expected[transfer] = units
        if transfer in self.parked:
            self.parked.remove(transfer)

    @precondition(lambda self: len(self.forgotten) < len(TRANSFERS))
    @rule(transfer=st.sampled_from(TRANSFERS))
    def forget(self, transfer: TransferId) -> None:
        self.table.forget(transfer)
        self.forgotten.add(transfer)
        self.expected.pop(transfer, None)
        self.seen.pop(transfer, None)
        if transfer in self.parked:
            self.parked.remove(transfer)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.table) == len(self.expected)
        assert self.table.num_parked == len(self.parked) <= 2
        for transfer in TRANSFERS:
            assert self.table.arrived(transfer) == sum(self.seen.get(transfer, {}).values())


TestCounting = Counting.TestCase
