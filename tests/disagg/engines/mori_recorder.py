"""`mori.io` as MoRI's sources describe it, over memory of this process. Every call is recorded.

An `IOEngine` listens at a host and a port. What an initiator asks there first is kept: connections
by engine, registrations by engine and number. A read copies at once, or, with `hold`, when it is
released; if its `IOEngine` was destroyed in between, it copies nothing.
"""

from __future__ import annotations

import ctypes
import enum
import threading
import weakref
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import msgspec

CALLS: list[tuple] = []
"""(key of the IOEngine, method, arguments) in order, over all of them."""

BackendType = enum.Enum("BackendType", {"RDMA": 2})
PollCqMode = enum.Enum("PollCqMode", {"POLLING": 0, "EVENT": 1})
MemoryLocationType = enum.Enum("MemoryLocationType", {"CPU": 1, "GPU": 2})
IOEngineConfig = namedtuple("IOEngineConfig", "host port")
RdmaBackendConfig = namedtuple(
    "RdmaBackendConfig",
    "qp_per_transfer post_batch_size num_worker_threads poll_cq_mode enable_notification",
)


class Packed:
    def pack(self):
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, packed):
        try:
            return msgspec.msgpack.decode(packed, type=cls)
        except msgspec.MsgspecError as error:
            raise RuntimeError(f"std::bad_cast: {error}") from None


class EngineDesc(msgspec.Struct, Packed, frozen=True, array_like=True):
    key: str
    host: str
    port: int


class MemoryDesc(msgspec.Struct, Packed, frozen=True, array_like=True):
    engine_key: str
    id: int
    device_id: int
    data: int
    size: int
    loc: MemoryLocationType


class TransferStatus:
    """Of a read: why it failed, once it has. Its bytes are copied by `land`."""

    def __init__(self, io, rows):
        self.io, self.rows = weakref.ref(io), rows
        self.problem, self.ended = None, threading.Event()

    def fail(self, problem):
        self.problem = problem
        self.ended.set()

    def land(self):
        """Copies (destination, source, length); whether anything landed."""
        if self.io() is None:
            return False
        for dst, src, nbytes in self.rows:
            ctypes.memmove(dst, src, nbytes)
        self.ended.set()
        return True

    def InProgress(self):
        return not self.ended.is_set()

    def Succeeded(self):
        return self.ended.is_set() and self.problem is None

    def Failed(self):
        return self.problem is not None

    def Message(self):
        return self.problem

    def WaitFor(self, timeout_ms):
        assert isinstance(timeout_ms, int)
        self.ended.wait(timeout_ms / 1000)


class Network:
    """Who listens where, and what happens to reads. `hold` and `refuse` are asked with the number
    of a read and the key of the peer; `block` is an event that calls wait for.
    """

    def __init__(self):
        CALLS.clear()
        self.listening, self.ports = weakref.WeakValueDictionary(), iter(range(40000, 50000))
        self.held, self.engines, self.no_device = [], [], False
        self.hold = self.refuse = lambda number, key: None
        self.block = threading.Event()
        self.block.set()

    def module(self):
        """What `import mori.io` gives."""
        names = "BackendType", "PollCqMode", "MemoryLocationType", "IOEngineConfig"
        names += "RdmaBackendConfig", "EngineDesc", "MemoryDesc"
        return SimpleNamespace(
            IOEngine=partial(IOEngine, self), **{name: globals()[name] for name in names}
        )

    def alive(self):
        return sum(engine() is not None for engine in self.engines)

    def release(self):
        """Lands everything that was held; whether any byte did."""
        waiting, self.held = self.held, []
        return sum(status.land() for status in waiting) > 0


class IOEngine:
    def __init__(self, network, key, config):
        CALLS.append((key, "IOEngine", (config,)))
        self.network, self.key, self.config = network, key, config
        self.memory, self.engines, self.connected, self.regions = {}, {}, {}, {}
        self.uids, self.desc = 0, None
        network.engines.append(weakref.ref(self))

    def _record(self, method, *arguments):
        CALLS.append((self.key, method, arguments))

    def create_backend(self, kind, config=None):
        self._record("create_backend", kind, config)
        assert isinstance(config, RdmaBackendConfig)
        if self.network.no_device:
            raise RuntimeError("no active RDMA device on this host")
        self.desc = EngineDesc(self.key, self.config.host, next(self.network.ports))
        self.network.listening[self.desc.host, self.desc.port] = self

    def get_engine_desc(self):
        return self.desc

    def register_remote_engine(self, desc):
        self._record("register_remote_engine", desc)
        self.engines[desc.key] = desc

    def register_memory(self, ptr, size, device_id, mem_loc):
        self._record("register_memory", ptr, size, device_id, mem_loc)
        assert size > 0
        desc = MemoryDesc(self.key, len(self.memory), device_id, ptr, size, mem_loc)
        self.memory[desc.id] = desc
        return desc

    def allocate_transfer_uid(self):
        self.uids += 1
        return self.uids - 1

    def batch_read(self, *lists):
        self._record("batch_read", *lists)
        assert self.network.block.wait(20)
        assert {len(values) for values in lists} == {1}, "one status could be lost with an error"
        dst, dst_offsets, src, src_offsets, sizes, uid = (value for [value] in lists)
        assert self.memory[dst.id] == dst
        listener, base = self._connection(src)
        rows = list(zip(dst_offsets, src_offsets, sizes, strict=True))
        assert rows and all(type(value) is int for row in rows for value in row)
        status = TransferStatus(self, [(dst.data + d, base + s, n) for d, s, n in rows])
        if any(n > 0xFFFFFFFF or d + n > dst.size or s + n > src.size for d, s, n in rows):
            status.fail("length out of range")
        elif listener() is None:
            status.fail("transport retry counter exceeded")
        elif reason := self.network.refuse(uid, src.engine_key):
            status.fail(reason)
            self.network.held.append(status)  # other parts of it may be in flight
        elif self.network.hold(uid, src.engine_key):
            self.network.held.append(status)
        else:
            status.land()
        return [status]

    def _connection(self, src):
        """Who is read, and where its memory begins: whoever listened when that was first asked."""
        desc = self.engines[src.engine_key]
        place, region = (desc.key, src.device_id, src.loc), (desc.key, src.id)
        if place not in self.connected:
            self.connected[place] = weakref.ref(self._listener(desc))
        if region not in self.regions:
            memory = self._listener(desc).memory[src.id]
            if memory.size != src.size:
                raise RuntimeError("remote MR size mismatch")
            self.regions[region] = memory.data
        return self.connected[place], self.regions[region]

    def _listener(self, desc):
        listener = self.network.listening.get((desc.host, desc.port))
        if listener is None:
            raise RuntimeError(f"connect({desc.host}:{desc.port}): Connection refused")
        return listener
