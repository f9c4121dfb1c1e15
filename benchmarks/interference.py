"""Gaps between the tokens of a running answer while long prompts arrive one after another."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.client import random_prompt, stream
from benchmarks.machine import MAX_FOREIGN_CORES, ForeignCpu, load_average, wait_calm
from benchmarks.records import RecordFile

ANSWER_PROMPT_TOKENS = 200
LONG_PROMPT_TOKENS = 6000
LEAD_S = 0.5
MAX_EXTRA_ANSWERS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Attributes:
    records: where the gaps go.
    arm: name of what is measured.
    model: served name.
    answer_url: server that gives the running answer.
    prompt_urls: servers that take the long prompts, in turn.
    leaders: process ids of the servers, each the leader of its session.
    answer_tokens: length of the running answer.
    """

    records: RecordFile
    arm: str
    model: str
    answer_url: str
    prompt_urls: Sequence[str]
    leaders: Sequence[int]
    answer_tokens: int

    def measure(self, reps: int) -> None:
        """One quiet answer, then `reps` undisturbed ones with long prompts beside them."""
        turns = itertools.count()
        self._answer(-1, turns, is_quiet=True)
        extra, rep = MAX_EXTRA_ANSWERS, 0
        while rep < reps + MAX_EXTRA_ANSWERS - extra:
            is_disturbed = self._answer(rep, turns)
            extra -= 1 if is_disturbed and extra else 0
            rep += 1

    def _answer(self, rep: int, turns: Iterator[int], *, is_quiet: bool = False) -> bool:
        """One running answer; whether others disturbed it."""
        wait_calm(self.leaders)
        load, foreign = load_average(), ForeignCpu(self.leaders)
        times: list[float] = []
        with ThreadPoolExecutor(max_workers=1) as pool:
            prompt = random_prompt(ANSWER_PROMPT_TOKENS, self.arm, "answer", rep)
            answer = pool.submit(stream, self.answer_url, self.model, prompt, self.answer_tokens, into=times)
            while len(times) < 2 and not answer.done():
                time.sleep(0.005)
            time.sleep(LEAD_S)
            begun, waits, num_finished = time.monotonic(), [], 0
            while not (is_quiet or answer.done()):
                waits.append(self._long_prompt(rep, next(turns)))
                num_finished += not answer.done()
            answer.result()
        cores = foreign.cores()
        gaps = [1000 * (b - a) for a, b in pairwise(times[1:]) if b > begun]
        self.records.add(
            "quiet" if is_quiet else "gaps",
            arm=self.arm,
            rep=rep,
            gaps_ms=[round(gap, 1) for gap in gaps],
            prompt_first_token_s=waits,
            prompts_during_answer=num_finished,
            load=round(load, 2),
            foreign_cores=round(cores, 3),
            disturbed=cores > MAX_FOREIGN_CORES,
        )
        print(
            f"  {self.arm}: longest gap {max(gaps):.1f} ms, {len(waits)} prompts, others used {cores:.2f} cores",
            flush=True,
        )
        return cores > MAX_FOREIGN_CORES

    def _long_prompt(self, rep: int, turn: int) -> float:
        """Seconds to its first token."""
        url = self.prompt_urls[turn % len(self.prompt_urls)]
        sent = stream(url, self.model, random_prompt(LONG_PROMPT_TOKENS, self.arm, "long", rep, turn), 2)
        return round(sent[1] - sent[0], 4)
