"""Reads of a store: any part of any prefix, from several writers; and what is not what it says is
a miss that names its reason, and leaves the pool as it was.
"""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from disagg.store import Store
from disagg.store.chunks import chunk_layouts, of_kind
from kvpool import Shard
from kvpool.layout import RequestAddress
from tests import oracle
from tests.disagg.plan.test_geometry import geometries
from tests.disagg.plan.test_interleave import Side
from tests.disagg.store.stores import CHUNK, fresh, got, outcome, put, slow, stores
from tests.pools import hybrid, memory_of, mha, swa
from tests.processes import until

TOKENS = 3 * CHUNK
PROMPT = np.random.default_rng(5).integers(0, 900, 5 * CHUNK)


def computed(holders, seed=1, tokens=TOKENS):
    """Block tables at each chunk's end, of requests that are computed chunk by chunk."""
    tables = [oracle.place(holder, tokens, seed) for holder in holders]
    for stop in range(CHUNK, tokens + 1, CHUNK):
        for holder, table in zip(holders, tables):
            oracle.write(holder, RequestAddress(stop, table.spans), range(stop - CHUNK, stop))
        yield [RequestAddress(stop, table.spans) for table in tables]


def write_all(writing, holders, tokens=TOKENS, salt=""):
    for addresses in computed(holders, tokens=tokens):
        for store, address in zip(writing, addresses):
            put(store, PROMPT[: address.num_tokens], address, salt=salt)


@settings(max_examples=40)
@given(geometries(layers=4, pp=2), st.integers(1, 3), st.data())
def test_any_geometry_and_any_part_of_a_request(geometry, chunks, data):
    model, source, dest, where = geometry
    tokens = TOKENS
    holders = [source.pool(model, *rank, tokens) for rank in source.ranks()]
    into = dest.pool(model, *where, tokens)
    url, count = fresh(), chunks * CHUNK
    start = data.draw(st.one_of(st.just(0), st.integers(0, count - 1)), label="start")
    address = oracle.place(into, count, 0)
    oracle.blank(into)
    oracle.write(into, address, range(start), salt=1)
    with stores(url, holders) as writing, stores(url, [into]) as (reading,):
        write_all(writing, holders)
        assert reading.lookup(PROMPT) == tokens
        assert got(reading, PROMPT[:count], address, range(start, count)) is None
    oracle.assert_holds(into, address, range(start, count), kept=range(start))


def test_ranks_that_share_out_positions():
    side, other = (
        Side(tp=2, cp=3, size=4, window_size=2, page=8),
        Side(cp=2, size=6, page=5, heads_first=True),
    )
    holders = [side.state("mha", 9, TOKENS, *rank) for rank in side.ranks()]
    url = fresh()
    with stores(url, holders) as writing:
        write_all(writing, holders)
        for rank in other.ranks():
            dest = other.state("mha", 9, TOKENS, *rank)
            oracle.blank(dest)
            address = oracle.place(dest, TOKENS, 70)
            with Store(url, dest.layout, chunk_tokens=CHUNK) as reading:
                assert got(reading, PROMPT[:TOKENS], address) is None
            oracle.assert_holds(dest, address)


def test_chunks_of_a_prefix_may_be_of_several_writers():
    url, big = fresh(), {"num_pages": 40}
    first, second = [mha(**big)], [mha(shard=Shard(rank, 2), **big) for rank in range(2)]
    with stores(url, first) as one, stores(url, second) as two:
        *_, (address,) = computed(first)
        put(one[0], PROMPT[:TOKENS], address, positions=range(CHUNK))
        *_, addresses = computed(second)
        for store, address in zip(two, addresses):
            put(store, PROMPT[:TOKENS], address, positions=range(CHUNK, TOKENS))
    dest = mha(page_size=12, num_pages=20, placement="page")
    oracle.blank(dest)
    address = oracle.place(dest, TOKENS, 3)
    with Store(url, dest.layout, chunk_tokens=CHUNK) as reading:
        assert reading.lookup(PROMPT) == TOKENS
        assert got(reading, PROMPT[:TOKENS], address) is None
    oracle.assert_holds(dest, address)


def test_what_an_engine_of_ones_kind_has_written_is_found_at_once():
    """Others are found once their geometry is looked for again."""
    url, pool, other = fresh(), mha(num_pages=40), mha(num_pages=80, page_size=2)
    with (
        stores(url, [pool]) as (one,),
        stores(url, [pool]) as (two,),
        stores(url, [other]) as (three,),
    ):
        assert two.lookup(PROMPT) == three.lookup(PROMPT) == 0
        write_all([one], [pool])
        assert two.lookup(PROMPT) == TOKENS


def test_a_stage_of_a_pipeline_may_have_no_windows():
    """Of three layers the first has full attention: the other stage has windows only."""
    model = swa(num_pages=40, num_window_pages=40)
    names = {kind: of_kind(model.layout, kind) for kind in ("full", "window")}
    stages = [SimpleNamespace(layout=layout) for layout in names.values()]
    url = fresh()
    with stores(url, [model]) as (writing,), stores(url, stages) as reading:
        write_all([writing], [model])
        address = oracle.place(model, TOKENS, 9)
        oracle.blank(model)
        hit = outcome(reading[0], reading[0].ask(PROMPT)).hit
        assert hit.tokens == TOKENS
        for store in reading:
            assert got(store, PROMPT[:TOKENS], address, hit=hit) is None
    oracle.assert_holds(model, address)


@pytest.fixture
def written(tmp_path):
    """A folder with a prompt's chunks, and the pool that they were written from."""
    pool = mha(num_pages=40)
    url = f"file://{tmp_path}/floor"
    with Store(
        url, pool.layout, chunk_tokens=CHUNK, conventions={"model": "m", "rope": "a"}
    ) as store:
        write_all([store], [pool])
    return url


def reader(url, pool=None, **options):
    pool = mha(num_pages=40) if pool is None else pool
    given = {"chunk_tokens": CHUNK, "conventions": {"model": "m"}, **options}
    return pool, Store(url, pool.layout, **given)


def object_of(url, chunk):
    """The file of a chunk's state that every position keeps."""
    _, store = reader(url)
    with store:
        key = store.keys(PROMPT).keys[chunk]
    (path,) = Path(url.removeprefix("file://")).rglob(f"{key.hex()}/*.full")
    return path


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"tokens": [*PROMPT[:30], 7, *PROMPT[31:]]}, CHUNK),
        ({"salt": "tenant"}, 0),
        ({"conventions": {"model": "m", "rope": "b"}}, 0),
        ({"conventions": {"model": "n"}}, 0),
        ({"chunk_tokens": 12}, 0),
        ({"pool": mha(num_pages=40, packing="f32")}, 0),
        ({"pool": mha(num_pages=40, packing="fp8")}, 0),
        ({"pool": swa(num_pages=40, num_window_pages=40)}, 0),
    ],
    ids=["tokens", "salt", "rope", "model", "chunk", "dtype", "packing", "window"],
)
def test_what_means_another_thing_is_not_found(other, why, written):
    other = dict(other)
    tokens, salt = other.pop("tokens", PROMPT), other.pop("salt", "")
    _, store = reader(written, **other)
    with store:
        assert store.lookup(tokens, salt) == why
        if "rope" in other.get("conventions", {}):
            assert "rope: 'a' of the writer, 'b' here" in store.stats().reasons["miss"]


def flipped(at):
    def damage(path, other):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return damage


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (flipped(0), "its head says b'.VPOOL"),
        (flipped(20), "its head says full of chunk 1, key"),
        (flipped(90), "its head is damaged"),
        (flipped(-1), "block .* of .* is damaged"),
        (flipped(2000), "block .* of .* is damaged"),
        (lambda path, other: path.write_bytes(path.read_bytes()[:-1]), "ends at byte"),
        (lambda path, other: path.write_bytes(b"x"), "ends at byte 1"),
        (lambda path, other: shutil.copy(other, path), "its head says full of chunk 0"),
    ],
    ids=["magic", "key", "digest", "last byte", "a byte", "cut", "tiny", "another chunk"],
)
def test_a_damaged_object_is_a_miss_and_is_not_read_again(damage, says, written):
    damage(object_of(written, 1), object_of(written, 0))
    pool, store = reader(written)
    prompt, address = PROMPT[: 2 * CHUNK], oracle.place(pool, 2 * CHUNK, 3)
    with store:
        oracle.blank(pool)
        before = memory_of(pool)
        failure = got(store, prompt, address, range(CHUNK, 2 * CHUNK))
        assert re.search(says, failure or "")
        assert np.array_equal(memory_of(pool), before)
        assert store.stats().counts["damaged"] == 1
        assert store.lookup(PROMPT) == CHUNK
        oracle.fill(pool, address)
        assert put(store, prompt, address) == 2  # by another geometry: the writer's has a rope
        oracle.blank(pool)
        assert got(store, prompt, address) is None
        oracle.assert_holds(pool, address)


def test_a_writer_replaces_what_it_has_found_damaged(written):
    object_of(written, 1).write_bytes(b"nothing")
    pool, store = reader(written, conventions={"model": "m", "rope": "a"})
    prompt, address = PROMPT[: 2 * CHUNK], oracle.place(pool, 2 * CHUNK, 3)
    with store:
        assert "ends at byte" in got(store, prompt, address)
        oracle.fill(pool, address)
        put(store, prompt, address)
        assert store.stats().counts["written"] == store.stats().counts["already there"] == 1
    pool, store = reader(written)
    with store:
        oracle.blank(pool)
        assert got(store, prompt, address) is None
        oracle.assert_holds(pool, address)


def test_an_object_that_has_gone_is_a_miss(written):
    pool, store = reader(written)
    with store:
        assert store.lookup(PROMPT) == TOKENS
        hit = outcome(store, store.ask(PROMPT)).hit
        object_of(written, 2).unlink()
        address = oracle.place(pool, TOKENS, 3)
        assert got(store, PROMPT[:TOKENS], address, hit=hit)
        assert store.stats().counts["vanished"] == 1
        assert store.lookup(PROMPT) == 2 * CHUNK


def test_a_floor_that_hangs_delays_nobody_and_writes_nothing_later(written, monkeypatch):
    floor = slow(monkeypatch)
    pool, store = reader(written, timeout=0.2)
    with store:
        oracle.blank(pool)
        before = memory_of(pool)
        address = oracle.place(pool, TOKENS, 3)
        assert store.lookup(PROMPT) == 0
        assert outcome(store, store.ask(PROMPT)).failure == f"{written} does not answer."
        failure = got(store, PROMPT[:TOKENS], address)
        assert failure == f"{written} did not answer within 0.2 s."
        counts = store.stats().counts
        assert counts["late"] == counts["unreachable"] == counts["away"] == 1
        floor.go.set()
        store.timeout = 10.0
        until(lambda: store.lookup(PROMPT) == TOKENS)
        assert np.array_equal(memory_of(pool), before)
        assert got(store, PROMPT[:TOKENS], address) is None
        oracle.assert_holds(pool, address)


def test_an_aborted_read_writes_nothing_later(written, monkeypatch):
    floor = slow(monkeypatch)
    pool, store = reader(written)
    with store:
        oracle.blank(pool)
        before = memory_of(pool)
        store.abort(store.read(PROMPT[:TOKENS], oracle.place(pool, TOKENS, 3)))
        floor.go.set()
        assert store.lookup(PROMPT) == TOKENS  # by the threads that would have read
        assert store.ended() == []
        assert np.array_equal(memory_of(pool), before)


def test_two_readers_of_half_the_heads_fetch_half_the_bytes_each(written):
    whole, store = reader(written)
    with store:
        assert got(store, PROMPT[:TOKENS], oracle.place(whole, TOKENS, 3)) is None
        nbytes = store.stats().sizes["read"]
    assert nbytes == 3 * chunk_layouts(whole.layout, CHUNK)["full"].nbytes
    half = mha(num_pages=40, shard=Shard(1, 2))
    _, store = reader(written, half)
    with store:
        assert got(store, PROMPT[:TOKENS], oracle.place(half, TOKENS, 3)) is None
        assert store.stats().sizes["read"] == nbytes // 2


def test_writers_that_differ_in_what_the_reader_does_not_say_do_not_meet():
    """The first is read: of two chunks with different ropes, one would be wrong."""
    url, pool = fresh(), mha(num_pages=40)
    for rope, positions in (("a", range(CHUNK)), ("b", range(CHUNK, TOKENS))):
        with Store(url, pool.layout, chunk_tokens=CHUNK, conventions={"rope": rope}) as store:
            *_, (address,) = computed([pool])
            put(store, PROMPT[:TOKENS], address, positions=positions)
    with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
        assert store.lookup(PROMPT) == CHUNK
    with Store(url, pool.layout, chunk_tokens=CHUNK, conventions={"rope": "b"}) as store:
        assert store.lookup(PROMPT) == 0
        assert store.stats().reasons["miss"] == "rope: 'a' of the writer, 'b' here."


def test_a_request_that_goes_on_has_no_state_of_an_earlier_chunk():
    """A slot, and rings of pages that it is in the middle of, are those of the last token."""
    url, pool = fresh(), hybrid(num_pages=40)
    with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
        address = oracle.filled(pool, TOKENS + 1, 1)
        assert put(store, PROMPT[: TOKENS + 1], address) == 3
        assert store.lookup(PROMPT) == 0
        address = oracle.filled(pool, TOKENS, 1)
        assert put(store, PROMPT[:TOKENS], address) == 1
        assert store.lookup(PROMPT) == TOKENS


def test_what_does_not_fit_in_memory_is_dropped_and_counted():
    url, pool = fresh(), mha(num_pages=40)
    size = chunk_layouts(pool.layout, CHUNK)["full"].nbytes
    with Store(url, pool.layout, chunk_tokens=CHUNK, room=size - 1) as store:
        *_, (address,) = computed([pool])
        assert put(store, PROMPT[:TOKENS], address) == 0
        assert store.stats().counts["dropped"] == 3
        assert store.stats().sizes["dropped"] == 3 * size
        assert store.stats().reasons["dropped"] == (
            f"0 of {size - 1:,} bytes in memory wait to be written."
        )
        assert store.lookup(PROMPT) == 0


def test_two_writers_of_one_chunk():
    """One of them writes it; both go on."""
    pools = [mha(num_pages=40) for _ in range(2)]
    url = fresh()
    writers = [Store(url, pool.layout, chunk_tokens=CHUNK) for pool in pools]
    for store, pool in zip(writers, pools):
        *_, (address,) = computed([pool])
        store.write(PROMPT[:TOKENS], address)
    for store in writers:
        store.close()
    counts = [store.stats().counts for store in writers]
    assert sum(count["written"] for count in counts) == 3
    assert sum(count["already there"] for count in counts) == 3


def test_a_namespace_takes_64_geometries():
    url = fresh()
    pools = [mha(num_pages=40, layers=range(n, n + 1), total_kv_layers=65) for n in range(65)]
    for number, pool in enumerate(pools):
        with Store(url, pool.layout, chunk_tokens=CHUNK) as store:
            *_, (address,) = computed([pool])
            assert put(store, PROMPT[:TOKENS], address) == 3
            stats = store.stats()
            if number < 64:
                assert stats.counts["written"] == 3
            else:
                assert stats.counts["not written"] == 3
                assert "this namespace has 64 geometries" in stats.reasons["not written"]
    with Store(url, pools[63].layout, chunk_tokens=CHUNK) as store:
        assert store.lookup(PROMPT) == TOKENS


def test_garbage_in_the_catalogue_is_passed_over(written):
    folder = next(Path(written.removeprefix("file://")).rglob("geometry"))
    (folder / "01").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    (folder / "02").write_bytes(b"")
    (folder / "03").write_bytes(b"\xff" * 64)
    pool, store = reader(written, mha(num_pages=40, shard=Shard(0, 2)))
    with store:
        assert store.lookup(PROMPT) == TOKENS
        address = oracle.filled(pool, TOKENS, 1)
        put(store, PROMPT[::-1][:TOKENS], address)
    assert (folder / "04").exists()


def test_a_hit_may_have_to_be_a_multiple_of_more_than_a_chunk(written):
    _, store = reader(written)
    with store:
        assert outcome(store, store.ask(PROMPT, step=2 * CHUNK)).hit.tokens == 2 * CHUNK
        assert outcome(store, store.ask(PROMPT, step=5)).hit.tokens == 0


def test_what_was_evicted_is_written_again(written, monkeypatch):
    monkeypatch.setattr("disagg.store.known.KNOWN_SECONDS", 0.05)
    pool, store = reader(written, conventions={"model": "m", "rope": "a"})
    address = oracle.filled(pool, TOKENS, 1)
    with store:
        assert put(store, PROMPT[:TOKENS], address) == 3  # it does not know that they are there
        assert put(store, PROMPT[:TOKENS], address) == 0
        object_of(written, 1).unlink()
        time.sleep(0.06)
        assert put(store, PROMPT[:TOKENS], address) == 3
        assert store.stats().counts["written"] == 1
        assert store.lookup(PROMPT) == TOKENS


def test_what_a_lookup_has_missed_is_written_again_at_once(written):
    pool, store = reader(written, conventions={"model": "m", "rope": "a"})
    address = oracle.filled(pool, TOKENS, 1)
    with store:
        put(store, PROMPT[:TOKENS], address)
        object_of(written, 1).unlink()
        assert store.lookup(PROMPT) == CHUNK
        assert put(store, PROMPT[:TOKENS], address) == 1
        assert store.lookup(PROMPT) == TOKENS
