"""What SGLang's decode asks of a bootstrap server."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request

import pytest

from disagg.connectors.sglang.bootstrap import BootstrapServer, join, split

ADDRESSES = ["tcp://10.0.0.1:5000", "tcp://[::1]:5001", "ipc:///run/kvpool/a"]


@pytest.fixture(scope="module")
def ask():
    def asked(path):
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}") as answer:
            return json.load(answer)

    with BootstrapServer("127.0.0.1", 0, ADDRESSES) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield asked
        server.shutdown()
        thread.join()


def route(tp):
    return f"/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank={tp}&target_pp_rank=0"


def test_ranks_are_found_one_by_one(ask):
    everything = ask(route(-1))
    assert (everything["attn_tp_size"], everything["pp_size"]) == (3, 1)
    ranks = [ask(route(rank)) for rank in range(3)]
    assert [join(rank["rank_ip"], rank["rank_port"]) for rank in ranks] == ADDRESSES
    assert [join(*split(address)) for address in ADDRESSES] == ADDRESSES


@pytest.mark.parametrize("path", [route(3), route("x"), "/other", "/"])
def test_what_is_not_there_is_not_found(path, ask):
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(path)
