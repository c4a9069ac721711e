"""Rows that are converted as they arrive: against a pool's own store of the same values, and a
room against one whose bytes are taken as they are.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import count

import numpy as np
import pytest
import torch

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from disagg.plan import plan
from disagg.portable.conversion import Converter, WantedRows
from kvpool import MHAPool
from kvpool.device.host_copy import copy_runs
from tests.bench.conftest import shuffled
from tests.disagg.engines.peers import ENGINES
from tests.processes import Child

LAYERS, HEADS, DIM, PAGE = 4, 8, 128, 64
CASES = [("bf16", "fp8"), ("bf16", "mxfp8"), ("fp8", "bf16"), ("bf16", "f32")]
named = pytest.mark.parametrize(
    ("given", "wanted"), CASES, ids=["{} to {}".format(*c) for c in CASES]
)


def pool_of(packing, pages):
    pool = MHAPool(
        layers=range(LAYERS),
        num_kv_heads=HEADS,
        head_dim=DIM,
        packing=packing,
        num_pages=pages + 1,
        page_size=PAGE,
    )
    rows = torch.randn(pages * PAGE, HEADS, DIM).to(torch.bfloat16)
    for layer in range(LAYERS):
        pool.set_kv_buffer(layer, np.arange(PAGE, (pages + 1) * PAGE), rows, rows)
    return pool


@named
def test_storing(paired, given, wanted, timed):
    """What has arrived is stored by one call a layer, as a model runner stores what it computed;
    from a quantised row, as one that reads and writes.
    """
    pages = 32 if timed else 2
    source, dest = pool_of(given, pages), pool_of(wanted, pages)
    there, here = shuffled(pages, 1, PAGE), shuffled(pages, 2, PAGE)
    tokens = range(pages * PAGE)
    planned = plan([source.layout], dest.layout, cast=True)
    wants = WantedRows(source=0, source_address=there, dest_address=here, tokens=tokens)
    arrived = []
    for part in Converter(planned.cast, dest.layout).parts(wants, 4 << 20):
        buffer = np.empty(4 << 20, dtype=np.uint8)
        copy_runs(part.read.src, part.read.dst + buffer.ctypes.data, part.read.nbytes)
        arrived.append((part.store, buffer))
    read, write = (
        (table.spans["kv"].ids[:, None] * PAGE + np.arange(PAGE)).ravel() for table in (there, here)
    )
    computed = [source.get_kv_buffer(layer, read) for layer in range(LAYERS)]

    def converted():
        for store, buffer in arrived:
            store(buffer.ctypes.data).synchronize()

    def stored():
        for layer in range(LAYERS):
            rows = computed[layer] if given == "bf16" else source.get_kv_buffer(layer, read)
            dest.set_kv_buffer(layer, write, *rows)

    paired(converted, stored)


def serve(pipe, engine, packing, pages):
    """Sends the same request in every room that the pipe names."""
    source = pool_of(packing, pages)
    with PrefillEndpoint(source.layout, create_engine(engine)) as prefill:
        pipe.send(prefill.address)
        while (room := pipe.recv()) is not None:
            prefill.send(room, shuffled(pages, 0, PAGE))


@named
@pytest.mark.parametrize("engine", ENGINES)
def test_room(paired, engine, given, wanted, timed):
    """A room that is converted, and one to a pool of prefill's format."""
    pages, rooms = 32 if timed else 2, count()
    with ExitStack() as stack:
        prefill = stack.enter_context(Child(serve, engine, given, pages))
        url, address, decodes = prefill.answer(), shuffled(pages, 1, PAGE), []
        pools = [pool_of(packing, pages) for packing in (wanted, given)]
        for pool in pools:
            decode = stack.enter_context(
                DecodeEndpoint(pool.layout, create_engine(engine), cast=True)
            )
            decode.connect([url], timeout=60)
            decodes.append(decode)

        def room_of(decode):
            room = next(rooms)
            decode.receive(room, address)
            prefill.pipe.send(room)
            assert decode.wait(room, 60) is KVPoll.Success, decode.failure(room)

        paired(lambda: room_of(decodes[0]), lambda: room_of(decodes[1]))
