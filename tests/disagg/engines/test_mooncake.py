"""Engine mooncake, and the behaviour of Mooncake that it relies on. Owners are processes."""

from __future__ import annotations

import os
import threading
import time

import msgspec
import numpy as np
import pytest

from disagg.engines.base import EngineUnavailable, TransferError, create_engine
from disagg.engines.mooncake import MooncakeEngine
from disagg.engines.mooncake.engine import CALL_RUNS, POLLED_BYTES
from disagg.engines.mooncake.package import choose, fetch, hasten, moves_cuda, start
from disagg.plan.bind import CopyBatch
from kvpool.layout import Slab
from tests.disagg.engines.owners import Owner, batch_of, engine_of, finish, pattern, read
from tests.disagg.engines.peers import ENGINES
from tests.processes import python, until

__test__ = "mooncake" in ENGINES  # collected if the package is installed

SIZE = 32 << 20
BLOCK = 4096


def owner(**options) -> Owner:
    return Owner("mooncake", SIZE, **options)


def address(peer) -> str:
    fields = msgspec.msgpack.decode(peer.metadata)
    return f"{fields['hostname']}:{fields['port']}"


@pytest.fixture(scope="module")
def other():
    """A peer that is never disturbed; it must exit with status 0."""
    with owner() as process:
        yield process
        assert process.close() == 0


@pytest.fixture
def memory():
    return np.zeros(SIZE, dtype=np.uint8)


@pytest.fixture
def engine(memory):
    with engine_of("mooncake", memory) as engine:
        yield engine


@pytest.fixture
def raw():
    """A `TransferEngine` without an engine of ours."""
    choose("tcp")
    made = start("tcp", "127.0.0.1", "")
    yield made
    hasten(made)


def rows(batch):
    """As `fetch` takes them."""
    return [column.tolist() for column in batch]


def blocks(peer, memory, count, width=BLOCK, first=0):
    """`count` runs of `width` bytes from block `first` on, to equal offsets here."""
    offsets = np.arange(first, first + count, dtype=np.int64) * width
    nbytes = np.full(count, width, dtype=np.int64)
    return CopyBatch(peer.base + offsets, memory.ctypes.data + offsets, nbytes)


def settled(memory):
    """The contents of memory once it has not changed for a second."""
    before = None
    while before is None or not np.array_equal(before, memory):
        before = memory.copy()
        time.sleep(1)
    return before


@pytest.mark.parametrize("polled", [False, True])
def test_a_failed_call_lands_later_unless_its_transfer_engine_is_destroyed(memory, polled):
    lost, kept, connected = memory, np.zeros_like(memory), np.zeros(1, dtype=np.uint8)
    choose("tcp")
    makers = [start("tcp", "127.0.0.1", "") for _ in range(2)]
    with owner() as peer:
        for maker in makers:
            assert fetch(maker, address(peer), [[peer.base], [connected.ctypes.data], [1]])
        peer.stop()
        for maker, place in zip(makers, (lost, kept)):
            batch = blocks(peer, place, 4 * CALL_RUNS)
            assert not fetch(maker, address(peer), rows(batch), polled=polled)
        assert not lost.any() and not kept.any()
        hasten(makers[1])
        del maker, makers[1]
        peer.go_on()
        until(lost.any)
        settled(lost)
        assert not kept.any()
        hasten(makers[0])
        makers.clear()


@pytest.mark.parametrize(("count", "width"), [(1, SIZE), (CALL_RUNS, BLOCK), (3, 1)])
def test_a_polled_read_has_all_bytes_when_it_ends(raw, memory, other, count, width):
    batch = blocks(other, memory, count, width)
    assert fetch(raw, address(other), rows(batch), polled=True)
    expected = pattern(SIZE)
    expected[count * width :] = 0
    assert np.array_equal(memory, expected)


class Noted:
    """A `TransferEngine`; keeps the names of its calls, and the lengths of what was read."""

    def __init__(self, engine):
        self._engine, self.calls, self.lengths = engine, [], []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self._engine, name)

    def batch_transfer_async_read(self, at, dst, src, nbytes):
        self.lengths.extend(nbytes)
        return self._engine.batch_transfer_async_read(at, dst, src, nbytes)


@pytest.fixture
def noted(memory):
    """An engine, and what it reads with, once a read has begun."""
    used = []
    with engine_of("mooncake", memory) as engine:
        make = engine.reading

        def reading():
            used.append(Noted(make()))
            return used[-1]

        engine.reading = reading
        yield engine, used
        used.clear()


def test_a_long_read_asks_with_pauses_and_a_short_one_waits_in_mooncake(noted, memory, other):
    engine, used = noted
    peer = engine.connect(other.metadata)
    read(engine, peer, blocks(other, memory, 1, width=POLLED_BYTES - 1))
    assert "transfer_check_status" not in used[0].calls
    read(engine, peer, blocks(other, memory, 1, width=POLLED_BYTES))
    assert "transfer_check_status" in used[0].calls


def test_a_long_run_is_read_in_pieces(noted, memory, other):
    engine, used = noted
    run = (9 << 20) + 5
    read(engine, engine.connect(other.metadata), blocks(other, memory, 1, width=run))
    assert np.array_equal(memory[:run], pattern(SIZE)[:run]) and not memory[run:].any()
    assert sorted(used[0].lengths)[-3:] == [(1 << 20) + 5, 4 << 20, 4 << 20]


def test_more_runs_than_mooncake_queues_are_cut_into_calls(engine, memory, other):
    count = 4 * CALL_RUNS + 3
    read(engine, engine.connect(other.metadata), blocks(other, memory, count))
    assert np.array_equal(memory[: count * BLOCK], pattern(SIZE)[: count * BLOCK])
    assert not memory[count * BLOCK :].any()


def test_parts_of_a_read_are_queued_and_their_arrays_copied(engine, memory, other):
    peer = engine.connect(other.metadata)
    batch = blocks(other, memory, 64)
    transfers = []
    for first in range(0, 4096, 64):
        columns = blocks(other, memory, 64, first=first)
        batch.src[:], batch.dst[:] = columns.src, columns.dst
        transfers.append(engine.read(peer, batch))
    batch.src[:] = batch.dst[:] = 0
    finish(engine, *transfers)
    assert np.array_equal(memory[: 4096 * BLOCK], pattern(SIZE)[: 4096 * BLOCK])


def test_a_run_across_registered_ranges_is_cut_at_their_edges(raw, memory):
    with engine_of("mooncake", memory, chunk=3 << 20) as engine, owner(chunk=(5 << 20) + 1) as peer:
        reader = engine.connect(peer.metadata)
        border = (5 << 20) + 1
        at, to = peer.base + border - 8, memory.ctypes.data
        assert not fetch(raw, address(peer), [[at], [to], [16]])
        assert fetch(raw, address(peer), [[at], [to], [8]])
        read(engine, reader, blocks(peer, memory, 1, width=SIZE))
        assert np.array_equal(memory, pattern(SIZE))


def test_anyone_who_reaches_the_ports_can_write_registered_memory(raw, memory):
    memory[:8] = 7
    with owner() as peer:
        assert raw.transfer_sync_write(address(peer), memory.ctypes.data, peer.base, 8) == 0
        assert fetch(raw, address(peer), [[peer.base], [memory.ctypes.data + 8], [8]])
    assert (memory[:16] == 7).all()


@pytest.mark.parametrize(("hostname", "times"), [("127.0.0.1", 0), ("0.0.0.0", 1)])
def test_that_other_hosts_can_reach_the_memory_is_said_once(memory, caplog, hostname, times):
    with engine_of("mooncake", memory, hostname=hostname) as engine:
        for _ in range(2):
            port = msgspec.msgpack.decode(engine.metadata())["port"]
    sentence = f"at {hostname}: any process that reaches its port {port} can read and overwrite"
    assert caplog.text.count(sentence) == caplog.text.count("firewall") == times


def test_memory_that_mooncake_refuses_is_an_error(engine, memory):
    with pytest.raises(TransferError, match="overlap"):
        engine.register([Slab(memory.ctypes.data + 4096, 4096)])
    engine.metadata()
    engine._engine.register_memory(1 << 40, 4096)  # behind the engine's back
    with pytest.raises(TransferError, match=r"cannot register 4096 bytes at 0x10000000000 \(code"):
        engine.register([Slab(1 << 40, 4096)])


def test_an_engine_that_only_reads_registers_no_memory(engine, memory, other):
    peer = engine.connect(other.metadata)
    read(engine, peer, batch_of((other.base, memory.ctypes.data, 64)))
    assert engine._engine is None


def test_nothing_is_written_outside_registered_memory(engine, memory, other):
    peer = engine.connect(other.metadata)
    batch = blocks(other, memory, 3)
    batch.dst[2] += SIZE - 2 * BLOCK - 1
    batch.nbytes[2] += 2
    with pytest.raises(TransferError, match="do not lie in memory that this engine"):
        engine.read(peer, batch)
    assert not memory.any()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hostname": "a b"}, "malformed metadata: host name"),
        ({"hostname": "x" * 300}, "malformed metadata: host name"),
        ({"port": 1 << 16}, "malformed metadata"),
        ({"token": b"short"}, "a token of 5 bytes"),
        ({"token_at": -1}, "malformed metadata"),
        ({"token_at": (1 << 64) - 1}, "malformed metadata"),
        ({"protocol": "rdma"}, "over 'rdma', this engine over 'tcp'"),
        ({"ranges": [[4096, 99], [4100, 9]]}, "overlap"),
        ({"ranges": [[4096, 1]] * 70_000}, "malformed metadata"),
        ({"more": 1}, "malformed metadata"),
    ],
)
def test_wrong_metadata_is_refused(engine, other, change, sentence):
    fields = msgspec.msgpack.decode(other.metadata)
    with pytest.raises(TransferError, match=sentence):
        engine.connect(msgspec.msgpack.encode({**fields, **change}))


def test_another_process_that_answers_is_refused(engine, memory, other):
    fields = msgspec.msgpack.decode(other.metadata)
    for change, sentence in (({"token": bytes(16)}, "process answers"), ({"port": 1}, "no answer")):
        peer = engine.connect(msgspec.msgpack.encode({**fields, **change}))
        with pytest.raises(TransferError, match=f"{sentence} at 127.0.0.1:"):
            read(engine, peer, blocks(other, memory, 1))
        with pytest.raises(TransferError, match=sentence):
            engine.read(peer, blocks(other, memory, 1))
        assert engine.fence(peer, 0)
    assert not memory.any()


def test_a_dead_peer_is_an_error_and_others_are_still_read(engine, memory, other):
    with owner() as peer:
        fragile, elsewhere = engine.connect(peer.metadata), engine.connect(other.metadata)
        read(engine, fragile, blocks(peer, memory, 1))
        transfer = engine.read(fragile, blocks(peer, memory, 2, width=SIZE // 2))
        peer.process.kill()
        with pytest.raises(TransferError, match="cannot read"):
            while True:
                finish(engine, transfer)
                transfer = engine.read(fragile, blocks(peer, memory, 1))
        assert engine.fence(fragile)
        read(engine, elsewhere, blocks(other, memory, 64))
    assert np.array_equal(memory[: 64 * BLOCK], pattern(SIZE)[: 64 * BLOCK])


def test_a_stopped_peer_blocks_no_other_and_nothing_lands_after_the_fence(engine, memory, other):
    half, truth = SIZE // 2, pattern(SIZE)
    with owner() as peer:
        fragile, elsewhere = engine.connect(peer.metadata), engine.connect(other.metadata)
        transfer = None
        # the read, or its bytes without the last status, arrived before the stop: once more
        while (
            transfer is None
            or transfer.ended.wait(0.2)
            or np.array_equal(memory[:half], truth[:half])
        ):
            peer.go_on()
            if transfer:
                assert transfer.ended.wait(20)
            memory[:half] = 0
            transfer = engine.read(fragile, blocks(peer, memory, 16, width=1 << 20))
            while not memory[0]:
                pass
            peer.stop()
        assert not engine.poll(transfer)
        assert not engine.fence(fragile, 0)
        with pytest.raises(TransferError, match="given up"):
            engine.read(fragile, blocks(peer, memory, 1))
        read(engine, elsewhere, blocks(other, memory, 64, first=half // BLOCK))
        assert np.array_equal(memory[half : half + 64 * BLOCK], truth[half : half + 64 * BLOCK])
        assert engine.fence(fragile)
        after = memory.copy()
        assert not np.array_equal(after[:half], truth[:half])
        peer.go_on()
        assert np.array_equal(settled(memory), after)
        again = engine.connect(peer.metadata)
        for connected_peer, process in ((again, peer), (elsewhere, other)):
            memory[:] = 0
            read(engine, connected_peer, blocks(process, memory, 4, width=SIZE // 4))
            assert np.array_equal(memory, truth)


def test_a_peer_that_was_stopped_before_the_first_read_is_fenced_at_once(engine, memory):
    with owner() as peer:
        peer.stop()
        fragile = engine.connect(peer.metadata)
        transfer = engine.read(fragile, blocks(peer, memory, 64))
        assert not engine.poll(transfer)
        assert engine.fence(fragile, 0)
        engine.close()
        peer.go_on()
        with pytest.raises(TransferError, match="given up"):
            finish(engine, transfer)
    assert not memory.any()


def test_close_ends_reads_in_flight(engine, memory):
    with owner() as peer:
        fragile = engine.connect(peer.metadata)
        read(engine, fragile, blocks(peer, memory, 1))
        peer.stop()
        engine.read(fragile, blocks(peer, memory, 16, width=1 << 20))
        until(lambda: fragile._doubt)
        engine.close()
        after = memory.copy()
        peer.go_on()
        assert np.array_equal(settled(memory), after)


def test_with_a_shared_transfer_engine_a_failed_read_is_never_quiet(memory, other, monkeypatch):
    monkeypatch.setattr(MooncakeEngine, "shared", True)  # as of ascend
    with engine_of("mooncake", memory) as engine, owner() as peer:
        fragile, elsewhere = engine.connect(peer.metadata), engine.connect(other.metadata)
        for connected_peer, process in ((fragile, peer), (elsewhere, other)):
            read(engine, connected_peer, blocks(process, memory, 64))
        assert engine.fence(elsewhere, 0)
        peer.process.kill()
        with pytest.raises(TransferError, match="cannot read"):
            read(engine, fragile, blocks(peer, memory, 64))
        with pytest.raises(TransferError, match="share one TransferEngine"):
            engine.fence(fragile, 0)
        again = engine.connect(other.metadata)
        read(engine, again, blocks(other, memory, 64, first=64))
    assert np.array_equal(memory[: 128 * BLOCK], pattern(SIZE)[: 128 * BLOCK])


def test_thirty_peers_leave_no_thread_and_no_file(engine, memory, other):
    def held():
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    for cycle in range(31):
        peer = engine.connect(other.metadata)
        read(engine, peer, blocks(other, memory, 1, first=cycle))
        assert engine.fence(peer, 0)
        peer.join()
        if cycle == 0:
            before = held()
    until(lambda: all(now <= then for now, then in zip(held(), before)))
    assert np.array_equal(memory[: 31 * BLOCK], pattern(SIZE)[: 31 * BLOCK])


def test_destroying_a_transfer_engine_does_not_wait_for_its_listener():
    choose("tcp")
    seconds = []
    for wake in (lambda _: time.sleep(0.1), hasten):
        maker = start("tcp", "127.0.0.1", "")
        time.sleep(0.05)  # its listener starts waiting
        wake(maker)
        began = time.perf_counter()
        del maker
        seconds.append(time.perf_counter() - began)
    assert seconds[1] < seconds[0] / 2


def test_an_ipv6_address_is_refused_where_mooncake_would_not_resolve_it(monkeypatch):
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    with pytest.raises(EngineUnavailable, match=r"'\[::1\]'.*MC_USE_IPV6=1.*both sides"):
        create_engine("mooncake", hostname="[::1]")


def test_a_protocol_is_established_or_refused():
    # the package itself takes any protocol and uses TCP
    code = """
import os
from disagg.engines.base import EngineUnavailable, TransferError, create_engine
from disagg.engines.mooncake.package import package
maker = package().TransferEngine()
assert maker.initialize("127.0.0.1", "P2PHANDSHAKE", "pigeon", "") == 0
for protocol, sentence in (("pigeon", "has tcp, rdma"), ("ascend", "has tcp, rdma")):
    try:
        create_engine("mooncake", protocol=protocol)
    except EngineUnavailable as error:
        assert sentence in str(error), error
    else:
        raise SystemExit(protocol)
try:
    create_engine("mooncake", protocol="rdma").metadata()
except TransferError as error:
    assert "cannot start rdma" in str(error), error
else:
    assert os.listdir("/sys/class/infiniband")
try:
    create_engine("mooncake")
except EngineUnavailable as error:
    assert "MC_FORCE_HCA is set" in str(error), error
else:
    raise SystemExit("two protocols")
"""
    python("-c", code, drop="MC_")


def test_the_missing_library_is_named(another_mooncake):
    assert "kvpool[mooncake-cpu]" in MooncakeEngine.availability()
    broken = "raise ImportError('liburing.so.2: cannot open shared object file')\n"
    (another_mooncake / "engine.py").write_text(broken)
    assert "liburing.so.2" in MooncakeEngine.availability()
    assert "apt-get install" in MooncakeEngine.availability()
    with pytest.raises(EngineUnavailable, match=r"engine 'mooncake': .*liburing\.so\.2"):
        create_engine("mooncake")


@pytest.mark.parametrize("build", ["mooncake_transfer_engine", "mooncake_transfer_engine_cuda13"])
def test_either_build_for_cuda_moves_the_memory_of_a_gpu(tmp_path, monkeypatch, build):
    assert not moves_cuda()
    (tmp_path / f"{build}-0.3.14.dist-info").mkdir()
    name = build.replace("_", "-")
    (tmp_path / f"{build}-0.3.14.dist-info" / "METADATA").write_text(f"Name: {name}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert moves_cuda()


@pytest.mark.parametrize("options", [{"hostname": "a b"}, {"chunk": 0}, {"hostname": "h:1"}])
def test_options_are_checked(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        MooncakeEngine(**options)


def test_a_call_releases_the_gil(raw, memory, other):
    turns, done = 0, threading.Event()
    columns = rows(blocks(other, memory, 512, width=SIZE // 512))

    def call():
        assert fetch(raw, address(other), columns)
        done.set()

    thread = threading.Thread(target=call)
    thread.start()
    while not done.is_set():
        turns += 1
        time.sleep(0.0001)
    thread.join()
    assert turns > 5
