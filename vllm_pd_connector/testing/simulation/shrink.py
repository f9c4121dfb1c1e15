"""A failing scenario made small: fewer requests, faults, kinds of noise and servers, as long as the same law breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from vllm_pd_connector.testing.simulation.scenario import NOISE_KINDS, PLAIN, ClientRequest, Fault, Scenario

MAX_TRIES = 400


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], max_tries: int = MAX_TRIES) -> Scenario:
    """The smallest scenario found that still fails.

    Args:
        scenario: fails.
        fails: whether a candidate fails in the same way.
        max_tries: runs to spend.
    """
    tries = 0
    is_smaller = True
    while is_smaller and tries < max_tries:
        is_smaller = False
        for candidate in _smaller(scenario):
            tries += 1
            if fails(candidate):
                scenario, is_smaller = candidate, True
                break
            if tries >= max_tries:
                break
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Candidates, the boldest first."""
    for requests in _without_parts(scenario.requests):
        yield replace(scenario, requests=requests)
    for faults in _without_parts(scenario.faults):
        yield replace(scenario, faults=faults)
    for kind in NOISE_KINDS:
        if getattr(scenario.noise, kind):
            yield replace(scenario, noise=replace(scenario.noise, **{kind: 0.0}))  # type: ignore[arg-type]
    if scenario.shape != PLAIN:
        yield replace(scenario, shape=PLAIN)
    if scenario.num_prefillers > 1:
        last = f"p{scenario.num_prefillers - 1}"
        faults = tuple(f for f in scenario.faults if last not in (f.target, f.other))
        yield replace(scenario, num_prefillers=scenario.num_prefillers - 1, faults=faults)
    if scenario.num_decoders > 1:
        last = f"d{scenario.num_decoders - 1}"
        yield replace(
            scenario,
            num_decoders=scenario.num_decoders - 1,
            faults=tuple(f for f in scenario.faults if f.target != last),
            requests=tuple(r for r in scenario.requests if r.decoder < scenario.num_decoders - 1),
        )


def _without_parts(items: tuple[ClientRequest | Fault, ...]) -> Iterator[tuple[ClientRequest | Fault, ...]]:
    """The items without one half, one quarter ... one item (delta debugging)."""
    size = -(-len(items) // 2)
    while size:
        for start in range(0, len(items), size):
            yield items[:start] + items[start + size :]
        size = size // 2 if size > 1 else 0
