"""Peers of engine local that stall, stop, die, fork, or live in another process namespace."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, suppress

import numpy as np
import pytest

from disagg.engines.base import TransferError
from disagg.engines.local import LocalEngine, engine as engines
from disagg.engines.local.offer import Offer, OfferServer, read_offer, receive_files
from disagg.engines.shared_files import Segment
from kvpool.layout import Slab
from tests.disagg.engines.local_peers import (
    SIZE,
    FakePeer,
    blank,
    files,
    metadata,
    offer,
    offering,
    reading,
)
from tests.disagg.engines.owners import Owner, batch_of, memory_of, pattern, read, slab_of
from tests.processes import Child, forked, until


def test_a_peer_that_stalls_holds_neither_connect_nor_other_peers_up(monkeypatch):
    monkeypatch.setattr(engines, "OFFER_SECONDS", 1.0)
    memory = blank()
    to = memory.ctypes.data
    with FakePeer(silent=True) as peer, reading(memory) as engine:
        before = files()
        began = time.monotonic()
        stuck = engine.connect(peer.metadata)
        assert time.monotonic() - began < 1
        transfer = engine.read(stuck, batch_of((1 << 30, to, 8)))
        assert not engine.poll(transfer)
        source = pattern(64)
        with offering(source) as (_, told):
            other = engine.connect(told)
            read(engine, other, batch_of((source.ctypes.data, to + 64, 64)))
            engine.fence(other)
        assert np.array_equal(memory[64:128], pattern(64))
        with pytest.raises(TransferError, match="not offered its memory within 1 s"):
            until(lambda: engine.poll(transfer))
        assert engine.fence(stuck)
        peer.hang_up()
        assert files() == before
    assert not memory[:64].any()


def test_a_read_from_a_stopped_process_waits_until_it_goes_on():
    memory = blank()
    with Owner("local", SIZE) as other, reading(memory) as engine:
        other.stop()
        began = time.monotonic()
        peer = engine.connect(other.metadata)
        batch = batch_of((other.base, memory.ctypes.data, SIZE))
        transfer = engine.read(peer, batch)
        assert not engine.poll(transfer) and time.monotonic() - began < 2
        batch.src[:] = 0  # the caller may use its arrays again
        other.go_on()
        until(lambda: engine.poll(transfer))
        assert np.array_equal(memory, pattern(SIZE))
        assert other.close() == 0


def test_a_read_that_begins_long_after_the_offer_has_come_finds_it(monkeypatch):
    monkeypatch.setattr(engines, "OFFER_SECONDS", 0.5)
    memory = blank()
    with Owner("local", SIZE) as other, reading(memory) as engine:
        other.stop()
        peer = engine.connect(other.metadata)
        other.go_on()
        time.sleep(1.0)  # prefill computes, and nobody asks for what it offers
        read(engine, peer, batch_of((other.base, memory.ctypes.data, SIZE)))
        assert np.array_equal(memory, pattern(SIZE))
        assert other.close() == 0


def test_a_read_given_up_before_the_offer_came_copies_nothing():
    memory = blank()
    with Owner("local", SIZE) as other, reading(memory) as engine:
        other.stop()
        peer = engine.connect(other.metadata)
        transfer = engine.read(peer, batch_of((other.base, memory.ctypes.data, SIZE)))
        assert engine.fence(peer)
        other.go_on()
        with pytest.raises(TransferError, match="registered no memory"):
            engine.poll(transfer)
        assert other.close() == 0
    assert not memory.any()


def test_private_memory_of_a_process_that_has_ended_is_not_read():
    memory = blank()
    with Owner("local", SIZE) as other, reading(memory) as engine:
        peer = engine.connect(other.metadata)
        other.process.kill()
        other.process.join()
        with pytest.raises(TransferError, match="process has ended"):
            read(engine, peer, batch_of((other.base, memory.ctypes.data, 8)))
    assert not memory.any()


@pytest.mark.parametrize("sign", ["hangs up", "speaks"])
def test_a_process_number_counts_only_while_its_connection_is_open_and_silent(sign):
    memory, source = blank(), pattern(64)
    with FakePeer(offer([(source.ctypes.data, 64, -1, 0)])) as peer, reading(memory) as engine:
        other = engine.connect(peer.metadata)
        batch = batch_of((source.ctypes.data, memory.ctypes.data, 64))
        read(engine, other, batch)
        assert np.array_equal(memory[:64], source)
        memory[:] = 0
        if sign == "hangs up":
            peer.hang_up()
        else:
            peer.connections[0].send(b"x")
        with pytest.raises(TransferError, match="process has ended"):
            read(engine, other, batch)
    assert not memory.any()


def test_shared_memory_of_a_process_that_has_ended_stays_readable():
    memory, source = blank(), memory_of("shared", SIZE)
    source[:] = pattern(SIZE)
    with offering(source) as (other, told), reading(memory) as engine:
        peer = engine.connect(told)
        other.close()
        read(engine, peer, batch_of((source.ctypes.data, memory.ctypes.data, SIZE)))
    assert np.array_equal(memory, pattern(SIZE))


def test_a_slab_may_reach_over_the_end_of_a_file_in_its_last_page():
    nbytes, page = SIZE + 512, mmap.PAGESIZE
    whole = -(-nbytes // page) * page
    arrays = [memory_of("shared", nbytes) for _ in range(64)]
    by_base = {array.ctypes.data: array for array in arrays}
    low = next(base for base in by_base if base + whole in by_base)  # mapped side by side
    memory, sources = blank(2 * nbytes), (by_base[low], by_base[low + whole])
    for number, source in enumerate(sources):
        source[:] = np.resize(np.roll(pattern(SIZE), number), nbytes)
    with closing(LocalEngine()) as other, reading(memory) as engine:
        other.register([Slab(low, whole + nbytes)])  # as of buffers that are less than a page apart
        runs = [
            (source.ctypes.data, memory.ctypes.data + n * nbytes, nbytes)
            for n, source in enumerate(sources)
        ]
        read(engine, engine.connect(other.metadata()), batch_of(*runs))
    assert np.array_equal(memory, np.concatenate(sources))


def test_one_read_takes_runs_of_several_segments_in_any_order():
    shared = [memory_of("shared", SIZE) for _ in range(2)]
    sources, memory, expected = [*shared, blank()], blank(), blank()
    for number, source in enumerate(sources):
        source[:] = np.roll(pattern(SIZE), number)
    random = np.random.default_rng(0)
    runs = []
    for slot in random.permutation(SIZE // 64)[: SIZE // 128].tolist():
        source, start = sources[int(random.integers(3))], int(random.integers(SIZE - 64))
        expected[64 * slot : 64 * slot + 64] = source[start : start + 64]
        runs.append((source.ctypes.data + start, memory.ctypes.data + 64 * slot, 64))
    with closing(LocalEngine()) as other, reading(memory) as engine:
        other.register([slab_of(source) for source in sources])
        peer = engine.connect(other.metadata())
        last = max(source.ctypes.data for source in sources)  # others may be side by side
        beyond = last + SIZE - 8, memory.ctypes.data, 9
        with pytest.raises(TransferError, match=f"9 bytes at {beyond[0]:#x} do not lie in"):
            engine.read(peer, batch_of(*runs, beyond))
        assert not memory.any()
        read(engine, peer, batch_of(*runs))
    assert np.array_equal(memory, expected)


def test_a_reader_that_takes_its_offer_late_delays_no_other():
    segments = [Segment(4096 * (n + 1), 8, -1, 0) for n in range(60_000)]
    server = OfferServer(Offer(segments, []), [])
    with socket.socket(socket.AF_UNIX) as late, reading(blank()) as engine:
        late.connect(server.path)
        peer = engine.connect(metadata(server.path))
        with pytest.raises(TransferError, match="cannot be read"):  # nothing lies at 4096
            read(engine, peer, batch_of((4096, 0, 8)))
        received = receive_files(late, 20)
        assert read_offer(received[0]).segments == segments
        for file in received:
            os.close(file)
    server.close()


def test_a_thousand_connects_leave_no_file_open():
    memory, shared = blank(), memory_of("shared", SIZE)
    with offering(shared) as (_, told), reading(memory) as engine:
        before = files()
        for _ in range(1000):
            engine.fence(engine.connect(told))
        until(lambda: files() == before)


# other process namespaces

READ = """
import sys
import numpy as np
from disagg.engines.base import TransferError
from disagg.engines.local import LocalEngine
from disagg.plan.bind import CopyBatch
memory = np.zeros(64, dtype=np.uint8)
try:
    engine = LocalEngine()
    peer = engine.connect(bytes.fromhex(sys.argv[1]))
    rows = [[int(sys.argv[2])], [memory.ctypes.data], [64]]
    transfer = engine.read(peer, CopyBatch(*np.array(rows)))
    while not engine.poll(transfer):
        pass
    print(memory.tobytes().hex())
except TransferError as error:
    print(error)
"""


@pytest.mark.root
@pytest.mark.parametrize("kind", ["shared", "private"])
def test_a_reader_in_another_process_namespace_reads_shared_memory_only(kind):
    memory = memory_of(kind, SIZE)
    memory[:] = pattern(SIZE)
    with offering(memory) as (_, told):
        command = ["unshare", "--pid", "--fork", sys.executable, "-c", READ, told.hex()]
        done = subprocess.run(
            [*command, str(memory.ctypes.data)], capture_output=True, text=True, check=True
        )
    if kind == "shared":
        assert bytes.fromhex(done.stdout) == pattern(64).tobytes()
    else:
        assert "process namespace that is out of sight from here" in done.stdout


# forked children


def sockets():
    links = set()
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one of this listing
            links.add(os.readlink(f"/proc/self/fd/{entry}"))
    return {link for link in links if link.startswith("socket:")}


def test_a_forked_child_gives_up_and_its_parent_serves_on():
    memory, source, before = blank(), pattern(SIZE), sockets()
    with offering(source) as (other, told), reading(memory) as engine:
        peer = engine.connect(told)
        ours = sockets() - before
        assert len(ours) == 3  # where peers dial, and both ends of the connection

        def give_up():
            other.abandon()
            engine.abandon()
            return ours & sockets()

        with forked(give_up) as (_, left):
            assert left == "set()"
            read(engine, peer, batch_of((source.ctypes.data, memory.ctypes.data, SIZE)))
            assert np.array_equal(memory, source)
            engine.fence(engine.connect(told))


def leave_a_child(pipe):
    """Offers memory, and leaves a child that has given it up."""
    memory = pattern(SIZE)
    with offering(memory) as (engine, told), forked(engine.abandon) as (pid, _):
        pipe.send((told, memory.ctypes.data, pid))
        pipe.recv()


def test_a_process_that_was_killed_has_ended_although_its_child_lives():
    child, memory = Child(leave_a_child), blank()
    told, base, pid = child.answer()
    try:
        with reading(memory) as engine:
            peer = engine.connect(told)
            child.process.kill()
            child.process.join()
            with pytest.raises(TransferError, match="has ended"):
                read(engine, peer, batch_of((base, memory.ctypes.data, SIZE)))
            with pytest.raises(TransferError, match="has ended"):
                engine.connect(told)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert not memory.any()


KEEP = """
import os
from disagg.engines.base import Engine

class Loud:
    def __del__(self):
        os.write(1, b"destroyed ")

class Vendors(Engine):
    name = "vendors"
    def __init__(self):
        self.agent = Loud()

for method in Engine.__abstractmethods__:
    setattr(Vendors, method, None)
Vendors.__abstractmethods__ = frozenset()
engine = Vendors()
if os.fork():
    os.wait()
    os.write(1, b"parent ")
else:
    engine.abandon()
del engine
"""


def test_nothing_of_an_abandoned_engine_is_destroyed_in_a_forked_child():
    done = subprocess.run([sys.executable, "-c", KEEP], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["parent", "destroyed"]
