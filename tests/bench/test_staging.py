"""Rooms of small runs that are adjacent at the source: staged, against one read per run."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count

import pytest
import torch

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from kvpool import MHAPool, Shard
from tests.bench.conftest import shuffled
from tests.disagg.engines.peers import ENGINES
from tests.processes import Child

PAGE, LAYERS, DIM = 64, 2, 128


def pool_of(pages, heads, **more):
    shape = {"num_kv_heads": heads, "head_dim": DIM, "dtype": "bf16", "page_size": PAGE}
    return MHAPool(layers=range(LAYERS), num_pages=pages + 1, **shape, **more)


def last_row(pool, address):
    """Bytes of the last page's first entry, `[head, byte]`."""
    (row,) = pool.gather("v", LAYERS - 1, [PAGE * address.spans["kv"].ids[-1]])
    return row.view(torch.uint8).numpy()


def serve(pipe, engine, pages, heads):
    """Sends the same request in every room that the pipe names."""
    source = pool_of(pages, heads)
    source._slab.random_()
    address = shuffled(pages, 0, PAGE)
    with PrefillEndpoint(source.layout, create_engine(engine)) as prefill:
        pipe.send((prefill.address, last_row(source, address)))
        while (room := pipe.recv()) is not None:
            prefill.send(room, address)


@pytest.mark.parametrize(
    ("heads", "there"),
    [
        *((heads, {"order": "hnd"}) for heads in (1, 8, 64)),
        *((heads, {"shard": Shard(1, heads)}) for heads in (2, 8)),
    ],
    ids=["1 head, hnd", "8 heads, hnd", "64 heads, hnd", "1 of 2 heads", "1 of 8 heads"],
)
@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "local"])
def test_small_runs(paired, engine, heads, there, timed):
    """Rooms of pages of all heads, to a decode pool with the options `there`."""
    size = (8 if timed else 1) << 20
    pages = max(1, size // (4 * LAYERS * DIM * PAGE * heads))
    dest, address, rooms = pool_of(pages, heads, **there), shuffled(pages, 1, PAGE), count()
    with ExitStack() as stack:
        prefill = stack.enter_context(Child(serve, engine, pages, heads))
        url, row = prefill.answer()
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
            prefill.pipe.send(room)
            assert decode.wait(room, 60) is KVPoll.Success, decode.failure(room)

        paired(lambda: room_of(staged), lambda: room_of(direct))
        assert (last_row(dest, address) == (row[1:2] if "shard" in there else row)).all()
