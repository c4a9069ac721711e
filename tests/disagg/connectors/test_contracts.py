"""An engine serves its contract where its settings say so, whole or rank by rank."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from importlib.metadata import version

import pytest

from disagg.connectors.contracts import RankDescription, ServingEngine, serve_contract
from disagg.connectors.settings import Settings
from disagg.contract.client import read_contract
from kvpool import MHAPool
from kvpool.layout.formats import Shard
from tests.ports import free_port

LOG = logging.getLogger("tests.contracts")
SIDES = {"produces": True, "consumes": False}
# numpy stands for a serving engine's package
WHOLE = ServingEngine(package="numpy", size=2, **SIDES)


def ranks(tp=2):
    for number in range(tp):
        pool = MHAPool(
            layers=range(2),
            num_kv_heads=4,
            head_dim=8,
            shard=Shard(number, tp),
            num_pages=3,
            page_size=16,
            dtype="bf16",
        )
        yield RankDescription(
            address=f"tcp://10.0.0.1:{7000 + number}",
            layout=pool.layout.to_msgpack(),
            conventions={"model": "m", "theta": 1.5, "scale": number},
        )


RANKS = [*ranks()]


def settings(**values):
    return Settings(**{"contract": "127.0.0.1:*", "engine": "nixl"} | values)


def test_an_engine_that_knows_its_ranks_serves_all_of_them():
    own = settings(allow_missing=["draft"], conventions={"theta": 2.5, "scale": None})
    with serve_contract(own, WHOLE, RANKS, LOG) as server:
        contract = read_contract(f"http://{server.address}")
    assert (contract.engine, contract.serves, contract.size) == ("nixl", ("prefill",), 2)
    assert contract.allow_missing == ("draft",)
    assert contract.versions == {"kvpool": version("kvpool"), "numpy": version("numpy")}
    assert [rank.address for rank in contract.ranks] == [rank.address for rank in RANKS]
    # what a user says instead of the engine is what the endpoints say too
    assert [rank.conventions for rank in contract.ranks] == [{"model": "m", "theta": 2.5}] * 2


def test_both_sides_and_one():
    for sides in ({"produces": True, "consumes": True}, {"produces": False, "consumes": True}):
        engine = ServingEngine(package="none", size=2, **sides)
        names = [name for name, side in zip(("prefill", "decode"), sides.values()) if side]
        assert engine.contract(settings(), RANKS).serves == tuple(names)


def test_ranks_that_know_themselves_only_and_engines_that_share_a_setting_have_ports_of_their_own():
    port = free_port()
    own = settings(contract=f"127.0.0.1:{port}")
    with ExitStack() as stack:
        for number in range(2):
            for first, rank in enumerate(RANKS):
                engine = ServingEngine(package="numpy", size=2, first=first, number=number, **SIDES)
                server = stack.enter_context(serve_contract(own, engine, [rank], LOG))
                assert server.address == f"127.0.0.1:{port + 2 * number + first}"
        engine = ServingEngine(package="numpy", size=2, number=4, **SIDES)
        server = stack.enter_context(serve_contract(own, engine, RANKS, LOG))
        assert server.address == f"127.0.0.1:{port + 4}"
        assert read_contract(f"http://127.0.0.1:{port + 2}").missing == []


def test_without_the_setting_nothing_listens():
    assert serve_contract(Settings(), WHOLE, RANKS, LOG) is None


@pytest.mark.parametrize(
    ("values", "broken", "reason"),
    [
        ({"contract": "192.0.2.1:9400"}, {}, "contract at 192.0.2.1:9400: "),
        ({}, {"layout": b"\xff"}, "malformed layout"),
        ({}, {"conventions": {"a\n": 1}}, "1 to 128 printable characters"),
    ],
)
def test_what_goes_wrong_is_logged_once_and_the_engine_serves(values, broken, reason, caplog):
    fields = {"address": None, "layout": RANKS[0].layout, "conventions": {}}
    rank = RankDescription(**fields | broken)
    engine = ServingEngine(package="numpy", size=1, **SIDES)
    assert serve_contract(settings(**values), engine, [rank], LOG) is None
    (line,) = caplog.messages
    assert line.startswith("no contract is served: ") and reason in line


def test_settings_of_a_variable_may_name_it(monkeypatch):
    monkeypatch.setenv("KVPOOL", json.dumps({"contract": "10.0.0.1:9400"}))
    assert Settings.of_environment("KVPOOL", ()).contract == "10.0.0.1:9400"
