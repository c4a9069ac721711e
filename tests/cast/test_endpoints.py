"""Rows that decode converts as they arrive, between real endpoints."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from disagg import DecodeEndpoint, Group, KVPoll, PrefillEndpoint, create_engine
from disagg.plan import IncompatibleLayouts
from kvpool import RequestAddress
from kvpool.layout.formats import Shard
from tests import oracle
from tests.cast.rows import names, read, write
from tests.cast.test_pools import built, rows_for, stored
from tests.disagg.engines.peers import ENGINES
from tests.pools import CLASSES, mha

TOKENS = 45
STAGING = 1 << 20
SIZES = {"layers": range(3), "num_pages": 40, "page_size": 4}


class Prefill:
    """A rank of prefill with a request, of which half is computed at first."""

    def __init__(self, pool, tokens=TOKENS, seed=0):
        self.pool, self.table = pool, oracle.filled(pool, tokens)
        rng = np.random.default_rng(seed)
        self.values = {key: rows_for(pool, key, tokens, rng) for key in names(pool)}
        for key, rows in self.values.items():
            write(pool, key, self.table, rows)

    def part(self, tokens):
        return RequestAddress(tokens, self.table.spans)


@contextmanager
def joined(sources, dest, engine="local", ranks=1, **options):
    prefills = [PrefillEndpoint(s.pool.layout, create_engine(engine)) for s in sources]
    decode = DecodeEndpoint(
        dest.layout, create_engine(engine), ranks=ranks, staging=STAGING, cast=True, **options
    )
    try:
        decode.connect([prefill.address for prefill in prefills], timeout=30)
        yield prefills, decode
    finally:
        for endpoint in (decode, *prefills):
            endpoint.close()


def is_right(sources, dest, want, table, start=0):
    """What decode has stored is what its format makes of prefill's values, and nothing else has
    changed where it stores.
    """
    for key in names(dest):
        whole = None
        for source in sources:
            entries, held = read(source.pool, key, source.table)
            axes = source.pool.layout.region_by_key[key].inner_axes
            if whole is None:
                whole = np.zeros_like(source.values[key])
            whole[(entries, *(slice(axis.start, axis.stop) for axis in axes))] = held
        write(want, key, table, whole, start)
    for key in dest.layout.region_by_key:
        assert np.array_equal(stored(dest, key), stored(want, key)), key


def pools(packing, count=1, **more):
    return [built(mha, packing, **SIZES, **more) for _ in range(count)]


@pytest.mark.parametrize("verify", [None, "checksum"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("given", "wanted"), [("bf16", "fp8"), ("mxfp8", "f32")])
def test_a_room_in_chunks_behind_a_prefix(given, wanted, engine, verify):
    (pool,), (dest, want) = pools(given), pools(wanted, 2)
    source, start = Prefill(pool), 8
    for each in (dest, want):
        oracle.blank(each)
    table = oracle.place(dest, TOKENS, 5)
    with joined([source], dest, engine, verify=verify) as ((prefill,), decode):
        decode.receive("r", table, start=start)
        for stop in (20, 33, TOKENS):
            prefill.send("r", source.part(stop), last=stop == TOKENS)
        assert decode.wait("r", 60) is KVPoll.Success, decode.failure("r")
    is_right([source], dest, want, table, start)


def test_layers_as_they_are_computed():
    (pool,), (dest, want) = pools("bf16"), pools("fp8", 2)
    source = Prefill(pool)
    for each in (dest, want):
        oracle.blank(each)
    table = oracle.place(dest, TOKENS, 5)
    with joined([source], dest) as ((prefill,), decode):
        decode.receive("r", table)
        for layer in range(3):
            prefill.send("r", source.table, layers=range(layer, layer + 1), last=layer == 2)
        assert decode.wait("r", 60) is KVPoll.Success, decode.failure("r")
    is_right([source], dest, want, table)


@pytest.mark.parametrize("name", ["mla", "nsa", "swa", "dsv4"])
def test_families_whose_length_decode_learns(name):
    tokens = 12
    given, wanted = built(CLASSES[name], "bf16"), [built(CLASSES[name], "fp8") for _ in range(2)]
    dest, want = wanted
    source = Prefill(given, tokens)
    for each in wanted:
        oracle.blank(each)
    table = oracle.place(dest, tokens + 3, 5)
    with joined([source], dest, verify="checksum") as ((prefill,), decode):
        decode.receive("r", table, at_most=True)
        prefill.send("r", source.table)
        assert decode.wait("r", 60) is KVPoll.Success, decode.failure("r")
    learned = RequestAddress(tokens, table.spans)
    arrival = decode.machine.peers.plans._plans.popitem()[1].cast.arrival
    for key in arrival.conversions:
        _, held = read(source.pool, key, source.table)
        entries, _ = read(source.pool, key, source.table)
        whole = np.zeros_like(source.values[key])
        whole[entries] = held
        write(want, key, learned, whole)
    for key in arrival.converted:
        assert np.array_equal(stored(dest, key), stored(want, key)), key


def test_ranks_of_a_group_read_their_heads():
    heads = {**SIZES, "num_kv_heads": 4}
    sources = [Prefill(built(mha, "bf16", **heads, shard=Shard(rank, 2))) for rank in range(2)]
    dests, wants = (
        [built(mha, "fp8", **heads, shard=Shard(rank, 4)) for rank in range(4)] for _ in range(2)
    )
    layouts, tables = tuple(dest.layout for dest in dests), []
    with ExitStack() as stack:
        prefills = [
            stack.enter_context(PrefillEndpoint(s.pool.layout, create_engine("local")))
            for s in sources
        ]
        decodes = [
            stack.enter_context(
                DecodeEndpoint(
                    dest.layout,
                    create_engine("local"),
                    ranks=Group(layouts, rank),
                    staging=STAGING,
                    cast=True,
                )
            )
            for rank, dest in enumerate(dests)
        ]
        for decode, dest in zip(decodes, dests):
            oracle.blank(dest)
            tables.append(oracle.place(dest, TOKENS, 5))
            decode.connect([prefill.address for prefill in prefills], timeout=30)
            decode.receive("r", tables[-1])
        for prefill, source in zip(prefills, sources):
            prefill.send("r", source.table)
        for endpoint in (*decodes, *prefills):
            assert endpoint.wait("r", 60) is KVPoll.Success, endpoint.failure("r")
    for dest, want, table in zip(dests, wants, tables):
        oracle.blank(want)
        is_right(sources, dest, want, table)


def test_what_was_damaged_is_named():
    (pool,), (dest,) = pools("bf16"), pools("fp8")
    source = Prefill(pool)
    table = oracle.place(dest, TOKENS, 5)

    with joined([source], dest, verify="checksum") as ((prefill,), decode):
        decode.receive("r", table)
        prefill.send("r", source.part(20), last=False)
        key = ("target", 1, "k")
        arrived = decode.machine.rooms.known("r").arrived[0]
        # an entry stands in the table before its first part does
        while not (parts := arrived._parts.get(key)):
            time.sleep(0.001)
        parts[0].hashes[3] += np.uint64(1)
        prefill.send("r", source.table)
        assert decode.wait("r", 60) is KVPoll.Failed
        assert "target layer 1 k: position 3 differs" in decode.failure("r").reason


def test_without_it_the_refusal_says_how():
    (pool,), (dest,) = pools("bf16"), pools("fp8")
    with (
        PrefillEndpoint(pool.layout, create_engine("local")) as prefill,
        DecodeEndpoint(dest.layout, create_engine("local")) as decode,
        pytest.raises(IncompatibleLayouts, match=r"Or let decode convert bfloat16 .*: cast=True"),
    ):
        decode.connect([prefill.address], timeout=30)
