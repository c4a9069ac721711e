"""Metadata of engine `local`, and what comes over the socket that it leads to, with files: a peer
that can be read, or a refusal; no open file is left.

In an input, host "here" stands for this host, socket "there" for one that sends the input's offer,
and pointer OWN for memory of this process. Files are numbers of KINDS.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from disagg.engines.base import TransferError
from disagg.engines.local import LocalEngine
from disagg.engines.shared_files import this_host
from disagg.plan.bind import CopyBatch
from tests.disagg.engines.local_peers import FakePeer, memory_file
from tests.fuzz import build, edits
from tests.fuzz.guard import Finding

SHARED = 1 << 16
HOST, SOCKET, OWN = "here", b"there", 1 << 44
KINDS: tuple[Callable[[], int], ...] = (
    lambda: memory_file(SHARED),
    lambda: memory_file(100),
    lambda: memory_file(SHARED, sealed=False),
    lambda: os.pipe()[0],
    lambda: os.open("/tmp", os.O_RDONLY),
    lambda: os.open("/dev/zero", os.O_RDWR),
)
MOST_FILES = 250
PATIENCE = 2.0
UNREADABLE = msgspec.MsgspecError, UnicodeDecodeError, OverflowError, RecursionError
_dest = np.zeros(64, dtype=np.uint8)
_own = np.full(4096, 2, dtype=np.uint8)


class Input(msgspec.Struct, omit_defaults=True):
    """What is said at connect, and at the socket."""

    metadata: bytes
    offer: bytes
    files: list[int]


def run(data: bytes) -> str:
    """Connects, reads at the edges of what is offered, and closes."""
    server = _server()
    try:
        given = msgspec.msgpack.decode(data, type=Input)
        metadata, server.data, server.files = prepared(given)
    except UNREADABLE:
        return "no input"
    files = len(os.listdir("/proc/self/fd"))
    engine = LocalEngine()
    try:
        peer = engine.connect(metadata)
    except TransferError:
        outcome = "refused"
    else:
        outcome = "connected"
        ranges = peer.ranges
        for base, end in zip(ranges.starts[:2].tolist(), ranges.ends[:2].tolist()):
            for start in (base, end - 8, end - 1, base - 1):
                batch = CopyBatch(*np.array([[start], [_dest.ctypes.data], [8]], dtype=np.int64))
                _dest[:] = 0
                try:
                    transfer = engine.read(peer, batch)
                    while not engine.poll(transfer):
                        pass
                except TransferError:
                    continue
                outcome = "read"
                if not base <= start <= end - 8 and ranges.starts.size == 1:
                    raise Finding(f"8 bytes at {start:#x} were read, offered are {base:#x} on.")
                if not peer.ways.any() and not (_dest[:8] == 1).all():
                    raise Finding(f"8 bytes at {start:#x} are not those of the file.")
        del peer
    engine.close()
    until = time.monotonic() + PATIENCE
    while True:
        server.hang_up()
        if len(os.listdir("/proc/self/fd")) <= files:  # fewer: the last input's was accepted late
            return outcome
        if time.monotonic() > until:
            raise Finding("a file was left open.")
        time.sleep(0.001)  # the socket's thread may accept what the engine has already given up


@lru_cache
def _server() -> FakePeer:
    return FakePeer()


@lru_cache
def _file(kind: int) -> int:
    return KINDS[kind]()


def prepared(given: Input) -> tuple[bytes, bytes, list[int]]:
    """An input's metadata, what its socket sends, and the files with it."""
    offer = _replaced(given.offer, _with_own_memory)
    files = [_file(kind % len(KINDS)) for kind in given.files[:MOST_FILES]]
    metadata = _replaced(given.metadata, _with_own_place)
    return metadata, offer, files


def mutate(data: bytes, source: random.Random, most: int) -> bytes:
    """An edit of the metadata, of the offer or of the files."""
    try:
        given = msgspec.msgpack.decode(data, type=Input)
    except UNREADABLE:
        return edits.mutate(data, source, most)
    chance = source.random()
    if chance < 0.15:
        given.metadata = edits.mutate(given.metadata, source, most)
    elif chance < 0.85:
        given.offer = edits.mutate(given.offer, source, most)
    else:
        given.files = [source.randrange(len(KINDS)) for _ in range(source.choice((0, 1, 2, 250)))]
    return msgspec.msgpack.encode(given)[:most]


def _replaced(data: bytes, change: Callable[[Any], None]) -> bytes:
    """The document with its placeholders replaced; as it is if it has none."""
    try:
        document = msgspec.msgpack.decode(data)
        change(document)
        return msgspec.msgpack.encode(document)
    except (*UNREADABLE, TypeError, KeyError, IndexError, AttributeError):
        return data


def _with_own_place(metadata: dict[str, Any]) -> None:
    for key, placeholder, value in (
        ("host", HOST, this_host()),
        ("socket", SOCKET, os.fsencode(_server().path)),
    ):
        if metadata[key] == placeholder:
            metadata[key] = value


def _with_own_memory(offer: list[list[list[Any]]]) -> None:
    for segment in offer[0]:
        if segment[0] == OWN:
            segment[0] = _own.ctypes.data


def seeds() -> Iterator[bytes]:
    """Shared and private memory, files of every kind, another host, a path of nobody."""
    private, none = [OWN, 4096, -1, 0], [1 << 40, 4096, -1, 0]
    shared, later = [1 << 41, SHARED, 0, 0], [1 << 42, 4096, 0, SHARED - 4096]
    small = [1 << 43, 50, 1, 50]
    good: list[tuple[list[list[int]], list[int]]] = [([], []), ([private], []), ([none], [])]
    good += [([shared], [0]), ([private, shared], [0]), ([later, small], [0, 1])]
    good += [([[1 << 41, 4096, 0, 0], later], [0])]
    here = {"host": HOST, "socket": SOCKET}
    elsewhere = {"host": "elsewhere", "socket": SOCKET}, {"host": HOST, "socket": b"/tmp/nobody"}
    for segments, files in good:
        for metadata in (here, here, *elsewhere):  # twice, so that half of them can be read
            yield _input(metadata, [segments, []], files)
        yield _input(here, [segments, [[1 << 45, 4096, "cuda:0", b"handle"]]], files)
    for kind in range(1, len(KINDS)):
        yield _input(here, [[[1 << 41, 64, 0, 0]], []], [kind])
    yield _input(here, [[shared], []], [0, 0])
    yield _input(here, [[shared, small], []], [0])


def _input(metadata: object, offer: object, files: list[int]) -> bytes:
    return msgspec.msgpack.encode(Input(build.packed(metadata), build.packed(offer), files))
