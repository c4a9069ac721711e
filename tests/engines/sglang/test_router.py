"""`sglang-router` and `kvpool proxy` before two prefill and two decode servers, beside one
server.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from http.client import HTTPConnection

import httpx
import pytest

from tests.engines.servers import Server, kvpool_proxy, texts
from tests.engines.sglang.servers import SglangServer, chat_template
from tests.engines.vllm import models
from tests.engines.vllm.engines import prompts
from tests.ports import free_port
from tests.processes import until

pytestmark = pytest.mark.timeout(600)
CHAT = "/v1/chat/completions"
BEFORE = ("router", "proxy")
MODEL = {"model": "llama"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Lists of prefill, decode and single servers, and by name what stands before the pairs."""
    folder = tmp_path_factory.mktemp("servers")
    model = models.save("llama", folder)
    exact = {
        "dtype": "float32",
        "chat_template": chat_template(folder),
        "enable_metrics": True,
    }
    with ExitStack() as stack:
        sides = {
            role: [stack.enter_context(SglangServer(role, model, folder, **exact)) for _ in which]
            for role, which in (("prefill", "12"), ("decode", "12"), ("single", "1"))
        }
        for server in [one for side in sides.values() for one in side]:
            server.ready(300)
        router = ["--pd-disaggregation", "--policy", "round_robin"]
        router += ["--prometheus-port", str(free_port())]
        for one in sides["prefill"]:
            router += ["--prefill", one.url, str(one.bootstrap_port)]
        for one in sides["decode"]:
            router += ["--decode", one.url]
        pair = {
            "router": Server("router", "sglang_router.launch_router", router, folder),
            "proxy": kvpool_proxy(sides["prefill"], sides["decode"], folder),
        }
        for one in pair.values():
            stack.enter_context(one).ready()
        yield sides | pair


def words(count, seed=1):
    return " ".join(f"w{number}" for number in prompts(count, seed=seed)[0])


def idle(servers):
    for server in [*servers["prefill"], *servers["decode"]]:
        server.idle()


@pytest.mark.parametrize("before", BEFORE)
def test_completions_have_one_servers_text(servers, before):
    for seed, length in enumerate((300, 77, 16, 513)):
        prompt = words(length, seed)  # the router takes no token ids
        answers = texts(servers[before], "/v1/completions", **MODEL, prompt=prompt)
        expected, _ = texts(servers["single"][0], "/v1/completions", **MODEL, prompt=prompt)
        assert answers == (expected, expected) and expected
    idle(servers)


@pytest.mark.parametrize("before", BEFORE)
def test_chats_have_one_servers_text(servers, before):
    asked = MODEL | {"messages": [{"role": "user", "content": words(200)}]}
    expected, _ = texts(servers["single"][0], CHAT, **asked)
    assert texts(servers[before], CHAT, **asked) == (expected, expected) and expected
    idle(servers)


@pytest.mark.parametrize("before", BEFORE)
def test_a_bad_request_is_refused_as_by_one_server(servers, before):
    for wrong in ({"top_p": 7}, {"prompt": words(5000)}):
        body = MODEL | {"prompt": "w7 w8"} | wrong
        answer, expected = (
            httpx.post(f"{one.url}/v1/completions", json=body, timeout=60)
            for one in (servers[before], servers["single"][0])
        )
        assert answer.status_code == expected.status_code == 400, (answer.text, expected.text)
    idle(servers)


@pytest.mark.parametrize("before", BEFORE)
def test_pages_come_back_where_a_client_leaves(servers, before):
    body = MODEL | {
        "prompt": words(300),
        "max_tokens": 700,
        "ignore_eos": True,
        "stream": True,
    }
    connection = HTTPConnection(servers[before].url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body))
    assert connection.getresponse().readline()
    connection.close()
    idle(servers)
    asked = MODEL | {"prompt": words(300)}
    expected, _ = texts(servers["single"][0], "/v1/completions", **asked)
    assert texts(servers[before], "/v1/completions", **asked) == (expected, expected)


def test_metrics_of_both_sides_have_a_hand_off(servers):
    def counted(side, name, **labels):
        found = [one.metric(name, model_name="llama", **labels) for one in servers[side]]
        return sum(number or 0 for number in found)

    def numbers():
        ended = [
            counted(side, "kvpool_rooms_total", endpoint=side, outcome="success")
            for side in ("prefill", "decode")
        ]
        timed = counted("decode", "kvpool_phase_seconds_count", endpoint="decode", phase="total")
        return [*ended, timed, counted("decode", "kvpool_moved_bytes_total", endpoint="decode")]

    until(lambda: counted("decode", "kvpool_open_rooms") == 0)
    before = numbers()
    prompt = words(150)
    answer = servers["proxy"].ask(model="llama", prompt=prompt)
    length = answer["usage"]["prompt_tokens"]
    # K and V of each token of the prompt: 4 layers, 4 heads of 32 float32 elements
    more = [1, 1, 1, length * 2 * 4 * 4 * 32 * 4]
    until(lambda: [now - then for now, then in zip(numbers(), before)] == more)
    for side in ("prefill", "decode"):
        assert counted(side, "kvpool_lost_peers_total") == 0
        until(lambda side=side: counted(side, "kvpool_open_rooms", endpoint=side) == 0)
