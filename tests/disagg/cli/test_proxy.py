"""`kvpool proxy` before servers that note what they are asked for: what each side is sent, and what
reaches the client. Pairs of real engines: tests/engines.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from typer.testing import CliRunner

from disagg.cli.proxy.app import proxy_app
from disagg.connectors.source import prompt_digest
from kvpool.cli import app

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"model": "m", "prompt": "a b c", "max_tokens": 9, "temperature": 0.5, "n": 1}
PARAMS = {"do_remote_prefill": True, "remote_request_id": "r", "remote_addresses": ["ipc:///p"]}
SECONDS = 30


@dataclass
class Engine:
    """A server that notes each request; `answer` is a body or a handler, by path."""

    mode: str | None = None  # SGLang's; None: a server of vLLM
    answers: dict[str, Any] = field(default_factory=dict)
    asked: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/server_info":
            told = {"disaggregation_mode": self.mode, "disaggregation_bootstrap_port": self.port}
            return web.json_response(told) if self.mode else web.Response(status=404)
        if request.path == "/route":
            return web.json_response(self.route(request.query))
        self.asked.append((request.path, await request.json()))
        self.headers.append(request.headers)
        answer = self.answers.get(request.path, {"choices": [], "served by": self.url})
        try:
            return await answer(request) if callable(answer) else web.json_response(answer)
        except asyncio.CancelledError:
            self.left.set()
            raise

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def route(self, query: Any) -> dict[str, Any]:
        if query["target_tp_rank"] == "-1":
            return {"pp_size": 1, "attn_tp_size": 2}
        return {"rank_ip": f"/rank{query['target_tp_rank']}", "rank_port": 0}


async def started(stack: AsyncExitStack, application: web.Application) -> str:
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


def with_proxy(
    client: Callable[..., Any], prefills: list[Engine], decodes: list[Engine], **more: Any
) -> None:
    """Runs `client(session, url)` with a proxy before these servers."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            for engine in (*prefills, *decodes):
                if engine.url:
                    continue  # nobody is there
                application = web.Application()
                application.router.add_route("*", "/{path:.*}", engine.handle)
                engine.url = await started(stack, application)
            urls = ([engine.url for engine in side] for side in (prefills, decodes))
            url = await started(stack, proxy_app(*urls, **more))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await asyncio.wait_for(client(session, url), SECONDS)

    asyncio.run(main())


def vllm(**answer: Any) -> Engine:
    """A prefill of vLLM that answers what decode is to be told."""
    return Engine(answers=dict.fromkeys((TEXT, CHAT), {"kv_transfer_params": PARAMS} | answer))


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_vllms_prefill_is_asked_for_a_token_and_decode_for_the_rest(path):
    prefill, decode = vllm(), Engine()
    body = BODY | {"stream_options": {}, "min_tokens": 3, "n": 2, "max_completion_tokens": 7}

    async def client(session, url):
        name = {"X-Request-Id": "one", "Authorization": "Bearer key", "traceparent": "00-1-2-01"}
        async with session.post(url + path, json=body, headers=name) as answer:
            assert (answer.status, await answer.json()) == (200, decode_answer(decode))
            steps = re.findall(r"(\w+);dur=[\d.]+", answer.headers["Server-Timing"])
            assert steps == ["prefill", "decode", "total"]

    with_proxy(client, [prefill], [decode])
    ((there, asked),), ((here, rest),) = prefill.asked, decode.asked
    assert there == here == path
    assert rest == body | {"kv_transfer_params": PARAMS}
    assert asked.pop("kv_transfer_params")["do_remote_decode"] is True
    one = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}
    kept = {name: body[name] for name in ("model", "prompt", "temperature")}
    assert asked == kept | one
    for headers in (*prefill.headers, *decode.headers):
        assert headers["X-Request-Id"] == "one" and headers["traceparent"] == "00-1-2-01"
        assert headers["Authorization"] == "Bearer key"


def decode_answer(decode: Engine) -> dict[str, Any]:
    return {"choices": [], "served by": decode.url}


def test_at_once_both_are_told_a_room_where_prefills_addresses_are_known():
    prefill, decode = vllm(), Engine()

    async def client(session, url):
        for _ in range(2):
            async with session.post(url + TEXT, json=BODY) as answer:
                assert await answer.json() == decode_answer(decode)

    with_proxy(client, [prefill], [decode], at_once=True)
    (_, first), (_, second) = (decode.asked[n] for n in (0, 1))
    assert first["kv_transfer_params"] == PARAMS
    room = prefill.asked[1][1]["kv_transfer_params"]["room"]
    assert second["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "room": room,
        "remote_addresses": ["ipc:///p"],
    }


def test_sglangs_servers_are_both_told_room_and_bootstrap_server():
    prefill, decode = Engine(mode="prefill"), Engine(mode="decode")

    async def client(session, url):
        async with session.post(url + CHAT, json=BODY | {"stream": True}) as answer:
            assert await answer.json() == decode_answer(decode)

    with_proxy(client, [prefill], [decode])
    ((_, asked),), ((_, rest),) = prefill.asked, decode.asked
    room = rest["bootstrap_room"]
    where = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.port, "bootstrap_room": room}
    assert rest == BODY | where | {"stream": True} and 0 <= room < 2**63
    assert asked == rest | {"stream": False}


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_from_vllm_to_sglang_go_the_tokens_that_vllm_has_computed(path):
    ids = [5, 6, 7]
    prefill = (
        vllm(choices=[{"prompt_token_ids": ids}]) if path == TEXT else vllm(prompt_token_ids=ids)
    )
    decode = Engine(mode="decode")

    async def client(session, url):
        async with session.post(url + path, json=BODY | {"min_tokens": 4}) as answer:
            assert await answer.json() == decode_answer(decode)
        where = decode.asked[0][1]
        route = f"http://{where['bootstrap_host']}:{where['bootstrap_port']}/route?target_tp_rank="
        async with session.get(f"{route}-1") as sizes, session.get(f"{route}0") as rank:
            assert (await sizes.json(content_type=None))["attn_tp_size"] == 1
            assert (await rank.json(content_type=None)) == {"rank_ip": "ipc:///p", "rank_port": 0}

    with_proxy(client, [prefill], [decode])
    ((_, asked),), ((_, rest),) = prefill.asked, decode.asked
    params = asked["kv_transfer_params"]
    assert params["whole"] is True and params["room"] == rest["bootstrap_room"]
    assert asked["return_token_ids"] is True and asked["min_tokens"] == 1
    assert rest["prompt" if path == TEXT else "input_ids"] == ids


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_from_sglang_to_vllm_go_all_tokens_but_the_last(path):
    prefill = Engine(mode="prefill")
    decode = Engine(answers={"/tokenize": {"tokens": [5, 6, 7]}})
    messages = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    body = BODY | (messages if path == CHAT else {})

    async def client(session, url):
        async with session.post(url + path, json=body) as answer:
            assert await answer.json() == decode_answer(decode)

    with_proxy(client, [prefill], [decode])
    ((there, asked),) = prefill.asked
    (_, render), (_, rest) = decode.asked
    assert render == {"model": "m"} | (messages if path == CHAT else {"prompt": "a b c"})
    assert there == "/generate" and asked["input_ids"] == [5, 6]
    assert asked["bootstrap_port"] == prefill.port
    assert rest.pop("kv_transfer_params") == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": asked["bootstrap_room"],
        "remote_addresses": ["/rank0", "/rank1"],
        "remote_num_tokens": 2,
        "remote_prompt": prompt_digest([5, 6]),
    }
    assert rest == body


def test_requests_take_servers_in_turns():
    prefills, decodes = [vllm() for _ in range(3)], [Engine() for _ in range(2)]

    async def client(session, url):
        for _ in range(6):
            async with session.post(url + TEXT, json=BODY) as answer:
                assert answer.ok

    with_proxy(client, prefills, decodes)
    assert [len(engine.asked) for engine in (*prefills, *decodes)] == [2, 2, 2, 3, 3]


def refusing(status: int) -> Callable[..., Any]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status, text="{ no \u2603", content_type="text/plain")

    return answer


@pytest.mark.parametrize("mode", [None, "sglang"])
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_error_of_either_side_is_passed_on_unchanged(side, mode):
    engines = {
        name: Engine(mode=mode and name) if mode or name == "decode" else vllm()
        for name in ("prefill", "decode")
    }

    async def never(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError

    engines[side].answers[TEXT] = refusing(418)
    if mode:  # the other one would wait for it
        engines["decode" if side == "prefill" else "prefill"].answers[TEXT] = never

    async def client(session, url):
        async with session.post(url + TEXT, json=BODY) as answer:
            assert (answer.status, await answer.text()) == (418, "{ no \u2603")
            assert answer.content_type == "text/plain"
        if mode:
            await engines["decode" if side == "prefill" else "prefill"].left.wait()

    with_proxy(client, [engines["prefill"]], [engines["decode"]])


def test_a_server_that_is_not_there_is_named():
    nobody = Engine(url="http://127.0.0.1:9")

    async def client(session, url):
        async with session.post(url + TEXT, json=BODY) as answer:
            assert answer.status == 502
            assert "http://127.0.0.1:9" in (await answer.json())["error"]["message"]

    with_proxy(client, [vllm()], [nobody])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ["a", "b"]}, "one prompt a request"),
        ({"n": 2}, "n = 1"),
        ({"logprobs": 1}, "no logprobs"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only"),
    ],
)
def test_what_two_engines_do_not_treat_alike_is_refused(body, words):
    prefill, decode = vllm(), Engine(mode="decode")

    async def client(session, url):
        async with session.post(url + TEXT, json=BODY | body) as answer:
            assert answer.status == 400
            assert words in (await answer.json())["error"]["message"]

    with_proxy(client, [prefill], [decode])
    assert not prefill.asked and not decode.asked


def test_a_server_of_the_wrong_mode_is_refused():
    async def client(session, url):
        async with session.post(url + TEXT, json=BODY) as answer:
            assert answer.status == 502
            message = (await answer.json())["error"]["message"]
            assert "--disaggregation-mode decode, --prefill needs prefill" in message

    with_proxy(client, [Engine(mode="decode")], [Engine(mode="decode")])


PIECES = [b"data: \xe2\x98", b"\x83\n\n", b"data: [DONE]\n\n"]


def test_bytes_are_passed_on_as_they_come():
    more = asyncio.Event()

    async def pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for piece in PIECES:
            await response.write(piece)
            await more.wait()  # until the client has it
            more.clear()
        return response

    async def client(session, url):
        async with session.post(url + TEXT, json=BODY | {"stream": True}) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            for piece in PIECES:
                assert await answer.content.readexactly(len(piece)) == piece
                more.set()
            assert await answer.content.read() == b""

    with_proxy(client, [vllm()], [Engine(answers={TEXT: pieces})])


@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_leaves_ends_the_request_on_both_sides(begun):
    waits = asyncio.Event()

    async def hold(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if begun:
            await response.prepare(request)
            await response.write(b"a")
        waits.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def silent(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    prefill = Engine(mode="prefill", answers={TEXT: silent})
    decode = Engine(mode="decode", answers={TEXT: hold})

    async def client(session, url):
        asked = asyncio.create_task(session.post(url + TEXT, json=BODY))
        await waits.wait()
        if begun:
            answer = await asked
            assert await answer.content.readexactly(1) == b"a"
            answer.close()
        asked.cancel()
        await prefill.left.wait()
        await decode.left.wait()

    with_proxy(client, [prefill], [decode])


def test_a_client_does_not_wait_for_prefills_own_answer():
    late, answered = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        await late.wait()
        answered.set()
        return web.json_response({})

    prefill, decode = Engine(mode="prefill", answers={TEXT: slow}), Engine(mode="decode")

    async def client(session, url):
        for _ in range(2):
            async with session.post(url + TEXT, json=BODY) as answer:
                assert await answer.json() == decode_answer(decode)
        await session.close()
        late.set()
        await answered.wait()
        assert not prefill.left.is_set()

    with_proxy(client, [prefill], [decode])


def test_an_answer_that_breaks_off_breaks_off_for_the_client():
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"a")
        request.transport.abort()
        return response

    async def client(session, url):
        with pytest.raises(aiohttp.ClientError):
            async with session.post(url + TEXT, json=BODY) as answer:
                assert answer.status != 200 or await answer.read() == b"whole"
                answer.raise_for_status()

    with_proxy(client, [vllm()], [Engine(answers={TEXT: breaks})])


def test_connections_are_kept():
    prefill, decode = vllm(), Engine()
    peers = set()

    async def noted(request: web.Request) -> web.Response:
        peers.add(request.transport.get_extra_info("peername"))
        return web.json_response({})

    decode.answers[TEXT] = noted

    async def client(session, url):
        for _ in range(5):
            async with session.post(url + TEXT, json=BODY) as answer:
                await answer.read()

    with_proxy(client, [prefill], [decode])
    assert len(peers) == 1


def test_the_command_serves_at_a_free_port():
    sides = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9/"]
    command = [sys.executable, "-m", "kvpool", "proxy", *sides, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()

            async def ask():
                async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as one:
                    return await one.json()

            assert asyncio.run(asyncio.wait_for(ask(), SECONDS)) == {"prefill": 1, "decode": 1}
        finally:
            process.terminate()


def test_a_url_without_a_scheme_is_refused():
    done = CliRunner().invoke(app, ["proxy", "--prefill", "here:1", "--decode", "http://there:2"])
    assert done.exit_code == 2 and "here:1: http://HOST:PORT" in done.output


def test_a_body_that_is_no_object_is_refused():
    async def client(session, url):
        async with session.post(url + TEXT, data=json.dumps([1])) as answer:
            assert answer.status == 400

    with_proxy(client, [vllm()], [Engine()])
