"""A rank of SGLang serves its own part of its engine's contract, at a port of its own."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from disagg.connectors.settings import Settings
from disagg.connectors.sglang.contract import serve_rank
from disagg.contract.client import read_contract
from disagg.contract.labelling import labels
from kvpool import MHAPool
from kvpool.layout.formats import Shard
from tests.ports import free_port

LAYERS = 4


@dataclass
class Rank:
    layout: Any
    address: str | None


@dataclass
class Manager:
    """What SGLang's manager knows of its rank."""

    attn_tp_rank: int = 0
    attn_tp_size: int = 2
    pp_rank: int = 0
    pp_size: int = 2
    attn_dp_rank: int = 0
    system_dp_size: int = 1
    system_dp_rank: int = 0
    is_dummy_cp_rank: bool = False

    @property
    def rank(self):
        half = LAYERS // self.pp_size
        pool = MHAPool(
            layers=range(half * self.pp_rank, half * (self.pp_rank + 1)),
            total_kv_layers=LAYERS,
            num_kv_heads=4,
            head_dim=8,
            shard=Shard(self.attn_tp_rank, self.attn_tp_size),
            num_pages=3,
            page_size=16,
            dtype="bf16",
        )
        return Rank(pool.layout, "tcp://10.0.0.1:7000")


RANKS = [(stage, rank) for stage in range(2) for rank in range(2)]


def serve(port, **fields):
    settings = Settings(contract=f"127.0.0.1:{port}")
    return serve_rank(Manager(**fields), settings, {"model": "m"})


@pytest.mark.parametrize("data_parallel", [{"attn_dp_rank": 1}, {"system_dp_size": 2}])
def test_all_ranks_together_are_the_engine(data_parallel):
    port = free_port()
    if "system_dp_size" in data_parallel:
        data_parallel["system_dp_rank"] = 1
    with ExitStack() as stack:
        for stage, rank in RANKS:
            server = serve(port, pp_rank=stage, attn_tp_rank=rank, **data_parallel)
            stack.enter_context(server)
        contract = read_contract(f"http://127.0.0.1:{port + 4}")
    assert (contract.size, contract.missing, contract.serves) == (4, [], ("prefill",))
    layers = [{region.layer for region in rank.layout.regions} for rank in contract.ranks]
    assert layers == [{0, 1}, {0, 1}, {2, 3}, {2, 3}]
    assert "contract" in labels(contract)


def test_where_nobody_asks_for_it_and_on_ranks_that_send_nothing_none_is_served():
    assert serve_rank(Manager(), Settings(), {}) is None
    assert serve(free_port(), is_dummy_cp_rank=True) is None
