"""Engine mori without MoRI: what is missing, what it refuses, and every call that it makes, with a
recorder in MoRI's place.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import time

import msgspec
import numpy as np
import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines import mori
from disagg.engines.base import EngineUnavailable, TransferError
from disagg.engines.mori import MoriEngine
from kvpool import MHAPool
from kvpool.layout import Slab
from tests import oracle
from tests.disagg.engines import mori_recorder as recorder
from tests.disagg.engines.owners import batch_of, finish, until

PARTS = {"_driver": "/dev/kfd", "_active_port": "RDMA port", "find_spec": "kvpool[mori]"}
SWITCH = "MORI_DISABLE_AUTO_XGMI"


@pytest.mark.parametrize("absent", [*PARTS, None])
def test_exactly_the_missing_parts_are_named(monkeypatch, absent):
    for part in PARTS:
        monkeypatch.setattr(mori, part, lambda *_, part=part: None if part == absent else True)
    monkeypatch.setitem(sys.modules, "mori.io", None)  # as if its library could not be loaded
    reason = MoriEngine.availability()
    if absent is None:
        assert "MoRI cannot be loaded: " in reason and "torch for ROCm" in reason
    else:
        assert reason.startswith("missing: ")
        assert [part for part, text in PARTS.items() if text in reason] == [absent]


@pytest.fixture
def network(monkeypatch):
    """Pretends that nothing is missing."""
    network = recorder.Network()
    for part in PARTS:
        monkeypatch.setattr(mori, part, lambda *_: True)
    monkeypatch.setitem(sys.modules, "mori.io", network.module())
    monkeypatch.delenv(SWITCH, raising=False)
    yield network
    network.block.set()
    network.release()


@pytest.mark.parametrize("hostname", ["prefill-7", "192.0.2.77", "0.0.0.0", "::1"])
def test_hosts_that_mori_would_not_survive_are_refused(network, hostname):
    with pytest.raises(ValueError, match=f"hostname '{hostname}': must be an IPv4 address of this"):
        MoriEngine(hostname)
    assert not recorder.CALLS


def test_xgmi_stays_off(network, monkeypatch):
    MoriEngine()
    assert os.environ[SWITCH] == "1"
    for value in ("0", ""):
        monkeypatch.setenv(SWITCH, value)
        with pytest.raises(EngineUnavailable, match="could move bytes over XGMI"):
            MoriEngine()


@pytest.mark.parametrize(
    ("slabs", "sentence"),
    [
        ([Slab(4096, 5, "npu:0")], "on npu:0: engine mori moves memory of cpu and cuda:N"),
        ([Slab(4096, 5, "cuda")], "on cuda: engine mori moves memory of cpu and cuda:N"),
        ([Slab(4096, 5), Slab(4100, 5)], "5 bytes at 0x1004 overlap another range"),
        ([Slab(4096, 0)], "0 bytes at 0x1000"),
    ],
)
def test_slabs_that_mori_would_not_survive_are_refused(network, slabs, sentence):
    with pytest.raises(TransferError, match=sentence):
        MoriEngine().register(slabs)
    assert not recorder.CALLS


@pytest.fixture
def engine_of(network):
    """Makes engines with registered memory; all are closed, and nothing is left of them."""
    engines = []

    def make(*memories, memory="cpu"):
        engines.append(MoriEngine())
        slabs = [Slab(array.ctypes.data, array.nbytes, memory) for array in memories]
        engines[-1].register(slabs)
        return engines[-1]

    yield make
    network.block.set()
    network.release()
    while engines:
        engines.pop().close()
    until(lambda: gc.collect() is not None and network.alive() == 0)


def bytes_of(size, seed=0):
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8)


def whole(source, dest):
    return batch_of((source.ctypes.data, dest.ctypes.data, source.nbytes))


def called(method):
    return [arguments for _, name, arguments in recorder.CALLS if name == method]


@pytest.fixture
def pair(engine_of):
    """A serving engine and a reading one, with their memory and the peer."""
    source, dest = bytes_of(1 << 16), np.zeros(1 << 16, np.uint8)
    serving, reading = engine_of(source), engine_of(dest)
    return serving, reading, source, dest, reading.connect(serving.metadata())


def test_each_call_and_argument_of_a_read(engine_of):
    source, dest = bytes_of(1 << 16), np.zeros(1 << 16, np.uint8)
    serving, reading = (engine_of(array, memory="cuda:5") for array in (source, dest))
    peer = reading.connect(serving.metadata())
    src, dst = source.ctypes.data, dest.ctypes.data
    finish(reading, reading.read(peer, batch_of((src + 7, dst + 100, 5), (src + 900, dst, 64))))
    finish(reading, reading.read(peer, batch_of((src + 20, dst + 300, 30))))

    gpu, cpu = recorder.MemoryLocationType.GPU, recorder.MemoryLocationType.CPU
    polling = recorder.PollCqMode.POLLING
    config = recorder.RdmaBackendConfig(4, -1, 4, polling, enable_notification=False)
    ours = serving_key, reading_key = list(dict.fromkeys(key for key, *_ in recorder.CALLS))
    reads = [("register_remote_engine"), *["batch_read"] * 4]
    for key, base, more in ((serving_key, src, []), (reading_key, dst, reads)):
        calls = [(name, arguments) for owner, name, arguments in recorder.CALLS if owner == key]
        assert calls[0] == ("IOEngine", (recorder.IOEngineConfig("127.0.0.1", 0),))
        assert calls[1] == ("create_backend", (recorder.BackendType.RDMA, config))
        assert calls[2][0] == "register_memory" and calls[2][1][1:] == (32, -1, cpu)
        assert calls[3] == ("register_memory", (base, 1 << 16, 5, gpu))
        assert [name for name, _ in calls[4:]] == more
    assert {desc.key for (desc,) in called("register_remote_engine")} == {serving_key}
    first, proof, second, again = called("batch_read")
    to = recorder.MemoryDesc(reading_key, 1, 5, dst, 1 << 16, gpu)
    of = recorder.MemoryDesc(serving_key, 1, 5, src, 1 << 16, gpu)
    assert first == ([to], [[100, 0]], [of], [[7, 900]], [[5, 64]], [0])
    assert second == ([to], [[300]], [of], [[20]], [[30]], [2])
    for number, token in ((1, proof), (3, again)):
        assert [token[0][0].id, token[2][0].id] == [0, 0] and token[4:] == ([[16]], [number])
    assert len(ours) == 2 and reading.fence(peer, 0)
    expected = np.zeros_like(dest)
    for first, stop, n in ((7, 100, 5), (900, 0, 64), (20, 300, 30)):
        expected[stop : stop + n] = source[first : first + n]
    assert np.array_equal(dest, expected)


def test_runs_across_slabs_of_the_host_and_of_gpus_arrive_in_calls_between_two(engine_of):
    source, dest = bytes_of(300), np.zeros(300, np.uint8)
    places = ("cuda:0", "cpu", "cuda:3")
    serving, reading = engine_of(), engine_of()
    for engine, memory in ((serving, source), (reading, dest)):
        slabs = [Slab(memory.ctypes.data + 100 * n, 100, places[n]) for n in (2, 0, 1)]
        engine.register(slabs[:2])
        engine.register(slabs[2:])
    peer = reading.connect(serving.metadata())
    finish(reading, reading.read(peer, batch_of((source.ctypes.data, dest.ctypes.data + 50, 200))))
    assert np.array_equal(dest[50:250], source[:200]) and not dest[:50].any()
    gpu, cpu = recorder.MemoryLocationType.GPU, recorder.MemoryLocationType.CPU
    registered = [slab[2:] for slab in called("register_memory") if slab[1] == 100]
    assert registered == 2 * [(3, gpu), (0, gpu), (-1, cpu)]
    assert all(
        offset >= 0 and offset + n <= desc.size
        for (to,), (dst,), (of,), (src,), (sizes,), _ in called("batch_read")
        for desc, offsets in ((to, dst), (of, src))
        for offset, n in zip(offsets, sizes)
    )
    outside = batch_of((source.ctypes.data + 299, dest.ctypes.data, 2))
    with pytest.raises(TransferError, match="do not lie in memory that the peer has registered"):
        reading.read(peer, outside)
    assert reading.poll(reading.read(peer, batch_of()))
    with pytest.raises(TransferError, match="register all memory before"):
        reading.register([Slab(4096, 5)])


def test_a_read_is_done_when_mori_says_so_and_the_descriptor_tells(network, pair):
    _, reading, source, dest, peer = pair
    tells, waker = socket.socketpair()
    waker.setblocking(False)
    reading.notify(waker.fileno())
    network.hold = lambda number, key: number == 0
    transfer = reading.read(peer, whole(source, dest))
    until(lambda: network.held)
    time.sleep(0.02)
    assert not reading.poll(transfer) and not dest.any()
    network.release()
    tells.settimeout(20)
    assert tells.recv(1)
    finish(reading, transfer)
    assert np.array_equal(dest, source)
    tells.close()
    waker.close()


def test_after_a_fence_nothing_lands_and_reads_of_others_go_on(network, pair, engine_of):
    serving, reading, source, dest, peer = pair
    other_source = bytes_of(1 << 12, seed=1)
    other = engine_of(other_source)
    live = reading.connect(other.metadata())
    network.hold = lambda number, key: True
    reading.read(peer, whole(source[4096:], dest[4096:]))
    slow = reading.read(live, whole(other_source, dest[:4096]))
    until(lambda: len(network.held) == 4)  # each with its token
    assert not reading.fence(peer, 0) and reading.fence(peer)
    with pytest.raises(TransferError, match="the peer was given up"):
        reading.read(peer, whole(source, dest))
    network.release()
    finish(reading, slow)
    assert np.array_equal(dest[:4096], other_source) and not dest[4096:].any()
    network.hold = lambda number, key: False
    again = reading.connect(serving.metadata())
    finish(reading, reading.read(again, whole(source, dest)))
    assert np.array_equal(dest, source)


def test_a_failed_read_says_why_and_then_nothing_of_it_lands(network, pair):
    serving, reading, source, dest, peer = pair
    network.refuse = lambda number, key: "SQ full (batch)" if number == 0 else None
    with pytest.raises(TransferError, match=r"cannot read from 127.0.0.1:\d+: SQ full \(batch\)"):
        finish(reading, reading.read(peer, whole(source, dest)))
    assert network.held and not network.release() and not dest.any()
    assert reading.fence(peer, 0)  # there is nothing to wait for
    network.refuse = lambda number, key: None
    again = reading.connect(serving.metadata())
    finish(reading, reading.read(again, whole(source, dest)))
    assert np.array_equal(dest, source)


def test_nothing_is_posted_behind_a_call_that_failed(network, engine_of):
    source, dest = bytes_of(300), np.zeros(300, np.uint8)
    serving, reading = engine_of(source[:100], source[200:]), engine_of(dest)
    peer = reading.connect(serving.metadata())
    network.refuse = lambda number, key: "ibv_post_send failed" if number == 0 else None
    src, dst = source.ctypes.data, dest.ctypes.data
    with pytest.raises(TransferError, match="ibv_post_send failed"):
        finish(reading, reading.read(peer, batch_of((src, dst, 50), (src + 200, dst + 50, 50))))
    assert len(called("batch_read")) == 1


def test_a_fence_outlasts_a_thread_in_a_call_and_close_ends_what_is_in_flight(network, pair):
    serving, reading, source, dest, peer = pair
    network.block.clear()
    network.hold = lambda number, key: True
    reading.read(peer, whole(source, dest))
    until(lambda: called("batch_read"))
    assert not reading.fence(peer, 0.3)
    network.block.set()
    reading.read(reading.connect(serving.metadata()), whole(source, dest))
    until(lambda: network.held)
    reading.close()
    assert not network.release() and not dest.any() and network.alive() == 1


def test_a_peer_that_dies_or_cannot_be_reached_fails_its_reads_alone(network, pair, engine_of):
    serving, reading, source, dest, peer = pair
    finish(reading, reading.read(peer, whole(source, dest)))
    unreachable = reading.connect(serving.metadata())
    serving.close()
    with pytest.raises(TransferError, match="transport retry counter exceeded"):
        finish(reading, reading.read(peer, whole(source, dest)))
    with pytest.raises(TransferError, match=r"connect\(127.0.0.1:\d+\): Connection refused"):
        finish(reading, reading.read(unreachable, whole(source, dest)))
    assert reading.fence(peer, 0) and reading.fence(unreachable, 0)
    other = engine_of(source)
    dest[:] = 0
    finish(reading, reading.read(reading.connect(other.metadata()), whole(source, dest)))
    assert np.array_equal(dest, source)
    network.no_device = True
    lost = reading.connect(other.metadata())
    sentence = "MoRI's RDMA on 127.0.0.1: no active RDMA device on this host"
    with pytest.raises(TransferError, match=sentence):
        finish(reading, reading.read(lost, whole(source, dest)))
    with pytest.raises(TransferError, match=sentence):
        engine_of(np.zeros(8, np.uint8)).metadata()


def test_a_process_that_took_over_the_port_is_not_believed(network, pair, engine_of):
    _, reading, _, dest, _ = pair
    source, stranger = bytes_of(512, seed=2), bytes_of(512, seed=3)
    first = engine_of(source)
    metadata = first.metadata()
    peer = reading.connect(metadata)
    first.close()
    second = engine_of(stranger)  # it has as many bytes, under the same number
    fresh = second.metadata()
    old, new = (
        recorder.EngineDesc.unpack(msgspec.msgpack.decode(data)["engine"])
        for data in (metadata, fresh)
    )
    network.listening[old.host, old.port] = network.listening[new.host, new.port]
    with pytest.raises(TransferError, match=r"another process answers at 127.0.0.1:\d+. Connect"):
        finish(reading, reading.read(peer, whole(source, dest[:512])))
    assert reading.fence(peer, 0)
    again = reading.connect(fresh)
    finish(reading, reading.read(again, whole(stranger, dest[:512])))
    assert np.array_equal(dest[:512], stranger)


def moved_to_another(packed):
    desc = recorder.MemoryDesc.unpack(packed)
    return msgspec.structs.replace(desc, engine_key="another").pack()


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": lambda _: b"\xff"},
        {"memory": lambda memory: [*memory, b"x"]},
        {"memory": lambda memory: [memory[0], memory[0]]},
        {"memory": lambda memory: [moved_to_another(memory[0])]},
        {"token_memory": moved_to_another},
        {"token": lambda token: token[:15]},
        {"nobody": lambda _: 1},
    ],
    ids=["no engine", "three", "one twice", "another's", "of the token", "short", "nobody"],
)
def test_malformed_metadata_is_refused_before_a_call(pair, changes):
    serving, reading, *_ = pair
    metadata = serving.metadata()
    until(lambda: called("register_remote_engine"))
    calls = len(recorder.CALLS)
    fields = msgspec.msgpack.decode(metadata)
    fields |= {name: change(fields.get(name)) for name, change in changes.items()}
    for wrong in (msgspec.msgpack.encode(fields), b"", b"\xc1", metadata[:-1]):
        with pytest.raises(TransferError, match="malformed metadata: "):
            reading.connect(wrong)
    assert len(recorder.CALLS) == calls


def test_a_room_of_endpoints(network):
    model = {"layers": range(3), "num_kv_heads": 2, "head_dim": 16, "dtype": "f32"}
    source, dest = (MHAPool(**model, num_pages=9, page_size=size) for size in (4, 8))
    ours, theirs = oracle.place(source, 21, 0), oracle.place(dest, 21, 1)
    oracle.fill(source, ours)
    oracle.blank(dest)
    with (
        PrefillEndpoint(source.layout, MoriEngine()) as prefill,
        DecodeEndpoint(dest.layout, MoriEngine()) as decode,
    ):
        decode.connect([prefill.address], timeout=20)
        decode.receive("r", theirs)
        prefill.send("r", ours)
        assert decode.wait("r", timeout=20) == KVPoll.Success
        assert prefill.wait("r", timeout=20) == KVPoll.Success
    oracle.assert_holds(dest, theirs)
    assert network.alive() == 0
