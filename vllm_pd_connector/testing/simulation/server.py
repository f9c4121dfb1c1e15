"""One address of the pool: its processes one after another, and what its clients see."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm.v1.engine import FinishReason

from vllm_pd_connector.testing.simulation import template
from vllm_pd_connector.testing.simulation.engine import Engine
from vllm_pd_connector.testing.simulation.world import Process, Thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

    from vllm_pd_connector.testing.simulation.network import Exchange, Network
    from vllm_pd_connector.testing.simulation.scenario import ClientRequest, Scenario


ABORT_S = 0.5
"""Without a grace a process has at most so long, if it does not end by itself."""

OTHER_THREADS = {
    "dispatches",
    "outstanding at prefillers",
    "incoming transfers",
    "counted transfers",
    "outgoing transfers",
    "drains",
}
"""What the dispatcher and the messengers may still have to take in when the engine ends."""


class Server:
    """A vLLM server that is started again whenever it dies.

    Args:
        name: its address.
        network: where it listens.
        scenario: sizes and configuration.
        on_end: told (client request, outcome) when a client has its answer or its error.
    """

    def __init__(self, name: str, network: Network, scenario: Scenario, on_end: Callable[[str, str], None]) -> None:
        self.name = name
        self.is_decoder = name.startswith("d")
        self._network = network
        self._world = network.world
        self._scenario = scenario
        self._on_end = on_end
        self._incarnation = 0
        self._exchanges: dict[str, Exchange] = {}
        self._clients: dict[str, str] = {}
        self._num_taken = 0
        self.counters: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        """The next process at this address."""
        self.process = Process(self._world, self.name, self._incarnation)
        self._incarnation += 1
        extra = dict(self._scenario.config)
        if self.is_decoder:
            extra["prefillers"] = [f"http://p{i}" for i in range(self._scenario.num_prefillers)]
        self.engine = Engine(
            self.process,
            self._network,
            self._scenario,
            role="kv_consumer" if self.is_decoder else "kv_producer",
            extra=extra,
            on_output=self._answer,
            on_leave=self._leave_pool,
        )
        self._back_after_s: float | None = None
        self._network.servers[self.name] = self
        self._world.tell("%s starts", self.process)

    @property
    def is_up(self) -> bool:
        return self.process.is_alive

    def kill(self, *, silently: bool, back_after_s: float) -> None:
        """SIGKILL, or the machine is gone: then no connection is closed that others could notice."""
        if not self.is_up:
            return
        self._world.tell("%s dies%s", self.process, " with its machine" if silently else "")
        self.process.is_alive = False
        self.counters.update(self.engine.counters())
        del self._network.servers[self.name]
        for transport in self.engine.transports:
            transport.die()
        for worker in self.engine.workers:
            if worker._fences is not None:
                worker._fences.close()
        exchanges, self._exchanges = self._exchanges, {}
        if not silently:
            for exchange in exchanges.values():
                exchange.reset()
            if self.engine.dispatcher is not None:
                for exchange in self.engine.dispatcher.client.exchanges:
                    exchange.close()
        clients, self._clients = self._clients, {}
        for name in clients.values():
            self._on_end(name, "connection lost")
        self._world.after(back_after_s, None, self.start)

    def terminate(self, *, grace_s: float, back_after_s: float) -> None:
        """SIGTERM, and SIGKILL for a process that is still there after its grace."""
        if not self.is_up or self._back_after_s is not None:
            return
        self._world.tell("%s is told to end within %g s", self.process, grace_s)
        self._back_after_s = back_after_s
        self.engine.terminate(is_patient=grace_s > 0)
        process, limit = self.process, grace_s or self._world.random.uniform(0.0, ABORT_S)
        self._world.after(limit, None, lambda: self._kill_late(process))

    def _kill_late(self, process: Process) -> None:
        if self.process is process and process.is_alive:
            self.kill(silently=False, back_after_s=self._back_after_s or 0.0)

    def _leave_pool(self) -> None:
        """The engine has nothing more to do: everybody has an answer, and no page is in use or read.

        A paused engine ends at once whatever it holds, which for others is as if it had been killed.
        """
        kept = {name: number for name, number in self.leftovers().items() if name not in OTHER_THREADS}
        if kept and not self.engine.is_paused:
            self._world.break_law(9, f"{self.process} ends in good order and leaves {kept}")
        if any(transport.num_in_flight for transport in self.engine.transports) and not self.engine.is_paused:
            self._world.break_law(2, f"{self.process} ends in good order while a posted write reads its pages")
        self.engine.close()
        self.counters["ended_in_good_order"] += 1
        self.kill(silently=False, back_after_s=self._back_after_s or 0.0)

    # A decoder's clients

    def submit(self, wanted: ClientRequest) -> None:
        """A client's request arrives."""
        if not self.is_up:
            self._on_end(wanted.name, "connection refused")
            return
        request_id = f"{wanted.name}@{self.process}"
        self._clients[request_id] = wanted.name
        tokens = template.prompt(wanted.family, wanted.num_tokens)
        self.engine.add(self._make_request(request_id, tokens, wanted.max_tokens, wanted.params))
        if wanted.leaves_after_s is not None:
            self._world.after(wanted.leaves_after_s, Thread(self.process), lambda: self._leave(request_id))

    def _leave(self, request_id: str) -> None:
        if name := self._clients.pop(request_id, None):
            self._world.tell("the client of %s leaves", name)
            self.engine.abort(request_id)
            self._on_end(name, "left")

    # A prefiller's HTTP side

    def take(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """An HTTP request has been read."""
        self._num_taken += 1
        request_id = f"{body.get('request_id', 'hello')}#{self._num_taken}@{self.process}"
        self._exchanges[request_id] = exchange
        params = body.get("kv_transfer_params")
        self.engine.add(self._make_request(request_id, body["prompt"], body["max_tokens"], params))

    def connection_closed(self, exchange: Exchange) -> None:
        for request_id in [r for r, e in self._exchanges.items() if e is exchange]:
            del self._exchanges[request_id]
            self.engine.abort(request_id)

    def _make_request(self, *what: Any) -> Request:
        return template.make_request(*what, block_size=self.engine.layout.block_size)

    def _answer(self, output: EngineCoreOutput) -> None:
        is_error = output.finish_reason is FinishReason.ERROR
        is_aborted = output.finish_reason is FinishReason.ABORT
        if name := self._clients.pop(output.request_id, None):
            self._world.tell("%s is answered: %s", name, output.finish_reason)
            self._on_end(name, "error" if is_error else "aborted" if is_aborted else "answered")
        if exchange := self._exchanges.pop(output.request_id, None):
            if is_error:
                exchange.answer(500, {"error": "EngineCore refused"})
            elif is_aborted:
                exchange.answer(200, {"choices": [{"finish_reason": "abort"}], "kv_transfer_params": None})
            else:
                exchange.answer(200, {"kv_transfer_params": output.kv_transfer_params})

    # The end

    @property
    def is_quiet(self) -> bool:
        return self.is_up and self.engine.is_quiet

    def leftovers(self) -> dict[str, int]:
        """What a server without requests must not hold, by name; only what is not zero."""
        engine, left = self.engine, {}
        left["pages in use"] = engine.pages.num_in_use
        left["vLLM requests"] = len(engine.scheduler.requests)
        left["connections"] = len(self._exchanges) + len(self._clients)
        for side in (engine.half._decode, engine.half._prefill):
            if side is not None:
                gauges = side.gauges()
                left |= {k: v for k, v in gauges.items() if k != "prefillers_usable"}
        if engine.half._decode is not None:
            left["courses of requests"] = len(engine.half._decode._courses)
        if engine.half._prefill is not None:
            left["prefills"] = len(engine.half._prefill._prefills) + len(engine.half._prefill._by_transfer)
            left["replies"] = len(engine.half._prefill._replies)
        if engine.dispatcher is not None:
            left["dispatches"] = len(engine.dispatcher._sent)
            left["outstanding at prefillers"] = sum(c.outstanding for c in engine.dispatcher.pool())
            left["fences without an answer"] = len(engine.dispatcher.unanswered)
        for worker in engine.workers:
            left["outgoing transfers"] = left.get("outgoing transfers", 0) + len(worker._writer._ledger._transfers)
            left["incoming transfers"] = left.get("incoming transfers", 0) + len(worker._receiver._incoming)
            counts = worker._receiver._counts
            left["counted transfers"] = left.get("counted transfers", 0) + len(counts) + counts.num_parked
            left["drains"] = left.get("drains", 0) + len(worker._writer._drains)
        return {name: number for name, number in left.items() if number}
