"""One engine: vLLM's real scheduler, both halves of the connector, and a forward pass that only takes time."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_pd_connector.config import parse
from vllm_pd_connector.engine.connector import PDConnector
from vllm_pd_connector.engine.scheduler_half import SchedulerHalf
from vllm_pd_connector.engine.step import StepMetadata
from vllm_pd_connector.engine.worker_half import PREEMPTION_WAIT_S, WorkerHalf
from vllm_pd_connector.testing.simulation import template
from vllm_pd_connector.testing.simulation.network import Network, SimulatedFenceServer
from vllm_pd_connector.testing.simulation.pages import NUM_LAYERS, Layout, Pages
from vllm_pd_connector.testing.simulation.threads import SimulatedDispatcher, SimulatedMessenger
from vllm_pd_connector.testing.simulation.transport import SimulatedTransport
from vllm_pd_connector.testing.simulation.world import Thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import PauseMode

    from vllm_pd_connector.testing.simulation.scenario import Scenario
    from vllm_pd_connector.testing.simulation.world import Process

STEP_S = (0.004, 0.02)
IDLE_STEP_S = (0.005, 0.5)
"""vLLM steps each millisecond while it only waits; steps in which nothing happens get rarer here, to save time."""

OWNERS_EVERY = 16
"""Steps between two full comparisons of vLLM's reference counts with the owners."""

SLACK_S = 3 * PREEMPTION_WAIT_S
"""What deadlines are late by at most: steps are discrete, and a step may wait for preempted pages."""


class Engine:
    """EngineCore and its workers in one simulated process.

    Args:
        process: its life.
        network: its world outside.
        scenario: sizes.
        role: kv_producer or kv_consumer.
        extra: the connector's configuration.
        on_output: called with whatever the client is to be told.
        on_leave: called when the engine ends by itself after SIGTERM.
    """

    def __init__(
        self,
        process: Process,
        network: Network,
        scenario: Scenario,
        *,
        role: str,
        extra: dict[str, Any],
        on_output: Callable[[EngineCoreOutput], None],
        on_leave: Callable[[], None],
    ) -> None:
        self.process = process
        self._thread = Thread(process)
        self._world = process.world
        self._network = network
        self._scenario = scenario
        self._on_output = on_output
        self._on_leave = on_leave
        self._is_leaving = False
        self._inbox: list[Callable[[], None]] = []
        self._is_idle = True
        self._idle_step_s = IDLE_STEP_S[0]
        self._num_steps = 0
        self._counters: Counter[str] = Counter()
        self.dispatcher: SimulatedDispatcher | None = None
        self.transports: list[SimulatedTransport] = []
        self.layout = Layout.of(scenario, role)
        self._build(role, extra)
        self._aggregator = KVOutputAggregator(self.layout.num_ranks)

    def add(self, request: Request) -> None:
        self._put(lambda: self._add(request))

    def abort(self, request_id: str) -> None:
        self._put(lambda: self._abort(request_id))

    def reset_cache(self) -> None:
        self._put(self._reset_cache)

    def terminate(self, *, is_patient: bool) -> None:
        """SIGTERM: nothing new is taken, what there is is finished or aborted; then the engine ends."""
        self._put(lambda: self._terminate(is_patient))

    def pause(self, mode: PauseMode, seconds: float) -> None:
        """vLLM's `pause_scheduler`, and `resume_scheduler` after a while."""
        self._put(lambda: self._pause(mode, seconds))

    def close(self) -> None:
        """The process ends in good order."""
        for worker in self.workers:
            worker.shutdown()
        self.half.shutdown()

    def counters(self) -> Counter[str]:
        """Everything both halves have counted since they started."""
        for worker in self.workers:
            self._counters.update(worker._tally.take())
        self.half._tally.take()
        return self._counters

    def _counted(self, counts: dict[str, int]) -> dict[str, int]:
        self._counters.update(counts)
        return counts

    @property
    def is_paused(self) -> bool:
        return bool(self.scheduler.pause_state)

    @property
    def is_quiet(self) -> bool:
        return self._is_idle and not self._inbox

    def _build(self, role: str, extra: dict[str, Any]) -> None:
        layout, config = self.layout, parse(extra)
        vllm_config = template.engine_config(role, self.process.name, self._scenario, layout, extra)
        caches = template.cache_config(layout)
        self.scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=layout.block_size,
            hash_block_size=layout.block_size,
        )
        self.manager = self.scheduler.kv_cache_manager
        self.pages = Pages(self.process, self.manager.block_pool, layout)
        self.half = SchedulerHalf(
            config, vllm_config, caches, open_dispatcher=self._open_dispatcher, clock=self.process.clock
        )
        connector = self.scheduler.connector
        assert isinstance(connector, PDConnector)
        connector._scheduler = self.half
        take = self.half._tally.take
        self.half._tally.take = lambda: self._counted(take())  # type: ignore[method-assign]
        self.half.bind(self.manager)
        self.workers = [self._worker(rank, config, vllm_config, caches) for rank in range(layout.num_ranks)]
        for worker in self.workers:
            worker.register(template.kv_tensors(layout))
        for transport, worker in zip(self.transports, self.workers, strict=True):
            transport.wake = worker._messenger.bell.ring
        self.half.greet_workers({(0, rank): worker.handshake() for rank, worker in enumerate(self.workers)})

    def _worker(self, rank: int, config: Any, vllm_config: Any, caches: Any) -> WorkerHalf:
        transport = SimulatedTransport(self.process, self._network, rank, self.pages)
        self.transports.append(transport)
        return WorkerHalf(
            config,
            vllm_config,
            caches,
            rank=rank,
            open_transport=lambda name, placement: transport,
            open_messenger=partial(SimulatedMessenger, process=self.process),
            open_fence_server=partial(SimulatedFenceServer, process=self.process, network=self._network, rank=rank),
            clock=self.process.clock,
        )

    def _open_dispatcher(self, *args: Any, **kwargs: Any) -> SimulatedDispatcher:
        self.dispatcher = SimulatedDispatcher(*args, process=self.process, network=self._network, **kwargs)
        return self.dispatcher

    # What reaches EngineCore between two steps

    def _put(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._idle_step_s = IDLE_STEP_S[0]
        if self._is_idle:
            self._is_idle = False
            self._world.after(self._world.random.uniform(0.0, 0.002), self._thread, self._begin_step)

    def _add(self, request: Request) -> None:
        if self._is_leaving:
            self._tell_aborted(request)
        else:
            self.scheduler.add_request(request)

    def _abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def _abort_all(self) -> None:
        for request in self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED):
            self._tell_aborted(request)

    def _tell_aborted(self, request: Request) -> None:
        self._on_output(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ABORT))

    def _terminate(self, is_patient: bool) -> None:
        self._is_leaving = True
        if not is_patient:
            self._abort_all()

    def _pause(self, mode: PauseMode, seconds: float) -> None:
        if self._is_leaving:
            return
        if mode == "abort":
            self._abort_all()
        self.process.paused_s += seconds
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        resume = partial(self.scheduler.set_pause_state, PauseState.UNPAUSED)
        self._world.after(seconds, self._thread, lambda: self._put(resume))

    def _reset_cache(self) -> None:
        if self._is_leaving:
            return
        self.pages.may_preempt = True  # until the next step has announced it
        # With a request held vLLM preempts everything and then says that it could not empty the cache.
        with suppress(RuntimeError):
            self.scheduler.reset_prefix_cache(reset_running_requests=True)

    # A step

    def _begin_step(self) -> None:
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            action()
        if not self.scheduler.has_requests():
            self._is_idle = True
            if self._is_leaving:
                self._on_leave()
            return
        self._num_steps += 1
        self.pages.may_preempt = True
        output = self.scheduler.schedule()
        orders = output.kv_connector_metadata
        assert isinstance(orders, StepMetadata)
        for expect in orders.expects:
            self.pages.open(expect.transfer_id, expect.request_id, self.manager.get_block_ids(expect.request_id)[0])
            self._world.tell("%s reserves %s for %s", self.process, expect.transfer_id[:6], expect.request_id)
        self._wait_for_preempted(orders)
        if not self.process.is_alive:
            return
        self._check_owners()
        for worker in self.workers:
            worker.start_step(orders)
        self._forward(output, orders)

    def _wait_for_preempted(self, orders: StepMetadata) -> None:
        """`handle_preemptions` of every rank; after it nothing may read what preempted requests held (law 2)."""
        started = self._world.now
        for worker in self.workers:
            worker.handle_preemptions(orders.preempted)
        if self.process.is_alive:
            self.pages.end_preemption(has_waited=self._world.now - started > 0.999 * PREEMPTION_WAIT_S)

    def _forward(self, output: SchedulerOutput, orders: StepMetadata) -> None:
        """Lay the pass out in time. Layers matter where something is sent; elsewhere all are computed at its end."""
        chunks = []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            blocks = self.manager.get_block_ids(request_id)[0]
            stop = request.num_computed_tokens
            first = stop - num_tokens
            self.pages.check_overwrite(first, stop, blocks)
            chunks.append((first, stop, template.family_of(request), blocks))
        if output.num_scheduled_tokens:
            self._idle_step_s = IDLE_STEP_S[0]
            seconds = self._world.random.uniform(*STEP_S)
        else:
            seconds = self._world.random.uniform(0.5, 1.0) * self._idle_step_s
            self._idle_step_s = min(IDLE_STEP_S[1], self._idle_step_s * 2)
        if orders.writes:
            for layer in range(NUM_LAYERS):
                at = self._world.now + seconds * (layer + 1) / (NUM_LAYERS + 1)
                self._world.at(at, self._thread, partial(self._layer_done, layer, chunks))
        self._world.after(seconds, self._thread, partial(self._end_step, output, [] if orders.writes else chunks))

    def _layer_done(self, layer: int, chunks: list[Any]) -> None:
        for chunk in chunks:
            self.pages.compute(layer, *chunk)
        for worker in self.workers:
            worker.layer_done(template.LAYERS[layer])

    def _end_step(self, output: SchedulerOutput, chunks: list[Any]) -> None:
        for layer in range(NUM_LAYERS if chunks else 0):
            for chunk in chunks:
                self.pages.compute(layer, *chunk)
        for worker in self.workers:
            worker.end_step()
        ids = list(output.num_scheduled_tokens)
        requests = self.scheduler.requests
        sampled = [
            [template.SAMPLED_TOKEN] if requests[r].num_computed_tokens >= requests[r].num_tokens else [] for r in ids
        ]
        result = self._collect(ids, sampled)
        reported = result.kv_connector_output
        if reported is not None:
            self._check_reports(reported)
        finished = {r: requests[r] for r in ids if sampled[ids.index(r)]}
        before = {r: self.manager.get_block_ids(r)[0] for r in finished}
        try:
            made = self.scheduler.update_from_output(output, result)
        except (AssertionError, KeyError) as error:
            self._world.break_law(7, f"{self.process}: vLLM's engine dies of a report: {error!r} {reported}")
        for outputs in made.values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self._check_pages(finished.get(one.request_id), before.get(one.request_id, []))
                    self._on_output(one)
        self._begin_step()

    def _collect(self, ids: list[str], sampled: list[list[int]]) -> ModelRunnerOutput:
        """The workers' results, merged as vLLM does."""
        outputs = []
        for worker in self.workers:
            sent, received, failed = worker.take_results()
            outputs.append(
                ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={r: i for i, r in enumerate(ids)},
                    sampled_token_ids=sampled,
                    kv_connector_output=KVConnectorOutput(
                        finished_sending=_in_order(sent),
                        finished_recving=_in_order(received),
                        failed_recving=failed,
                        kv_connector_worker_meta=worker.take_report(),
                    ),
                )
            )
        merged = self._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]  # type: ignore[arg-type]
        assert merged is not None
        if merged.kv_connector_output is not None and merged.kv_connector_output.is_empty():
            merged.kv_connector_output = None
        return merged

    # Checks

    def _check_reports(self, reported: KVConnectorOutput) -> None:
        """What the workers say of held requests, before vLLM acts on it (laws 5 and 8)."""
        for request_id in reported.finished_recving or ():
            request = self.scheduler.requests.get(request_id)
            attempts = self.pages.by_request.get(request_id)
            if request is None or not attempts:
                continue  # vLLM will say what it thinks of it
            transfer = attempts[-1]
            limit = self.half._config.request_deadline_s + self.half._config.settle_s + SLACK_S
            if self._world.now - transfer.opened_at > limit + self.process.paused_s:
                self._world.break_law(8, f"{request_id} was held for {self._world.now - transfer.opened_at:.1f} s")
            if request_id not in (reported.failed_recving or ()) and not request.is_finished():
                transfer.is_loaded = True
                blocks = self.manager.get_block_ids(request_id)[0]
                self._world.tell("%s has loaded %s", self.process, request_id)
                self.pages.expect(request_id, template.family_of(request), request.num_computed_tokens, blocks)

    def _check_pages(self, request: Request | None, blocks: list[int]) -> None:
        """A request that has just finished normally: everything it attended to was right."""
        if request is not None and request.num_computed_tokens:
            self.pages.expect(request.request_id, template.family_of(request), request.num_computed_tokens, blocks)

    def _check_owners(self) -> None:
        """Every block that is not free has owners, as many as vLLM counts (no page is held without one)."""
        decode = self.half._decode
        for fenced in decode._fenced.values() if decode is not None else ():
            config = self.half._config
            limit = fenced.lease_s + config.unreachable_s + config.quarantine_s + SLACK_S + self.process.paused_s
            if self.process.clock() - fenced.closed_at > limit:
                self._world.break_law(8, f"pages of {fenced.transfer_id[:6]} have been fenced for more than {limit} s")
        if self._num_steps % OWNERS_EVERY:
            return
        owners: Counter[int] = Counter()
        for request_id in self.scheduler.requests:
            owners.update(self.manager.get_block_ids(request_id)[0])
        for fenced in decode._fenced.values() if decode is not None else ():
            owners.update(fenced.blocks)
        for block in self.manager.block_pool.blocks[1:]:
            if block.ref_cnt != owners[block.block_id]:
                self._world.break_law(
                    8,
                    f"block {block.block_id} of {self.process}: {block.ref_cnt} references, "
                    f"{owners[block.block_id]} owners",
                )


def _in_order(ids: set[str]) -> Any:
    """Ids as vLLM's sets, but always in the same order."""
    return dict.fromkeys(sorted(ids)).keys() or None
