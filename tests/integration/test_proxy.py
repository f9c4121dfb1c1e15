"""The example proxy in front of small fake decoders: streams, cancels through, refuses, spreads."""

import asyncio
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

STEP_S = 5.0  # longest wait for something that takes milliseconds


def load_example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "disaggregated_proxy.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeDecoder:
    """Streams a first chunk at once and the second when `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.bodies: list[dict[str, Any]] = []
        self.server: TestServer

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/die", self.die)
        self.server = TestServer(app)
        await self.server.start_server()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"query": request.query_string, "key": request.headers.get("Authorization")})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Request-Id": "7"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        await response.write(b"data: two\n\n")
        return response

    async def die(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.abort()
        return response


class Stage:
    """Two fake decoders, a proxy and a client, all closed at the end."""

    def __init__(self) -> None:
        self.decoders = [FakeDecoder(), FakeDecoder()]
        self.clients: list[TestClient[Any, Any]] = []

    async def client(self, decoders: list[str], prefillers: list[str]) -> TestClient[Any, Any]:
        server = TestServer(load_example().Proxy(decoders, prefillers).app())
        await server.start_server()
        client = TestClient(server)
        self.clients.append(client)
        return client

    async def close(self) -> None:
        for closing in (*self.clients, *(d.server for d in self.decoders)):
            await closing.close()


@pytest.fixture
async def stage() -> Any:
    stage = Stage()
    for decoder in stage.decoders:
        await decoder.start()
    yield stage
    await stage.close()


async def test_chunks_pass_as_they_come(stage: Stage) -> None:
    decoder = stage.decoders[0]
    client = await stage.client([decoder.url], [])
    async with client.post("/v1/completions", json={"prompt": "x"}) as response:
        assert response.headers["X-Request-Id"] == "7"
        assert response.content_type == "text/event-stream"
        # The second chunk is not written yet: the first one must not wait for it.
        assert await asyncio.wait_for(response.content.readany(), STEP_S) == b"data: one\n\n"
        decoder.go.set()
        assert await response.content.read() == b"data: two\n\n"
    assert decoder.bodies == [{"prompt": "x"}]


async def test_a_client_that_leaves_cancels_the_decoder(stage: Stage) -> None:
    decoder = stage.decoders[0]
    client = await stage.client([decoder.url], [])
    response = await client.post("/v1/completions", json={"prompt": "x"})
    await response.content.readany()
    response.close()
    await asyncio.wait_for(decoder.cancelled.wait(), STEP_S)
    async with client.get("/health") as health:
        assert await health.json() == {"in_flight": {decoder.url: 0}}


async def test_the_least_busy_decoder_is_chosen(stage: Stage) -> None:
    client = await stage.client([d.url for d in stage.decoders], [])
    responses = [await client.post("/v1/completions", json={"prompt": n}) for n in range(4)]
    assert [len(d.bodies) for d in stage.decoders] == [2, 2]
    async with client.get("/health") as health:
        assert await health.json() == {"in_flight": {d.url: 2 for d in stage.decoders}}
    for response in responses:
        response.close()


async def test_prefillers_take_turns_unless_the_client_chose(stage: Stage) -> None:
    decoder = stage.decoders[0]
    decoder.go.set()
    client = await stage.client([decoder.url], ["http://p1/", "http://p2"])
    for body in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {"prefiller": "http://mine"}}, {}):
        await (await client.post("/v1/completions", json={"prompt": "x", **body})).read()
    chosen = [body["kv_transfer_params"]["prefiller"] for body in decoder.bodies]
    assert chosen[0] == "http://p1"
    assert chosen[1] == "http://p2"
    assert chosen[2] == "http://mine"


@pytest.mark.parametrize(
    "body",
    ['{"kv_transfer_params": 1}', '{"kv_transfer_params": ' + '{"a":' * 5_000 + "1" + "}" * 5_001, "[" * 200_000],
)
async def test_harmful_bodies_get_400(stage: Stage, body: str) -> None:
    client = await stage.client([stage.decoders[0].url], ["http://p1"])
    async with client.post("/v1/completions", data=body, headers={"Content-Type": "application/json"}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "BadRequestError"
    assert stage.decoders[0].bodies == []


async def test_other_paths_and_headers_pass(stage: Stage) -> None:
    client = await stage.client([stage.decoders[0].url], ["http://p1"])
    async with client.get("/v1/models?x=%20y", headers={"Authorization": "Bearer k"}) as response:
        assert await response.json() == {"query": "x= y", "key": "Bearer k"}
    async with client.post("/nowhere", data=b"\xff") as response:
        assert response.status == 404


async def test_a_dead_decoder_is_passed_over_and_none_left_is_502(stage: Stage) -> None:
    alive, dead = stage.decoders
    dead_url = dead.url
    await dead.server.close()
    client = await stage.client([dead_url, alive.url], [])
    async with client.get("/v1/models") as response:
        assert response.status == 200
    lonely = await stage.client([dead_url], [])
    async with lonely.get("/v1/models") as response:
        assert response.status == 502
        assert json.loads(await response.read())["error"]["code"] == 502


async def test_half_an_answer_does_not_look_whole(stage: Stage) -> None:
    client = await stage.client([stage.decoders[0].url], [])
    with pytest.raises(Exception, match=r"(?i)payload|disconnect|closed"):
        await (await client.post("/die", data=b"{}")).read()
