"""Two vLLM API servers and the proxy, over HTTP, beside a single server.

Prefill names the connector's module, decode finds it by its entry point (`vllm.general_plugins`).
Engine cores and workers are processes of their own, as vLLM deploys them.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import NamedTuple

import httpx
import pytest

from disagg import DecodeEndpoint, create_engine
from disagg.plan import IncompatibleLayouts
from kvpool import MHAPool
from tests.engines.servers import Server, greedy, kvpool_proxy, tokens
from tests.engines.vllm import models
from tests.engines.vllm.engines import PREFILL, prompts
from tests.engines.vllm.servers import PLUGIN, api_server

pytestmark = pytest.mark.timeout(900)
CHAT = "/v1/chat/completions"
LOST = "ipc:///nobody/listens"


class Servers(NamedTuple):
    prefill: Server
    decode: Server
    single: Server
    pair: Server

    def idle(self):
        for server in self[:3]:
            server.idle()

    def read(self):
        """Rooms that decode has read."""
        return self.decode.metric("kvpool_rooms_total", outcome="success") or 0


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("servers")
    model = models.save("llama", folder)
    extra = {"lease": 30.0, "peer_timeout": 10}
    exact = {"dtype": "float32"}  # bfloat16 rounds as batches happen to be
    with (
        api_server("prefill", model, folder, extra=extra, **exact) as prefill,
        api_server(
            "decode", model, folder, extra=extra, **exact, transfer=PLUGIN, block_size=32
        ) as decode,
        api_server("single", model, folder, **exact) as single,
        kvpool_proxy([prefill], [decode], folder) as pair,
    ):
        for server in (prefill, decode, single, pair):
            server.ready(600)
        yield Servers(prefill, decode, single, pair)


def words(count):
    return " ".join(f"w{number}" for number in prompts(count)[0])


def test_completions_have_the_single_servers_tokens(servers):
    before = servers.read()
    for prompt in prompts(300, 77, 16, 513):
        asked = {"model": "llama", "prompt": prompt}
        ours, theirs = servers.pair.ask(**asked), servers.single.ask(**asked)
        assert len(tokens(ours)) == 24 and tokens(ours) == tokens(theirs)
        assert ours["usage"]["prompt_tokens"] == theirs["usage"]["prompt_tokens"]
        events = servers.pair.stream(**asked)
        assert tokens(events) == tokens(theirs)
    assert servers.read() == before + 8
    servers.idle()


def test_chats_have_the_single_servers_tokens(servers):
    before = servers.read()
    asked = {"model": "llama", "messages": [{"role": "user", "content": words(200)}]}
    ours, theirs = (one.ask(CHAT, **asked) for one in (servers.pair, servers.single))
    assert len(tokens(ours)) == 24 and tokens(ours) == tokens(theirs)
    assert ours["choices"][0]["message"] == theirs["choices"][0]["message"]
    more = {"max_completion_tokens": 24, "stream_options": {"include_usage": True}}
    events = servers.pair.stream(CHAT, **asked, **more)
    assert tokens(events) == tokens(theirs)
    assert events[-1]["usage"].items() <= theirs["usage"].items()
    assert servers.read() == before + 2
    servers.idle()


def test_concurrent_requests_have_the_single_servers_tokens(servers):
    before = servers.read()
    asked = [{"model": "llama", "prompt": one} for one in prompts(*range(20, 420, 25))]
    with ThreadPoolExecutor(len(asked)) as pool:
        ours = [*pool.map(lambda one: servers.pair.ask(**one), asked)]
        streamed = [*pool.map(lambda one: servers.pair.stream(**one), asked)]
    theirs = [tokens(servers.single.ask(**one)) for one in asked]
    assert [tokens(one) for one in ours] == theirs
    assert [tokens(one) for one in streamed] == theirs
    assert servers.read() == before + 2 * len(asked)
    servers.idle()


def test_n_sequences_of_one_prompt_hold_no_blocks_afterwards(servers):
    (prompt,) = prompts(300)
    greedily = {"model": "llama", "prompt": prompt, "temperature": 1, "top_k": 1}
    ours, theirs = servers.pair.ask(**greedily, n=2), servers.single.ask(**greedily)
    assert tokens(ours, 0) == tokens(ours, 1) == tokens(theirs)
    servers.idle()


@pytest.mark.parametrize("stream", [True, False])
def test_blocks_come_back_where_a_client_leaves(servers, stream):
    (prompt,) = prompts(300)
    body = greedy(model="llama", prompt=prompt, max_tokens=700, stream=stream)
    before = servers.read()
    connection = HTTPConnection(servers.pair.url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body))
    if stream:
        assert connection.getresponse().readline()
    else:
        servers.decode.until("kvpool_rooms_total", before + 1, outcome="success")
    connection.close()
    servers.idle()
    assert servers.read() <= before + 1
    asked = {"model": "llama", "prompt": prompt}
    assert tokens(servers.pair.ask(**asked)) == tokens(servers.single.ask(**asked))


def test_metrics_of_both_sides_agree(servers):
    (prompt,) = prompts(257)
    before = servers.decode.metric("kvpool_moved_bytes_total")
    servers.pair.ask(model="llama", prompt=prompt)
    servers.idle()
    read, served = (
        one.metric("kvpool_rooms_total", endpoint=side, outcome="success")
        for one, side in ((servers.decode, "decode"), (servers.prefill, "prefill"))
    )
    assert read == served > 0
    # 256 tokens of K and V: 4 layers, 4 heads of 32 float32 elements
    assert servers.decode.metric("kvpool_moved_bytes_total") - before == 256 * 2 * 4 * 4 * 32 * 4
    for phase in ("wait", "wire", "total"):
        assert servers.decode.metric("kvpool_phase_seconds_count", phase=phase) == read
    assert servers.decode.metric("kvpool_links", endpoint="decode", state="open") == 1
    assert servers.prefill.metric("kvpool_alive_peers", endpoint="prefill") == 1
    for one in servers.prefill, servers.decode:
        assert one.metric("kvpool_open_rooms") == 0
        assert not one.metric("kvpool_leased_items")
        assert one.metric("kvpool_quarantined_rooms") == 0
        assert one.metric("kvpool_lost_peers_total") == 0


def test_a_refused_link_is_on_the_metrics_once_the_engine_goes_on(servers):
    (prompt,) = prompts(40)
    asked = greedy(model="llama", prompt=prompt)
    prefill = {**asked, "max_tokens": 1, "kv_transfer_params": PREFILL}
    params = servers.prefill.ask(**prefill)["kv_transfer_params"]
    layout = MHAPool(layers=[0], num_kv_heads=1, head_dim=8, num_pages=2, page_size=16, dtype="f32")
    with DecodeEndpoint(layout.layout, create_engine("local")) as stranger:
        with pytest.raises(IncompatibleLayouts):
            stranger.connect(params["remote_addresses"], timeout=60)
        servers.decode.ask(**asked, kv_transfer_params=params)
        refused = {"endpoint": "prefill", "side": "decode", "kind": "told"}
        servers.prefill.until("kvpool_refusals_total", 1, **refused)
    servers.idle()


def test_errors_of_both_sides_reach_the_client(servers):
    (prompt,) = prompts(40)
    asked = greedy(model="llama", prompt=prompt)
    for wrong in ({"max_tokens": 5000}, {"min_tokens": 50}, {"model": "other"}, {"top_p": 7}):
        ours, theirs = (
            httpx.post(f"{one.url}/v1/completions", json=asked | wrong, timeout=60)
            for one in (servers.pair, servers.single)
        )
        assert ours.is_error and ours.status_code == theirs.status_code, wrong
        assert ours.json() == theirs.json(), wrong
    asked["kv_transfer_params"] = {
        "do_remote_prefill": True,
        "remote_request_id": "r",
        "remote_addresses": [LOST],
    }
    lost = httpx.post(f"{servers.decode.url}/v1/completions", json=asked, timeout=60)
    assert lost.status_code == 500  # kv_load_failure_policy "fail", vLLM's default
    assert LOST in servers.decode.tail()
    failed = {"endpoint": "decode", "side": "prefill", "kind": "lost"}
    assert servers.decode.metric("kvpool_failures_total", **failed) == 1
    assert servers.decode.metric("kvpool_rooms_total", outcome="failed") >= 1
    servers.prefill.idle()  # its lease ends: decode refused one request before it asked
