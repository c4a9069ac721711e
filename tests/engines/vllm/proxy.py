"""`python -m tests.engines.vllm.proxy --prefill URL --decode URL`: one address for both sides.

The protocol is that of vLLM's own toy proxy, `tests/v1/kv_connector/nixl_integration/
toy_proxy_server.py` at commit 030ea52: prefill is asked for one token with `do_remote_decode`;
decode is asked for the request as it came, with the `kv_transfer_params` that prefill answered.
Beyond it: statuses and bodies of errors reach the client, a client that leaves ends both requests,
and prefill computes a prompt once where `n` sequences are asked for (else it holds n - 1 prompts
that nobody fetches until their lease ends). One prompt a request: decode is told of one.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from tests.engines.vllm.engines import PREFILL

ONLY_DECODE = ("stream_options", "min_tokens", "min_completion_tokens")
CLIENT_LEFT = 499


def proxy(prefill: list[str], decode: list[str]) -> FastAPI:
    """An application that hands requests to prefill and decode servers in turns, by their URLs."""
    prefills, decodes = itertools.cycle(prefill), itertools.cycle(decode)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=None, limits=unlimited) as app.state.client:
            yield

    app = FastAPI(lifespan=lifespan)

    @app.get("/health")
    async def health() -> dict[str, int]:
        return {"prefill": len(prefill), "decode": len(decode)}

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def completions(request: Request) -> Response:
        body = await request.json()  # before `_left`: both read the connection
        path, client = request.url.path, request.app.state.client
        answer = asyncio.ensure_future(
            _hand_over(client, next(prefills) + path, next(decodes) + path, body, _headers(request))
        )
        left = asyncio.ensure_future(_left(request))
        await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if answer.done():
            return await answer
        answer.cancel()
        return Response(status_code=CLIENT_LEFT)

    return app


def prefill_request(body: dict[str, Any]) -> dict[str, Any]:
    """What prefill is asked for, where a client asks for `body`."""
    asked = {key: value for key, value in body.items() if key not in ONLY_DECODE}
    asked |= {"kv_transfer_params": PREFILL, "stream": False, "max_tokens": 1}
    for one in ("max_completion_tokens", "n"):
        if one in body:
            asked[one] = 1
    return asked


async def _hand_over(
    client: httpx.AsyncClient,
    prefill: str,
    decode: str,
    body: dict[str, Any],
    headers: dict[str, str],
) -> Response:
    first = await client.post(prefill, json=prefill_request(body), headers=headers)
    if first.is_error:
        return Response(first.content, first.status_code, media_type=_media_type(first))
    if params := first.json().get("kv_transfer_params"):
        body = body | {"kv_transfer_params": params}
    asked = client.build_request("POST", decode, json=body, headers=headers)
    second = await client.send(asked, stream=True)
    return StreamingResponse(_chunks(second), second.status_code, media_type=_media_type(second))


async def _chunks(response: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in response.aiter_bytes():
            yield chunk
    finally:  # a client that leaves ends decode's request
        await response.aclose()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _headers(request: Request) -> dict[str, str]:
    """Both sides know a request by one name."""
    kept = {"x-request-id": request.headers.get("x-request-id") or str(uuid.uuid4())}
    if "authorization" in request.headers:
        kept["authorization"] = request.headers["authorization"]
    return kept


def _media_type(response: httpx.Response) -> str:
    return response.headers.get("content-type", "application/json")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for side in ("prefill", "decode"):
        parser.add_argument(f"--{side}", nargs="+", required=True, metavar="URL")
    given = parser.parse_args()
    uvicorn.run(proxy(given.prefill, given.decode), host=given.host, port=given.port)
