"""An engine that does what it is told: reads that land part by part, late, never, after they have
failed, and peers that cannot be given up.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from disagg.engines.base import Engine, TransferError
from disagg.plan.bind import CopyBatch
from disagg.runtime.staging import NUM_BUFFERS, ReadPart, StagingBuffers, coalesce, cut
from kvpool.device.host_copy import copy_runs
from kvpool.layout import Slab

ALL = 99
"""So many runs are all."""


@dataclass(eq=False)
class Peer:
    """Whom an engine reads from: what served reads of `owner` when it was connected."""

    owner: SlowEngine | None = None
    serving: int = 0
    unfenceable: bool = False
    fenced: bool = False


@dataclass(eq=False)
class Transfer:
    """Runs `(src, dst, nbytes)` that have not landed, and whose their pages or buffers were when
    posted.

    `fate`: "fail" (it may land nevertheless), "stick", or none.
    """

    peer: Peer
    runs: list[tuple[int, int, int]]
    owners: dict[int, object]
    fate: str = ""


class WatchedBuffers(StagingBuffers):
    """Buffers that belong, while they are taken, to who took them: by numbers below 0."""

    def __init__(self, node, nbytes: int) -> None:
        memory = np.zeros(NUM_BUFFERS * nbytes, dtype=np.uint8)
        slab = Slab(memory.ctypes.data, memory.nbytes, "cpu")
        super().__init__([slab], self._copy_out, memory)
        self.begin, self.end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
        self.node = node
        self.owners: dict[int, object] = {}

    def number(self, address: int) -> int:
        return -1 - (address - self.begin) // self.buffer_bytes

    def parts(self, batch, source, engine):
        if not self._usable:
            return super().parts(batch, source, engine)
        offsets = np.cumsum(batch.nbytes) - batch.nbytes
        apart = ReadPart(
            CopyBatch(batch.src, offsets, batch.nbytes), CopyBatch(offsets, batch.dst, batch.nbytes)
        )
        coalesced = coalesce(batch, source, engine.run_overhead_bytes) or apart
        return cut(coalesced, self.buffer_bytes, engine.max_runs)

    def take_buffer(self):
        buffer = super().take_buffer()
        if buffer is not None:
            self.owners[self.number(buffer)] = object()
        return buffer

    def give(self, *buffers):
        for buffer in buffers:
            del self.owners[self.number(buffer)]
        super().give(*buffers)

    def _copy_out(self, src, dst, nbytes):
        self.node.engine.check_scattered(dst, nbytes)
        copy_runs(src, dst, nbytes)


class SlowEngine(Engine):
    """Reads for a node of the protocol model. What must not be is noted in `broken`.

    Nothing lands before `land` or `go_on`, unless `eager`; no peer is given up while `patient`.
    `trouble` names calls that raise, once each; what `read` has posted by then may still land.
    `fate` is that of the next transfer, `meanwhile` is called in the midst of the next call. What
    serves reads ends by `renew`.
    """

    name = "slow"
    max_bytes = 24
    max_runs = 3
    run_overhead_bytes = 8

    def __init__(self, node, broken: list[str]) -> None:
        self.node, self.broken = node, broken
        self.transfers: list[Transfer] = []
        self.trouble: dict[str, Exception] = {}
        self.fate = ""
        self.meanwhile: Callable[[], None] | None = None
        self.eager = self.patient = False
        self.serving, self.renewal = 0, None
        self.stage: WatchedBuffers | None = None

    @classmethod
    def availability(cls) -> None:
        return None

    def metadata(self) -> bytes:
        return f"{self.node.life} {self.serving}".encode()

    def renew(self) -> None:
        """What served reads is gone, and another does."""
        self.serving, self.renewal = self.serving + 1, "what served reads is gone."

    def take_renewal(self) -> str | None:
        renewal, self.renewal = self.renewal, None
        return renewal

    def connect(self, metadata: bytes) -> Peer:
        self._enter("connect")
        life, serving = map(int, metadata.split())
        node = self.node.world.lives[life]
        peer = Peer(node.engine, serving)
        if not node.alive or self._is_gone(peer):
            raise TransferError("the peer's process is gone.")
        return peer

    def _is_gone(self, peer: Peer) -> bool:
        return peer.owner is not None and peer.serving != peer.owner.serving

    def read(self, peer: Peer, batch) -> Transfer:
        runs = list(zip(batch.src.tolist(), batch.dst.tolist(), batch.nbytes.tolist()))
        owners = {page: self._owner(page) for run in runs for page in self._pages(run)}
        self._must(None not in owners.values(), "a read is posted into pages that are nobody's")
        self._must(not peer.fenced, "a peer that was given up is read from")
        transfer = Transfer(peer, runs, owners, self.fate)
        self.fate = ""
        self.transfers.append(transfer)
        if self.eager:
            self.land(transfer, ALL)
        self._enter("read")
        return transfer

    def poll(self, transfer: Transfer) -> bool:
        self._must(not transfer.peer.fenced, "a transfer of a peer that was given up is polled")
        try:
            self._enter("poll")
        except Exception:
            transfer.fate = "fail"
            raise
        if transfer.fate == "fail" or self._is_gone(transfer.peer):
            raise TransferError("the wire broke.")
        return not transfer.runs

    def fence(self, peer: Peer, timeout: float | None = None) -> bool:
        self._must(timeout == 0, "the fence of one peer holds all others up")
        self._must(not (peer.fenced or peer.unfenceable), "a peer is given up twice")
        try:
            self._enter("fence")
        except Exception:
            peer.unfenceable = True
            raise
        if self.patient:
            return False
        peer.fenced = True
        self.transfers = [transfer for transfer in self.transfers if transfer.peer is not peer]
        return True

    def close(self, *_) -> None:
        pass

    register = close

    def land(self, transfer: Transfer, runs: int, at: int = 0) -> None:
        """Some runs arrive, the first of them being any."""
        for _ in range(min(runs, len(transfer.runs))):
            src, dst, nbytes = run = transfer.runs.pop(at % len(transfer.runs))
            for page in self._pages(run):
                owner = self._owner(page)
                self._must(owner is transfer.owners[page], f"bytes land in page {page} of others")
            ctypes.memmove(dst, src, nbytes)

    def go_on(self, runs: int) -> None:
        """Some runs of the latest transfer arrive; or all that can."""
        able = [t for t in self.transfers if t.runs and t.fate != "stick"]
        for transfer in able if runs == ALL else able[-1:]:
            self.land(transfer, runs)
        self.transfers = [transfer for transfer in self.transfers if transfer.runs]

    def check_scattered(self, dst, nbytes) -> None:
        """Bytes come out of a buffer."""
        for run in zip(dst.tolist(), dst.tolist(), nbytes.tolist()):
            owned = all(self._owner(page) for page in self._pages(run))
            self._must(owned, "bytes are scattered into pages that are nobody's")

    def _owner(self, page: int) -> object:
        owners = self.node.owners if page >= 0 or self.stage is None else self.stage.owners
        return owners.get(page)

    def _pages(self, run: tuple[int, int, int]) -> range:
        """Pages of a run, or the number of its buffer, below 0."""
        _, dst, nbytes = run
        if self.stage is not None and self.stage.begin <= dst < self.stage.end:
            first, last = (self.stage.number(address) for address in (dst, dst + nbytes - 1))
            self._must(first == last, "a run leaves its buffer")
            return range(first, first + 1)
        for buffer in self.node.layout.buffers:
            if buffer.base <= dst and dst + nbytes <= buffer.end:
                last = (dst + nbytes - 1 - buffer.base) // buffer.item_stride
                return range((dst - buffer.base) // buffer.item_stride, last + 1)
        self._must(False, "a run leaves its pool")
        return range(0)

    def _enter(self, call: str) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        if call in self.trouble:
            raise self.trouble.pop(call)

    def _must(self, holds: bool, otherwise: str) -> None:
        """An assertion here would be taken for an engine's error."""
        if not holds:
            self.broken.append(otherwise)
