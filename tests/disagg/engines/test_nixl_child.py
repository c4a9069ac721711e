"""NIXL: a process of its own from which peers read, and that a reader may crash."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from disagg.engines.base import TransferError, create_engine
from disagg.engines.nixl import child as nixl_child
from kvpool.device import shared_memory
from tests.disagg.engines.owners import (
    Owner,
    batch_of,
    engine_of,
    finish,
    memory_of,
    pattern,
    read,
    slab_of,
)
from tests.processes import Child, until

SIZE = 4 << 20
TCP = {"transports": "tcp"}
OPTIONS = {**TCP, "child": True}
READ_BYTES = 64 << 20
RUN_BYTES = 4 << 10, 36 << 10, 1 << 20


def children_of(pid):
    """Processes that a process has started and that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) == pid and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def filled(size=SIZE):
    memory = memory_of("shared", size)
    memory[:] = pattern(size)
    return memory


def blank(size=SIZE):
    return np.full(size, 0xEE, dtype=np.uint8)


def all_of(base, memory):
    return batch_of((base, memory.ctypes.data, memory.size))


def reads_all(reader, metadata, base, memory, owner=None):
    """Over a new connection, every byte."""
    memory[:] = 0xEE
    peer = reader.connect(metadata)
    finish(reader, reader.read(peer, all_of(base, memory)), owner=owner)
    assert np.array_equal(memory, pattern(memory.size))
    return peer


def test_it_is_read_while_its_parent_is_stopped():
    memory = blank()
    with Owner("nixl", SIZE, "shared", **OPTIONS) as owner, engine_of("nixl", memory, **TCP) as e:
        reads_all(e, owner.metadata, owner.base, memory)
        owner.stop()
        reads_all(e, owner.metadata, owner.base, memory)
        owner.go_on()
        assert owner.close() == 0


def test_it_may_only_read_the_memory_and_has_it_at_the_same_place():
    memory = filled()
    with engine_of("nixl", memory, **OPTIONS) as engine:
        engine.metadata()
        maps = Path(f"/proc/{engine._child._process.pid}/maps").read_text().splitlines()
        (own,) = [line for line in maps if line.startswith(f"{memory.ctypes.data:x}-")]
        assert own.split()[1] == "r--s"


def test_when_it_is_ended_another_serves_and_peers_are_to_connect_again():
    memory, source = blank(), filled()
    with engine_of("nixl", source, **OPTIONS) as owner, engine_of("nixl", memory, **TCP) as reader:
        base, before = source.ctypes.data, owner.metadata()
        peer = reads_all(reader, before, base, memory, owner)
        assert owner.take_renewal() is None
        assert owner.telemetry()["children_ended"] == 0
        os.kill(owner._child._process.pid, signal.SIGSEGV)
        until(lambda: owner.progress() or owner.telemetry()["children_ended"])
        reason = owner.take_renewal()
        assert reason == "the process that served reads by engine nixl was ended by SIGSEGV."
        assert owner.take_renewal() is None
        assert owner.metadata() != before
        with pytest.raises(TransferError):
            finish(reader, reader.read(peer, all_of(base, memory)), owner=owner)
        assert reader.fence(peer, 20)
        reads_all(reader, owner.metadata(), base, memory, owner)


def read_until_killed(pipe, metadata, base, run):
    memory = blank(READ_BYTES)
    with engine_of("nixl", memory, **TCP) as engine:
        peer = engine.connect(metadata)
        starts = np.arange(READ_BYTES // run) * run
        runs = zip(base + starts, memory.ctypes.data + starts, np.full(starts.size, run))
        batch = batch_of(*runs)
        read(engine, peer, batch)
        pipe.send(None)
        while True:
            for part in batch.split(READ_BYTES, 8192):
                read(engine, peer, part)


def killed_readers(count, seed):
    """Kills processes that read over TCP, and returns how many children of the owner that ended:
    the owner lives, and others read every byte after each.
    """
    pick, memory, source = random.Random(seed), blank(), filled(READ_BYTES)
    with engine_of("nixl", source, **OPTIONS) as owner:
        base = source.ctypes.data
        for number in range(count):
            run = RUN_BYTES[number % len(RUN_BYTES)]
            with Child(read_until_killed, owner.metadata(), base, run) as reader:
                until(lambda reader=reader: owner.progress() or reader.pipe.poll(0.001))
                # in the midst of one of its reads
                stop = time.monotonic() + pick.uniform(0, 0.1)
                while time.monotonic() < stop:
                    owner.progress()
                reader.process.kill()
            stop = time.monotonic() + 0.2
            while time.monotonic() < stop:
                owner.progress()
            with engine_of("nixl", memory, **TCP) as other:
                reads_all(other, owner.metadata(), base, memory, owner)
        return int(owner.telemetry()["children_ended"])


def test_a_reader_that_is_killed_ends_it_at_most():
    killed_readers(3, seed=1)


@pytest.mark.long
def test_readers_that_are_killed_end_it_at_most():
    print(f"{killed_readers(72, seed=2)} children ended")


def test_it_ends_with_its_parent():
    with Owner("nixl", SIZE, "shared", **OPTIONS) as owner:
        (pid,) = children_of(owner.process.pid)
        owner.process.kill()
        until(lambda: not Path(f"/proc/{pid}").exists())


def test_it_ends_with_its_engine():
    memory = filled()
    with engine_of("nixl", memory, **OPTIONS) as engine:
        engine.metadata()
        pid = engine._child._process.pid
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("host", "more", "kind", "starts"),
    [
        ("127.0.0.1", {}, "shared", False),
        ("localhost", {}, "shared", False),
        ("198.51.100.7", {}, "shared", True),
        ("kv-7.example", {}, "shared", True),
        ("198.51.100.7", {"child": False}, "shared", False),
        ("127.0.0.1", {"child": True}, "shared", True),
        ("198.51.100.7", {}, "private", False),
    ],
)
def test_by_default_it_serves_where_peers_of_other_hosts_read(host, more, kind, starts):
    memory = memory_of(kind, SIZE)
    engine = create_engine("nixl", **TCP, **more)
    try:
        engine.reached_at(host)
        engine.register([slab_of(memory)])
        engine.metadata()
        assert (engine._child is not None) == starts
    finally:
        engine.close()


def test_memory_that_is_not_shared_is_refused():
    with (
        engine_of("nixl", memory_of("private", SIZE), **OPTIONS) as engine,
        pytest.raises(TransferError, match=r"private memory of this process, .* CPU device"),
    ):
        engine.metadata()


def test_an_address_that_is_taken_is_refused():
    memory = filled()
    (file,) = shared_memory.files_between(memory.ctypes.data, memory.ctypes.data + 1)
    with pytest.raises(TransferError, match=r"cannot be mapped at 0x[0-9a-f]+ \(File exists\)"):
        nixl_child._map_at(file.base, file.handle)


def test_what_keeps_it_from_starting_is_said(monkeypatch):
    monkeypatch.setattr(nixl_child, "STARTS", 2)
    memory = filled()
    with pytest.raises(TransferError, match="no process can be started that serves reads: NIXL"):
        nixl_child.Child("NONE", {}, [slab_of(memory)])
