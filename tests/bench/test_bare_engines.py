"""One big room between two processes, against the bare engine with the same runs: one request of
all of them, polled without a pause. In the same rounds, what of it is the engine's part: `Engine`
with parts of a room, without an endpoint.

Both sides of the reference are bare. Over a transport whose rate depends on it, the process that is
read makes progress without a pause too.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from functools import cache

import numpy as np
import pytest
import torch

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from disagg.engines.mooncake import package as mooncake
from disagg.engines.nixl.agent import NEED_PROGRESS, backend_options, nixl_api
from disagg.plan.bind import CopyBatch
from kvpool import PoolLayout, RequestAddress, Space, Span
from kvpool.describe import describe
from kvpool.device.cpu import CPUDevice
from kvpool.layout import Slab
from tests.disagg.engines.owners import pattern
from tests.disagg.engines.peers import ENGINES
from tests.processes import Child

SIZES = {4 << 10: 64 << 20, 36 << 10: 252 << 20, 1 << 20: 256 << 20, None: 256 << 20}
"""Bytes of a room by bytes of a run; None is one run of all."""
PAGE = 1 << 20
"""Bytes of a page where all is one run."""
ROUNDS = 9
PAUSE = 0.0002
"""Seconds between two calls on the side that is read, where the rate does not depend on them."""
WAYS = {
    "nixl": ("nixl", {}),
    "nixl-tcp": ("nixl", {"transports": "tcp"}),
    "mooncake": ("mooncake", {}),
}
OURS = [way for way, (engine, _) in WAYS.items() if engine in ENGINES]


CALL_RUNS = 1024
"""Runs per call of Mooncake: its queue takes no more at once."""


class BareNixl:
    """An agent with host memory `[bytes]`, over one UCX transport or those that UCX chooses."""

    def __init__(self, memory: np.ndarray, transports: str | None = None) -> None:
        api = nixl_api()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = api.nixl_agent(uuid.uuid4().hex, config)
        self._agent.create_backend("UCX", backend_options("UCX", {}, transports))
        self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")

    def metadata(self) -> bytes:
        return self._agent.get_agent_metadata()

    def connect(self, metadata: bytes) -> None:
        name = self._agent.add_remote_agent(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def read(self, src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray) -> None:
        """Reads runs, int64 `[N]` each: from a request to its end."""
        agent = self._agent
        remote, local = (
            agent.get_xfer_descs(np.stack([at, nbytes, 0 * at], 1).astype(np.uint64), "DRAM")
            for at in (src, dst)
        )
        handle = agent.initialize_xfer("READ", local, remote, self._peer)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE"
        agent.release_xfer_handle(handle)


class BareMooncake:
    """A `TransferEngine` over TCP with host memory `[bytes]`."""

    def __init__(self, memory: np.ndarray) -> None:
        mooncake.package()
        mooncake.choose("tcp")
        self._engine = mooncake.start("tcp", "127.0.0.1", "")
        mooncake.register_ranges(self._engine, [(memory.ctypes.data, memory.nbytes)])

    def metadata(self) -> bytes:
        return f"127.0.0.1:{self._engine.get_rpc_port()}".encode()

    def connect(self, metadata: bytes) -> None:
        self._peer = metadata.decode()

    def progress(self) -> None:
        """Its own threads answer."""

    def read(self, src: np.ndarray, dst: np.ndarray, nbytes: np.ndarray) -> None:
        """Reads runs, int64 `[N]` each: from a request to its end."""
        for at in range(0, src.size, CALL_RUNS):
            lists = [column[at : at + CALL_RUNS].tolist() for column in (dst, src, nbytes)]
            number = self._engine.batch_transfer_async_read(self._peer, *lists)
            assert number and self._engine.get_batch_transfer_status([number]) == 0


def bare_of(way, memory):
    name, options = WAYS[way]
    return BareNixl(memory, **options) if name == "nixl" else BareMooncake(memory)


@cache
def truth(size):
    """A pattern that repeats, at no multiple of a page."""
    return np.resize(pattern(1_000_003), size)


def memory_of(size):
    """Memory in which a room of `size` bytes has gaps."""
    return CPUDevice().allocate(2 * size).numpy()


def room_of(memory, width, size, seed):
    """A layout over the memory in pages of `width` bytes, and a request in every second page in
    random order; without a width, in pages side by side.
    """
    page = min(width or PAGE, size)
    items = memory.size // page
    tensor = torch.from_numpy(memory[: items * page]).view(items, 1, 1, page)
    seen = describe(tensor, ("item", "entry", "head", "dim"), role="k", layer=0)
    layout = PoolLayout(seen.buffers, seen.regions, (Space("kv", entries_per_item=1),), 1)
    pages = size // page
    ids = np.arange(pages) + 1
    if width:
        ids = 1 + 2 * np.random.default_rng(seed).permutation(pages)
    return layout, RequestAddress(pages, {"kv": Span(ids)}), page


def serve(pipe, way, size):
    """Obeys: sends rooms of an endpoint, serves an engine without one, or the bare engine."""
    name, options = WAYS[way]
    memory = memory_of(size)
    memory[:] = truth(memory.size)
    bare = bare_of(way, memory)
    pipe.send((bare.metadata(), memory.ctypes.data))
    endpoint = engine = None
    while True:
        while not pipe.poll(engine.progress_seconds if engine else None):
            engine.progress()
        match pipe.recv():
            case "endpoint", width, room_bytes, rooms:
                layout, address, _ = room_of(memory, width, room_bytes, seed=0)
                endpoint = PrefillEndpoint(layout, create_engine(name, **options))
                for room in range(rooms):
                    endpoint.send(room, address)
                pipe.send(endpoint.address)
            case ("engine",):
                engine = create_engine(name, **options)
                engine.register([Slab(memory.ctypes.data, memory.nbytes)])
                pipe.send(engine.metadata())
            case ("progress",):
                pipe.send(None)
                while not pipe.poll(0 if options.get("transports") in NEED_PROGRESS else PAUSE):
                    bare.progress()
            case ("close",):
                for each in filter(None, (endpoint, engine)):
                    each.close()
                endpoint = engine = None
                pipe.send(None)
            case None:
                break


class Other(Child):
    """The process that is read, and this side's bare engine and memory."""

    def __init__(self, way, size):
        super().__init__(serve, way, size)
        self.way = way
        metadata, self.base = self.answer()
        self.memory = memory_of(size)
        self.bare = bare_of(way, self.memory)
        self.bare.connect(metadata)

    def read_bare(self, columns):
        """The reference."""
        self.ask("progress")
        self.bare.read(*columns)
        self.pipe.send(("stop",))


@pytest.fixture(scope="module", params=OURS)
def other(request, timed):
    with Other(request.param, max(SIZES.values()) if timed else 2 << 20) as other:
        yield other
        assert other.close() == 0


@pytest.fixture(params=SIZES, ids=["4 KiB", "36 KiB", "1 MiB", "one run"])
def runs(request, other, timed):
    """Rooms of runs of one length: layout, address, and the runs, int64 `[N]` each."""
    width = request.param
    size = SIZES[width] if timed else 2 * (width or PAGE)
    layout, address, page = room_of(other.memory, width, size, seed=1)
    _, theirs, _ = room_of(other.memory, width, size, seed=0)
    src, dst = (at.spans["kv"].ids.astype(np.int64) * page for at in (theirs, address))
    lengths = np.full(src.size, page)
    if width is None:
        src, dst, lengths = src[:1], dst[:1], np.array([size])
    columns = other.base + src, other.memory.ctypes.data + dst, lengths
    other.memory[:] = 0
    yield width, size, layout, address, columns
    whole = truth(other.memory.size)
    expected = np.zeros_like(other.memory)
    for a, b, n in zip(src, dst, lengths):
        expected[b : b + n] = whole[a : a + n]
    assert np.array_equal(other.memory, expected)


def test_room(paired, other, runs):
    """From `receive` to Success, the other side having sent before."""
    width, size, layout, address, columns = runs
    name, options = WAYS[other.way]
    engine, posted = create_engine(name, **options), []
    url = other.ask("endpoint", width, size, ROUNDS + 3)
    rooms = iter(range(ROUNDS + 3))
    with DecodeEndpoint(layout, engine, staging=0) as decode:  # the same runs
        decode.connect([url], timeout=60)

        def ours():
            room = next(rooms)
            decode.receive(room, address)
            assert decode.wait(room, 60) is KVPoll.Success, decode.failure(room)

        read = engine.read
        engine.read = lambda peer, batch: posted.append(np.stack(list(batch))) or read(peer, batch)
        ours()
        del engine.read
        paired(ours, lambda: other.read_bare(columns), rounds=ROUNDS)
    other.ask("close")
    made = np.concatenate(posted, axis=1)
    assert made[2].sum() == size
    if width:
        assert set(map(tuple, made.T.tolist())) == set(zip(*(each.tolist() for each in columns)))


def test_engine(paired, other, runs):
    """The parts of such a room, as many in flight as an endpoint has; polled without a pause, or
    when the engine tells.
    """
    *_, columns = runs
    name, options = WAYS[other.way]
    engine = create_engine(name, **options)
    engine.register([Slab(other.memory.ctypes.data, other.memory.nbytes)])
    peer = engine.connect(other.ask("engine"))
    told, tells = os.pipe()
    os.set_blocking(tells, False)
    engine.notify(tells)
    in_flight = deque()

    def take():
        if engine.poll(in_flight[0]):
            in_flight.popleft()
        elif engine.background:
            os.read(told, 4096)

    def ours():
        for part in CopyBatch(*columns).split(engine.max_bytes, engine.max_runs):
            while len(in_flight) >= engine.parts_in_flight:
                take()
            in_flight.append(engine.read(peer, part))
        while in_flight:
            take()

    paired(ours, lambda: other.read_bare(columns), rounds=ROUNDS)
    engine.fence(peer)
    engine.close()
    os.close(told)
    os.close(tells)
    other.ask("close")
