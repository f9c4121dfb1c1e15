"""The faults. Each takes a cast whose servers are well, does its worst, and leaves them well."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from server_tier.ask import until
from server_tier.probe import Since

from fault_run.cast import DEADLINE_S, LIMIT_S, Cast
from fault_run.checks import Outcome, check
from fault_run.clients import LONG, SMALL, Crowd, Load, Tally, Want, leave
from vllm_pd_connector.testing.machine import HOST, free_ports
from vllm_pd_connector.testing.servers import Server

Scenario = Callable[[Cast, Want, random.Random], Outcome]
ROOT = Path(__file__).parent.parent.parent
NUM_CANCELLED = 200
PROXY_START_S = 30.0


def kill_prefiller(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """SIGKILL in mid-prompt, at a random layer of a random chunk; it is put back in the background."""
    cast.wait_usable(1, deadline_s=300)
    since = Since(cast.decoder)
    before = {p.name: len(cast.moments(p, "write_posted")) for p in cast.prefillers}
    crowd = Crowd(cast.decoder.url, LONG, want, LIMIT_S)
    num_writes = chance.randrange(1, 30)

    def alive() -> list[Server]:
        return [p for p in cast.prefillers if p.process.poll() is None]

    def busy() -> list[Server]:
        # One that was put back may be greeted, and work, before the cast knows it.
        return [p for p in alive() if len(cast.moments(p, "write_posted")) - before.get(p.name, 0) >= num_writes]

    until(lambda: bool(busy()), 60, f"{num_writes} writes were posted")
    victim = busy()[0]
    last = cast.moments(victim, "write_posted")[-1]
    victim.kill()
    tally = crowd.join()
    outcome = Outcome(f"kill -9 of a prefiller after {num_writes} writes, in layer {last['layers'][-1]}")
    outcome.count(tally, LIMIT_S)
    check(outcome, cast.decoder, [p for p in alive() if p.is_ready()], want, LIMIT_S)
    names = ("dispatched", "failed", "retried", "released", "fences_lifted", "fences_expired")
    outcome.more = dict(zip(names, since(*names), strict=True))
    cast.put_back(victim, wait=False)
    return outcome


def kill_decoder(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """SIGKILL while prompts are written into it; its clients get errors, its prefillers get free; it is put back."""
    outcome = Outcome("kill -9 of the decoder in mid-prompt, restarted on the same address")
    before = cast.num_writes()
    crowd = Crowd(cast.decoder.url, LONG, want, LIMIT_S)
    until(lambda: cast.num_writes() > before + 5, 60, "writes")
    cast.decoder.kill()
    outcome.count(crowd.join(), LIMIT_S, may_fail=True)
    cast.put_back(cast.decoder)
    cast.wait_usable(len(cast.prefillers))
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def _stand_still(cast: Cast, want: Want, server: Server, what: str) -> Outcome:
    """SIGSTOP of a server for longer than the lease, in mid-transfer, then SIGCONT."""
    outcome = Outcome(f"SIGSTOP of {what} for {DEADLINE_S + 5:g} s, then SIGCONT")
    before = cast.num_writes()
    limit_s = LIMIT_S + DEADLINE_S + 5
    crowd = Crowd(cast.decoder.url, LONG, want, limit_s)
    until(lambda: cast.num_writes() > before + 3, 60, "writes")
    os.killpg(server.process.pid, signal.SIGSTOP)
    try:
        time.sleep(DEADLINE_S + 5)
    finally:
        os.killpg(server.process.pid, signal.SIGCONT)
    outcome.count(crowd.join(), limit_s)
    cast.wait_usable(len(cast.prefillers), deadline_s=120)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def stop_prefiller(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    return _stand_still(cast, want, cast.prefillers[0], "a prefiller")


def stop_decoder(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    return _stand_still(cast, want, cast.decoder, "the decoder")


def restart_prefiller(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """Killed and put back on the same port while small prompts keep coming."""
    outcome = Outcome("restart of a prefiller on the same address under load")
    load = Load(cast.decoder.url, want, LIMIT_S)
    time.sleep(2)  # under way
    victim = cast.prefillers[0]
    victim.kill()
    cast.put_back(victim)
    cast.wait_usable(len(cast.prefillers), deadline_s=120)
    time.sleep(3)  # the new one works for some of them
    outcome.count(load.stop(), LIMIT_S)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def restart_decoder(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """The same with the decoder: clients get errors while nobody listens."""
    outcome = Outcome("restart of the decoder on the same address under load")
    load = Load(cast.decoder.url, want, LIMIT_S)
    time.sleep(2)
    cast.decoder.kill()
    cast.put_back(cast.decoder)
    cast.wait_usable(len(cast.prefillers), deadline_s=120)
    time.sleep(3)
    outcome.count(load.stop(), LIMIT_S, may_fail=True)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def terminate_prefiller(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """SIGTERM with --shutdown-timeout: what it has begun is finished, what comes then goes elsewhere."""
    outcome = Outcome("SIGTERM of a prefiller under load (--shutdown-timeout 30)")
    since = Since(cast.decoder)
    load = Load(cast.decoder.url, want, LIMIT_S)
    crowd = Crowd(cast.decoder.url, LONG, want, LIMIT_S)
    time.sleep(2)
    victim = cast.prefillers[0]
    victim.process.terminate()
    outcome.count(crowd.join(), LIMIT_S)
    outcome.count(load.stop(), LIMIT_S)
    began = time.monotonic()
    victim.process.wait(60)
    outcome.more["ended_after_s"] = round(time.monotonic() - began, 1)
    names = ("failed", "retried", "released")
    outcome.more |= dict(zip(names, since(*names), strict=True))
    victim.kill()
    check(outcome, cast.decoder, cast.prefillers[1:], want, LIMIT_S)
    cast.put_back(victim)
    cast.wait_usable(len(cast.prefillers), deadline_s=120)
    return outcome


def terminate_decoder(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """SIGTERM with --shutdown-timeout: held requests are answered, its prefillers keep nothing."""
    outcome = Outcome("SIGTERM of the decoder with held requests (--shutdown-timeout 30)")
    crowd = Crowd(cast.decoder.url, LONG, want, LIMIT_S)
    before = cast.num_writes()
    until(lambda: cast.num_writes() > before + 3, 60, "writes")
    victim = cast.decoder
    victim.process.terminate()
    outcome.count(crowd.join(), LIMIT_S, may_fail=True)
    victim.process.wait(60)
    victim.kill()
    cast.put_back(victim)
    cast.wait_usable(len(cast.prefillers), deadline_s=120)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def cancel(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """Clients that leave at random moments: queued, held, written to, decoding."""
    outcome = Outcome(f"{NUM_CANCELLED} clients that leave at random moments")
    since = Since(cast.decoder)
    url = cast.decoder.url
    with ThreadPoolExecutor(max_workers=12) as pool:
        futures = [
            pool.submit(
                leave,
                url,
                chance.choice(LONG if chance.random() < 0.3 else SMALL),
                chance.expovariate(2.0),
                stream=chance.random() < 0.5,
            )
            for _ in range(NUM_CANCELLED)
        ]
        stayed = sum(future.result() for future in futures)
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    names = ("dispatched", "released", "aborted", "failed", "fences_lifted", "fences_expired")
    outcome.more = {"left": NUM_CANCELLED - stayed, "answered_before": stayed}
    outcome.more |= dict(zip(names, since(*names), strict=True))
    return outcome


def kill_proxy(cast: Cast, want: Want, chance: random.Random) -> Outcome:
    """The proxy in front of the decoder dies with requests on their way: the decoder lets go of them."""
    outcome = Outcome("kill -9 of the proxy with requests on their way")
    since = Since(cast.decoder)
    (port,) = free_ports(1)
    command = [sys.executable, str(ROOT / "examples" / "disaggregated_proxy.py"), "--decoders", cast.decoder.url]
    with (cast.folder / "proxy.log").open("wb") as log:
        proxy = subprocess.Popen([*command, "--port", str(port)], stdout=log, stderr=subprocess.STDOUT)
    try:
        url = f"http://{HOST}:{port}"
        right = Tally()
        until(lambda: not _refuses(url), PROXY_START_S, "the proxy listens")
        right.ask(url, SMALL[0], want[SMALL[0]], LIMIT_S)
        outcome.count(right, LIMIT_S)
        crowd = Crowd(url, LONG, want, LIMIT_S)
        since.until("dispatched", 2, deadline_s=60)
        proxy.kill()
        outcome.count(crowd.join(), LIMIT_S, may_fail=True)
    finally:
        proxy.kill()
        proxy.wait()
    check(outcome, cast.decoder, cast.prefillers, want, LIMIT_S)
    return outcome


def _refuses(url: str) -> bool:
    import urllib.request

    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2):
            return False
    except OSError:
        return True
