"""Each law broken on purpose, in one place of the real code. `python tests/simulation/mutants.py` prints the table.

A mutant replaces one function or one row of a table while it is applied.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np

from vllm_pd_connector.control import dispatcher, fence_server
from vllm_pd_connector.control.dispatcher import Dispatcher
from vllm_pd_connector.control.fence_client import FenceClient
from vllm_pd_connector.control.prefiller_client import NotTaken, PrefillerClient, ShuttingDown
from vllm_pd_connector.engine import fenced_pages, posting, prefill_side, receiver, vllm_compat, worker_half
from vllm_pd_connector.engine.decode_side import DecodeSide
from vllm_pd_connector.engine.kept_prefix import KeptPrefix
from vllm_pd_connector.engine.ledger import Ledger
from vllm_pd_connector.engine.outgoing import Outgoing
from vllm_pd_connector.engine.prefill_side import PrefillSide
from vllm_pd_connector.engine.receiver import Receiver
from vllm_pd_connector.engine.writer import Writer
from vllm_pd_connector.lifecycle.completion import Arrival, CompletionTable, _compare
from vllm_pd_connector.lifecycle.decode_request import DECODE_TABLE, DecodeCommand, DecodeEvent, DecodeState
from vllm_pd_connector.lifecycle.fence import FENCE_TABLE, FenceCommand, FenceEvent, FenceState
from vllm_pd_connector.plan import route as plan_route
from vllm_pd_connector.testing.simulation.pages import NUM_LAYERS
from vllm_pd_connector.testing.simulation.run import Run
from vllm_pd_connector.testing.simulation.scenario import (
    PLAIN,
    TIMES,
    ClientRequest,
    Fault,
    Noise,
    Scenario,
    Shape,
    Side,
    draw,
)
from vllm_pd_connector.wire.messages import Quiet

Apply = Callable[[ExitStack], None]
Scenarios = Callable[[int, int], Scenario]
"""A scenario from a seed and a number of requests."""


def sleeper(seed: int, _: int) -> Scenario:
    """A client leaves while the prefiller of its request is stopped in mid-prompt."""
    random = Random(f"sleeper {seed}")
    stopped_after_s = random.uniform(0.01, 0.1)
    leaves_after_s = stopped_after_s + random.uniform(0.0, 0.1)
    fault = Fault(kind="pause", at=1.0 + stopped_after_s, target="p0", seconds=random.uniform(7.0, 32.0))
    return _small(seed, [leaves_after_s], fault)


def reset(seed: int, _: int) -> Scenario:
    """The prefiller's cache is reset in mid-prompt."""
    at = 1.0 + Random(f"reset {seed}").uniform(0.01, 0.1)
    return _small(seed, [None, None], Fault(kind="reset_cache", at=at, target="p0"))


def broken_off(seed: int, _: int) -> Scenario:
    """The prefiller dies in mid-prompt, and messages overtake each other."""
    at = 1.0 + Random(f"broken off {seed}").uniform(0.02, 0.12)
    scenario = _small(seed, [None, None], Fault(kind="kill", at=at, target="p0", seconds=1.0))
    config = {**scenario.config, "min_write_bytes": 1}
    noise = Noise(slow=0.3, slow_s=0.1, note_lost=0.1)
    return dataclasses.replace(scenario, shape=Shape(Side(2), Side(2), 2), config=config, noise=noise)


def held_back(seed: int, _: int) -> Scenario:
    """Clients leave; their dispatches lie in the socket of a stopped prefiller, and what closes them is held back."""
    random = Random(f"held back {seed}")
    wakes_at = random.uniform(20.5, 22.0)
    scenario = _small(
        seed,
        [random.uniform(0.3, 0.6) for _ in range(4)],
        Fault(kind="pause", at=0.9, target="p0", seconds=wakes_at - 0.9),
        Fault(kind="cut", at=1.2, target="d0", other="p0", seconds=wakes_at - 1.2 - random.uniform(0.0, 0.3)),
    )
    return dataclasses.replace(scenario, config={**scenario.config, "fence_s": 6.0, "unreachable_s": 6.0})


def overtaken(seed: int, _: int) -> Scenario:
    """Clients leave while their prompts wait in the prefiller, and messages overtake each other."""
    random = Random(f"overtaken {seed}")
    scenario = _small(seed, [random.uniform(0.0, 0.2) for _ in range(8)])
    return dataclasses.replace(scenario, noise=Noise(slow=0.4, slow_s=0.3))


def restarted(seed: int, _: int) -> Scenario:
    """A prefiller dies in mid-prompt with writes on their way, and is back before its decoder asks it to stop."""
    random = Random(f"restarted {seed}")
    fault = Fault(kind="kill", at=1.0 + random.uniform(0.02, 0.1), target="p0", seconds=random.uniform(0.001, 0.1))
    return dataclasses.replace(_small(seed, [None] * 4, fault), noise=Noise(slow=0.5, slow_s=0.3))


def vanished(seed: int, _: int) -> Scenario:
    """The prefiller's machine is gone between the last page of a prompt and the answer; each step ends a prompt."""
    at = 1.0 + Random(f"vanished {seed}").uniform(0.02, 0.15)
    scenario = _small(seed, [None] * 12, Fault(kind="kill_silently", at=at, target="p0", seconds=1.0))
    requests = tuple(dataclasses.replace(request, num_tokens=9) for request in scenario.requests)
    return dataclasses.replace(scenario, requests=requests, config={**scenario.config, "min_write_bytes": 1})


def replicas(seed: int, num_requests: int) -> Scenario:
    """Two prefiller ranks that hold the same head."""
    return dataclasses.replace(draw(seed, num_requests), shape=Shape(Side(2), Side(1), 1))


def split(seed: int, num_requests: int) -> Scenario:
    """Two decoder ranks that share the heads of one prefiller rank."""
    return dataclasses.replace(draw(seed, num_requests), shape=Shape(Side(1), Side(2), 2))


def sizes(seed: int, num_requests: int) -> Scenario:
    """Decoder pages that are twice as large as the prefiller's."""
    return dataclasses.replace(draw(seed, num_requests), shape=Shape(Side(1), Side(1, 8), 1))


def leaving(seed: int, _: int) -> Scenario:
    """A prefiller aborts what it computes because it ends, and another one is there; writes fail or are slow."""
    random = Random(f"leaving {seed}")
    fault = Fault(kind="terminate", at=1.0 + random.uniform(0.01, 0.15), target="p0", seconds=1.0)
    scenario = _small(seed, [None] * 4, fault)
    return dataclasses.replace(scenario, num_prefillers=2, noise=Noise(slow=0.5, slow_s=0.3))


def draining(seed: int, _: int) -> Scenario:
    """A decoder is told to end, and clients leave before it does."""
    random = Random(f"draining {seed}")
    fault = Fault(kind="terminate", at=1.0 + random.uniform(0.01, 0.1), target="d0", seconds=1.0, grace_s=30.0)
    scenario = _small(seed, [random.uniform(0.02, 0.2) for _ in range(4)], fault)
    return dataclasses.replace(scenario, noise=Noise(slow=0.5, slow_s=0.3))


def cut_off(seed: int, _: int) -> Scenario:
    """Clients leave behind a cut with a router that refuses; what their prefiller sends meanwhile comes in later."""
    random = Random(f"cut off {seed}")
    fault = Fault(
        kind="cut", at=1.0 + random.uniform(0.0, 0.08), target="d0", other="p0", seconds=random.uniform(6.5, 12.0)
    )
    scenario = _small(seed, [random.uniform(0.02, 0.2) for _ in range(4)], fault)
    return dataclasses.replace(scenario, noise=Noise(refusing_router=True, slow=0.3, slow_s=0.3))


def _small(seed: int, leaves_after_s: list[float | None], *faults: Fault) -> Scenario:
    """One decoder, one prefiller, and long prompts that are computed in seven steps."""
    requests = [
        ClientRequest(
            name=f"r{i}",
            at=1.0,
            decoder=0,
            family=i,
            num_tokens=56,
            max_tokens=1,
            leaves_after_s=leaves,
            params=None,
        )
        for i, leaves in enumerate(leaves_after_s)
    ]
    return Scenario(
        seed=seed,
        num_decoders=1,
        num_prefillers=1,
        shape=PLAIN,
        num_blocks=256,
        chunk_tokens=8,
        config={**TIMES, "min_remote_tokens": 1},
        noise=Noise(),
        requests=tuple(requests),
        faults=faults,
    )


@dataclass(frozen=True)
class Mutant:
    """`scenarios`: where it is looked for; drawn ones show some mutants only in one of hundreds of seeds or more."""

    law: int
    name: str
    apply: Apply
    scenarios: Scenarios = draw


MUTANTS: list[Mutant] = []
RESERVE = dispatcher.Dispatcher._reserve


def mutant(law: int, name: str, scenarios: Scenarios = draw) -> Callable[[Apply], Apply]:
    def add(apply: Apply) -> Apply:
        MUTANTS.append(Mutant(law, name, apply, scenarios))
        return apply

    return add


def replace(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.enter_context(patch.object(owner, name, value))


def change_stops(stack: ExitStack, change: Callable[[list[int], int], list[int]]) -> None:
    """Other numbers than the ranks reported decide what is kept of a failed attempt."""
    real = KeptPrefix.keep

    def keep(self: KeptPrefix, request: Any, transfer_id: str, *, stops: list[int], **rest: Any) -> None:
        real(self, request, transfer_id, stops=change(stops, self._identity.geometry.block_size), **rest)

    replace(stack, KeptPrefix, "keep", keep)


@contextmanager
def applied(one: Mutant) -> Iterator[None]:
    with ExitStack() as stack:
        one.apply(stack)
        yield


# Law 1: no page is reused while a writer may still write it


@mutant(1, "a fence does not take the pages over")
def _(stack: ExitStack) -> None:
    replace(stack, vllm_compat, "pin_blocks", lambda manager, blocks: None)
    replace(stack, vllm_compat, "unpin_blocks", lambda manager, blocks: None)


@mutant(1, "giving up asks no fence")
def _(stack: ExitStack) -> None:
    for state in (DecodeState.DISPATCHED, DecodeState.SETTLING):
        row = {
            event: (target, tuple(c for c in commands if c is not DecodeCommand.FENCE))
            for event, (target, commands) in DECODE_TABLE[state].items()
        }
        stack.enter_context(patch.dict(DECODE_TABLE, {state: row}))


@mutant(1, "a sender that cannot be reached counts as quiet")
def _(stack: ExitStack) -> None:
    lifted = (FenceState.LIFTED, (FenceCommand.UNPIN,))
    row = {
        **FENCE_TABLE[FenceState.ASKING],
        FenceEvent.UNREACHABLE: lifted,
        FenceEvent.GONE: lifted,
        FenceEvent.DEADLINE: lifted,
    }
    stack.enter_context(patch.dict(FENCE_TABLE, {FenceState.ASKING: row}))


@mutant(1, "what a dead sender had on the wire is not waited out")
def _(stack: ExitStack) -> None:
    lifted = (FenceState.LIFTED, (FenceCommand.UNPIN,))
    for state in (FenceState.ASKING, FenceState.SILENT):
        stack.enter_context(patch.dict(FENCE_TABLE, {state: {**FENCE_TABLE[state], FenceEvent.GONE: lifted}}))


@mutant(1, "a silent sender is waited for without its lease", sleeper)
def _(stack: ExitStack) -> None:
    replace(stack, fenced_pages, "silence_end", lambda *, now, **_: now + TIMES["quarantine_s"])


@mutant(1, "a prefiller keeps writing after its lease", sleeper)
def _(stack: ExitStack) -> None:
    real = Writer.begin

    def begin(self: Writer, order: Any) -> None:
        real(self, order)
        self._ledger.leases.disarm(order.reservation.transfer_id)

    replace(stack, Writer, "begin", begin)


@mutant(1, "a prefiller forgets which transfers were fenced before they began", overtaken)
def _(stack: ExitStack) -> None:
    replace(stack, Ledger, "is_fenced", lambda self, transfer_id: False)


@mutant(1, "a prefiller says quiet while its writes are in flight")
def _(stack: ExitStack) -> None:
    def fence(self: Writer, transfer_id: str, when_quiet: Any) -> None:
        self._ledger.fence(transfer_id)
        if (outgoing := self._ledger.get(transfer_id)) is not None:
            self._cancel(outgoing)
        when_quiet(Quiet(transfer_id, 0))

    replace(stack, Writer, "fence", fence)


@mutant(1, "a prefiller says quiet and goes on posting")
def _(stack: ExitStack) -> None:
    replace(stack, Writer, "fence", lambda self, transfer_id, when_quiet: when_quiet(Quiet(transfer_id, 0)))


@mutant(1, "a failed write counts as one that cannot land any more")
def _(stack: ExitStack) -> None:
    replace(stack, Outgoing, "silence", property(lambda self: Quiet(self.transfer_id, self.units)))


@mutant(1, "a failed write is forgotten with its transfer")
def _(stack: ExitStack) -> None:
    replace(stack, Ledger, "was_clean", lambda self, transfer_id: True)


@mutant(1, "a prefill that its prefiller aborted counts as never begun", leaving)
def _(stack: ExitStack) -> None:
    real = PrefillerClient.complete

    async def complete(self: PrefillerClient, *args: Any) -> Any:
        try:
            return await real(self, *args)
        except ShuttingDown as error:
            raise NotTaken(str(error)) from None

    replace(stack, PrefillerClient, "complete", complete)


@mutant(11, "a restarted prefiller answers fences for the one before it", restarted)
def _(stack: ExitStack) -> None:
    real = fence_server.FenceServer._receive

    def receive(self: Any, frames: list[Any]) -> None:
        message = fence_server.decode_control(frames[-1])
        if isinstance(message, fence_server.Fence):
            self._generation = message.generation
        real(self, frames)

    replace(stack, fence_server.FenceServer, "_receive", receive)


@mutant(1, "a prefiller starts the lease of a dispatch whenever it reads it", held_back)
def _(stack: ExitStack) -> None:
    replace(
        stack, dispatcher.Dispatcher, "_reserve", staticmethod(lambda order, hello, clock: RESERVE(order, hello, None))
    )


@mutant(1, "a refused connection is taken for a death", cut_off)
def _(stack: ExitStack) -> None:
    async def refuses(*_: Any) -> bool:
        return True

    replace(stack, FenceClient, "_refuses_itself", refuses)


# Law 2: no page is freed or overwritten under a posted write


@mutant(2, "a finished prefill is reported before its writes are over")
def _(stack: ExitStack) -> None:
    real = Writer.close

    def close(self: Writer, order: Any) -> None:
        real(self, order)
        outgoing = self._ledger.get(order.transfer_id)
        if outgoing is not None and outgoing.waiters:
            outgoing.waiters.pop()(outgoing.silence)

    replace(stack, Writer, "close", close)


@mutant(2, "a step does not wait for writes of preempted pages", reset)
def _(stack: ExitStack) -> None:
    replace(stack, worker_half.WorkerHalf, "handle_preemptions", lambda self, transfer_ids: None)


@mutant(2, "a write of a cancelled transfer counts as over")
def _(stack: ExitStack) -> None:
    def poll(self: posting.Posting) -> list[Any]:
        polled = [(posted, self._transport.poll(posted.handle)) for posted in self._posted]
        over = [(p, s) for p, s in polled if s is not posting.WriteStatus.POSTED or not p.outgoing.may_post]
        for posted, _ in over:
            self._transport.release(posted.handle)
            self._posted.remove(posted)
        return over

    replace(stack, posting.Posting, "poll", poll)


# Law 3: only reserved pages that nobody shares are written


@mutant(3, "pages shared by a prefix hit are reserved too")
def _(stack: ExitStack) -> None:
    spans, order = DecodeSide._spans, DecodeSide._order
    replace(stack, DecodeSide, "_spans", lambda self, num_tokens, local_tokens: spans(self, num_tokens, 0))
    replace(
        stack,
        DecodeSide,
        "_order",
        lambda self, held, *rest: order(self, dataclasses.replace(held, local_tokens=0), *rest),
    )


@mutant(3, "a write goes one block too far")
def _(stack: ExitStack) -> None:
    real = posting.select

    def select(group: Any, route: Any, transfer_id: str, src: Any, dst: Any) -> Any:
        blocks = np.minimum(np.asarray(group.dst_blocks) + 1, dst.num_blocks - 1)
        return real(
            posting.GroupWrite(span=group.span, src_blocks=group.src_blocks, dst_blocks=blocks),
            route,
            transfer_id,
            src,
            dst,
        )

    replace(stack, posting, "select", select)


# Law 4: a page is written once, when it is complete


@mutant(4, "tokens sent before are sent again")
def _(stack: ExitStack) -> None:
    real = prefill_side.completed_span
    replace(stack, prefill_side, "completed_span", lambda wanted, **at: real(wanted, **{**at, "sent_stop": 0}))


@mutant(4, "a page that is sent before it is full is sent again when it is")
def _(stack: ExitStack) -> None:
    real = prefill_side.completed_span
    replace(stack, prefill_side, "completed_span", lambda wanted, **at: real(wanted, **{**at, "granule": 1}))


@mutant(4, "ranks that hold the same head do not take turns", replicas)
def _(stack: ExitStack) -> None:
    real = posting.select

    def select(group: Any, route: Any, *rest: Any) -> Any:
        return real(group, dataclasses.replace(route, num_replicas=1, replica=0), *rest)

    replace(stack, posting, "select", select)


# Law 5: both sides agree on how much is to come


@mutant(5, "the decoder expects one unit less")
def _(stack: ExitStack) -> None:
    real = receiver.expected_units
    replace(stack, receiver, "expected_units", lambda spans, **shape: real(spans, **shape) - 1)


@mutant(5, "layers are sent before they are computed")
def _(stack: ExitStack) -> None:
    real = worker_half.WorkerHalf.start_step

    def start_step(self: Any, orders: Any) -> None:
        real(self, orders)
        if self._signal is not None:
            self._signal.finish()

    replace(stack, worker_half.WorkerHalf, "start_step", start_step)


@mutant(5, "a rank is sent the heads of another one", split)
def _(stack: ExitStack) -> None:
    real = plan_route.sources

    def sources(dst_rank: int, **shape: int) -> list[Any]:
        return [dataclasses.replace(part, src_head=0) for part in real(dst_rank, **shape)]

    replace(stack, plan_route, "sources", sources)


@mutant(5, "granules of a larger page change places", sizes)
def _(stack: ExitStack) -> None:
    real = posting.select

    def select(group: Any, route: Any, *rest: Any) -> Any:
        granules = real(group, route, *rest)
        if granules.spots is None:
            return granules
        return dataclasses.replace(granules, spots=route.num_spots - 1 - granules.spots)

    replace(stack, posting, "select", select)


@mutant(5, "one page more is kept of a failed attempt than has arrived", broken_off)
def _(stack: ExitStack) -> None:
    change_stops(stack, lambda stops, page: [stop + page for stop in stops])


@mutant(5, "what one rank has got is kept, whatever the others have", broken_off)
def _(stack: ExitStack) -> None:
    change_stops(stack, lambda stops, _: [max(stops)] * len(stops))


@mutant(5, "what has arrived behind a gap is kept", broken_off)
def _(stack: ExitStack) -> None:
    def whole_stop(self: CompletionTable, transfer_id: Any, *, start: int, units_per_token: int) -> int:
        steps = self._counts[transfer_id].steps if transfer_id in self._counts else {}
        return max([start] + [step.stop for step, units in steps.items() if units == len(step) * units_per_token])

    replace(stack, CompletionTable, "whole_stop", whole_stop)


@mutant(5, "a step counts as arrived with its first layer", broken_off)
def _(stack: ExitStack) -> None:
    real = CompletionTable.whole_stop

    def whole_stop(self: CompletionTable, transfer_id: Any, *, start: int, units_per_token: int) -> int:
        return real(self, transfer_id, start=start, units_per_token=units_per_token // NUM_LAYERS)

    replace(stack, CompletionTable, "whole_stop", whole_stop)


# Law 6: notes that come twice, early or late


@mutant(6, "a note that comes twice is counted twice")
def _(stack: ExitStack) -> None:
    def arrive(self: CompletionTable, transfer_id: Any, *, units: int, **_: Any) -> Arrival:
        if transfer_id in self._forgotten:
            return Arrival.LATE
        count = self._counts.get(transfer_id)
        if count is None:
            return Arrival.PARKED
        count.arrived += units
        return _compare(count.arrived, self._expected[transfer_id])

    replace(stack, CompletionTable, "arrive", arrive)


@mutant(6, "a late note revives a transfer that is over")
def _(stack: ExitStack) -> None:
    real = CompletionTable.forget

    def forget(self: CompletionTable, transfer_id: Any) -> None:
        real(self, transfer_id)
        self._forgotten.clear()

    replace(stack, CompletionTable, "forget", forget)


# Law 7: each request is reported once


@mutant(7, "a rank hands back what it has reported already")
def _(stack: ExitStack) -> None:
    def hand_back(self: Receiver, order: Any) -> None:
        if order.transfer_id in self._incoming:
            if order.failed:
                self.failed.append(order.request_id)
            self.finished.append(order.request_id)

    replace(stack, Receiver, "hand_back", hand_back)


@mutant(7, "a transfer that completes after it was handed back is reported again")
def _(stack: ExitStack) -> None:
    def report_complete(self: Receiver, transfer_id: str) -> None:
        if incoming := self._incoming.get(transfer_id):
            self.finished.append(incoming.request_id)

    replace(stack, Receiver, "_report_complete", report_complete)


@mutant(7, "a rank does not hand a given-up request back")
def _(stack: ExitStack) -> None:
    replace(stack, Receiver, "hand_back", lambda self, order: None)


# Law 8: nothing waits without a bound


@mutant(8, "a request whose last pages do not come has no deadline")
def _(stack: ExitStack) -> None:
    row = {**DECODE_TABLE[DecodeState.SETTLING], DecodeEvent.DEADLINE: (DecodeState.SETTLING, ())}
    stack.enter_context(patch.dict(DECODE_TABLE, {DecodeState.SETTLING: row}))


@mutant(8, "neither the end of its transfer nor a look at its prefiller ends the wait for an answer", vanished)
def _(stack: ExitStack) -> None:
    replace(stack, dispatcher, "LOOK_PAUSE_S", 1e9)
    replace(stack, Dispatcher, "_finish", lambda self, transfer_id: self._sent.pop(transfer_id, None))
    replace(stack, dispatcher, "LOOK_PAUSE_S", 1e6)  # else whoever starts at its address tells


@mutant(8, "a quarantine never ends")
def _(stack: ExitStack) -> None:
    row = {**FENCE_TABLE[FenceState.QUARANTINED], FenceEvent.DEADLINE: (FenceState.QUARANTINED, ())}
    stack.enter_context(patch.dict(FENCE_TABLE, {FenceState.QUARANTINED: row}))


@mutant(8, "the engine may fall idle while pages are fenced")
def _(stack: ExitStack) -> None:
    replace(stack, DecodeSide, "is_pending", property(lambda self: False))


@mutant(8, "a prefiller does not drop transfers that are over")
def _(stack: ExitStack) -> None:
    replace(stack, Ledger, "drop", lambda self, transfer_id: None)


@mutant(8, "an aborted prefill is not closed")
def _(stack: ExitStack) -> None:
    real = PrefillSide.plan

    def plan(self: PrefillSide, output: Any, orders: Any) -> None:
        self._closes = [close for close in self._closes if not close.cancel]
        real(self, output, orders)

    replace(stack, PrefillSide, "plan", plan)


# Law 9: who leaves in good order leaves nothing


@mutant(9, "a decoder that drains does not wait for its fences", draining)
def _(stack: ExitStack) -> None:
    replace(stack, DecodeSide, "is_pending", property(lambda self: False))


def search(one: Mutant, *, max_seeds: int, num_requests: int) -> tuple[int, str] | None:
    """(seeds run, what was seen) when a seed finds the mutant, None when none does."""
    with applied(one):
        for number in range(max_seeds):
            violation = Run(one.scenarios(number, num_requests)).run().violation
            if violation is not None:
                return number + 1, str(violation)
    return None


def main(max_seeds: int = 300, num_requests: int = 100) -> int:
    """Print the table; a minute or two on one core."""
    missed = 0
    for one in MUTANTS:
        started = time.monotonic()
        found = search(one, max_seeds=max_seeds, num_requests=num_requests)
        missed += found is None
        kind = "drawn scenarios" if one.scenarios is draw else f"{one.scenarios.__name__} scenarios"
        where = f"after {found[0]} {kind}: {found[1]}" if found else "NOT FOUND"
        print(f"law {one.law:2}  {one.name}: {where}  ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} mutants found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
