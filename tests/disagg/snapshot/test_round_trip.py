"""What is loaded from files is what was saved, byte by byte, whatever the geometries, and nothing
else is written.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from disagg import IncompatibleLayouts, IncompleteTransfer
from disagg.snapshot import load, save
from kvpool import Allocator, RequestPinned, Shard
from kvpool.device import DeviceUnavailable
from kvpool.layout import Pin
from tests import oracle
from tests.disagg.engines.shared_device import installed, there
from tests.disagg.plan.test_geometry import geometries
from tests.disagg.plan.test_interleave import Side
from tests.disagg.snapshot.folders import saved
from tests.disagg.test_matrix import MANY, SHAPES, TOKENS
from tests.pools import CLASSES, PACKED, dsv4, hybrid, mha, mla, swa

USUAL = {*CLASSES, "mha mxfp8", "hybrid nsa fp8", "dsv4 fp8"}
EVERY = {**CLASSES, **PACKED}
CASES = [
    pytest.param(name, "TP down", marks=() if name in USUAL else pytest.mark.long) for name in EVERY
]
CASES += [
    (name, shape) for name in ("mla", "hybrid", "dsv4") for shape in SHAPES if shape != "TP down"
]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_every_pool_and_every_shape(name, shape):
    sources, dests = SHAPES[shape](EVERY[name].but(**MANY))
    holders = [oracle.merged(*(build() for build in builds)) for builds in sources]
    addresses = [oracle.filled(holder, TOKENS, seed) for seed, holder in enumerate(holders, 1)]
    with saved(holders, addresses) as paths:
        for seed, builds in enumerate(dests, 90):
            dest = oracle.merged(*(build() for build in builds))
            oracle.blank(dest)
            address = oracle.place(dest, TOKENS, seed)
            assert load(paths, dest.layout, address) == TOKENS
            oracle.assert_holds(dest, address)


@settings(max_examples=50)
@given(geometries(layers=4, pp=2), st.integers(1, 200), st.data())
def test_any_geometry_and_any_part_of_a_request(geometry, tokens, data):
    model, source, dest, where = geometry
    holders = [source.pool(model, *rank, tokens) for rank in source.ranks()]
    into = dest.pool(model, *where, tokens)
    addresses = [oracle.filled(holder, tokens, seed) for seed, holder in enumerate(holders, 1)]
    of_file = data.draw(st.integers(1, tokens), label="saved")
    count = data.draw(st.integers(1, of_file), label="loaded")
    start = data.draw(st.one_of(st.just(0), st.integers(0, count)), label="start")
    address = oracle.place(into, count, 0)
    oracle.blank(into)
    oracle.write(into, address, range(start), salt=1)
    with saved(holders, addresses, tokens=of_file) as paths:
        assert load(paths, into.layout, address, tokens=range(start, count)) == count - start
    oracle.assert_holds(into, address, range(start, count), kept=range(start))


@pytest.mark.parametrize("tokens", [3, 45])
def test_ranks_that_share_out_positions(tokens):
    """Of 3 positions, two of three ranks hold none."""
    side = Side(tp=2, cp=3, size=4, window_size=2, page=8)
    ranks = side.ranks()
    holders = [side.state("mha", 9, tokens, *rank) for rank in ranks]
    addresses = [oracle.filled(holder, tokens, seed) for seed, holder in enumerate(holders, 1)]
    with saved(holders, addresses) as paths:
        other = Side(cp=2, size=6, page=5, heads_first=True)
        for rank in other.ranks():
            dest = other.state("mha", 9, tokens, *rank)
            oracle.blank(dest)
            address = oracle.place(dest, tokens, 70)
            load(paths, dest.layout, address)
            oracle.assert_holds(dest, address)


@pytest.mark.parametrize("tokens", [3, 4, 19])
def test_packed_items_beside_others_of_their_space(tokens):
    """K's pages are opaque, V's are not: the file has pages of K and entries of V."""

    def state(**more):
        pool = mha(**more)
        packed = tuple(
            replace(r, packing="amx", axes=(), width=r.nbytes) if r.role == "k" else r
            for r in pool.layout.regions
        )
        return pool, oracle.over(replace(pool.layout, regions=packed), pool._slab.numpy())

    (_pool, source), (_other, dest) = state(), state(placement="page")
    address = oracle.filled(source, tokens, 1)
    oracle.blank(dest)
    into = oracle.place(dest, tokens, 2)
    with saved([source], [address]) as paths:
        load(paths, dest.layout, into)
        oracle.assert_holds(dest, into)
        shorter = mha(page_size=2, num_pages=17)
        with pytest.raises(IncompatibleLayouts, match=r"layers 0-3 k: packing 'amx' on prefill"):
            load(paths, shorter.layout, oracle.place(shorter, tokens))


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (mla, None),
        (hybrid, "is that of 21 tokens, the destination needs that of 16"),
        (swa, "keeps entries from 15 on alive, the destination needs 10 to 15"),
        (dsv4, "alive, the destination needs"),
    ],
    ids=["mla", "hybrid", "swa", "dsv4"],
)
def test_the_state_of_a_prefix_is_loaded_or_refused(build, says):
    """Slots and rings hold that of the last token, a file what is alive of a window."""
    pool, dest = (build(num_pages=12, num_window_pages=16) for _ in range(2))
    tokens, prefix = 21, 16
    address, into = oracle.filled(pool, tokens, 1), oracle.place(dest, prefix, 2)
    oracle.blank(dest)
    with saved([pool], [address]) as paths:
        if says is None:
            load(paths, dest.layout, into)
            oracle.assert_holds(dest, into)
            return
        with pytest.raises(IncompleteTransfer, match=says):
            load(paths, dest.layout, into)
        with pytest.raises(IncompleteTransfer, match=says):
            save(paths[0].with_name("prefix"), pool.layout, address, tokens=prefix)
        assert [each.name for each in paths[0].parent.iterdir()] == ["0.kv"]
    assert all((memory == oracle.DEST).all() for memory in oracle.state(dest).memory)


def test_what_a_pool_has_beside_the_files_is_named_by_the_caller():
    target = mla()
    both = oracle.merged(mla(), mha(owner="draft", layers=[4]))
    into = oracle.place(both, 13, 3)
    oracle.blank(both)
    with saved([target], [oracle.filled(target, 13, 1)]) as paths:
        with pytest.raises(IncompatibleLayouts, match="draft layer 4 k"):
            load(paths, both.layout, into)
        load(paths, both.layout, into, allow_missing={"draft"})
    alone = oracle.of_layers(both, range(4))
    oracle.assert_holds(alone, into)


@pytest.mark.parametrize("build", [mha, swa, hybrid, dsv4], ids=["mha", "swa", "hybrid", "dsv4"])
def test_memory_of_a_device_goes_through_its_copies(build):
    pools = [build(num_window_pages=16, placement=each) for each in ("layer", "page")]
    address, into = oracle.filled(pools[0], 21, 1), oracle.place(pools[1], 21, 2)
    oracle.blank(pools[1])
    source, dest = (
        replace(oracle.state(pool), layout=there(pool.layout, "shm:0")) for pool in pools
    )
    with installed(), saved([source], [address]) as paths:
        load(paths, dest.layout, into)
    oracle.assert_holds(dest, into)


@pytest.mark.parametrize("native", ["1", "0"])
def test_requests_larger_than_the_staging_buffer(native, monkeypatch):
    """Windows of a file are cut, and long gaps in it are not read."""
    monkeypatch.setenv("KVPOOL_NATIVE", native)
    monkeypatch.setattr("disagg.snapshot.STAGING_BYTES", 1000)
    monkeypatch.setattr("disagg.snapshot.CHUNK_TOKENS", 7)
    monkeypatch.setattr("disagg.snapshot.MAX_GAP", 30)
    monkeypatch.setattr("disagg.snapshot.files.MAX_SPAN", 50)
    for build in (mha, hybrid, dsv4):
        halves = [build(shard=Shard(rank, 2)) for rank in range(2)]
        addresses = [oracle.filled(half, 21, seed) for seed, half in enumerate(halves, 1)]
        with saved(halves, addresses) as paths:
            dest = build(page_size=8)
            oracle.blank(dest)
            into = oracle.place(dest, 21, 5)
            load(paths, dest.layout, into)
            oracle.assert_holds(dest, into)


def test_a_request_is_pinned_while_it_is_saved_and_loaded():
    pool = mla()
    allocator = Allocator(pool)
    request = allocator.new_request()
    allocator.extend(request, 10)
    oracle.fill(pool, request.address())
    with saved([pool], [request.address()]) as paths:
        fork = allocator.fork(request, 8)
        with pytest.raises(ValueError, match="items 1-2 of space kv, which 1 other request holds"):
            load(paths, pool.layout, fork.address())
        allocator.extend(fork, 2)
        load(paths, pool.layout, fork.address(), tokens=range(8, 10))
        assert oracle.holds(pool, fork.address()) and not fork.pins() and not request.pins()
        allocator.free(fork)
        address = request.address()
        for side, call in (
            ("received", lambda: save(paths[0], pool.layout, address)),
            ("offered", lambda: load(paths, pool.layout, address)),
        ):
            pin = Pin("r", side, address, pool.layout, last=True, held=lambda: True)
            request.pin(pin)
            with pytest.raises(RequestPinned, match=r"room 'r' .* the 10 tokens of this"):
                call()
            request.unpin(pin)


def test_memory_that_cannot_be_copied_is_refused(tmp_path):
    pool = mla()
    address = oracle.filled(pool, 9, 1)
    meta = mla(device="meta")
    with pytest.raises(DeviceUnavailable, match="no memory to save or load"):
        save(tmp_path / "a", meta.layout, oracle.place(meta, 9))
    with pytest.raises(DeviceUnavailable, match="no installed package offers 'tpu'"):
        save(tmp_path / "a", there(pool.layout, "tpu:0"), address)
    first, *others = pool.layout.buffers
    mixed = replace(pool.layout, buffers=(replace(first, memory="meta"), *others))
    with pytest.raises(
        ValueError, match="buffers in cpu and meta: save and load the layout of one"
    ):
        save(tmp_path / "a", mixed, address)
    save(tmp_path / "b", pool.layout, address)
    with pytest.raises(DeviceUnavailable, match="no memory to save or load"):
        load(tmp_path / "b", meta.layout, oracle.place(meta, 9))
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("tokens", [0, 10, -1])
def test_tokens_that_the_block_table_lacks_are_refused(tokens, tmp_path):
    pool = mla()
    with pytest.raises(
        ValueError, match=f"tokens: 1 to 9, which the block table has, got {tokens}"
    ):
        save(tmp_path / "a", pool.layout, oracle.place(pool, 9), tokens=tokens)


@pytest.mark.parametrize("tokens", [range(8), range(0, 9, 2), range(-1, 9), range(10, 9)])
def test_positions_that_do_not_end_with_the_block_table_are_refused(tokens, tmp_path):
    pool = mla()
    save(tmp_path / "a", pool.layout, oracle.filled(pool, 9, 1))
    with pytest.raises(ValueError, match="a range that ends with the block table's 9 tokens"):
        load(tmp_path / "a", pool.layout, oracle.place(pool, 9), tokens=tokens)
    with pytest.raises(ValueError, match="at least one file"):
        load([], pool.layout, oracle.place(pool, 9))
