"""A small proxy in front of decoders: python examples/disaggregated_proxy.py --decoders URL... --prefillers URL...

Each request goes to the decoder with the fewest requests in flight. With --prefillers the proxy also names, in turn,
the prefiller that the decoder shall use; without, the decoders choose by themselves. The decoder does the rest: it
holds the request, has its prompt computed on the prefiller, and streams the answer. Any load balancer would do.
"""

import argparse
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from vllm_pd_connector.control.request_guard import KEY, MAX_BODY_BYTES, check_body, error_body
from vllm_pd_connector.errors import ProtocolError

CONNECT_S = 5.0
KEEPALIVE_S = 3.0  # vLLM drops an idle connection after 5 s: drop it first, so that none breaks as it is reused
# Of one connection, not of the message; aiohttp writes its own.
HOP_HEADERS = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "expect"}


@dataclass(slots=True)
class Decoder:
    """A decoder's base URL and how many requests it is answering for us."""

    url: str
    in_flight: int = 0


class Proxy:
    """Forwards every path to one of the decoders.

    Args:
        decoders: base URLs.
        prefillers: base URLs to choose from in turn; empty: the decoders choose.
    """

    def __init__(self, decoders: list[str], prefillers: list[str]) -> None:
        self._decoders = [Decoder(url.rstrip("/")) for url in decoders]
        self._turns: Iterator[str] | None = (
            itertools.cycle(url.rstrip("/") for url in prefillers) if prefillers else None
        )
        self._session: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._run)
        app.router.add_get("/health", self.health)
        app.router.add_route("*", "/{path:.*}", self.forward)
        return app

    async def _run(self, _app: web.Application) -> AsyncIterator[None]:
        """One client session for the life of the process."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        # Bodies pass as they are, also compressed ones.
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self._session:
            yield

    async def health(self, _request: web.Request) -> web.Response:
        """That the proxy is up, and what it is doing; says nothing about the decoders."""
        return web.json_response({"in_flight": {decoder.url: decoder.in_flight for decoder in self._decoders}})

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Try the decoders, the least busy first, until one can be connected to."""
        try:
            body = self._prepare(request.method, await request.read())
        except ProtocolError as error:
            return web.Response(status=400, body=error_body(str(error)), content_type="application/json")
        complaint = "no decoder"
        for decoder in sorted(self._decoders, key=lambda decoder: decoder.in_flight):
            decoder.in_flight += 1
            try:
                return await self._relay(request, decoder.url, body)
            except aiohttp.ClientConnectorError as error:  # it has not seen the request: the next may have it
                complaint = str(error)
            except aiohttp.ClientError as error:
                complaint = f"{decoder.url}: {type(error).__name__}: {error}"
                break
            finally:
                decoder.in_flight -= 1
        error = {"message": complaint, "type": "BadGateway", "param": None, "code": 502}
        return web.json_response({"error": error}, status=502)

    def _prepare(self, method: str, body: bytes) -> bytes:
        """The body to send on: checked, and with a prefiller named unless the client named one.

        Raises:
            ProtocolError: it must not reach an engine.
        """
        if method != "POST":
            return body
        check_body(body)
        if self._turns is None:
            return body
        try:
            parsed = json.loads(body)
        except ValueError:
            return body  # an upload, or nonsense that the decoder will refuse
        if not isinstance(parsed, dict) or not {"prompt", "messages", "input"} & parsed.keys():
            return body
        parsed[KEY] = {"prefiller": next(self._turns), **(parsed.get(KEY) or {})}
        return json.dumps(parsed).encode()

    async def _relay(self, request: web.Request, url: str, body: bytes) -> web.StreamResponse:
        """One exchange with a decoder, chunk by chunk. A client that leaves cancels this, which closes the upstream.

        Raises:
            aiohttp.ClientError: the decoder failed before it answered.
        """
        assert self._session is not None
        async with self._session.request(
            request.method,
            URL(url + request.raw_path, encoded=True),
            data=body or None,
            headers=_pass(request.headers, {"content-length"}),
        ) as upstream:
            response = web.StreamResponse(status=upstream.status, headers=_pass(upstream.headers, set()))
            await response.prepare(request)
            try:
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
            except aiohttp.ClientError:
                if request.transport is not None:
                    request.transport.abort()  # half an answer must not look like a whole one
                return response
            await response.write_eof()
            return response


def _pass(headers: Mapping[str, str], drop: set[str]) -> CIMultiDict[str]:
    """The headers that belong to the message."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP_HEADERS | drop)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoders", nargs="+", required=True, metavar="URL", help="base URLs of decoders")
    parser.add_argument("--prefillers", nargs="*", default=[], metavar="URL", help="base URLs to take turns with")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    # Without handler_cancellation a client that leaves is noticed only at the next chunk.
    web.run_app(Proxy(args.decoders, args.prefillers).app(), host=args.host, port=args.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
