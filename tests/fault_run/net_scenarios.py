"""Faults of the network between the decoder and its prefiller, which talk over TCP here."""

from __future__ import annotations

import random
import time

from server_tier.ask import until

from fault_run.cast import DEADLINE_S, LIMIT_S, Cast
from fault_run.checks import Outcome, check
from fault_run.clients import LONG, Crowd, Load, Want

CUT_S = DEADLINE_S + 15.0
"""Longer than the lease and the quarantine: the pages have new owners when the network comes back."""


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
    """Loss and delay on both ends."""
    assert cast.link is not None
    outcome = Outcome(f"{cast.link.spoil()} on both ends")
    try:
        load = Load(cast.decoder.url, want, LIMIT_S)
        outcome.count(Crowd(cast.decoder.url, LONG, want, LIMIT_S).join(), LIMIT_S)
        outcome.count(load.stop(), LIMIT_S)
    finally:
        cast.link.heal()
    cast.wait_usable(len(cast.prefillers), deadline_s=120)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome
