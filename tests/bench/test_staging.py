"""Rooms of small runs that are adjacent at the source: staged, against one read per run."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count

import numpy as np
import pytest
import torch

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from kvpool import MHAPool, RequestAddress, Shard, Span
from tests.disagg.engines.peers import ENGINES
from tests.processes import FORKS

PAGE, LAYERS, DIM = 64, 2, 128

engines = pytest.mark.parametrize("engine", [name for name in ENGINES if name != "local"])


def pool_of(pages, heads, **more):
    shape = {"num_kv_heads": heads, "head_dim": DIM, "dtype": "bf16", "page_size": PAGE}
    return MHAPool(layers=range(LAYERS), num_pages=pages + 1, **shape, **more)


def place(pages, seed):
    ids = 1 + np.random.default_rng(seed).permutation(pages)
    return RequestAddress(pages * PAGE, {"kv": Span(ids)})


def last_row(pool, address):
    """Bytes of the last page's first entry, `[head, byte]`."""
    (row,) = pool.gather("v", LAYERS - 1, [PAGE * address.spans["kv"].ids[-1]])
    return row.view(torch.uint8).numpy()


def serve(pipe, engine, pages, heads):
    """Sends the same request in every room that the pipe names."""
    source = pool_of(pages, heads)
    source._slab.random_()
    address = place(pages, 0)
    with PrefillEndpoint(source.layout, create_engine(engine)) as prefill:
        pipe.send((prefill.address, last_row(source, address)))
        while (room := pipe.recv()) is not None:
            prefill.send(room, address)


@engines
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_heads_of_another_order(paired, engine, heads, pytestconfig):
    hand_over(paired, engine, heads, pytestconfig, order="hnd")


@engines
@pytest.mark.parametrize("heads", [2, 8])
def test_one_head_of_some(paired, engine, heads, pytestconfig):
    hand_over(paired, engine, heads, pytestconfig, shard=Shard(1, heads))


def hand_over(paired, engine, heads, pytestconfig, **there):
    """Rooms of pages of all heads, to a decode pool with the options `there`."""
    size = (8 if pytestconfig.getoption("benchmark_enable") else 1) << 20
    pages = max(1, size // (4 * LAYERS * DIM * PAGE * heads))
    dest, address, rooms = pool_of(pages, heads, **there), place(pages, 1), count()
    here, away = FORKS.Pipe()
    process = FORKS.Process(target=serve, args=(away, engine, pages, heads), daemon=True)
    process.start()
    url, row = here.recv()
    with ExitStack() as stack:
        staged, direct = (
            stack.enter_context(
                DecodeEndpoint(dest.layout, create_engine(engine), **({} if on else {"staging": 0}))
            )
            for on in (True, False)
        )
        for decode in (staged, direct):
            decode.connect([url], timeout=60)

        def room_of(decode):
            room = next(rooms)
            decode.receive(room, address)
            here.send(room)
            assert decode.wait(room, 60) is KVPoll.Success, decode.failure(room)

        paired(lambda: room_of(staged), lambda: room_of(direct))
        held = row[1:2] if "shard" in there else row
        assert (last_row(dest, address) == held).all()
    here.send(None)
    process.join(30)
    assert process.exitcode == 0
