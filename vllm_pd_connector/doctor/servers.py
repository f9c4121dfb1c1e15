"""Questions to servers that run, each within a time limit; whatever they answer becomes a finding.

A prefiller is greeted as a decoder does; a decoder is given a short prompt for each prefiller, and its counters tell
whether the pages came.
"""

import asyncio
import random
import secrets
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import aiohttp
import msgspec

from vllm_pd_connector.config import PDConfig
from vllm_pd_connector.control.fence_client import FenceClient
from vllm_pd_connector.control.keys import load_key
from vllm_pd_connector.control.prefiller_client import NotTaken, PrefillerClient
from vllm_pd_connector.doctor.finding import Finding, failed, ok, warning
from vllm_pd_connector.doctor.pair import OUTCOMES, Model, Server, check_controls, compare, verdict
from vllm_pd_connector.errors import PDConnectorError, ProtocolError
from vllm_pd_connector.telemetry.counters import parse_metrics
from vllm_pd_connector.wire.messages import ControlEndpoint, HelloReply

T = TypeVar("T")

DOCTOR = "vllm-pd-doctor"
TRIAL_TOKENS = 256
PUBLISH_S = 5.0
"""Seconds within which an engine that has answered has published its counters."""


class Unanswered(Exception):
    """A question without a usable answer; the text says why."""


class _Models(msgspec.Struct):
    data: list[Model]


@dataclass(slots=True)
class Rounds:
    """Asks servers. Make it inside an event loop, and close it.

    Attributes:
        client: opened.
        fences: for the pool's control channel.
        limit_s: seconds for one question.
        trial_tokens: length of a trial prompt.
    """

    client: PrefillerClient
    fences: FenceClient
    limit_s: float
    trial_tokens: int

    @classmethod
    def start(cls, config: PDConfig, limit_s: float) -> "Rounds":
        """Raises:
        ConfigError: a file that `config` names cannot be read.
        """
        key, client = load_key(config.control_key_file), PrefillerClient(config)
        client.open()
        fences = FenceClient(key, client.is_serving)
        return cls(client, fences, limit_s, max(TRIAL_TOKENS, config.min_remote_tokens + 1))

    async def close(self) -> None:
        await self.client.close()
        self.fences.close()

    async def visit(self, prefillers: Sequence[str], decoders: Sequence[str]) -> list[Finding]:
        """All servers, and every decoder with every prefiller."""
        findings: list[Finding] = []
        there = [await self._decoder(url, findings) for url in decoders]
        usable = list(filter(None, [await self._prefiller(url, findings) for url in prefillers]))
        for one, other in pairwise(usable):
            findings += compare(one, other)
        for decoder in filter(None, there):
            for prefiller in usable:
                findings += compare(decoder, prefiller)
                findings.append(await self._try_pair(decoder, prefiller))
        return findings

    async def _prefiller(self, url: str, findings: list[Finding]) -> Server | None:
        name = f"prefiller {url}"
        try:
            models = await self._models(url)
            started = time.monotonic()
            reply = await self._bounded(self.client.greet(url, models[0].id, DOCTOR))
            elapsed_ms = (time.monotonic() - started) * 1e3
        except Unanswered as error:
            advice = "It must be a vLLM with PDConnector as kv_producer or kv_both, of this release, at this address."
            findings.append(failed(name, str(error), advice))
            return None
        hello = reply.hello
        assert hello is not None
        findings.append(ok(name, _describe(hello, models, elapsed_ms)))
        if reply.clock is None:
            findings.append(warning(name, "it sends no reading of its clock", "Install this release there too."))
        findings.append(await self._controls(url, hello))
        return Server(url, models, hello)

    async def _controls(self, url: str, hello: HelloReply) -> Finding:
        """Whether every rank takes control messages, encrypted if there is a key."""

        async def ask(control: ControlEndpoint) -> str:
            outlook = await self.fences.inquire([control], secrets.token_hex(16), self.limit_s)
            return "nobody listens" if outlook.is_gone else "" if outlook.is_over else "no answer"

        return check_controls(url, hello.controls, await asyncio.gather(*map(ask, hello.controls)))

    async def _decoder(self, url: str, findings: list[Finding]) -> Server | None:
        name = f"decoder {url}"
        try:
            status, _ = await self._bounded(self.client.fetch(f"{url}/health"))
            if status != 200:
                raise Unanswered(f"HTTP {status} from /health")
            counters = await self._counters(url)
            if "dispatched" not in counters:
                raise Unanswered("no vllm:pd_* counters in /metrics")
            models = await self._models(url)
        except Unanswered as error:
            advice = "It must be a vLLM with PDConnector as kv_consumer or kv_both, healthy, at this address."
            findings.append(failed(name, str(error), advice))
            return None
        told = ", ".join(f"{key} {counters.get(key, 0):g}" for key in ("dispatched", "released", "failed"))
        findings.append(ok(name, f"healthy, models {_names(models)}; so far {told}"))
        hello: HelloReply | None = None
        with suppress(Unanswered):  # a kv_both greets back; of a kv_consumer the shape is not known
            hello = (await self._bounded(self.client.greet(url, models[0].id, DOCTOR))).hello
        return Server(url, models, hello)

    async def _try_pair(self, decoder: Server, prefiller: Server) -> Finding:
        """One short prompt with the prefiller named, and what the decoder counted meanwhile."""
        name = f"trial {prefiller.url} -> {decoder.url}"
        body = {
            "model": decoder.models[0].id,
            "prompt": [random.randint(3, 99) for _ in range(self.trial_tokens)],
            "max_tokens": 4,
            "ignore_eos": True,
            "cache_salt": secrets.token_hex(8),
            "kv_transfer_params": {"prefiller": prefiller.url},
        }
        try:
            before = await self._counters(decoder.url)
            status, answer = await self._bounded(self.client.fetch(f"{decoder.url}/v1/completions", body))
            refusal = "" if status == 200 else f"HTTP {status}: {answer[:300].decode(errors='replace')}"
            ends_at = time.monotonic() + PUBLISH_S
            while True:
                rise = {key: value - before.get(key, 0) for key, value in (await self._counters(decoder.url)).items()}
                if any(map(rise.get, OUTCOMES)) or time.monotonic() > ends_at:
                    return verdict(name, rise, refusal)
                await asyncio.sleep(0.1)
        except Unanswered as error:
            return failed(name, str(error), "Look into the decoder's log.")

    async def _counters(self, url: str) -> dict[str, float]:
        status, page = await self._bounded(self.client.fetch(f"{url}/metrics"))
        if status != 200:
            raise Unanswered(f"HTTP {status} from /metrics")
        try:
            return parse_metrics(page.decode(errors="replace"))
        except ValueError as error:
            raise Unanswered(f"/metrics is no page of numbers: {error}") from None

    async def _models(self, url: str) -> list[Model]:
        status, page = await self._bounded(self.client.fetch(f"{url}/v1/models"))
        if status != 200:
            hint = ": it wants an API key (--api-key-file)" if status in (401, 403) else ""
            raise Unanswered(f"HTTP {status} from /v1/models{hint}")
        try:
            models = msgspec.json.decode(page, type=_Models).data
        except (ValueError, RecursionError) as error:
            raise Unanswered(f"/v1/models is no list of models: {error}") from None
        if not models:
            raise Unanswered("/v1/models lists none")
        return models

    async def _bounded(self, work: Coroutine[Any, Any, T]) -> T:
        """Raises:
        Unanswered: there is no answer, or not in time.
        """
        try:
            return await asyncio.wait_for(work, self.limit_s)
        except TimeoutError:
            raise Unanswered(f"no answer in {self.limit_s:g} s") from None
        except ProtocolError as error:
            raise Unanswered(str(error)) from None
        except (PDConnectorError, NotTaken, aiohttp.ClientError, OSError, ValueError) as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from None


def _describe(hello: HelloReply, models: Sequence[Model], elapsed_ms: float) -> str:
    shape = hello.shape
    rank = "" if hello.data_parallel_rank is None else f", data-parallel rank {hello.data_parallel_rank}"
    return (
        f"greets in {elapsed_ms:.0f} ms, models {_names(models)}, engine {hello.engine}, generation "
        f"{hello.generation}, TP {shape.tensor_parallel_size} PP {shape.pipeline_parallel_size}{rank}, "
        f"{shape.cache_dtype} {shape.layout} blocks of {shape.block_size}, {shape.attention}"
    )


def _names(models: Sequence[Model]) -> str:
    return ", ".join(model.id for model in models[:8])
