"""vLLM's and SGLang's API servers share requests by way of `kvpool proxy`. The text is that of a
vLLM server which computes the prompt by itself.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from http.client import HTTPConnection

import httpx
import pytest

from tests.engines.servers import kvpool_proxy, texts
from tests.engines.sglang.servers import SglangServer, chat_template
from tests.engines.vllm import models
from tests.engines.vllm.engines import prompts
from tests.engines.vllm.servers import forked_server

pytestmark = pytest.mark.timeout(600)
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
WAYS = ("vllm to sglang", "sglang to vllm")
MODEL = {"model": "llama"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Servers by engine and role, and proxies by way."""
    folder = tmp_path_factory.mktemp("servers")
    model = models.save("llama", folder)
    exact = {"dtype": "float32"}
    template = {"chat_template": chat_template(folder)}
    extra = {"extra": {"lease": 10.0}}
    with ExitStack() as stack:
        made = {}
        for role in ("prefill", "decode"):
            vllm = forked_server(role, model, folder, block_size=32, **exact, **extra)
            made["vllm", role] = stack.enter_context(vllm)
            sglang = SglangServer(role, model, folder, page_size=16, **exact, **template)
            made["sglang", role] = stack.enter_context(sglang)
        for server in made.values():
            server.ready(300)
        proxies = {}
        for way in WAYS:
            first, _, second = way.split()
            pair = [made[first, "prefill"]], [made[second, "decode"]]
            proxies[way] = stack.enter_context(kvpool_proxy(*pair, folder)).ready()
        yield made | proxies


def idle(servers, way):
    first, _, second = way.split()
    servers[first, "prefill"].idle()
    servers[second, "decode"].idle()


@pytest.mark.parametrize("way", WAYS)
def test_completions_have_one_servers_text(way, servers):
    asked = MODEL | {"prompt": prompts(300)[0]}
    expected, _ = texts(servers["vllm", "decode"], TEXT, **asked)
    assert texts(servers[way], TEXT, **asked) == (expected, expected) and expected
    idle(servers, way)


@pytest.mark.parametrize("way", WAYS)
def test_chats_have_one_servers_words(way, servers):
    """SGLang's chats have no space before the first word."""
    words = " ".join(f"w{number}" for number in prompts(200)[0])
    asked = MODEL | {"messages": [{"role": "user", "content": words}]}
    expected, _ = texts(servers["vllm", "decode"], CHAT, **asked)
    answers = [text.split() for text in texts(servers[way], CHAT, **asked)]
    assert answers == [expected.split()] * 2 and expected
    idle(servers, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_bad_request_is_refused(way, servers):
    for wrong in ({"top_p": 7}, {"prompt": ["a", "b"]}):
        body = MODEL | {"prompt": prompts(40)[0]} | wrong
        answer = httpx.post(f"{servers[way].url}{TEXT}", json=body, timeout=60)
        assert answer.status_code == 400, answer.text
    idle(servers, way)


@pytest.mark.parametrize("way", WAYS)
def test_state_comes_back_where_a_client_leaves(way, servers):
    body = MODEL | {"prompt": prompts(300)[0], "max_tokens": 700, "ignore_eos": True}
    connection = HTTPConnection(servers[way].url.removeprefix("http://"), timeout=60)
    connection.request("POST", TEXT, json.dumps(body | {"stream": True}))
    assert connection.getresponse().readline()
    connection.close()
    idle(servers, way)
