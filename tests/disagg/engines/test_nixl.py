"""NIXL: what is read, what a fence guarantees, and what is released."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from disagg.engines.base import TransferError, create_engine
from disagg.engines.nixl import agent as nixl_agent, engine as nixl_engine
from disagg.host.interfaces import interface_addresses, interface_names, is_loopback
from disagg.plan.bind import CopyBatch
from kvpool.layout import Slab
from tests.disagg.engines import giving_up
from tests.disagg.engines.owners import Owner, batch_of, engine_of, finish, pattern, read
from tests.processes import FORKS, Child, started

MIB = 1 << 20
SIZE = 16 * MIB
"""More than TCP and shared memory buffer between two processes that have just connected."""
BY_OPTION = {"engine_config": "TLS=tcp"}
TRANSPORTS = {"default": {}, "tcp": {"transports": "tcp"}, "posix": {"transports": "posix"}}


@pytest.fixture(scope="module")
def friends():
    """A process per transport that is never stopped; all exit with status 0."""
    owners = {}

    def friend(transports):
        if transports not in owners:
            owners[transports] = Owner("nixl", SIZE, **TRANSPORTS[transports])
        return owners[transports]

    yield friend
    assert {name: owner.close() for name, owner in owners.items()} == dict.fromkeys(owners, 0)


@pytest.fixture(autouse=True)
def kept_agents(monkeypatch):
    """As many as a process of its own could keep."""
    places = iter(range(nixl_engine.MAX_KEPT_AGENTS))
    monkeypatch.setattr(nixl_engine, "KEPT_AGENTS", places)


def blank(size):
    return np.full(size, 0xEE, dtype=np.uint8)


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_another_process_is_read_over(transports, friends):
    """Several parts in flight on one connection."""
    count, width = 3000, 144
    memory, expected = blank(2 * count * width), blank(2 * count * width)
    other, random = friends(transports), np.random.default_rng(0)
    src, dst = (random.permutation(2 * count)[:count] * width for _ in range(2))
    lengths = random.integers(1, width + 1, count)
    with engine_of("nixl", memory, **TRANSPORTS[transports]) as engine:
        peer = engine.connect(other.metadata)
        batch = CopyBatch(other.base + src, memory.ctypes.data + dst, lengths)
        finish(engine, *[engine.read(peer, part) for part in batch.split(1 << 16, 400)])
        assert engine.fence(peer, 0)
        assert not engine._agent._held, "NIXL's requests are released"
    truth = pattern(memory.size)
    for at, to, nbytes in zip(src, dst, lengths):
        expected[to : to + nbytes] = truth[at : at + nbytes]
    assert np.array_equal(memory, expected)


def stuck(engine, other, memory, seen=True):
    """A peer that was stopped, and a read from it that it has partly served or not yet seen."""
    if seen:
        other.step()
        peer = engine.connect(other.metadata)
    else:
        peer = small_read(engine, other, memory)
        memory[:] = 0xEE
        other.stop()
    starts = np.arange(0, memory.size, MIB)
    lengths = np.full(starts.size, MIB)
    transfer = engine.read(
        peer, CopyBatch(other.base + starts, memory.ctypes.data + starts, lengths)
    )
    while seen and (memory == 0xEE).all():  # a step fills the buffers between, not all of it
        other.step()
        engine.poll(transfer)
    other.stop()
    for _ in range(3):
        assert not engine.poll(transfer)
    return peer, transfer


def small_read(engine, other, memory, peer=None):
    """Reads eight bytes to the end of `memory` and checks them."""
    peer = peer or engine.connect(other.metadata)
    memory[-8:] = 0xEE
    read(engine, peer, to_the_end(other, memory))
    assert np.array_equal(memory[-8:], pattern(8))
    return peer


def to_the_end(other, memory):
    return batch_of((other.base, memory.ctypes.data + memory.size - 8, 8))


@pytest.mark.parametrize(
    ("transports", "seen"),
    [("tcp", True), ("tcp", False), ("posix", True), ("posix", False), ("tcp by option", False)],
)
def test_after_a_fence_nothing_lands_when_a_stopped_peer_continues(transports, seen, friends):
    """UCX can end a peer whose connection closes before it answers: the agent is kept, and the peer
    survives.
    """
    memory, more = blank(SIZE), blank(MIB)
    good, options = friends(transports.partition(" ")[0]), TRANSPORTS.get(transports, BY_OPTION)
    with (
        Owner("nixl", SIZE, **options) as bad,
        engine_of("nixl", memory, more, patience=0.3, **options) as engine,
    ):
        friend = small_read(engine, good, more)
        peer, transfer = stuck(engine, bad, memory, seen)
        assert not engine.fence(peer, 0), "bytes can still land"
        small_read(engine, good, more, friend)
        assert engine.fence(peer)
        assert engine.telemetry()["agents_ended"] == 1
        memory[:] = 0xEE
        bad.go_on()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:  # the friend is still read, by a new agent
            small_read(engine, good, more, friend)
            engine.progress()
        assert (memory == 0xEE).all()
        with pytest.raises(TransferError, match="given up"):
            engine.poll(transfer)
        with pytest.raises(TransferError, match="Connect again"):
            engine.read(peer, to_the_end(bad, memory))
        assert engine.fence(peer, 0), "once fenced, always fenced"
        assert bad.close() == 0


ENDS = {"its engine is closed": "close", "nothing refers to it": "drop"}


@pytest.mark.parametrize("transports", ["tcp", "posix"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_read_that_was_given_up_does_not_land_when(end, transports, tmp_path):
    """Its bytes wait in sockets and segments, and UCX makes progress while it destroys an agent.
    The memory is a file, which this process sees too.
    """
    memory = np.memmap(tmp_path / "memory", dtype=np.uint8, mode="w+", shape=(SIZE,))
    with Owner("nixl", SIZE, transports=transports) as owner:
        place = owner.metadata, owner.base
        with Child(giving_up.give_up, end, memory.filename, place, transports) as reader:
            given_up(reader.pipe, owner, memory)
            assert owner.close() == 0
            assert (memory == 0xEE).all()


EXITS = {"after it was given up": "exit", "during the read": "reading"}


@pytest.mark.parametrize("end", EXITS.values(), ids=EXITS)
def test_no_byte_lands_while_the_interpreter_ends(end, tmp_path):
    """It destroys what is left, unlike a process that is forked off another."""
    memory = np.memmap(tmp_path / "memory", dtype=np.uint8, mode="w+", shape=(SIZE,))
    pipe, line = FORKS.Pipe()
    command = [sys.executable, "-m", giving_up.__name__, str(line.fileno())]
    with (
        Owner("nixl", SIZE, transports="tcp") as owner,
        started(command, pass_fds=[line.fileno()]) as reader,
    ):
        pipe.send((end, memory.filename, (owner.metadata, owner.base), "tcp"))
        given_up(pipe, owner, memory)
        pipe.send(None)
        assert reader.wait(60) == 0
        assert (memory == 0xEE).all()
    for each in pipe, line:
        each.close()


def given_up(pipe, owner, memory):
    """Leads a reader to where it has ended its agent, after the owner has sent what it can."""
    pipe.recv()
    memory[:] = 0xEE
    owner.stop()
    pipe.send(None)
    pipe.recv()
    os.kill(owner.process.pid, signal.SIGCONT)
    for _ in range(100):
        owner.step()
    owner.pipe.send(("serve",))
    pipe.send(None)
    pipe.recv()


def test_beyond_those_that_are_kept_an_agent_is_destroyed_before_its_fence_ends(monkeypatch):
    monkeypatch.setattr(nixl_engine, "KEPT_AGENTS", iter(range(1)))
    memory, options, alive = blank(SIZE), TRANSPORTS["posix"], []
    with engine_of("nixl", memory, patience=0.0, **options) as engine:
        for _ in range(2):
            with Owner("nixl", SIZE, **options) as bad:
                peer, transfer = stuck(engine, bad, memory)
                assert engine.fence(peer)
                alive.append(transfer.agent._alive() is not None)
                memory[:] = 0xEE
                bad.go_on()
                assert bad.close() == 0
                assert (memory == 0xEE).all()
    assert alive == [True, False]


@pytest.mark.parametrize(
    ("backend", "options", "transport", "selected", "device", "by_progress"),
    [
        ("UCX", {}, None, None, False, True),
        ("UCX", {}, None, None, True, False),
        ("UCX", {}, None, "tcp,cma", True, True),
        ("UCX", {}, None, "tcp,rc", True, False),
        ("UCX", {}, "tcp", None, True, True),
        ("UCX", {}, "rc", None, True, False),
        ("UCX", {"num_threads": "2"}, "tcp", None, False, False),
        ("LIBFABRIC", {}, None, None, False, False),
    ],
)
def test_where_reads_land_by_progress_of_their_reader_alone(
    backend, options, transport, selected, device, by_progress, monkeypatch, tmp_path
):
    monkeypatch.setattr(nixl_agent, "RDMA_DEVICES", tmp_path)
    if device:
        (tmp_path / "mlx5_0").touch()
    monkeypatch.delenv("UCX_TLS", raising=False)
    if selected:
        monkeypatch.setenv("UCX_TLS", selected)
    assert nixl_agent.lands_by_progress(backend, options, transport) == by_progress


def test_a_fence_lets_reads_complete():
    """A peer that stops for a moment costs no agent, and all its bytes arrive."""
    memory, options = blank(SIZE), TRANSPORTS["tcp"]
    with Owner("nixl", SIZE, **options) as other:
        with engine_of("nixl", memory, patience=math.inf, **options) as engine:
            peer, transfer = stuck(engine, other, memory)
            assert not engine.fence(peer, 0.05)
            other.go_on()
            assert engine.fence(peer)
            assert engine.poll(transfer) and np.array_equal(memory, pattern(SIZE))
            assert engine.telemetry()["agents_ended"] == 0
        assert other.close() == 0


def test_a_fence_waits_for_reads_from_other_peers():
    memory, more, options = blank(SIZE), blank(SIZE), TRANSPORTS["tcp"]
    with Owner("nixl", SIZE, **options) as bad, Owner("nixl", SIZE, **options) as slow:
        with engine_of("nixl", memory, more, patience=0.1, **options) as engine:
            friend, transfer = stuck(engine, slow, more)
            peer, _ = stuck(engine, bad, memory)
            assert not engine.fence(peer, 0.3), "the friend's read would be lost"
            slow.go_on()
            small_read(engine, slow, memory, friend)
            later = engine.read(friend, to_the_end(slow, memory))
            assert later.agent is not transfer.agent, "an agent that goes on reading never ends"
            assert engine.fence(peer, 20)
            assert engine.poll(transfer) and np.array_equal(more, pattern(SIZE))
            assert engine.fence(friend, 0)
        assert slow.close() == 0


@pytest.mark.parametrize(("transports", "patience"), [("tcp", math.inf), ("posix", 0.2)])
def test_a_dead_peer_is_fenced_and_others_are_still_read(transports, patience, friends):
    """TCP reports it. Over shared memory UCX does not notice, and the read stays pending."""
    memory, good, options = blank(SIZE), friends(transports), TRANSPORTS[transports]
    with (
        Owner("nixl", SIZE, **options) as bad,
        engine_of("nixl", memory, patience=patience, **options) as engine,
    ):
        peer, transfer = stuck(engine, bad, memory)
        bad.process.kill()
        bad.process.join(20)
        friend = small_read(engine, good, memory)
        if transports == "tcp":
            with pytest.raises(TransferError, match="the peer is dead or out of reach"):
                finish(engine, transfer)
        assert engine.fence(peer, 20)
        small_read(engine, good, memory, friend)


def test_what_keeps_an_agent_alive(monkeypatch):
    """A kept exception does not; a reference does, and then the fence raises."""
    monkeypatch.setattr(nixl_engine, "KEPT_AGENTS", iter(()))
    memory = blank(SIZE)
    with (
        Owner("nixl", SIZE, transports="tcp") as other,
        engine_of("nixl", memory, patience=0.0, **BY_OPTION) as engine,
    ):
        peer, _ = stuck(engine, other, memory)
        with pytest.raises(TransferError) as kept:
            engine.read(peer, batch_of((8, 8, 8)))
        agent = engine._agent._nixl.agent
        with pytest.raises(TransferError, match="still refers to it"):
            engine.fence(peer, 0)
        del agent
        assert engine.fence(peer, 0), kept.value


def usage() -> tuple[int, int, int]:
    """Open files, threads, and resident pages of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def come_and_go(pipe, metadata: bytes, base: int, size: int, options: dict, cycles: int) -> None:
    """Creates, uses and closes engines; sends its usage after each cycle."""
    memory, truth = np.zeros(size, dtype=np.uint8), pattern(size)
    starts = np.arange(0, size, 4096)
    lengths = np.full(starts.size, 4096)
    for _ in range(cycles):
        memory[:] = 0
        with engine_of("nixl", memory, **options) as engine:
            peer = engine.connect(metadata)
            read(engine, peer, CopyBatch(base + starts, memory.ctypes.data + starts, lengths))
            assert engine.fence(peer, 0)
        assert np.array_equal(memory, truth)
        pipe.send(usage())
    pipe.recv()


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_created_and_closed_engines_leave_nothing_behind(transports, friends):
    """Files, threads and memory of the reading process, over cycles."""
    other, options = friends(transports), TRANSPORTS[transports]
    with Child(come_and_go, other.metadata, other.base, MIB, options, 9) as child:
        seen = [child.answer() for _ in range(9)]
        assert child.close() == 0
    for before, after in pairwise(seen[3:]):
        assert after[:2] == before[:2]
    assert seen[-1][2] - seen[3][2] < 256, "pages of 4 KiB"


CYCLES = 15


def read_over_a_new_connection(engine, other, memory):
    """Connects, reads `memory.size` bytes, compares them and gives the peer up."""
    memory[:] = 0xEE
    peer = engine.connect(other.metadata)
    read(engine, peer, batch_of((other.base, memory.ctypes.data, memory.size)))
    assert engine.fence(peer, 0)
    assert np.array_equal(memory, pattern(memory.size))


def open_files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_a_peer_that_is_connected_again_and_again_costs_no_more_files_on_either_side(
    transports, friends
):
    other, memory, counts = friends(transports), blank(4096), []
    with engine_of("nixl", memory, **TRANSPORTS[transports]) as engine:
        for _ in range(CYCLES):
            read_over_a_new_connection(engine, other, memory)
            counts.append((open_files(os.getpid()), open_files(other.process.pid)))
    # the other process accepts a connection in its own time
    assert np.ptp(counts[CYCLES // 3 :], axis=0).max() == 0, counts


def break_connections():
    """Ends every TCP connection of this process, as a network does that is down for long."""
    before = open_files(os.getpid())
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not Path(f"/proc/self/fd/{number}").is_socket():
                continue
            with socket.socket(fileno=os.dup(int(number))) as copy:
                if copy.family == socket.AF_INET and copy.type == socket.SOCK_STREAM:
                    copy.getpeername()
                    copy.shutdown(socket.SHUT_RDWR)
    assert open_files(os.getpid()) == before


@pytest.mark.parametrize("transports", ["default", "tcp"])
def test_a_connection_that_broke_while_nothing_used_it_is_replaced(transports, friends):
    other, memory = friends(transports), blank(4096)
    with engine_of("nixl", memory, **TRANSPORTS[transports]) as engine:
        read_over_a_new_connection(engine, other, memory)
        break_connections()
        read_over_a_new_connection(engine, other, memory)
        assert engine.telemetry()["agents_ended"] == 0


def test_one_network_device_is_used():
    """Loopback: the metadata has no other address of this host, and the bytes arrive."""
    others = [
        socket.inet_aton(address)
        for name in interface_names()
        for address in interface_addresses(name)
        if ":" not in address and not is_loopback(address)
    ]
    memory = blank(4096)
    options = TRANSPORTS["tcp"] | {"device": "lo"}
    with Owner("nixl", SIZE, **options) as other, engine_of("nixl", memory, **options) as engine:
        read(
            engine, engine.connect(other.metadata), batch_of((other.base, memory.ctypes.data, 4096))
        )
        assert np.array_equal(memory, pattern(4096))
        assert not any(address in other.metadata for address in others)
        assert other.close() == 0
    with engine_of("nixl", memory, transports="tcp") as engine:
        assert not others or any(address in engine.metadata() for address in others)
    with pytest.raises(TransferError, match="NET_DEVICES=kvpool9"):
        create_engine("nixl", transports="tcp", device="kvpool9")


@pytest.mark.parametrize("given", ["lo,eth0", "lo"])
def test_devices_that_ucx_would_not_use_are_refused(given, monkeypatch):
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    with pytest.raises(ValueError, match=f"device='{given}'.*UCX_NET_DEVICES"):
        create_engine("nixl", device=given)


@pytest.mark.parametrize("given", ["tcp,cma", "tcp"])
def test_transports_that_ucx_would_not_use_are_refused(given, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "posix")
    with pytest.raises(ValueError, match="UCX_TLS"):
        create_engine("nixl", transports=given)


def test_memory_names_are_those_of_layouts():
    assert nixl_agent.memory_of("cpu") == ("cpu", "DRAM", 0)
    assert nixl_agent.memory_of("cuda:3") == ("cuda:3", "VRAM", 3)
    for other in ("npu:0", "meta", "cpu:0", "cuda:x", "cuda:-1", f"cuda:{1 << 16}", "cuda:²"):
        with pytest.raises(TransferError, match=re.escape(repr(other))):
            nixl_agent.memory_of(other)


def test_slabs_of_two_memories_are_refused():
    with pytest.raises(TransferError, match=r"on cuda:0, others on cpu: .* serves one memory"):
        create_engine("nixl").register([Slab(4096, 4096), Slab(1 << 20, 4096, "cuda:0")])
