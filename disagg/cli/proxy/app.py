"""The proxy's HTTP: requests in, decode's bytes out."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, web

from disagg.cli.proxy.asks import CHAT, NotHandedOver, parsed
from disagg.cli.proxy.exchange import Answer, Exchange
from disagg.cli.proxy.servers import BootstrapServers, NoAnswer, Upstream

ONE_HOP = {
    *("connection", "keep-alive", "proxy-connection", "te", "trailer", "upgrade", "expect"),
    *("transfer-encoding", "content-length", "content-type", "host", "date", "server"),
}
"""Headers that are not passed on: of one connection, or written here."""
IDLE_SECONDS = 2.0
"""Idle connections are closed before the servers close them, after 5: a request that meets such a
close fails."""
CONNECT_SECONDS = 10.0
MOST_BYTES = 1 << 30


def proxy_app(
    prefills: Sequence[str], decodes: Sequence[str], *, at_once: bool = False
) -> web.Application:
    """An application that hands requests to prefill and decode servers in turns, by their URLs.
    Run it with `handler_cancellation`, so that a client that leaves ends its request.
    """
    proxy = _Proxy(
        prefills=[Upstream(role="prefill", url=url.rstrip("/")) for url in prefills],
        decodes=[Upstream(role="decode", url=url.rstrip("/")) for url in decodes],
        at_once=at_once,
    )
    app = web.Application(client_max_size=MOST_BYTES)
    app.cleanup_ctx.append(proxy.run)
    app.router.add_get("/health", proxy.health)
    app.router.add_get("/v1/models", proxy.models)
    for path in ("/v1/completions", CHAT):
        app.router.add_post(path, proxy.completions)
    return app


@dataclass(eq=False, kw_only=True)
class _Proxy:
    prefills: list[Upstream]
    decodes: list[Upstream]
    at_once: bool
    _bootstraps: BootstrapServers = field(default_factory=BootstrapServers)

    async def run(self, app: web.Application) -> AsyncIterator[None]:
        """One pool of connections, as long as the application runs."""
        self._turns = itertools.cycle(self.prefills), itertools.cycle(self.decodes)
        connector = TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        async with ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,  # bodies are passed on as they come
            cookie_jar=DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
        ) as self._session:
            yield
        self._bootstraps.close()

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"prefill": len(self.prefills), "decode": len(self.decodes)})

    async def models(self, request: web.Request) -> web.StreamResponse:
        try:
            url = self.decodes[0].url + request.path
            async with self._session.get(url, headers=_asked_headers(request)) as response:
                return await _pass_on(request, Answer(response, b""), {})
        except (ClientError, OSError) as error:
            return _error(502, f"{url}: {error}")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        began = time.perf_counter()
        body = parsed(await request.read())
        if not body:
            return _error(400, "the body is no JSON object.")
        prefill, decode = (next(turn) for turn in self._turns)
        exchange = Exchange(
            session=self._session,
            bootstraps=self._bootstraps,
            path=request.path,
            body=body,
            headers=_asked_headers(request),
            prefill=prefill,
            decode=decode,
            at_once=self.at_once,
        )
        try:
            answer = await exchange.answer()
            steps = exchange.seconds | {"total": time.perf_counter() - began}
            response = await _pass_on(request, answer, steps)
            if not answer.failed:
                exchange.complete()
            return response
        except NotHandedOver as error:
            return _error(400, f"kvpool proxy between vLLM and SGLang: {error}")
        except NoAnswer as error:
            return _error(502, str(error))
        finally:
            exchange.close()


async def _pass_on(
    request: web.Request, answer: Answer, steps: Mapping[str, float]
) -> web.StreamResponse:
    """Status, headers and bytes. An answer that breaks off does so for the client too."""
    theirs = answer.response
    response = web.StreamResponse(status=theirs.status, reason=theirs.reason)
    for name, value in theirs.headers.items():
        if name.lower() not in ONE_HOP or name.lower() == "content-type":
            response.headers.add(name, value)
    if length := theirs.headers.get("Content-Length"):
        response.content_length = int(length)
    if steps:
        timing = ", ".join(f"{name};dur={1e3 * seconds:.1f}" for name, seconds in steps.items())
        response.headers["Server-Timing"] = timing
    await response.prepare(request)
    if answer.start:
        await response.write(answer.start)
    async for chunk in theirs.content.iter_any():
        await response.write(chunk)
    await response.write_eof()
    return response


def _asked_headers(request: web.Request) -> dict[str, str]:
    """The client's, and a name by which both sides know the request."""
    kept = {name: text for name, text in request.headers.items() if name.lower() not in ONE_HOP}
    kept = {"X-Request-Id": str(uuid.uuid4())} | kept
    return kept | {"Content-Type": "application/json"}


def _error(status: int, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "bad_gateway"
    body = {"error": {"message": message, "type": kind, "code": status}}
    return web.Response(
        status=status, body=msgspec.json.encode(body), content_type="application/json"
    )
