"""From the first layer's computation to the last byte on decode: a request that is offered whole,
in chunks of positions, or layer by layer, against its computation alone.
"""

from __future__ import annotations

import time
from itertools import count

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from kvpool import MHAPool
from tests import oracle
from tests.bench.conftest import shuffled
from tests.disagg.engines.peers import ENGINES
from tests.processes import Child

PAGE, LAYERS, CHUNKS = 64, 16, 4
LAYER_SECONDS = 0.004


def pool_of(pages):
    shape = {"num_kv_heads": 8, "head_dim": 128, "dtype": "bf16", "page_size": PAGE}
    return MHAPool(layers=range(LAYERS), num_pages=pages + 1, **shape)


def parts(how, tokens):
    """What is offered, in order: positions, layers, and the part of the work that is done then."""
    if how == "layers":
        return [(range(tokens), range(n, n + 1), (n + 1) / LAYERS) for n in range(LAYERS)]
    chunks = CHUNKS if how == "chunks" else 1
    edges = [tokens * n // chunks for n in range(chunks + 1)]
    return [(range(*edges[n : n + 2]), None, (n + 1) / chunks) for n in range(chunks)]


def serve(pipe, engine, pages, seconds):
    """Computes the same request for every room that the pipe names, in as much time."""
    source, address = pool_of(pages), shuffled(pages, 0, PAGE)
    oracle.fill(source, address)
    with PrefillEndpoint(source.layout, create_engine(engine)) as prefill:
        pipe.send(prefill.address)
        while (told := pipe.recv()) is not None:
            room, how = told
            began, todo = time.perf_counter(), parts(how, address.num_tokens)
            for number, (tokens, layers, done) in enumerate(todo, 1):
                time.sleep(max(0.0, began + done * LAYERS * seconds - time.perf_counter()))
                last = number == len(todo)
                prefill.send(room, address, tokens=tokens, layers=layers, last=last)


@pytest.mark.parametrize("how", ["whole", "chunks", "layers"])
@pytest.mark.parametrize("engine", ENGINES)
def test_arrival(paired, engine, how, timed):
    pages = ((64 if timed else 1) << 20) // (LAYERS * 2 * 8 * 128 * 2 * PAGE) or 1
    dest, address, rooms = pool_of(pages), shuffled(pages, 1, PAGE), count()
    oracle.blank(dest)
    seconds = LAYER_SECONDS if timed else 0.0
    with (
        Child(serve, engine, pages, seconds) as prefill,
        DecodeEndpoint(dest.layout, create_engine(engine)) as decode,
    ):
        decode.connect([prefill.answer()], timeout=60)

        def hand_over():
            room = next(rooms)
            decode.receive(room, address)
            prefill.pipe.send((room, how))
            assert decode.wait(room, 60) is KVPoll.Success, decode.failure(room)

        paired(hand_over, lambda: time.sleep(LAYERS * seconds))
        assert oracle.holds(dest, address)
