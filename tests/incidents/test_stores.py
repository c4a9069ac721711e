"""Reported failures of caches that engines share: hits that answer garbage, with HTTP 200."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from disagg.connectors.store.identity import Identity
from disagg.store import Store
from disagg.store.floors import open_floor
from kvpool import Allocator, PrefixCache
from kvpool.describe import describe
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from tests import oracle
from tests.disagg.store.stores import CHUNK, fresh, got, put
from tests.pools import dsv4, hybrid, memory_of, mha, mla, nsa, swa
from tests.processes import until

CHUNKS = 4
TOKENS = CHUNKS * CHUNK
PROMPT = np.random.default_rng(31).integers(0, 30_000, TOKENS)
SIZES = {"num_pages": 60, "num_window_pages": 60}


@pytest.fixture
def opened(floor_url, space):
    """Opens stores of one model, which no other test has, on a floor of each kind."""
    stores, floor = [], open_floor(floor_url)

    def store(holder, **more):
        said = {"model": space, **more.pop("conventions", {})}
        made = Store(floor_url, holder.layout, chunk_tokens=CHUNK, conventions=said, **more)
        stores.append(made)
        return made

    yield store
    for one in stores:
        one.close()
    for namespace in {one.namespace for one in stores}:
        floor.delete([listed.name for listed in floor.list(namespace)])
    floor.close()


def stored(store, holder, tokens=TOKENS, salt="", values=0):
    """Computes a prompt chunk by chunk, and writes each when it is computed."""
    table = oracle.place(holder, tokens, 5)
    for start, stop in pairwise([*range(0, tokens, CHUNK), tokens]):
        address = RequestAddress(stop, table.spans)
        oracle.write(holder, address, range(start, stop), values)
        put(store, PROMPT[:stop], address, salt=salt)


def assert_reads(store, holder, tokens, *, salt="", values=0):
    """A prefix is read, with the values of its writer, and no other byte is touched."""
    oracle.blank(holder)
    address = oracle.place(holder, tokens, 7)
    assert got(store, PROMPT[:tokens], address, salt=salt) is None
    assert oracle.holds(holder, address, values)
    if values == 0:
        oracle.assert_holds(holder, address)


def assert_reads_nothing(store, holder, tokens=TOKENS, *, salt=""):
    """There is no hit, and a read that does not ask for one leaves the pool as it was."""
    assert store.lookup(PROMPT[:tokens], salt) == 0
    oracle.blank(holder)
    before = memory_of(holder)
    assert got(store, PROMPT[:tokens], oracle.place(holder, tokens, 7), salt=salt) is not None
    assert np.array_equal(memory_of(holder), before)


DTYPES = [("bf16", "fp8"), ("fp8", "bf16"), ("bf16", "f32"), ("f32", "bf16")]


@pytest.mark.parametrize(
    ("build", "first", "second"),
    [
        *((mha, *pair) for pair in [*DTYPES, ("bf16", "f16"), ("f16", "bf16")]),
        *((build, *pair) for build in (mla, nsa) for pair in DTYPES),
    ],
)
def test_a_run_with_another_kv_dtype_shares_nothing(build, first, second, opened):
    """sglang#33268: keys had no KV dtype, so that a run took bytes of another one for its own."""
    pools = [build.but(**SIZES, packing=packing)() for packing in (first, second)]
    stores = [opened(pool) for pool in pools]
    stored(stores[0], pools[0], values=1)
    assert_reads_nothing(stores[1], pools[1])
    stored(stores[1], pools[1], values=2)
    for values, store, pool in zip((1, 2), stores, pools):
        assert store.lookup(PROMPT) == TOKENS
        assert_reads(store, pool, TOKENS, values=values)
    assert stores[0].namespace != stores[1].namespace


def test_bytes_under_the_name_of_another_dtype_are_not_read(tmp_path):
    """sglang#33268: as if both runs had made the same keys."""
    url, pools = f"file://{tmp_path}", [mha.but(**SIZES, packing=p)() for p in ("bf16", "f16")]
    stores = [Store(url, pool.layout, chunk_tokens=CHUNK) for pool in pools]
    for number, (store, pool) in enumerate(zip(stores, pools)):
        stored(store, pool, values=number)
    theirs, ours = (sorted((tmp_path / s.namespace).rglob("*.full")) for s in stores)
    assert [path.parent.name for path in theirs] == [path.parent.name for path in ours]
    assert {path.stat().st_size for path in theirs} == {path.stat().st_size for path in ours}
    for there, here in zip(theirs, ours):
        here.write_bytes(there.read_bytes())
    assert stores[1].lookup(PROMPT) == TOKENS  # names are all that a lookup sees
    before = memory_of(pools[1])
    failure = got(stores[1], PROMPT, oracle.place(pools[1], TOKENS, 7))
    assert "its head says" in failure
    while found := stores[1].lookup(PROMPT):  # each read finds at least one of them out
        assert got(stores[1], PROMPT[:found], oracle.place(pools[1], found, 7)) is not None
    assert np.array_equal(memory_of(pools[1]), before)
    for store in stores:
        store.close()


NAMES = [(), ("A",), ("B",), ("A", "lora"), ("", "A"), ('["A", "lora"]',), ("Alora",)]
TENANTS = [Identity(*names) for names in NAMES]


def test_no_tenant_reads_what_another_has_written(opened):
    """sglang#26747, #37160, LMCache#4825: keys had no salt, and a tenant read 25,100 pages of
    another.
    """
    pools = [mha.but(**SIZES)(), mha.but(**SIZES, page_size=12)()]
    writer, reader = (opened(pool) for pool in pools)
    for number, writes in enumerate(TENANTS):
        for reads in TENANTS[number:]:
            assert_reads_nothing(reader, pools[1], salt=reads.salt)
        stored(writer, pools[0], salt=writes.salt, values=number)
        for before, reads in enumerate(TENANTS[: number + 1]):
            assert_reads(reader, pools[1], TOKENS, salt=reads.salt, values=before)


def test_a_prefix_cache_asks_its_store_for_the_tenant(opened):
    """sglang#26747: the radix tree had the salt, the storage behind it had not."""
    pool, other = mha.but(**SIZES)(), mha.but(**SIZES)()
    writer = Allocator(pool, prefix=PrefixCache(store=(store := opened(pool))))
    request = writer.new_request(PROMPT, salt="tenant-A")
    writer.extend(request, TOKENS)
    oracle.write(pool, request.address(), range(TOKENS))
    writer.store(request, PROMPT)
    until(lambda: not store.stats().queued_bytes)
    reader = Allocator(other, prefix=PrefixCache(store=opened(other)))
    oracle.blank(other)
    before = memory_of(other)
    assert reader.new_request(PROMPT, salt="tenant-B").num_tokens == 0
    assert reader.new_request(PROMPT).num_tokens == 0
    assert np.array_equal(memory_of(other), before)
    request = reader.new_request(PROMPT, salt="tenant-A")
    assert request.num_tokens == TOKENS
    oracle.assert_holds(other, request.address())


def ends(store):
    """The prefixes of the prompt that can be read, in chunks."""
    counts = {store.lookup(PROMPT[: chunks * CHUNK]) // CHUNK for chunks in range(CHUNKS + 1)}
    return counts - {0}


@pytest.mark.parametrize("more", [0, 1, CHUNK - 1])
def test_a_recurrent_state_is_read_at_its_own_position_only(more, opened):
    """vllm#53084, #51094: blocks were saved by position in the request's table, which had the state
    of another position by then, or of another request. What was saved first could not be replaced.
    """
    pool, other = hybrid.but(**SIZES)(), hybrid.but(**SIZES, page_size=12)()
    writer, reader = opened(pool), opened(other)
    table = oracle.place(pool, TOKENS + more, 5)
    for stop in (CHUNK, 2 * CHUNK + more, 3 * CHUNK + more):  # what a step has computed
        address = RequestAddress(stop, table.spans)
        oracle.blank(pool)
        oracle.write(pool, address, range(stop))
        put(writer, PROMPT[:stop], address)
    assert ends(reader) == ({1} if more else {1, 2, 3})
    for chunks in ends(reader):
        assert_reads(reader, other, chunks * CHUNK)
    if more:
        oracle.blank(other)
        before = memory_of(other)
        for chunks in (2, 3):
            address = oracle.place(other, chunks * CHUNK, 7)
            assert "the store has 24 tokens" in got(reader, PROMPT[: chunks * CHUNK], address)
        assert np.array_equal(memory_of(other), before)
        stored(writer, pool)  # later the right one comes, and is kept
        assert ends(reader) == {1, 2, 3, 4}
        assert_reads(reader, other, 3 * CHUNK)


def moved_on(pool, address):
    """The pages of windows that a request does not see any more hold another request's state; its
    block table has the others.
    """
    spans = dict(address.spans)
    for space in pool.layout.spaces:
        if space.window is None or space.ring or space.per_request:
            continue
        gone = space.alive(address.num_tokens).start // space.entries_per_item
        assert gone, "the window reaches back to the first page"
        span = spans[space.id_list]
        for region in pool.layout.regions:
            if pool.layout.space_of(region).id_list == space.id_list:
                oracle.state(pool).views[region.key][span.ids[:gone]] = 77
        spans[space.id_list] = Span(span.ids[gone:], gone)
    return RequestAddress(address.num_tokens, spans)


@pytest.mark.parametrize(("build", "page"), [(swa, 12), (dsv4, 16)], ids=["swa", "dsv4"])
def test_a_window_is_read_at_its_own_position_only(build, page, opened):
    """sglang#38031: tails of windows were restored at another position. Here the pages of earlier
    windows are gone when a request is written.
    """
    pool, other = build.but(**SIZES)(), build.but(**SIZES, page_size=page)()
    writer, reader = opened(pool), opened(other)
    oracle.write(pool, address := oracle.place(pool, TOKENS, 5), range(TOKENS))
    put(writer, PROMPT, moved_on(pool, address))
    assert writer.stats().counts["gone"]
    assert ends(reader) == {CHUNKS}
    assert_reads(reader, other, TOKENS)
    oracle.blank(other)
    before = memory_of(other)
    shorter = oracle.place(other, 2 * CHUNK, 7)
    assert got(reader, PROMPT[: 2 * CHUNK], shorter) is not None
    assert np.array_equal(memory_of(other), before)


@settings(max_examples=60)
@given(
    full=st.sets(st.integers(0, CHUNKS - 1)),
    states=st.sets(st.integers(0, CHUNKS - 1)),
    asked=st.integers(1, CHUNKS),
)
def test_a_hit_ends_where_all_kinds_of_state_do(full, states, asked):
    """Mooncake#4153, vllm#50359: a hit of one kind was cut to the end of another, and taken for
    whole blocks there.
    """
    url, pool = fresh(), hybrid.but(**SIZES)()
    other, floor = hybrid.but(**SIZES, page_size=16)(), open_floor(url)
    with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
        stored(store, pool)
        keys = store.keys(PROMPT).keys
        for kind, lost in (("full", full), ("state", states)):
            gone = {keys[chunk].hex() for chunk in lost}
            names = [listed.name for listed in floor.list(store.namespace)]
            floor.delete([n for n in names if n.endswith(kind) and n.split("/")[1] in gone])
    whole = [n for n in range(1, asked + 1) if not full & {*range(n)} and n - 1 not in states]
    expected = max(whole, default=0) * CHUNK
    with Store(url, other.layout, chunk_tokens=CHUNK) as store:
        assert store.lookup(PROMPT[: asked * CHUNK]) == expected
        if expected:
            assert_reads(store, other, expected)


@pytest.mark.parametrize("page", [32, 48, 64])
def test_a_part_of_a_page_serves_no_other_prompt(page, opened):
    """Mooncake#4153: a hit of a part of an attention block was taken for the whole block."""
    pool, other = mha.but(**SIZES)(), mha.but(num_pages=40, page_size=page)()
    stored(opened(pool), pool)
    allocator = Allocator(other, prefix=PrefixCache(store=opened(other)))
    for parts in range(1, CHUNKS):
        known = parts * CHUNK
        prompt = np.concatenate([PROMPT[:known], PROMPT[known:] + 1])  # goes on elsewhere
        oracle.blank(other)
        request = allocator.new_request(prompt[:-1])
        assert request.num_tokens == known
        oracle.assert_holds(other, request.address())
        allocator.extend(request, TOKENS - known)
        oracle.write(other, request.address(), range(known, TOKENS), salt=parts)
        allocator.store(request, prompt[known:])
        allocator.free(request)
        again = allocator.new_request(prompt)
        assert again.num_tokens >= known
        assert oracle.holds(other, RequestAddress(known, again.address().spans))
        allocator.free(again)
        allocator.prefix.clear()  # what is in the pool: the next prompt asks the store again
    allocator.check_integrity()


BLOCKS, HEADS, DIM, LAYERS = 40, 4, 8, 2
VALUES = torch.from_numpy(
    np.random.default_rng(4).integers(0, 1 << 15, (LAYERS, 2, TOKENS, HEADS, DIM), dtype=np.int16)
)
"""By layer, K and V, token and head."""


# one after the other in a block, as vLLM had them before its upgrade; side by side behind it
SEPARATE = "item", "role", "entry", "head", "dim"
PACKED = "item", "head", "entry", "role", "dim"


class Version:
    """An engine of one version: where it keeps K and V, and what it says of that."""

    def __init__(self, dims, block):
        self.dims, self.block = dims, block
        sizes = {"item": BLOCKS, "role": 2, "entry": block, "head": HEADS, "dim": DIM}
        self.memory = torch.zeros(LAYERS, *(sizes[dim] for dim in dims), dtype=torch.bfloat16)
        parts = [
            describe(self.memory[layer], dims, role=("k", "v"), layer=layer)
            for layer in range(LAYERS)
        ]
        self.layout = PoolLayout.of(*parts, spaces=[Space("kv", "paged", block)])
        count = -(-TOKENS // block)
        self.blocks = torch.from_numpy(1 + np.random.default_rng(block).permutation(BLOCKS - 1))
        self.blocks = self.blocks[:count]

    def address(self, tokens):
        return RequestAddress(tokens, {"kv": Span(self.blocks[: -(-tokens // self.block)].numpy())})

    def rows(self, layer, which):
        """K or V of all blocks `[item, entry, head, dim]`, and where tokens lie in it."""
        order = [self.dims.index(dim) for dim in ("role", "item", "entry", "head", "dim")]
        view = self.memory[layer].view(torch.int16).permute(order)[which]
        tokens = torch.arange(TOKENS)
        return view, (self.blocks[tokens // self.block], tokens % self.block)


@pytest.mark.parametrize("blocks", [(16, 16), (16, 48), (8, 12)], ids=str)
@pytest.mark.parametrize("old", [SEPARATE, PACKED], ids=["to packed", "to separate"])
def test_an_upgrade_that_moves_kv_reads_what_was_written_before_it(old, blocks, opened):
    """LMCache#4247, dynamo#14416: vLLM 0.26 put K and V side by side, and what the version before
    had stored was read as if nothing had changed: wrong text for weeks, with HTTP 200.
    """
    new = PACKED if old is SEPARATE else SEPARATE
    before, after = Version(old, blocks[0]), Version(new, blocks[1])
    for layer, which in product(range(LAYERS), range(2)):
        view, places = before.rows(layer, which)
        view[places] = VALUES[layer, which]
    put(opened(before), PROMPT, before.address(TOKENS))
    store = opened(after)
    assert store.lookup(PROMPT) == TOKENS
    assert got(store, PROMPT, after.address(TOKENS)) is None
    for layer, which in product(range(LAYERS), range(2)):
        view, places = after.rows(layer, which)
        assert torch.equal(view[places], VALUES[layer, which])
        view[places] = 0
    assert not after.memory.view(torch.int16).any()  # nothing else was written


@pytest.mark.parametrize("name", ["rope", "quantization", "index_keys"])
def test_an_upgrade_that_changes_what_bytes_mean_reads_nothing_and_says_why(name, opened):
    """dynamo#14416: nobody was told."""
    pool, other = mha.but(**SIZES)(), mha.but(**SIZES)()
    stored(opened(pool, conventions={name: "before"}), pool)
    store = opened(other, conventions={name: "behind"})
    assert_reads_nothing(store, other)
    assert store.stats().reasons["miss"] == f"{name}: 'before' of the writer, 'behind' here."
