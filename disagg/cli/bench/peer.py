"""A peer process whose memory the engines read, and the readers in this process."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from disagg.cli.bench.work import CannotRun, noise
from disagg.engines.base import Engine, EngineUnavailable, TransferError, create_engine
from disagg.plan.bind import CopyBatch
from kvpool.device import Device, DeviceUnavailable, get_device
from kvpool.layout import Slab
from kvpool.process import OtherProcess, ProcessFailed, Restarted

READER_TIMEOUT = 60.0
"""Seconds to wait for a read or a hand-off."""
WAIT_SECONDS = 0.1
REFUSED = (
    EngineUnavailable,
    TransferError,
    ProcessFailed,
    DeviceUnavailable,
    MemoryError,
    NotImplementedError,
)
"""Why an engine or a device cannot run a case."""


class Closable(Protocol):
    """What is closed after its use."""

    def close(self) -> None:
        """Closes it."""


_T = TypeVar("_T", bound=Closable)


class OneOpen(Generic[_T]):
    """What `open(other, *key)` returned last, which uses another process.

    It is closed before another is opened. The process starts with the first.
    """

    def __init__(self, processes: Restarted, open: Callable[..., _T]) -> None:
        self._processes, self._open = processes, open
        self._key: tuple[str, ...] = ()
        self._opened: _T | CannotRun | None = None

    def __call__(self, *key: str) -> _T:
        """What is open for a key, such as an engine. Raises CannotRun if it cannot be opened."""
        if self._opened is None or self._key != key or not self._processes.alive:
            self._close_opened()
            self._key = key
            try:
                self._opened = self._open(self._processes(), *key)
            except REFUSED as error:
                self._opened = CannotRun(str(error))
        if isinstance(self._opened, CannotRun):
            raise self._opened
        return self._opened

    def close(self) -> None:
        """Closes what is open, and ends the process."""
        self._close_opened()
        self._processes.close()

    def _close_opened(self) -> None:
        if self._opened is not None and not isinstance(self._opened, CannotRun):
            self._opened.close()
        self._opened = None


class PeerReader:
    """An engine connected to the same engine in the peer process.

    `memory` is this side's; the peer's, at pointer `base`, holds `pattern`.
    """

    def __init__(self, memory: torch.Tensor, other: OtherProcess, name: str) -> None:
        self.engine, self.memory = create_engine(name), memory
        try:
            self.base: int = other.call("base")
            self.engine.register([slab_of(memory)])
            self.peer: Any = self.engine.connect(other.call("metadata", name))
        except BaseException:
            self.engine.close()
            raise
        self._wake, self._notify = os.pipe()
        for end in (self._wake, self._notify):
            os.set_blocking(end, False)
        self.engine.notify(self._notify)

    def close(self) -> None:
        """Closes the engine."""
        self.engine.close()
        os.close(self._wake)
        os.close(self._notify)

    def read(self, batch: CopyBatch) -> None:
        """Reads all of a batch, in parts as an endpoint does. Raises TransferError."""
        for part in batch.split(self.engine.max_bytes, self.engine.max_runs):
            transfer = self.engine.read(self.peer, part)
            ends = time.monotonic() + READER_TIMEOUT
            while not self.engine.poll(transfer):
                if time.monotonic() > ends:
                    raise TransferError(f"no {part.total} bytes in {READER_TIMEOUT:.0f} s.")
                if self.engine.background:  # the processor is for the threads that move the bytes
                    self._wait()

    def _wait(self) -> None:
        """Waits until the engine reports that a transfer may have ended."""
        if select.select([self._wake], [], [], WAIT_SECONDS)[0]:
            os.read(self._wake, 4096)


def peer_readers(device: Device, nbytes: int) -> OneOpen[PeerReader]:
    """Readers by engine. Each side has `nbytes` of the device's memory."""
    memory = device.allocate(nbytes)
    processes = Restarted(PeerMemory, device.name, nbytes)
    return OneOpen(processes, partial(PeerReader, memory))


class BareServer:
    """Called by the other process: it serves memory by one bare engine at a time."""

    bare: Engine | None = None

    @property
    def progress_seconds(self) -> float | None:
        """How often the engine is to make progress."""
        return None if self.bare is None else self.bare.progress_seconds

    def progress(self) -> None:
        """Lets reads proceed."""
        if self.bare is not None:
            self.bare.progress()

    def stop(self) -> None:
        """Closes the engine, before its memory goes."""
        if self.bare is not None:
            self.bare.close()
            self.bare = None

    def serve(self, engine: str, slabs: Sequence[Slab]) -> bytes:
        """Metadata of an engine of that name over this memory, which replaces the one before."""
        self.stop()
        self.bare = create_engine(engine)
        self.bare.register(slabs)
        return self.bare.metadata()


class PeerMemory(BareServer):
    """Memory that holds `pattern`."""

    def __init__(self, device: str, nbytes: int) -> None:
        torch.set_num_threads(1)
        peer_device = get_device(device)
        self._memory = peer_device.allocate(nbytes)
        self._memory.copy_(pattern(nbytes))
        peer_device.record().synchronize()

    def base(self) -> int:
        """The memory's pointer."""
        return self._memory.data_ptr()

    def metadata(self, engine: str) -> bytes:
        """Metadata of an engine of that name."""
        return self.serve(engine, [slab_of(self._memory)])


def pattern(nbytes: int) -> torch.Tensor:
    """The contents of the peer's memory."""
    return noise(nbytes, seed=7)


def slab_of(memory: torch.Tensor) -> Slab:
    """A tensor of bytes as memory to register."""
    return Slab(memory.data_ptr(), memory.numel(), str(memory.device))
