"""Engines without endpoints: what they read, and what they refuse."""

from __future__ import annotations

import ctypes
import mmap
import os

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from disagg.engines.base import (
    EngineUnavailable,
    TransferError,
    create_engine,
    engine_class,
    engine_names,
)
from disagg.engines.local import LocalEngine
from disagg.plan.bind import CopyBatch
from kvpool.device.cpu import CPUDevice
from kvpool.device.host_copy import LARGE, copy_runs
from kvpool.layout import Slab
from tests.disagg.engines.local_peers import metadata
from tests.disagg.engines.peers import ENGINES
from tests.processes import FORKS

SIZE = 1 << 20


def pattern(kind: str) -> np.ndarray:
    """Memory of a kind, filled with a pattern."""
    if kind == "shared":
        memory = CPUDevice().allocate(SIZE).numpy()
    elif kind == "unsealed":
        handle = os.memfd_create("other")
        os.ftruncate(handle, SIZE)
        memory = np.frombuffer(mmap.mmap(handle, SIZE), dtype=np.uint8)
    else:
        memory = np.empty(SIZE, dtype=np.uint8)
    memory[:] = (np.arange(SIZE) * 2654435761 >> 11).astype(np.uint8)
    return memory


def owner(pipe, name, kind):
    """Registers memory and waits."""
    memory, engine = pattern(kind), create_engine(name)
    engine.register([Slab(memory.ctypes.data, SIZE)])
    pipe.send((engine.metadata(), memory.ctypes.data))
    while not pipe.poll(0.001):
        engine.progress()
    engine.close()


class Owner:
    """A process with registered memory."""

    def __init__(self, name, kind):
        self.pipe, there = FORKS.Pipe()
        self.process = FORKS.Process(target=owner, args=(there, name, kind), daemon=True)
        self.process.start()
        there.close()
        assert self.pipe.poll(60)
        self.metadata, self.base = self.pipe.recv()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pipe.send(None)
        self.process.join(20)
        assert self.process.exitcode == 0


def read(engine, peer, batch):
    transfer = engine.read(peer, batch)
    while not engine.poll(transfer):
        pass


def batch_of(*runs):
    return CopyBatch(*np.array(runs, dtype=np.int64).T)


CASES = [(name, "shared") for name in ENGINES] + [
    ("local", "private"),
    ("local", "unsealed"),
    ("nixl", "private"),
]


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_runs_of_every_length_arrive_and_nothing_else_changes(name, kind):
    random = np.random.default_rng(0)
    lengths = random.permutation([1, 2, 3, 7, 64, 64, 64, 1000, 4096, LARGE - 1, LARGE, 100_003])
    gaps = random.integers(0, 50, (2, lengths.size))
    src, dst = (np.cumsum(lengths + gap) - lengths for gap in gaps)
    memory, truth = CPUDevice().allocate(SIZE).numpy(), pattern("private")
    memory[:] = 0xEE
    expected = memory.copy()
    for start, stop, length in zip(src, dst, lengths):
        expected[stop : stop + length] = truth[start : start + length]
    with Owner(name, kind) as other:
        engine = create_engine(name)
        engine.register([Slab(memory.ctypes.data, SIZE)])
        peer = engine.connect(other.metadata)
        read(engine, peer, CopyBatch(other.base + src, memory.ctypes.data + dst, lengths))
        read(engine, peer, CopyBatch(*[src[:0]] * 3))
        engine.fence(peer)
        engine.close()
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("at", [-1, SIZE - 7, SIZE + 4096, -(1 << 40)])
def test_a_pointer_outside_registered_memory_is_refused_before_a_byte_moves(name, at):
    memory = CPUDevice().allocate(SIZE).numpy()
    with Owner(name, "shared") as other:
        engine = create_engine(name)
        engine.register([Slab(memory.ctypes.data, SIZE)])
        peer = engine.connect(other.metadata)
        here = memory.ctypes.data
        with pytest.raises(TransferError):
            read(engine, peer, batch_of((other.base, here, 8), (other.base + at, here + 8, 8)))
        engine.close()
    assert not memory.any()


@pytest.mark.parametrize("name", ENGINES)
def test_malformed_metadata_is_refused(name):
    engine = create_engine(name)
    for data in (b"", b"\x93\x01\x02", b"x" * 1000):
        with pytest.raises(TransferError):
            engine.connect(data)
    engine.close()


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
    told = msgspec.msgpack.decode(metadata("/s"))
    with pytest.raises(TransferError, match=sentence):
        LocalEngine().connect(msgspec.msgpack.encode({**told, **change}))


def test_unmapped_memory_cannot_be_registered():
    with pytest.raises(TransferError, match="not mapped here"):
        LocalEngine().register([Slab(4096, 4096)])


def test_engines_are_known_by_name():
    assert {"local", "nixl"} <= set(engine_names())
    with pytest.raises(EngineUnavailable, match=r"'pigeon' is unknown; known: .*local.*nixl"):
        create_engine("pigeon")
    assert all(engine_class(name).availability() is None for name in ENGINES)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("copies")
@given(st.data())
def test_copies_of_many_runs_equal_slices(data):
    count = data.draw(st.integers(0, 60))
    widths = data.draw(st.sampled_from([[1], [3, 8], [8, 64], [5, LARGE], [LARGE - 1, 40_000]]))
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    lengths = random.choice([0, *widths], count)
    source = random.integers(0, 256, int(lengths.sum()) + 4096 * (count + 1), dtype=np.uint8)
    dest = np.full(source.size, 7, dtype=np.uint8)
    order = random.permutation(count)
    src = np.zeros(count, dtype=np.int64)
    src[order] = np.cumsum(lengths[order]) - lengths[order] + np.arange(count) * 13
    dst = np.cumsum(lengths) - lengths + np.arange(count) * 29
    expected = dest.copy()
    for start, stop, length in zip(src, dst, lengths):
        expected[stop : stop + length] = source[start : start + length]
    copy_runs(source.ctypes.data + src, dest.ctypes.data + dst, lengths.astype(np.int64))
    assert np.array_equal(dest, expected)


def test_a_pool_is_mapped_and_not_read_through_the_kernel():
    with Owner("local", "shared") as other:
        peer = LocalEngine().connect(other.metadata)
        assert not peer.ways.any()
        first = ctypes.c_ubyte.from_address(other.base + int(peer.shifts[0])).value
    assert first == pattern("private")[0]
