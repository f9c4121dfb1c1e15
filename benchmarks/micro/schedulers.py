"""vLLM's real scheduler with our connector and no model, with many requests in flight: what a step costs us."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.micro.engine import BLOCK_TOKENS, LEASE_S, kv_cache_config, vllm_config, worker_half
from vllm_pd_connector.config import parse
from vllm_pd_connector.engine.connector import PDConnector
from vllm_pd_connector.engine.messenger import Messenger
from vllm_pd_connector.engine.scheduler_half import SchedulerHalf
from vllm_pd_connector.engine.step import StepMetadata
from vllm_pd_connector.testing.fake_dispatcher import FakeDispatcher
from vllm_pd_connector.transport.memory import MemoryFabric, MemoryTransport
from vllm_pd_connector.wire.messages import DecoderRank, Reservation
from vllm_pd_connector.wire.transfer_params import RESERVATION, to_params
from vllm_pd_connector.wire.version import PROTOCOL_VERSION

NUM_LAYERS = 4
PAGE_BYTES = 128
MAX_STEPS = 32
"""Steps that a request's prompt is long enough for, a page in each."""


class HandTurned(Messenger):
    """A messenger without a thread: `turn` does what the thread would do."""

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


@dataclass(frozen=True)
class StepCost:
    """CPU nanoseconds of one step. `scheduler` and `worker` are spent on the threads vLLM waits for."""

    scheduler: int
    worker: int
    messenger: int


class BusyEngine:
    """One server with `num_requests` of its role in flight: prefills of a page in each step, or held requests.

    Args:
        role: kv_producer or kv_consumer.
        num_requests: how many.
    """

    def __init__(self, role: str, num_requests: int) -> None:
        extra: dict[str, Any] = {"max_held_share": 1.0}
        if role == "kv_consumer":
            extra |= {"prefillers": ["http://prefiller:8100"], "min_remote_tokens": 1}
        num_blocks = (num_requests + 1) * (MAX_STEPS + 2)
        config = vllm_config(role, extra, max_num_seqs=max(16, num_requests))
        config.cache_config.num_gpu_blocks = num_blocks
        config.scheduler_config.long_prefill_token_threshold = BLOCK_TOKENS  # of one request, beside others
        config.scheduler_config.max_num_scheduled_tokens = BLOCK_TOKENS * num_requests
        caches = kv_cache_config(NUM_LAYERS, num_blocks, PAGE_BYTES)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS,
        )
        self._scheduler_ns = 0
        self._build(role, extra, config, caches, num_blocks)
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        for number in range(num_requests):
            request = Request(
                request_id=f"r{number}",
                prompt_token_ids=[1000 + number] * (MAX_STEPS * BLOCK_TOKENS),
                sampling_params=SamplingParams(max_tokens=1, ignore_eos=True, temperature=0.0),
                pooling_params=None,
                block_hasher=hasher,
            )
            if role == "kv_producer":
                request.kv_transfer_params = self._reservation(number)
            self.scheduler.add_request(request)

    def _build(self, role: str, extra: dict[str, Any], config: Any, caches: Any, num_blocks: int) -> None:
        made: list[FakeDispatcher] = []
        scheduler_half = SchedulerHalf(parse(extra), config, caches, open_dispatcher=FakeDispatcher.factory(made))
        connector = self.scheduler.connector
        assert isinstance(connector, PDConnector)
        connector._scheduler = scheduler_half
        scheduler_half.bind(self.scheduler.kv_cache_manager)
        fabric = MemoryFabric()
        own, peer = MemoryTransport(fabric, "own"), MemoryTransport(fabric, "peer")
        self.worker = worker_half(
            role, extra, own, num_layers=NUM_LAYERS, num_blocks=num_blocks, page_bytes=PAGE_BYTES, messenger=HandTurned
        )
        handshake = self.worker.half.handshake()
        peer.register(handshake.pages)
        self._target = DecoderRank(descriptor=base64.b64encode(b"peer").decode(), pages=handshake.pages)
        self._geometry = handshake.shape.geometry()
        scheduler_half.greet_workers({(0, 0): handshake})
        assert scheduler_half._prefill is not None or scheduler_half._decode is not None
        hello = scheduler_half._prefill._hello if scheduler_half._prefill is not None else None
        self._generation = hello.generation if hello is not None else "0" * 16
        build = scheduler_half.build_meta

        def timed(output: Any) -> StepMetadata:
            start = time.thread_time_ns()
            orders = build(output)
            self._scheduler_ns = time.thread_time_ns() - start
            return orders

        scheduler_half.build_meta = timed  # type: ignore[method-assign]

    def _reservation(self, number: int) -> dict[str, Any]:
        first = 1 + number * MAX_STEPS
        reservation = Reservation(
            protocol=PROTOCOL_VERSION,
            transfer_id=f"{number:032x}",
            decoder="bench",
            decoder_generation="0" * 16,
            prefiller_generation=self._generation,
            local_tokens=0,
            blocks=[list(range(first, first + MAX_STEPS))],
            lease_s=LEASE_S,
            geometry=self._geometry,
            ranks=[self._target],
        )
        return to_params(RESERVATION, reservation)

    def step(self) -> tuple[StepCost, StepMetadata]:
        """One engine step, its model replaced by the layer hooks alone, and the messenger's turns until it is done."""
        output = self.scheduler.schedule()
        orders = output.kv_connector_metadata
        assert isinstance(orders, StepMetadata)
        half, messenger = self.worker.half, self.worker.half._messenger
        start = time.thread_time_ns()
        half.start_step(orders)
        half.end_step()
        half.take_results()
        half.take_report()
        worker_ns = time.thread_time_ns() - start
        start = time.thread_time_ns()
        messenger.turn()
        messenger.turn()
        messenger_ns = time.thread_time_ns() - start
        self._report(output)
        return StepCost(self._scheduler_ns, worker_ns, messenger_ns), orders

    def _report(self, output: Any) -> None:
        ids = list(output.num_scheduled_tokens)
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
                sampled_token_ids=[[] for _ in ids],
                kv_connector_output=KVConnectorOutput(),
            ),
        )

    def close(self) -> None:
        self.worker.half.shutdown()
