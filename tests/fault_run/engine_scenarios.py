"""What operators do to an engine, and what a machine does to it, while transfers run."""

from __future__ import annotations

import random
import time
import urllib.error
import urllib.request
from contextlib import suppress

from server_tier.ask import until
from server_tier.probe import Since, vllm_metric

from fault_run.cast import LIMIT_S, Cast
from fault_run.checks import Outcome, check
from fault_run.clients import LONG, SMALL, Crowd, Load, Want
from vllm_pd_connector.testing.servers import Server

PREEMPTIONS = "vllm:num_preemptions_total"
NUM_RESETS = 6
GROWN_TOKENS = 400
HOUR_S = 3600


def preempt(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """Answers grow until the pages of either side are too few: both preempt, nobody gets a wrong answer."""
    outcome = Outcome("tiny KV space on both sides: preemption")
    servers = [cast.decoder, *cast.prefillers]
    before = [vllm_metric(server, PREEMPTIONS) for server in servers]
    since = Since(cast.prefillers[0])
    limit_s = LIMIT_S * 3
    # vLLM admits a prompt only where all of it fits: answers have to grow, on the prefiller those of its own clients.
    crowds = [Crowd(server.url, SMALL[:30], want, limit_s, max_tokens=GROWN_TOKENS) for server in servers]
    crowds.append(Crowd(cast.decoder.url, [*LONG, *SMALL[30:]], want, limit_s))
    for crowd in crowds:
        outcome.count(crowd.join(), limit_s)
    after = [vllm_metric(server, PREEMPTIONS) for server in servers]
    preemptions = {s.name: int(b - a) for s, a, b in zip(servers, before, after, strict=True)}
    outcome.complaints += [f"{name} preempted nothing" for name, number in preemptions.items() if not number]
    names = ("preemption_waits", "preemption_wait_us")
    outcome.more = {"preemptions": preemptions, **dict(zip(names, since(*names), strict=True))}
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def reset_cache(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """The prefix cache is emptied, running requests included, again and again on both sides."""
    outcome = Outcome(f"{NUM_RESETS} x reset_prefix_cache?reset_running_requests=true on both sides under load")
    load = Load(cast.decoder.url, want, LIMIT_S)
    crowd = Crowd(cast.decoder.url, LONG, want, LIMIT_S)
    statuses: list[int] = []
    for _ in range(NUM_RESETS):
        time.sleep(chance.uniform(0.2, 1.0))
        for server in (cast.decoder, *cast.prefillers):
            statuses.append(_post(server, "/reset_prefix_cache?reset_running_requests=true"))
    outcome.count(crowd.join(), LIMIT_S)
    outcome.count(load.stop(), LIMIT_S)
    outcome.more["statuses"] = {status: statuses.count(status) for status in set(statuses)}
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def pause(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """The engines are paused (`/sleep?level=0&mode=keep`) for a few seconds each, with transfers under way."""
    outcome = Outcome("each engine paused for 3 s in mid-transfer (/sleep level 0, mode keep)")
    for server in (cast.prefillers[0], cast.decoder):
        before = cast.num_writes()
        crowd = Crowd(cast.decoder.url, LONG, want, LIMIT_S)
        until(lambda seen=before: cast.num_writes() > seen + 3, 60, "writes")
        outcome.more[server.name] = [_post(server, "/sleep?level=0&mode=keep")]
        time.sleep(3)
        outcome.more[server.name].append(_post(server, "/wake_up"))
        outcome.count(crowd.join(), LIMIT_S)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def sleep(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """A sleep that frees the cache (`level=1`) is asked of each engine under load: whatever vLLM does, it goes on."""
    outcome = Outcome("/sleep?level=1 asked of each engine under load, then /wake_up")
    load = Load(cast.decoder.url, want, LIMIT_S)
    for server in (cast.prefillers[0], cast.decoder):
        time.sleep(1)
        outcome.more[server.name] = [_post(server, "/sleep?level=1"), _post(server, "/wake_up")]
    outcome.count(load.stop(), LIMIT_S, may_fail=True)  # mode abort is vLLM's default
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def fill_disk(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """The disk with the servers' logs and timelines is full while requests run."""
    outcome = Outcome("disk full for logs and timelines")
    filler = cast.folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))
    try:
        load = Load(cast.decoder.url, want, LIMIT_S)
        outcome.count(Crowd(cast.decoder.url, LONG, want, LIMIT_S).join(), LIMIT_S)
        outcome.count(load.stop(), LIMIT_S)
        check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    finally:
        filler.unlink()
    return outcome


def jump_clock(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """The wall clock of every process jumps an hour ahead and two back in mid-transfer."""
    outcome = Outcome("wall clocks jump +1 h and -2 h in mid-transfer; monotonic clocks 100,000 s apart")
    load = Load(cast.decoder.url, want, LIMIT_S)
    crowd = Crowd(cast.decoder.url, LONG, want, LIMIT_S)
    for shift in (HOUR_S, -HOUR_S, 0):
        time.sleep(1.5)
        cast.shift_clock(shift)
    outcome.count(crowd.join(), LIMIT_S)
    outcome.count(load.stop(), LIMIT_S)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def head_of_line(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """Long prompts queue for pages; how long do short ones behind them wait, and how long with an ordinary server?"""
    outcome = Outcome("short prompts behind long ones that wait for pages")
    since = Since(cast.decoder)
    outcome.more["short_waits_s"] = _wait_behind(cast.decoder.url, want, outcome)
    names = ("dispatched", "waited", "prefilled_locally")
    outcome.more |= dict(zip(names, since(*names), strict=True))
    with cast.ordinary_server() as server:
        outcome.more["ordinary_server_s"] = _wait_behind(server.url, want, outcome)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def _wait_behind(url: str, want: Want, outcome: Outcome) -> dict[str, float]:
    """Waits of short prompts, one after another, while long ones queue for pages; and until the last long one."""
    began = time.monotonic()
    crowd = Crowd(url, [*LONG, *LONG], want, LIMIT_S * 2)
    time.sleep(0.5)
    waits: list[float] = []
    for name in SMALL[:15]:
        one = Crowd(url, [name], want, LIMIT_S).join()
        outcome.count(one, LIMIT_S)
        waits.append(one.longest_s)
    outcome.count(crowd.join(), LIMIT_S * 2)
    waits.sort()
    return {
        "median": round(waits[len(waits) // 2], 2),
        "worst": round(waits[-1], 2),
        "long_ones_done_after": round(time.monotonic() - began, 1),
    }


def _post(server: Server, path: str) -> int:
    """HTTP status of a developer's endpoint; 0 without an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, method="POST"), timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0
