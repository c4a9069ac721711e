"""Engine mori without MoRI: what is missing, what it refuses, and every call that it makes, with a
recorder in MoRI's place.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import EngineUnavailable, TransferError
from disagg.engines.mori import MoriEngine, package
from disagg.plan.bind import CopyBatch
from kvpool import MHAPool
from kvpool.layout import Slab
from tests import oracle
from tests.disagg.engines import mori_recorder as recorder

PARTS = {"_driver": "/dev/kfd", "_active_port": "RDMA port", "find_spec": "kvpool[mori]"}
SWITCHES = ("MORI_DISABLE_AUTO_XGMI", "MORI_RDMA_DEVICES")


def test_without_an_amd_gpu_it_is_unavailable_and_imports_no_vendor_package():
    if MoriEngine.availability() is None:
        return  # this machine has one
    code = """
import sys
from disagg.engines.base import EngineUnavailable
from disagg.engines.mori import MoriEngine
print(MoriEngine.availability())
try:
    MoriEngine()
except EngineUnavailable as error:
    print(error)
assert not {"torch", "mori"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said, raised = done.stdout.splitlines()
    assert said.startswith("missing: ") and raised == f"engine mori: {said}"


@pytest.mark.parametrize("absent", [*PARTS, None])
def test_exactly_the_missing_parts_are_named(monkeypatch, absent):
    for part in PARTS:
        found = None if part == absent else True
        monkeypatch.setattr(package, part, lambda *_, found=found: found)
    monkeypatch.setitem(sys.modules, "mori.io", None)  # as if its library could not be loaded
    said = MoriEngine.availability()
    if absent is None:
        assert "MoRI cannot be loaded: " in said and "torch for ROCm" in said
    else:
        assert said.startswith("missing: ")
        assert [part for part, text in PARTS.items() if text in said] == [absent]


@pytest.fixture
def network(monkeypatch):
    """Pretends that nothing is missing."""
    made = recorder.Network()
    for part in PARTS:
        monkeypatch.setattr(package, part, lambda *_: True)
    monkeypatch.setitem(sys.modules, "mori.io", made.module())
    for switch in SWITCHES:
        monkeypatch.delenv(switch, raising=False)
    yield made
    made.block.set()
    made.release()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hostname": "prefill-7"}, "hostname 'prefill-7': must be an IPv4 address of this host"),
        ({"hostname": "192.0.2.77"}, "hostname '192.0.2.77': must be an IPv4 address of this"),
        ({"hostname": "0.0.0.0"}, "hostname '0.0.0.0': must be an IPv4 address of this host"),
        ({"hostname": "::1"}, "hostname '::1': must be an IPv4 address of this host"),
        ({"qp_per_transfer": 0}, "qp_per_transfer=0: must be at least 1"),
        ({"num_worker_threads": -1}, "num_worker_threads=-1: must be at least 1"),
        ({"post_batch_size": 0}, "post_batch_size=0: must be at least 1, or -1"),
    ],
)
def test_options_that_mori_would_not_survive_are_refused(network, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        MoriEngine(**options)
    assert not recorder.CALLS


def test_xgmi_stays_off_and_a_process_has_one_choice_of_nics(network, monkeypatch):
    MoriEngine(device="mlx5_0,mlx5_1")
    assert os.environ["MORI_RDMA_DEVICES"] == "mlx5_0,mlx5_1"
    assert os.environ["MORI_DISABLE_AUTO_XGMI"] == "1"
    MoriEngine()
    with pytest.raises(EngineUnavailable, match="MORI_RDMA_DEVICES=mlx5_0,mlx5_1 is set"):
        MoriEngine(device="mlx5_2")
    for value in ("0", ""):
        monkeypatch.setenv("MORI_DISABLE_AUTO_XGMI", value)
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


def test_without_an_active_nic_metadata_and_connect_say_what_mori_says(network):
    serving = engine_of(np.zeros(8, np.uint8))
    metadata = serving.metadata()
    network.no_device = True
    sentence = "MoRI cannot start RDMA on 127.0.0.1: no active RDMA device on this host"
    with pytest.raises(TransferError, match=sentence):
        engine_of(np.zeros(8, np.uint8)).metadata()
    with pytest.raises(TransferError, match=sentence):
        engine_of(np.zeros(8, np.uint8)).connect(metadata)
    serving.close()


def engine_of(*memories, memory="cpu", **options):
    engine = MoriEngine(**options)
    engine.register([Slab(each.ctypes.data, each.nbytes, memory) for each in memories])
    return engine


def bytes_of(size, seed=0):
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8)


def batch_of(*runs):
    return CopyBatch(*np.array(runs, dtype=np.int64).reshape(-1, 3).T)


def whole(source, dest):
    return batch_of((source.ctypes.data, dest.ctypes.data, source.nbytes))


def finish(engine, transfer, seconds=20):
    until = time.monotonic() + seconds
    while not engine.poll(transfer):
        assert time.monotonic() < until
        time.sleep(0.0002)


def eventually(true, seconds=20):
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.0002)


def called(method):
    return [arguments for _, name, arguments in recorder.CALLS if name == method]


@pytest.fixture
def pair(network):
    """A serving engine and a reading one, with their memory and the peer."""
    source, dest = bytes_of(1 << 16), np.zeros(1 << 16, np.uint8)
    serving, reading = engine_of(source), engine_of(dest, patience=0.2)
    yield serving, reading, source, dest, reading.connect(serving.metadata())
    network.block.set()
    network.release()
    reading.close()
    serving.close()
    gc.collect()
    assert network.alive() == 0


def test_each_call_and_argument_of_a_read(network):
    source, dest = bytes_of(1 << 16), np.zeros(1 << 16, np.uint8)
    options = {"qp_per_transfer": 3, "post_batch_size": 64, "num_worker_threads": 2}
    serving, reading = (engine_of(each, memory="cuda:5", **options) for each in (source, dest))
    peer = reading.connect(serving.metadata())
    src, dst = source.ctypes.data, dest.ctypes.data
    finish(reading, reading.read(peer, batch_of((src + 7, dst + 100, 5), (src + 900, dst, 64))))
    finish(reading, reading.read(peer, batch_of((src + 20, dst + 300, 30))))

    rdma, gpu = recorder.BackendType.RDMA, recorder.MemoryLocationType.GPU
    ours = serving_key, reading_key = list(dict.fromkeys(key for key, *_ in recorder.CALLS))
    for key, base in ((serving_key, src), (reading_key, dst)):
        of_one = [(name, given) for each, name, given in recorder.CALLS if each == key]
        assert of_one[0] == ("IOEngine", (recorder.IOEngineConfig("127.0.0.1", 0),))
        polling = recorder.PollCqMode.POLLING
        config = recorder.RdmaBackendConfig(3, 64, 2, polling, enable_notification=False)
        assert of_one[1] == ("create_backend", (rdma, config))
        assert of_one[2][0] == "register_memory"
        assert of_one[2][1][1:] == ((1 + 4096) * 16, -1, recorder.MemoryLocationType.CPU)
        assert of_one[3] == ("register_memory", (base, 1 << 16, 5, gpu))
        assert [name for name, _ in of_one[4:]] == (
            ["get_engine_desc"]
            if key == serving_key
            else ["register_remote_engine", *["batch_read"] * 3]
        )
    assert {desc.key for (desc,) in called("register_remote_engine")} == {serving_key}
    first, proof, second = called("batch_read")
    here = recorder.MemoryDesc(reading_key, 1, 5, dst, 1 << 16, gpu)
    there = recorder.MemoryDesc(serving_key, 1, 5, src, 1 << 16, gpu)
    assert first == ([here], [[100, 0]], [there], [[7, 900]], [[5, 64]], [0])
    assert second == ([here], [[300]], [there], [[20]], [[30]], [2])
    assert [proof[0][0].id, proof[2][0].id] == [0, 0] and proof[4:] == ([[16]], [1])
    assert len(ours) == 2 and reading.fence(peer, 0)
    expected = np.zeros_like(dest)
    expected[100:105], expected[:64], expected[300:330] = (
        source[7:12],
        source[900:964],
        source[20:50],
    )
    assert np.array_equal(dest, expected)
    for engine in (reading, serving):
        engine.close()
    assert network.alive() == 0


def test_one_engine_has_memory_of_the_host_and_of_gpus(network):
    source, dest = bytes_of(300), np.zeros(300, np.uint8)
    places = ("cuda:0", "cpu", "cuda:3")
    serving, reading = MoriEngine(), MoriEngine()
    for engine, memory in ((serving, source), (reading, dest)):
        engine.register(
            [Slab(memory.ctypes.data + 100 * n, 100, where) for n, where in enumerate(places)]
        )
    peer = reading.connect(serving.metadata())
    rows = (source.ctypes.data, dest.ctypes.data + 50, 200)
    finish(reading, reading.read(peer, batch_of(rows)))
    assert np.array_equal(dest[50:250], source[:200]) and not dest[:50].any()
    held = [given[2:] for given in called("register_memory") if given[1] == 100]
    gpu, cpu = recorder.MemoryLocationType.GPU, recorder.MemoryLocationType.CPU
    assert held == 2 * [(0, gpu), (-1, cpu), (3, gpu)]
    reading.close()
    serving.close()


@st.composite
def geometry(draw):
    """Slabs of two sides as cuts of one array, some of them dropped, and runs within blocks."""
    sides = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, 4095), max_size=6)))
        edges = [0, *cuts, 4096]
        kept = draw(st.lists(st.booleans(), min_size=len(edges) - 1, max_size=len(edges) - 1))
        slabs = [(a, b) for a, b, keep in zip(edges, edges[1:], kept) if keep] or [(0, 4096)]
        held = np.zeros(4096, bool)
        for a, b in slabs:
            held[a:b] = True
        sides.append((slabs, held))
    runs, taken = [], np.zeros(4096, bool)
    for _ in range(draw(st.integers(1, 12))):
        src, dst, n = (
            draw(st.integers(0, 4095)),
            draw(st.integers(0, 4095)),
            draw(st.integers(1, 700)),
        )
        inside = src + n <= 4096 and dst + n <= 4096
        held = sides[0][1][src : src + n].all() and sides[1][1][dst : dst + n].all()
        if inside and held and not taken[dst : dst + n].any():
            taken[dst : dst + n] = True
            runs.append((src, dst, n))
    return sides[0][0], sides[1][0], runs


@given(geometry())
def test_runs_across_any_slabs_arrive_and_each_call_lies_in_one_of_each_side(given_geometry):
    sources, dests, runs = given_geometry
    with pytest.MonkeyPatch.context() as patch:
        network = recorder.Network()
        for part in PARTS:
            patch.setattr(package, part, lambda *_: True)
        patch.setitem(sys.modules, "mori.io", network.module())
        source, dest = bytes_of(4096), np.zeros(4096, np.uint8)
        serving, reading = MoriEngine(), MoriEngine()
        for engine, memory, slabs in ((serving, source, sources), (reading, dest, dests)):
            engine.register([Slab(memory.ctypes.data + a, b - a) for a, b in reversed(slabs)])
        peer = reading.connect(serving.metadata())
        moved = [(source.ctypes.data + s, dest.ctypes.data + d, n) for s, d, n in runs]
        finish(reading, reading.read(peer, batch_of(*moved)))
        expected = np.zeros_like(dest)
        for s, d, n in runs:
            expected[d : d + n] = source[s : s + n]
        assert np.array_equal(dest, expected)
        assert all(
            offset >= 0 and offset + n <= desc.size
            for (here,), (dst,), (there,), (src,), (sizes,), _ in called("batch_read")
            for desc, offsets in ((here, dst), (there, src))
            for offset, n in zip(offsets, sizes)
        )
        reading.close()
        serving.close()


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("at", [-1, (1 << 16) - 3, 1 << 20, -(1 << 40)])
def test_a_pointer_outside_registered_memory_is_refused_before_a_call(pair, side, at):
    _, reading, source, dest, peer = pair
    src, dst = source.ctypes.data, dest.ctypes.data
    run = (src + at, dst, 8) if side == "src" else (src, dst + at, 8)
    whose = "the peer" if side == "src" else "this engine"
    with pytest.raises(TransferError, match=f"do not lie in memory that {whose} has registered"):
        reading.read(peer, batch_of((src, dst, 8), run))
    assert not called("batch_read") and reading.poll(reading.read(peer, batch_of()))


def test_memory_that_is_registered_later_can_be_read_into(network):
    source, dest, later = bytes_of(64), np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    serving, reading = engine_of(source), engine_of(dest)
    peer = reading.connect(serving.metadata())
    reading.register([Slab(later.ctypes.data, later.nbytes)])
    finish(reading, reading.read(peer, whole(source, later)))
    assert np.array_equal(later, source)
    reading.close()
    serving.close()


def test_a_read_is_done_when_mori_says_so_and_the_descriptor_tells(network, pair):
    _, reading, source, dest, peer = pair
    tells, waker = socket.socketpair()
    waker.setblocking(False)
    reading.notify(waker.fileno())
    network.hold = lambda number, key: number == 0
    transfer = reading.read(peer, whole(source, dest))
    eventually(lambda: network.held)
    time.sleep(0.02)
    assert not reading.poll(transfer) and not dest.any()
    network.release()
    tells.settimeout(20)
    assert tells.recv(1) and reading.poll(transfer)
    assert np.array_equal(dest, source)
    tells.close()
    waker.close()


def test_reads_of_a_peer_are_in_flight_together(network, pair):
    _, reading, source, dest, peer = pair
    finish(reading, reading.read(peer, whole(source, dest)))
    network.hold = lambda number, key: True
    transfers = [reading.read(peer, whole(source, dest)) for _ in range(4)]
    eventually(lambda: len(network.held) == 4)
    network.release()
    for transfer in transfers:
        finish(reading, transfer)


def test_a_fence_waits_for_reads_that_succeed_and_destroys_nothing(network, pair):
    _, reading, source, dest, peer = pair
    network.hold = lambda number, key: True
    reading.read(peer, whole(source, dest))
    eventually(lambda: network.held)
    assert not reading.fence(peer, 0)
    network.hold = lambda number, key: False
    network.release()
    assert reading.fence(peer) and np.array_equal(dest, source)
    assert network.alive() == 2 and reading.telemetry() == {"engines_ended": 0}
    with pytest.raises(TransferError, match="the peer was given up"):
        reading.read(peer, whole(source, dest))


def test_after_a_fence_nothing_lands_of_a_read_that_did_not_end(network, pair):
    serving, reading, source, dest, peer = pair
    network.hold = lambda number, key: True
    reading.read(peer, whole(source, dest))
    eventually(lambda: network.held)
    began = time.monotonic()
    assert not reading.fence(peer, 0) and reading.fence(peer)
    assert time.monotonic() - began >= 0.19  # its patience
    assert not network.release() and not dest.any()
    assert reading.telemetry() == {"engines_ended": 1}
    network.hold = lambda number, key: False
    again = reading.connect(serving.metadata())
    finish(reading, reading.read(again, whole(source, dest)))
    assert np.array_equal(dest, source)


def test_a_failed_read_says_why_and_what_is_left_of_it_cannot_land_after_a_fence(network, pair):
    serving, reading, source, dest, peer = pair
    network.refuse = lambda number, key: "SQ full (batch)" if number == 0 else None
    with pytest.raises(TransferError, match=r"cannot read from 127.0.0.1:\d+: SQ full \(batch\)"):
        finish(reading, reading.read(peer, whole(source, dest)))
    assert network.held[0].land(slice(1)) and dest.any()  # a failed read still lands
    dest[:] = 0
    assert reading.fence(peer, 0)  # there is nothing to wait for
    assert not network.release() and not dest.any()
    network.refuse = lambda number, key: None
    again = reading.connect(serving.metadata())
    finish(reading, reading.read(again, whole(source, dest)))
    assert np.array_equal(dest, source)


def test_nothing_is_posted_behind_a_call_that_failed(network):
    source, dest = bytes_of(300), np.zeros(300, np.uint8)
    serving, reading = engine_of(source[:100], source[200:]), engine_of(dest)
    peer = reading.connect(serving.metadata())
    network.refuse = lambda number, key: "ibv_post_send failed" if number == 0 else None
    src, dst = source.ctypes.data, dest.ctypes.data
    with pytest.raises(TransferError, match="ibv_post_send failed"):
        finish(reading, reading.read(peer, batch_of((src, dst, 50), (src + 200, dst + 50, 50))))
    assert len(called("batch_read")) == 1
    reading.close()
    serving.close()


def test_an_ioengine_is_destroyed_only_when_no_live_peer_waits_for_it(network, pair):
    _, reading, source, dest, peer = pair
    other_source = bytes_of(1 << 12, seed=1)
    other = engine_of(other_source)
    live = reading.connect(other.metadata())
    ours, theirs = whole(other_source, dest[:4096]), whole(source[:4096], dest[4096:])
    for each, batch in ((live, ours), (peer, theirs)):  # their tokens are read
        finish(reading, reading.read(each, batch))
    dest[:] = 0
    network.hold = lambda number, key: True
    slow = reading.read(live, ours)
    reading.read(peer, theirs)
    eventually(lambda: len(network.held) == 2)
    assert not reading.fence(peer, 0.4)  # twice its patience
    network.hold = lambda number, key: False
    meanwhile = reading.read(live, batch_of((other_source.ctypes.data, dest.ctypes.data + 8192, 9)))
    finish(reading, meanwhile)  # through a new one
    assert network.alive() == 4
    [held] = [each for each in network.held if each.rows[0][0] == dest.ctypes.data]
    held.land()
    finish(reading, slow)
    assert reading.fence(peer) and not network.release()
    assert np.array_equal(dest[:4096], other_source) and not dest[4096:8192].any()
    other.close()


def test_a_fence_outlasts_a_thread_in_a_call(network, pair):
    _, reading, source, dest, peer = pair
    network.block.clear()
    reading.read(peer, whole(source, dest))
    eventually(lambda: called("batch_read"))
    assert not reading.fence(peer, 0.3)  # longer than its patience
    network.block.set()
    assert reading.fence(peer) and not network.release()


def test_an_unreachable_peer_is_named_and_costs_no_ioengine(network, pair):
    _, reading, source, dest, _ = pair
    gone = engine_of(source[:64])
    metadata = gone.metadata()
    gone.close()
    peer = reading.connect(metadata)
    with pytest.raises(TransferError, match=r"connect\(127.0.0.1:\d+\): Connection refused"):
        finish(reading, reading.read(peer, whole(source[:64], dest[:64])))
    assert reading.fence(peer, 0) and reading.telemetry() == {"engines_ended": 0}


def test_a_peer_that_dies_fails_its_reads_and_no_others(network, pair):
    serving, reading, source, dest, peer = pair
    finish(reading, reading.read(peer, whole(source, dest)))
    serving.close()
    with pytest.raises(TransferError, match="transport retry counter exceeded"):
        finish(reading, reading.read(peer, whole(source, dest)))
    assert reading.fence(peer)
    other = engine_of(source)
    again = reading.connect(other.metadata())
    dest[:] = 0
    finish(reading, reading.read(again, whole(source, dest)))
    assert np.array_equal(dest, source)
    other.close()


def place_of(metadata):
    desc = recorder.EngineDesc.unpack(msgspec.msgpack.decode(metadata)["engine"])
    return desc.host, desc.port


def test_a_process_that_took_over_the_port_is_not_believed(network, pair):
    _, reading, _, dest, _ = pair
    source, stranger = bytes_of(512, seed=2), bytes_of(512, seed=3)
    first = engine_of(source)
    metadata = first.metadata()
    peer = reading.connect(metadata)
    first.close()
    second = engine_of(stranger)  # it has as many bytes, under the same number
    fresh = second.metadata()
    network.listening[place_of(metadata)] = network.listening[place_of(fresh)]
    with pytest.raises(TransferError, match=r"another process answers at 127.0.0.1:\d+. Connect"):
        finish(reading, reading.read(peer, whole(source, dest[:512])))
    assert reading.fence(peer, 0)
    again = reading.connect(fresh)
    finish(reading, reading.read(again, whole(stranger, dest[:512])))
    assert np.array_equal(dest[:512], stranger)
    second.close()


def forged(metadata, **changes):
    found = msgspec.msgpack.decode(metadata)
    return msgspec.msgpack.encode({**found, **{k: v(found[k]) for k, v in changes.items()}})


def moved_to(key):
    return lambda packed: msgspec.structs.replace(
        recorder.MemoryDesc.unpack(packed), engine_key=key
    ).pack()


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": lambda _: b"\xff"},
        {"memory": lambda each: [*each, b"x"]},
        {"memory": lambda each: [each[0], each[0]]},
        {"memory": lambda each: [moved_to("another")(each[0])]},
        {"token_memory": moved_to("another")},
        {"token": lambda each: each[:15]},
        {"nobody": lambda each: 1},
    ],
    ids=["no engine", "three", "one twice", "another's", "of the token", "short", "nobody"],
)
def test_malformed_metadata_is_refused_before_a_call(pair, changes):
    serving, reading, *_ = pair
    before = len(recorder.CALLS)
    metadata = serving.metadata()
    found = {**msgspec.msgpack.decode(metadata), "nobody": 0}
    altered = {**found, **{k: v(found[k]) for k, v in changes.items()}}
    if "nobody" not in changes:
        del altered["nobody"]
    with pytest.raises(TransferError, match="malformed metadata: "):
        reading.connect(msgspec.msgpack.encode(altered))
    for wrong in (b"", b"\xc1", metadata[:-1]):
        with pytest.raises(TransferError, match="malformed metadata: "):
            reading.connect(wrong)
    assert [name for _, name, _ in recorder.CALLS[before:]] == ["get_engine_desc"]


def test_a_peer_cannot_take_the_place_of_another(pair):
    serving, reading, source, dest, peer = pair
    finish(reading, reading.read(peer, whole(source, dest)))

    def elsewhere(packed):
        desc = recorder.EngineDesc.unpack(packed)
        return msgspec.structs.replace(desc, port=desc.port + 1).pack()

    impostor = reading.connect(forged(serving.metadata(), engine=elsewhere))
    with pytest.raises(TransferError, match="two peers have MoRI's key 'kvpool-"):
        finish(reading, reading.read(impostor, whole(source, dest)))
    assert reading.fence(impostor, 0)
    finish(reading, reading.read(peer, whole(source, dest)))


def test_close_ends_what_is_in_flight(network):
    source, dest = bytes_of(1 << 12), np.zeros(1 << 12, np.uint8)
    serving, reading = engine_of(source), engine_of(dest, patience=0.05)
    threads = threading.active_count()
    peer = reading.connect(serving.metadata())
    network.hold = lambda number, key: True
    reading.read(peer, whole(source, dest))
    eventually(lambda: network.held)
    reading.close()
    assert not network.release() and not dest.any() and network.alive() == 1
    serving.close()
    assert network.alive() == 0
    eventually(lambda: threading.active_count() == threads)


@pytest.mark.parametrize(("host", "warnings"), [("127.0.0.1", 0), ("10.0.0.1", 2)])
def test_each_side_warns_once_of_an_address_beyond_loopback(
    network, monkeypatch, caplog, host, warnings
):
    monkeypatch.setattr("disagg.engines.mori.engine._check_host", lambda hostname: None)
    serving, reading = (engine_of(np.zeros(8, np.uint8), hostname=host) for _ in range(2))
    for _ in range(2):
        reading.connect(serving.metadata())
    said = [each for each in caplog.messages if "can read and overwrite" in each]
    assert len(said) == warnings and all(f"engine mori at {host}: " in each for each in said)
    reading.close()
    serving.close()


def test_a_room_of_endpoints(network):
    model = {"layers": range(3), "num_kv_heads": 2, "head_dim": 16, "dtype": "f32"}
    source, dest = (MHAPool(**model, num_pages=9, page_size=size) for size in (4, 8))
    here, there = oracle.place(source, 21, 0), oracle.place(dest, 21, 1)
    oracle.fill(source, here)
    oracle.blank(dest)
    with (
        PrefillEndpoint(source.layout, MoriEngine()) as prefill,
        DecodeEndpoint(dest.layout, MoriEngine()) as decode,
    ):
        decode.connect([prefill.address], timeout=20)
        decode.receive("r", there)
        prefill.send("r", here)
        assert decode.wait("r", timeout=20) == KVPoll.Success
        assert prefill.wait("r", timeout=20) == KVPoll.Success
    oracle.assert_holds(dest, there)
    assert network.alive() == 0
