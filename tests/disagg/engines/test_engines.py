"""Engines without endpoints: what they read, and what they refuse."""

from __future__ import annotations

import ctypes

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from disagg.engines.base import (
    EngineUnavailable,
    TransferError,
    create_engine,
    engine_class,
    engine_names,
)
from disagg.engines.local import LocalEngine
from disagg.engines.ranges import Ranges
from disagg.plan.bind import CopyBatch
from kvpool.layout import Slab
from tests.disagg.engines.local_peers import metadata
from tests.disagg.engines.owners import Owner, batch_of, engine_of, memory_of, pattern, read
from tests.disagg.engines.peers import ENGINES
from tests.processes import python

SIZE = 1 << 20
CASES = [(name, "shared") for name in ENGINES] + [
    ("local", "private"),
    ("local", "unsealed"),
    ("nixl", "private"),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_runs_of_every_length_arrive_and_nothing_else_changes(name, kind):
    random = np.random.default_rng(0)
    lengths = random.permutation([1, 2, 3, 7, 64, 64, 64, 1000, 4096, 16383, 16384, 100_003])
    gaps = random.integers(0, 50, (2, lengths.size))
    src, dst = (np.cumsum(lengths + gap) - lengths for gap in gaps)
    memory, truth = memory_of("shared", SIZE), pattern(SIZE)
    memory[:] = 0xEE
    expected = memory.copy()
    for start, stop, length in zip(src, dst, lengths):
        expected[stop : stop + length] = truth[start : start + length]
    with Owner(name, SIZE, kind) as other, engine_of(name, memory) as engine:
        peer = engine.connect(other.metadata)
        read(engine, peer, CopyBatch(other.base + src, memory.ctypes.data + dst, lengths))
        read(engine, peer, batch_of())
        engine.fence(peer)
        assert other.close() == 0
    assert np.array_equal(memory, expected)


def test_without_compiled_code_shared_memory_is_copied_and_private_memory_refused(monkeypatch):
    monkeypatch.setenv("KVPOOL_NATIVE", "0")
    memory, shared, private = (memory_of(kind, SIZE) for kind in ("shared", "shared", "private"))
    shared[:] = pattern(SIZE)
    with engine_of("local", shared, private) as other, engine_of("local", memory) as engine:
        peer = engine.connect(other.metadata())
        read(engine, peer, batch_of((shared.ctypes.data, memory.ctypes.data, SIZE)))
        assert np.array_equal(memory, shared)
        with pytest.raises(TransferError, match=r"private memory of .* turned off by"):
            read(engine, peer, batch_of((private.ctypes.data, memory.ctypes.data, 8)))
    assert np.array_equal(memory, shared)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("offset", [-1, SIZE - 7, SIZE + 4096, -(1 << 40)])
def test_a_pointer_outside_registered_memory_is_refused_before_a_byte_moves(name, offset):
    memory = memory_of("shared", SIZE)
    dst = memory.ctypes.data
    with Owner(name, SIZE, "shared") as other, engine_of(name, memory) as engine:
        runs = batch_of((other.base, dst, 8), (other.base + offset, dst + 8, 8))
        with pytest.raises(TransferError):
            read(engine, engine.connect(other.metadata), runs)
    assert not memory.any()


@pytest.mark.parametrize("name", ENGINES)
def test_malformed_metadata_is_refused(name):
    with engine_of(name) as engine:
        for data in (b"", b"\x93\x01\x02", b"x" * 1000):
            with pytest.raises(TransferError):
                engine.connect(data)


@pytest.mark.parametrize("name", ENGINES)
def test_memory_of_a_missing_device_is_refused_by_name(name):
    with pytest.raises(TransferError, match="cuda:0"):
        create_engine(name).register([Slab(1 << 20, SIZE, "cuda:0")])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"host": "elsewhere"}, "on another host"),
        ({"socket": "/text"}, "malformed metadata"),
        ({"more": 1}, "malformed metadata"),
    ],
)
def test_wrong_metadata_is_refused(change, sentence):
    fields = msgspec.msgpack.decode(metadata("/s"))
    with pytest.raises(TransferError, match=sentence):
        LocalEngine().connect(msgspec.msgpack.encode({**fields, **change}))


def test_engines_are_known_by_name():
    assert {"local", "nixl"} <= set(engine_names())
    with pytest.raises(EngineUnavailable, match=r"'pigeon' is unknown; known: .*local.*nixl"):
        create_engine("pigeon")
    assert all(engine_class(name).availability() is None for name in ENGINES)


def test_an_engine_without_a_name_is_refused_where_it_is_made(monkeypatch):
    kind = type("Nameless", (LocalEngine,), {})
    monkeypatch.delattr(LocalEngine, "name")
    monkeypatch.setattr("disagg.engines.base.engine_class", lambda name: kind)
    with pytest.raises(EngineUnavailable, match=r"'mine': Nameless says no name. Set `name` to"):
        create_engine("mine")


@pytest.mark.parametrize("name", ["ascend", "mori"])
def test_without_its_device_it_is_unavailable_and_imports_no_vendor_package(name):
    if engine_class(name).availability() is None:
        return  # this machine has one
    code = f"""
import sys
from disagg.engines.base import EngineUnavailable, create_engine, engine_class
for make in (engine_class({name!r}), lambda: create_engine({name!r})):
    try:
        make()
    except EngineUnavailable as error:
        print(error)
assert not {{"torch", "torch_npu", "mooncake", "mori"}} & set(sys.modules)
"""
    direct, by_name = python("-c", code).splitlines()
    assert direct.startswith(f"engine {name}: missing: ")
    assert by_name.startswith(f"engine '{name}': missing: ")


def test_a_pool_is_mapped_and_not_read_through_the_kernel():
    with Owner("local", SIZE, "shared") as other, engine_of("local") as engine:
        peer = engine.connect(other.metadata)
        assert not peer.ways.any()
        first = ctypes.c_ubyte.from_address(other.base + int(peer.shifts[0])).value
    assert first == pattern(1)[0]


# ranges of registered memory, against a byte-by-byte model

# gaps of 0 make ranges that touch
RANGES = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=8)
RUNS = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), max_size=12)


@given(RANGES, RUNS)
def test_runs_are_cut_at_edges_and_no_byte_is_lost_or_added(given_ranges, runs):
    end, placed = 5, []
    for gap, nbytes in given_ranges:
        placed.append((end + gap, nbytes))
        end += gap + nbytes
    owner = {
        byte: number for number, (base, n) in enumerate(placed) for byte in range(base, base + n)
    }
    src = np.array([start for start, _ in runs], dtype=np.int64)
    nbytes = np.array([length for _, length in runs], dtype=np.int64)
    batch = CopyBatch(src, src + 1000, nbytes)
    bytes_of = [range(start, start + length) for start, length in runs]
    ranges = Ranges.of(placed[::-1])
    if not all(byte in owner for run in bytes_of for byte in run):
        with pytest.raises(TransferError, match="the peer has registered"):
            ranges.cut(batch, batch.src, "the peer")
        return
    cut = ranges.cut(batch, batch.src, "the peer")
    pieces = [range(start, start + n) for start, n in zip(cut.src.tolist(), cut.nbytes.tolist())]
    assert [byte for piece in pieces for byte in piece] == [b for run in bytes_of for b in run]
    assert all(len({owner[byte] for byte in piece}) == 1 for piece in pieces)
    assert np.array_equal(cut.dst, cut.src + 1000)


def test_without_registered_memory_every_run_is_refused():
    ones = np.ones(1, dtype=np.int64)
    with pytest.raises(TransferError, match="this engine has registered no memory"):
        Ranges.of([]).cut(CopyBatch(ones, ones, ones), ones, "this engine")


@pytest.mark.parametrize(
    "given_ranges", [[(0, 0)], [(5, -1)], [(-1, 9)], [(0, 9), (8, 2)], [((1 << 63) - 1, 1)]]
)
def test_ranges_that_overlap_or_overflow_are_refused(given_ranges):
    with pytest.raises(ValueError, match="overlap another range or are invalid"):
        Ranges.of(given_ranges)
