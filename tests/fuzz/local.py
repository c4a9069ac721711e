"""Metadata of engine `local`: a peer that can be read, or a refusal; no open file is left.

In an input, host "here", process 0 and start "now" stand for this process, and file -2 for a shared
memory file of this process.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from disagg.engines.base import TransferError
from disagg.engines.local import LocalEngine
from disagg.plan.bind import CopyBatch
from tests.fuzz import build
from tests.fuzz.guard import Finding

F_ADD_SEALS, F_SEAL_SHRINK = 1033, 2
SHARED = 1 << 16
HOST, PROCESS, START, FILE = "here", 0, "now", -2
_dest = np.zeros(64, dtype=np.uint8)


def run(data: bytes) -> str:
    """Connects, reads at the edges of what is offered, and closes."""
    engine, metadata = LocalEngine(), with_own_process(data)
    files = len(os.listdir("/proc/self/fd"))
    try:
        peer = engine.connect(metadata)
    except TransferError:
        outcome = "refused"
    else:
        outcome = "connected"
        for base, end in zip(peer.bases[:2].tolist(), peer.ends[:2].tolist()):
            for start in (base, end - 8, end - 1, base - 1):
                batch = CopyBatch(*np.array([[start], [_dest.ctypes.data], [8]], dtype=np.int64))
                try:
                    engine.read(peer, batch)
                    outcome = "read"
                except TransferError:
                    continue
                if not base <= start <= end - 8 and peer.bases.size == 1:
                    raise Finding(f"8 bytes at {start:#x} were read, offered are {base:#x} on.")
        del peer
    engine.close()
    if len(os.listdir("/proc/self/fd")) != files:
        raise Finding("a file was left open.")
    return outcome


@lru_cache
def _own() -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.msgpack.decode(LocalEngine().metadata())
    return fields


@lru_cache
def _file() -> tuple[int, int, int]:
    handle = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(handle, SHARED)
    fcntl.fcntl(handle, F_ADD_SEALS, F_SEAL_SHRINK)
    status = os.fstat(handle)
    return handle, status.st_dev, status.st_ino


def with_own_process(data: bytes) -> bytes:
    """The input with the placeholders replaced by this process."""
    try:
        fields = msgspec.msgpack.decode(data)
        if not isinstance(fields, dict):
            return data
        for key, placeholder in (("host", HOST), ("pid", PROCESS), ("started", START)):
            if fields.get(key) == placeholder:
                fields[key] = _own()[key]
        for segment in fields.get("segments", ()):
            if isinstance(segment, list) and len(segment) == 6 and segment[2] == FILE:
                segment[2], *segment[4:] = _file()
        return msgspec.msgpack.encode(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, OverflowError):
        return data


def seeds() -> Iterator[bytes]:
    """Private and shared memory: of this process, of none that exists, of another host."""
    private, shared = [1 << 40, 4096, -1, 0, 0, 0], [1 << 41, 4096, FILE, 0, 0, 0]
    whole = [1 << 42, SHARED, FILE, 0, 0, 0]
    later = [1 << 42, 4096, FILE, SHARED - 4096, 0, 0]
    for segments in ([], [private], [shared], [private, shared], [whole], [later], [shared, later]):
        own = HOST, PROCESS, START  # twice, so that half of the seeds can be read
        for host, pid, start in (own, own, (HOST, 1 << 40, ""), ("elsewhere", 1, "5")):
            fields = {"host": host, "pid": pid, "started": start, "segments": segments}
            yield build.packed(fields)
            yield build.packed({**fields, "devices": [[1 << 43, 4096, "cuda:0", b"handle"]]})
