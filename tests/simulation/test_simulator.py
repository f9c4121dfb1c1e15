"""Whole pools on virtual time: every law holds for every seed, and the simulator sees a law that is broken."""

from dataclasses import replace
from typing import get_args

import pytest
from mutants import MUTANTS, Mutant, applied, search
from vllm.v1.engine import PauseMode

from vllm_pd_connector.testing.simulation.run import Run
from vllm_pd_connector.testing.simulation.scenario import (
    FAULT_KINDS,
    NOISE_KINDS,
    UNEQUAL,
    Noise,
    Scenario,
    Shape,
    draw,
)
from vllm_pd_connector.testing.simulation.shrink import shrink

NUM_REQUESTS = 60
SEEDS_PER_TEST = 4


@pytest.mark.parametrize("first_seed", range(0, 32, SEEDS_PER_TEST))
def test_every_law_holds(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        outcome = Run(draw(seed, NUM_REQUESTS)).run()
        assert outcome.violation is None, (
            f"{outcome.violation}: vllm-pd simulate --seeds 1 --requests {NUM_REQUESTS} --first-seed {seed}"
        )
        assert sum(outcome.ends.values()) == NUM_REQUESTS


def test_a_calm_run_loads_what_it_dispatches() -> None:
    scenario = replace(draw(3, NUM_REQUESTS), noise=Noise(), faults=())
    patient = replace(scenario, requests=tuple(replace(r, leaves_after_s=None, params=None) for r in scenario.requests))
    outcome = Run(patient).run()
    assert outcome.violation is None
    assert outcome.ends == {"answered": NUM_REQUESTS}
    assert outcome.counters["released"] == outcome.counters["dispatched"] > NUM_REQUESTS // 3


@pytest.mark.parametrize("shape", UNEQUAL, ids=str)
def test_between_servers_of_other_shapes_every_law_holds_and_pages_arrive(shape: Shape) -> None:
    troubled = draw(3, NUM_REQUESTS)  # a prefiller is told to end, and a decoder is cut off
    calm = replace(troubled, noise=Noise(), faults=())
    for scenario, at_least in ((calm, NUM_REQUESTS // 4), (troubled, 1)):
        outcome = Run(replace(scenario, shape=shape)).run()
        assert outcome.violation is None
        assert outcome.counters["released"] >= at_least


def test_everything_that_can_happen_happens() -> None:
    """The seeds of this test together reach every kind of end, fault and counter that matters."""
    counters: dict[str, int] = {}
    kinds: set[str] = set()
    shapes: set[Shape] = set()
    for seed in range(40):
        scenario = draw(seed, 40)
        outcome = Run(scenario).run()
        kinds |= {fault.kind for fault in scenario.faults} | set(outcome.ends)
        kinds |= {kind for kind in NOISE_KINDS if getattr(scenario.noise, kind)}
        for name, number in outcome.counters.items():
            counters[name] = counters.get(name, 0) + number
        kinds |= {fault.mode for fault in scenario.faults if fault.kind == "pause_engine"}
        shapes.add(scenario.shape)
    assert {*FAULT_KINDS, *NOISE_KINDS, *get_args(PauseMode)} <= kinds
    assert {"answered", "error", "left", "connection lost", "aborted"} <= kinds
    assert len(shapes) > len(UNEQUAL) // 2
    wanted = {
        "released",
        "failed",
        "aborted",
        "write_failures",
        "transfers_cancelled",
        "tokens_kept",
        "fences_lifted",
        "fences_expired",
        "ended_in_good_order",
    }
    assert wanted | {"notes_late", "notes_duplicate", "pages_verified"} <= {k for k, v in counters.items() if v}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"law {mutant.law}, {mutant.name}")
def test_a_broken_law_is_found(mutant: Mutant) -> None:
    assert search(mutant, max_seeds=400, num_requests=100) is not None


def test_a_failing_scenario_is_made_small() -> None:
    broken = next(m for m in MUTANTS if m.name == "giving up asks no fence")
    found = search(broken, max_seeds=20, num_requests=NUM_REQUESTS)
    assert found is not None
    scenario = draw(found[0] - 1, NUM_REQUESTS)

    def fails(candidate: Scenario) -> bool:
        with applied(broken):
            return Run(candidate).run().violation is not None

    assert fails(scenario)
    small = shrink(scenario, fails, max_tries=60)
    assert fails(small)
    assert small.size < scenario.size / 4


def test_a_seed_is_the_same_run_each_time() -> None:
    first, second = (Run(draw(7, NUM_REQUESTS), keep_log=True).run() for _ in range(2))
    assert first.log == second.log
    assert first.num_events == second.num_events
