"""Faults of the network between the decoder and its prefiller, which talk over TCP here."""

from __future__ import annotations

import os
import random
import signal
import time

from server_tier.ask import fresh_salt, until
from server_tier.probe import Since, held, idle_cores

from fault_run.cast import DEADLINE_S, LIMIT_S, QUICK, Cast
from fault_run.checks import Outcome, check
from fault_run.clients import LONG, Crowd, Load, Want

CUT_S = DEADLINE_S + 15.0
"""Longer than the lease and the quarantine: the pages have new owners when the network comes back."""

STOP_S = 2 * DEADLINE_S + QUICK["quarantine_s"] + 5.0
"""The first lease, the second, counted from the moment the request was closed, and the quarantine."""


def cut_network(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """Nothing passes for a while, in mid-transfer; small prompts keep coming meanwhile and when it is mended."""
    outcome = Outcome(f"network cut for {CUT_S:g} s in mid-transfer, then mended, under load")
    assert cast.link is not None
    before = cast.num_writes()
    crowd = Crowd(cast.decoder.url, LONG, want, LIMIT_S)
    until(lambda: cast.num_writes() > before + 3, 60, "writes")
    cast.link.cut()
    try:
        load = Load(cast.decoder.url, want, LIMIT_S)
        time.sleep(CUT_S)
    finally:
        cast.link.mend()
    cast.wait_usable(len(cast.prefillers), deadline_s=120)
    time.sleep(10)  # what was under way when it was cut may arrive now
    outcome.count(load.stop(), LIMIT_S)
    outcome.count(crowd.join(), LIMIT_S)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def blip_network(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """The same for two seconds: everything goes on."""
    outcome = Outcome("network cut for 2 s in mid-transfer")
    assert cast.link is not None
    before = cast.num_writes()
    crowd = Crowd(cast.decoder.url, LONG, want, LIMIT_S)
    until(lambda: cast.num_writes() > before + 3, 60, "writes")
    cast.link.cut()
    time.sleep(2)
    cast.link.mend()
    outcome.count(crowd.join(), LIMIT_S)
    cast.wait_usable(len(cast.prefillers), deadline_s=120)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def bad_network(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """The link does its worst on both ways while prompts are written."""
    assert cast.link is not None
    outcome = Outcome(f"{cast.link.spoil()} on both ways")
    try:
        load = Load(cast.decoder.url, want, LIMIT_S)
        outcome.count(Crowd(cast.decoder.url, LONG, want, LIMIT_S).join(), LIMIT_S)
        outcome.count(load.stop(), LIMIT_S)
    finally:
        cast.link.heal()
    cast.wait_usable(len(cast.prefillers), deadline_s=120)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def stop_in_write(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """A prefiller is stopped while UCX still holds most of its writes, until others own the pages; then it goes on.

    The clients that ask meanwhile leave pages in the decoder's prefix cache, and ask again when the rest has landed.
    """
    assert cast.link is not None
    outcome = Outcome("SIGSTOP of a prefiller in mid-write over TCP for longer than lease and quarantine, then SIGCONT")
    since = Since(cast.decoder)
    before = cast.num_writes()
    limit_s = LIMIT_S + STOP_S
    victim, salt = cast.prefillers[0].process.pid, fresh_salt()
    began = time.monotonic()
    cast.link.slow_down()
    try:
        crowd = Crowd(cast.decoder.url, LONG, want, limit_s)
        until(lambda: cast.num_writes() > before + chance.randrange(8, 16), 60, "writes")
        os.killpg(victim, signal.SIGSTOP)
    finally:
        cast.link.speed_up()
    stopped = time.monotonic()
    try:
        time.sleep(STOP_S)
        outcome.count(crowd.join(), limit_s)
        outcome.count(Crowd(cast.decoder.url, LONG[:3], want, limit_s, salt).join(), limit_s)
        fenced = int(held(cast.decoder).get("fenced_pages", 0))
        outcome.more["cores_of_the_decoder_meanwhile"] = round(idle_cores(cast.decoder, 4.0), 3)
        received = cast.link.num_received()
    finally:
        os.killpg(victim, signal.SIGCONT)
    outcome.more |= {"after_s": round(stopped - began, 1), "stopped_s": round(time.monotonic() - stopped, 1)}
    time.sleep(10)  # what UCX still held lands now
    (num_late,) = since("notes_late")
    outcome.more |= {"fenced_when_it_went_on": fenced, "late_notes": num_late}
    outcome.more["bytes_received_then"] = cast.link.num_received() - received
    if num_late and not fenced:
        outcome.complaints.append(f"{num_late} writes landed in pages that had been given back")
    outcome.count(Crowd(cast.decoder.url, LONG[:3], want, limit_s, salt).join(), limit_s)
    cast.wait_usable(len(cast.prefillers), deadline_s=120)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome
