"""Any interleaving of arrivals, failures, aborts, preemptions, late answers and clock jumps ends every request once.

Every page comes back. The scheduler is real and so is our half; what workers and prefillers do is decided by a seed.
"""

import random
import sys
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))

from scheduler_rig import BLOCK, Rig, make_rig
from vllm.v1.request import Request

from vllm_pd_connector.lifecycle.decode_request import DecodeEvent

STEPS = 120
BLOCKS = 48
POOL = ["http://prefiller:8100", "http://other:8100"]


class World:
    """The prefillers and workers of one seed.

    Attributes:
        open: request id of each held transfer that no worker has reported yet.
    """

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.requests: list[Request] = []
        self.open: dict[str, str] = {}
        self.fences_answered = 0

    def add(self) -> None:
        tokens = self.random.choice([3, BLOCK, BLOCK * 2 + 1, BLOCK * 5, BLOCK * 9 + 7])
        params = self.random.choice([None, None, None, {"prefiller": 5}, {"prefiller": "http://prefiller:8100"}])
        self.requests.append(self.rig.add(tokens, seed=self.random.randrange(4), params=params))

    def disturb(self) -> None:
        """One thing that may happen between two steps."""
        alive = [r for r in self.requests if not r.is_finished()]
        match self.random.randrange(7):
            case 0 | 1:
                self.add()
            case 2 if alive:
                self.rig.abort(self.random.choice(alive))
            case 3 if self.rig.dispatcher.dispatched:
                order = self.random.choice(self.rig.dispatcher.dispatched)
                event = self.random.choice([DecodeEvent.ANSWERED, DecodeEvent.ANSWERED, DecodeEvent.FAILED])
                self.rig.dispatcher.report(order.reservation.transfer_id, event, "scripted")
            case 4:
                self.rig.clock.advance(self.random.choice([0.1, 5.0, 11.0, 125.0]))
            case 5 if self.random.random() < 0.2:
                # With a request held vLLM preempts everything and then says that it could not empty the cache.
                with suppress(RuntimeError):
                    self.rig.scheduler.reset_prefix_cache(reset_running_requests=True)

    def answer_fences(self, *, all_of_them: bool = False) -> None:
        fenced = self.rig.dispatcher.fenced
        while self.fences_answered < len(fenced) and (all_of_them or self.random.random() < 0.3):
            quiet = all_of_them or self.random.random() < 0.7
            self.rig.dispatcher.answer_fence(
                fenced[self.fences_answered], is_quiet=quiet, is_dead=self.random.random() < 0.5
            )
            self.fences_answered += 1

    def step(self, *, finish: bool = False) -> None:
        """One engine step; workers report some transfers as arrived and obey every hand-back."""
        step = self.rig.schedule()
        for expect in step.orders.expects:
            self.open[expect.transfer_id] = expect.request_id
        received: set[str] = set()
        failed: set[str] = set()
        for order in step.orders.hand_backs:
            if order.transfer_id in self.open:
                del self.open[order.transfer_id]
                received.add(order.request_id)
                failed |= {order.request_id} if order.failed else set()
        for transfer in [t for t in self.open if finish or self.random.random() < 0.2]:
            received.add(self.open.pop(transfer))
        self.check_owners()
        self.rig.complete(step, received=received or None, failed=failed)

    def check_owners(self) -> None:
        """Law 1: a page whose writers may still write belongs to no request but the one it was reserved for."""
        half = self.rig.half._decode
        assert half is not None
        manager = self.rig.scheduler.kv_cache_manager
        for fenced in half._fenced.values():
            for block in fenced.blocks:
                assert manager.block_pool.blocks[block].ref_cnt > 0, f"block {block} is free while fenced"
        assert half.gauges()["held_pages"] <= (BLOCKS - 1) // 2, "more is held than max_held_share allows"


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_once_and_every_page_comes_back(tmp_path: Path, seed: int) -> None:
    on_failure = random.Random(seed).choice(["local", "error"])
    rig = make_rig(tmp_path, num_blocks=BLOCKS, prefillers=POOL, on_failure=on_failure, unreachable_s=200.0)
    before = rig.free_blocks
    world = World(rig, seed)
    for _ in range(STEPS):
        world.disturb()
        world.answer_fences()
        world.step()
    for _ in range(400):
        if not rig.scheduler.has_requests():
            break
        world.answer_fences(all_of_them=True)
        world.step(finish=True)
        rig.clock.advance(1.0)
    assert not rig.scheduler.has_requests(), f"seed {seed}: the engine still has requests"
    assert rig.free_blocks == before, f"seed {seed}: {before - rig.free_blocks} blocks are lost"
    assert all(request.is_finished() for request in world.requests)
    ends = [o.request_id for o in rig.outputs if o.finish_reason is not None]
    assert len(ends) == len(set(ends)), "a request ended twice"
    assert len(world.requests) > 15
    half = rig.half._decode
    assert half is not None
    assert half.gauges() == {"held_requests": 0, "held_pages": 0, "fenced_pages": 0, "prefillers_usable": len(POOL)}
