"""A peer of engine `mori`, and how a thread of its own reads from it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from disagg.engines.base import TransferError
from disagg.engines.mori.package import TOKEN_BYTES, MoriIO, MoriRuns, mori_io
from disagg.engines.ranges import Ranges
from disagg.plan.bind import CopyBatch

MAX_REGIONS = 1 << 16
WAIT_MILLISECONDS = 100
"""Interval at which a thread that waits for a read sees that its `IOEngine` has been destroyed."""


class MoriMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer needs to read from this side: MoRI's packed `EngineDesc` and `MemoryDesc`s. The
    registration `token_memory` begins with `token`.
    """

    engine: bytes
    token: bytes
    token_memory: bytes
    memory: Annotated[list[bytes], msgspec.Meta(max_length=MAX_REGIONS)]


@dataclass(eq=False)
class MoriPeer:
    """A peer and the threads that read it. `memory` has its `MemoryDesc`s by base. `open` are
    transfers of which a byte may still land, `proven` the registrations of both sides between which
    the peer was read and no other process.
    """

    slot: int
    engine: Any
    memory: dict[int, Any]
    ranges: Ranges
    token: bytes
    token_base: int
    threads: ThreadPoolExecutor
    open: list[MoriTransfer] = field(default_factory=list)
    proven: set[tuple[str, int, int]] = field(default_factory=set)
    given_up: float | None = None


@dataclass(eq=False)
class MoriTransfer:
    """A requested read, and MoRI's statuses of what was posted for it."""

    peer: MoriPeer
    io: MoriIO
    statuses: list[Any] = field(default_factory=list)
    landing: bool = True
    abandoned: bool = False
    ended: bool = False
    problem: str | None = None


def peer_of(metadata: bytes, slot: int, threads: int) -> MoriPeer:
    """A peer from its metadata (untrusted). Raises TransferError."""
    api = mori_io()
    try:
        owner = msgspec.msgpack.decode(metadata, type=MoriMetadata)
        engine = api.EngineDesc.unpack(owner.engine)
        token, *memory = (api.MemoryDesc.unpack(m) for m in (owner.token_memory, *owner.memory))
        ranges = Ranges.of((each.data, each.size) for each in memory)
        Ranges.of((each.data, each.size) for each in (token, *memory))
        if any(each.engine_key != engine.key for each in (token, *memory)):
            raise ValueError("memory of another engine.")
        if len(owner.token) != TOKEN_BYTES or token.size < TOKEN_BYTES:
            raise ValueError("a token of another size.")
    except Exception as error:  # msgspec's, and those of C++
        reason = str(error)
    else:
        pool = ThreadPoolExecutor(threads, thread_name_prefix=f"mori {engine.host}:{engine.port}")
        by_base = {each.data: each for each in (token, *memory)}
        return MoriPeer(slot, engine, by_base, ranges, owner.token, token.data, pool)
    raise TransferError(f"malformed metadata: {reason}")


def calls_of(batch: CopyBatch, own: Ranges, theirs: Ranges) -> Iterator[MoriRuns]:
    """The runs of a batch by pair of registrations. Each run lies in one pair."""
    here = np.searchsorted(own.starts, batch.dst, side="right") - 1
    there = np.searchsorted(theirs.starts, batch.src, side="right") - 1
    pair = here * theirs.starts.size + there
    for each in np.unique(pair):
        runs = pair == each
        dst_base = int(own.starts[each // theirs.starts.size])
        src_base = int(theirs.starts[each % theirs.starts.size])
        dst, src = batch.dst[runs] - dst_base, batch.src[runs] - src_base
        yield MoriRuns(dst_base, src_base, dst.tolist(), src.tolist(), batch.nbytes[runs].tolist())


def move(transfer: MoriTransfer, calls: list[MoriRuns]) -> None:
    """Posts a transfer's calls and waits until nothing of them can land, or not all have succeeded.

    A call between registrations that MoRI has not connected before is proven by a read of the token
    behind it: who answers with it then has answered at this address all along.
    """
    peer, io, problem = transfer.peer, transfer.io, None
    unproven = {(io.key, each.dst_base, each.src_base) for each in calls} - peer.proven
    proof = [io.read_token(peer.slot, peer.token_base)] if unproven else []
    try:
        io.start()
        for each in (*calls, *proof):
            if peer.given_up is not None:
                raise TransferError("the peer was given up. Connect again.")
            status = io.read(peer.engine, peer.memory, each)
            transfer.statuses.append(status)
            if status.Failed():
                break
    except TransferError as error:
        problem = str(error)
    for status in transfer.statuses:
        while status.InProgress() and not transfer.abandoned:
            status.WaitFor(WAIT_MILLISECONDS)
    where = f"{peer.engine.host}:{peer.engine.port}"
    for status in transfer.statuses:
        if not status.Succeeded():
            reason = status.Message() if status.Failed() else "the peer was given up."
            raise TransferError(f"MoRI cannot read from {where}: {reason}")
    transfer.landing = False
    io.spend(transfer.statuses)
    if problem is not None:
        raise TransferError(f"{where}: {problem}")
    if unproven and io.token_of(peer.slot) != peer.token:
        raise TransferError(
            f"another process answers at {where}. Connect with the peer's new metadata."
        )
    peer.proven |= unproven
