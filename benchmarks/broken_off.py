"""`python -m benchmarks.broken_off`: how long a client waits whose prefiller is killed in the last chunk of its prompt.

With the decoder's prefix cache what had arrived is kept; without one nothing is. Tokens are compared with those of an
ordinary server. Prints one JSON line for each request, then medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.client import random_prompt
from vllm_pd_connector.testing.models import random_llama
from vllm_pd_connector.testing.servers import GREETED, Server, ServerSpec, start_all

START_S = 300.0
ANSWER_S = 150.0
ANSWER_TOKENS = 16
POLL_S = 0.002
ARGS = ("--dtype", "float32", "--max-num-batched-tokens", "1024")
ARMS: dict[str, Sequence[str]] = {"kept": (), "not kept": ("--no-enable-prefix-caching",)}
COUNTERS = ("released", "failed", "tokens_kept", "pages_verified", "pages_mismatched")
SHORT = {"max_attempts": 1, "retry_s": 0.5, "quarantine_s": 3}

Answer = tuple[list[int], float]
"""Token ids, and the seconds they took."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.broken_off", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--verify", action="store_true", help="compare a digest of every page; takes time")
    args = parser.parse_args()
    prompts = [random_prompt(args.tokens, "broken off", number) for number in range(args.rounds + 1)]
    with start_all([ServerSpec(random_llama(), "plain", cores=[1], args=ARGS)], START_S) as (plain,):
        ask(plain, random_prompt(args.tokens, "warm"))
        ordinary = [ask(plain, prompt) for prompt in prompts]
    waits = {"ordinary server": [wait_s for _, wait_s in ordinary[1:]]}
    for arm in ARMS:
        waits[arm] = list(run(arm, prompts, ordinary, verify=args.verify))
    for arm, found in waits.items():
        print(f"{arm}: median {statistics.median(found):.2f} s of {sorted(round(w, 2) for w in found)}")


def run(arm: str, prompts: Sequence[list[int]], ordinary: Sequence[Answer], *, verify: bool) -> Iterator[float]:
    """Each client's wait; the first prompt is answered undisturbed, every other one loses its prefiller."""
    folder = Path(tempfile.mkdtemp(prefix="broken-off-"))
    extra = {"verify_pages": verify, "timeline_dir": str(folder)}
    first = ServerSpec(random_llama(), "prefiller", cores=[0], args=ARGS, extra=extra)
    second = ServerSpec(random_llama(), "decoder", cores=[1], args=(*ARGS, *ARMS[arm]), extra={**extra, **SHORT})
    with ExitStack() as stack:
        prefiller, decoder = stack.enter_context(start_all([first, second], START_S))
        ask(decoder, random_prompt(2000, "warm", arm))
        for number, prompt in enumerate(prompts):
            before = decoder.metrics()
            num_tokens = len(prompt) - 1
            args = (prefiller, folder, num_tokens, last_chunks(folder, num_tokens))
            killer = threading.Thread(target=kill_in_last_chunk, args=args)
            if number:
                killer.start()
            ids, wait_s = ask(decoder, prompt)
            if number:
                killer.join()
                yield wait_s
            ask(decoder, [11, 12])  # a step publishes what has been counted
            after = decoder.metrics()
            moved = {name: after.get(name, 0) - before.get(name, 0) for name in COUNTERS}
            is_equal = ids == ordinary[number][0]
            print(
                json.dumps({"arm": arm, "killed": number > 0, "wait_s": wait_s, "equal": is_equal, **moved}), flush=True
            )
            if number and number + 1 < len(prompts):
                greetings = decoder.count_log(GREETED)
                again = replace(first, port=prefiller.port)
                (prefiller,) = stack.enter_context(start_all([again], START_S))
                while decoder.count_log(GREETED) == greetings:
                    time.sleep(0.1)
                ask(prefiller, random_prompt(2000, "warm", arm, number))


def kill_in_last_chunk(prefiller: Server, folder: Path, num_tokens: int, ended: set[str]) -> None:
    """SIGKILL as soon as the step has been scheduled that computes a prompt's last tokens."""
    until = time.monotonic() + ANSWER_S
    while not last_chunks(folder, num_tokens) - ended:
        if time.monotonic() > until:
            raise TimeoutError(f"no prompt of {num_tokens} tokens came to its last chunk")
        time.sleep(POLL_S)
    prefiller.kill()


def last_chunks(folder: Path, num_tokens: int) -> set[str]:
    """Transfers of which a prefiller has scheduled all tokens."""
    lines = "".join(path.read_text() for path in folder.glob("scheduler-producer-*.jsonl")).splitlines()
    marks = [json.loads(line) for line in lines if line.endswith("}")]
    return {m["transfer"] for m in marks if m["moment"] == "chunk_scheduled" and m["computed"] >= num_tokens}


def ask(server: Server, prompt: list[int]) -> Answer:
    body = {
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    started = time.monotonic()
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        answer = json.load(response)
    return answer["choices"][0]["token_ids"], time.monotonic() - started


if __name__ == "__main__":
    main()
