"""`vllm-router` and `kvpool proxy` before two prefill and two decode servers. The tokens are those
of a decode that is asked without them: it computes the prompt by itself.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from http.client import HTTPConnection

import httpx
import pytest

from tests.engines.servers import Server, greedy, kvpool_proxy, tokens
from tests.engines.vllm import models
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.servers import forked_server
from tests.ports import free_port

pytestmark = pytest.mark.timeout(600)
CHAT = "/v1/chat/completions"
BEFORE = ("router", "proxy")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Lists of prefill and decode servers, and by name what stands before them."""
    folder = tmp_path_factory.mktemp("servers")
    model = models.save("llama", folder)
    # bfloat16 rounds as batches happen to be; a decode that refuses a request leaves a lease
    options = {"dtype": "float32", "extra": {"lease": 10.0}}
    with ExitStack() as stack:
        sides = {
            role: [
                stack.enter_context(forked_server(role, model, folder, **options)) for _ in which
            ]
            for role, which in (("prefill", "12"), ("decode", "12"))
        }
        for server in [one for side in sides.values() for one in side]:
            server.ready(300)
        router = ["--vllm-pd-disaggregation", "--policy", "round_robin"]
        for side in ("prefill", "decode"):
            router += [word for one in sides[side] for word in (f"--{side}", one.url)]
        prometheus = ["--prometheus-port", str(free_port())]
        module = "vllm_router.launch_router"
        pair = {
            "router": Server("router", module, router + prometheus, folder),
            "proxy": kvpool_proxy(sides["prefill"], sides["decode"], folder),
        }
        for one in pair.values():
            stack.enter_context(one).ready()
        yield sides | pair


def idle(servers):
    for server in [*servers["prefill"], *servers["decode"]]:
        server.idle()


def read(servers):
    """Rooms that each decode has read."""
    return [
        server.metric("kvpool_rooms_total", outcome="success") or 0 for server in servers["decode"]
    ]


def words(count, seed=1):
    return " ".join(f"w{number}" for number in prompts(count, seed=seed)[0])


@pytest.mark.parametrize("before", BEFORE)
def test_completions_have_one_servers_tokens(servers, before):
    known = read(servers)
    for seed, length in enumerate((300, 77, 16, 513)):
        (prompt,) = prompts(length, seed=seed)
        asked = {"model": "llama", "prompt": prompt}
        expected = servers["decode"][0].ask(**asked)
        answer = servers[before].ask(**asked)
        assert len(tokens(answer)) == 24 and tokens(answer) == tokens(expected)
        assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
        assert tokens(servers[before].stream(**asked)) == tokens(expected)
    assert [now - then for now, then in zip(read(servers), known)] == [4, 4]  # in turns
    idle(servers)


@pytest.mark.parametrize("before", BEFORE)
def test_chats_have_one_servers_tokens(servers, before):
    asked = {"model": "llama", "messages": [{"role": "user", "content": words(200)}]}
    expected = servers["decode"][0].ask(CHAT, **asked)
    answer = servers[before].ask(CHAT, **asked)
    assert len(tokens(answer)) == 24 and tokens(answer) == tokens(expected)
    assert (
        answer["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
    )
    events = servers[before].stream(CHAT, **asked)
    assert tokens(events) == tokens(expected)
    idle(servers)


@pytest.mark.parametrize("before", BEFORE)
def test_a_bad_request_is_refused_as_by_one_server(servers, before):
    (prompt,), alone = prompts(40), servers["decode"][0]
    asked = greedy(model="llama", prompt=prompt)
    for wrong in ({"top_p": 7}, {"max_tokens": 5000}):
        answer, expected = (
            httpx.post(f"{one.url}/v1/completions", json=asked | wrong, timeout=60)
            for one in (servers[before], alone)
        )
        assert answer.status_code == expected.status_code == 400, answer.text
        assert expected.json()["error"]["message"] in json.dumps(answer.json())
    idle(servers)


@pytest.mark.parametrize("before", BEFORE)
def test_blocks_come_back_where_a_client_leaves(servers, before):
    body = greedy(model="llama", prompt=prompts(300)[0], max_tokens=700, stream=True)
    connection = HTTPConnection(servers[before].url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body))
    assert connection.getresponse().readline()
    connection.close()
    idle(servers)
