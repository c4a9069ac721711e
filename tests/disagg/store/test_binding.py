"""Runs of a chunk are those of its plan, byte for byte, whichever items the block table lists."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from disagg.plan import IncompleteTransfer, TransferPlan, plan
from disagg.store.chunks import chunk_layouts, of_kind
from disagg.store.transfer.binding import ChunkBinder
from kvpool import RequestAddress, Span
from tests.pools import CLASSES, PACKED

CHUNK, CHUNKS, ITEMS = 24, 4, 60
SOME = {**CLASSES, **{name: PACKED[name] for name in ("mha mxfp8", "nsa fp8", "dsv4 fp8")}}


def moved(batch):
    """Each byte's place on both sides."""
    places = [
        (src + n, dst + n)
        for src, dst, nbytes in zip(*(column.tolist() for column in batch))
        for n in range(nbytes)
    ]
    assert len({*places}) == len(places)
    return {*places}


def tables(layout, seed):
    """First tokens and block tables: items in any order, or adjacent."""
    random, tokens = np.random.default_rng(seed), CHUNK * CHUNKS
    for first in (0, CHUNK):
        for ids in (random.permutation(ITEMS - 1) + 1, np.arange(1, ITEMS)):
            spans = {}
            for space in layout.spaces:
                begin = first // space.item_span
                count = -(-tokens // space.item_span) - begin
                spans[space.id_list] = Span(ids[:count], begin)
            yield first, RequestAddress(tokens, spans)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("side", ["src", "dst"])
def test_runs_move_the_bytes_of_the_plan(name, side):
    pool = SOME[name].but(num_pages=ITEMS)()
    part, own = chunk_layouts(pool.layout, CHUNK)["full"], of_kind(pool.layout, "full")
    ways = plan([own], part.layout) if side == "src" else plan([part.layout], own)
    binder = ChunkBinder(ways, part, side, lock=threading.Lock())
    for first, address in tables(own, seed=len(name)):
        for chunk in range(first // CHUNK, CHUNKS):
            for start in (chunk * CHUNK, chunk * CHUNK + 8):
                src, dst = (part.address(chunk), address)[:: -1 if side == "src" else 1]
                expected = ways.bind(0, src, dst, tokens=range(start, (chunk + 1) * CHUNK))
                assert expected.runs
                assert moved(binder.bind_chunk(chunk, address, start)) == moved(expected)


@pytest.fixture
def mha():
    """A binder of what is read to a pool, and how often its plan was bound."""
    pool, bound = CLASSES["mha"].but(num_pages=ITEMS)(), []
    part = chunk_layouts(pool.layout, CHUNK)["full"]

    class Counted(TransferPlan):
        def bind(self, *given, **more):
            bound.append(given)
            return super().bind(*given, **more)

    made = plan([part.layout], of_kind(pool.layout, "full"))
    counted = Counted(**{name: getattr(made, name) for name in made.__dataclass_fields__})
    return ChunkBinder(counted, part, "dst", lock=threading.Lock()), bound


def test_whole_chunks_are_bound_without_the_plan(mha):
    binder, bound = mha
    ids = np.random.default_rng(1).permutation(ITEMS - 1)[: CHUNKS * CHUNK // 4] + 1
    address = RequestAddress(CHUNKS * CHUNK, {"kv": Span(ids)})
    for chunk in range(CHUNKS):
        assert binder.bind_chunk(chunk, address).runs
    assert len(bound) == 3
    binder.bind_chunk(1, address, CHUNK + 4)
    assert len(bound) == 4


def test_what_cannot_be_bound_is_refused_as_by_the_plan(mha):
    binder, _ = mha
    binder.bind_chunk(0, RequestAddress(CHUNK, {"kv": Span(np.arange(1, 7))}))
    with pytest.raises(IncompleteTransfer):
        binder.bind_chunk(1, RequestAddress(2 * CHUNK, {"kv": Span(np.arange(1, 12))}))
    with pytest.raises(ValueError, match="lies outside"):
        binder.bind_chunk(0, RequestAddress(CHUNK, {"kv": Span(np.arange(ITEMS - 5, ITEMS + 1))}))
    with pytest.raises(ValueError, match="no ids for space"):
        binder.bind_chunk(0, RequestAddress(CHUNK, {}))


def test_a_pool_too_small_for_made_up_requests_is_bound_by_its_plan():
    pool = CLASSES["mha"].but(num_pages=CHUNK // 4 + 1)()
    part = chunk_layouts(pool.layout, CHUNK)["full"]
    ways = plan([part.layout], of_kind(pool.layout, "full"))
    binder = ChunkBinder(ways, part, "dst", lock=threading.Lock())
    address = RequestAddress(CHUNK, {"kv": Span(np.arange(CHUNK // 4, 0, -1))})
    expected = ways.bind(0, part.address(0), address)
    assert moved(binder.bind_chunk(0, address)) == moved(expected)
