"""Gaps between the tokens of a running answer while long prompts arrive one after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise

from benchmarks.client import random_prompt, stream
from benchmarks.machine import MAX_FOREIGN_CORES, ForeignCpu, load_average, wait_calm
from benchmarks.records import RecordFile

ANSWER_PROMPT_TOKENS = 200
LONG_PROMPT_TOKENS = 6000
LEAD_S = 0.5
MAX_EXTRA_ANSWERS = 3


def measure(
    records: RecordFile,
    arm: str,
    model: str,
    answer_url: str,
    prompt_urls: Sequence[str],
    leaders: Sequence[int],
    *,
    reps: int,
    answer_tokens: int,
) -> None:
    """One quiet answer, then `reps` undisturbed answers with long prompts going to `prompt_urls` in turn."""
    _answer(records, arm, model, answer_url, (), leaders, rep=-1, answer_tokens=answer_tokens, turn=0)
    extra, rep, turn = MAX_EXTRA_ANSWERS, 0, 0
    while rep < reps + MAX_EXTRA_ANSWERS - extra:
        disturbed, turn = _answer(
            records, arm, model, answer_url, prompt_urls, leaders, rep=rep, answer_tokens=answer_tokens, turn=turn
        )
        extra -= 1 if disturbed and extra else 0
        rep += 1


def _answer(
    records: RecordFile,
    arm: str,
    model: str,
    answer_url: str,
    prompt_urls: Sequence[str],
    leaders: Sequence[int],
    *,
    rep: int,
    answer_tokens: int,
    turn: int,
) -> tuple[bool, int]:
    """One running answer. (disturbed, turn of the next prompt)."""
    wait_calm(leaders)
    load, foreign = load_average(), ForeignCpu(leaders)
    times: list[float] = []
    prompt = random_prompt(ANSWER_PROMPT_TOKENS, arm, "answer", rep)
    errors: list[Exception] = []

    def run() -> None:
        try:
            stream(answer_url, model, prompt, answer_tokens, into=times)
        except (OSError, RuntimeError) as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while len(times) < 2 and thread.is_alive():
        time.sleep(0.005)
    time.sleep(LEAD_S)
    begun, waits, num_finished = time.monotonic(), [], 0
    while thread.is_alive() and prompt_urls:
        url = prompt_urls[turn % len(prompt_urls)]
        sent = stream(url, model, random_prompt(LONG_PROMPT_TOKENS, arm, "long", rep, turn), 2)
        waits.append(round(sent[1] - sent[0], 4))
        num_finished += thread.is_alive()
        turn += 1
    thread.join()
    if errors:
        raise errors[0]
    cores = foreign.cores()
    gaps = [1000 * (b - a) for a, b in pairwise(times[1:]) if b > begun]
    records.add(
        "gaps" if prompt_urls else "quiet",
        arm=arm,
        rep=rep,
        gaps_ms=[round(gap, 1) for gap in gaps],
        prompt_first_token_s=waits,
        prompts_during_answer=num_finished,
        load=round(load, 2),
        foreign_cores=round(cores, 3),
        disturbed=cores > MAX_FOREIGN_CORES,
    )
    print(f"  {arm}: longest gap {max(gaps):.1f} ms, {len(waits)} prompts, others used {cores:.2f} cores", flush=True)
    return cores > MAX_FOREIGN_CORES, turn
