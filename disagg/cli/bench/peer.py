"""A peer process whose memory the engines read, and the readers in this process."""

from __future__ import annotations

import multiprocessing
import os
import select
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from disagg.cli.bench.work import CannotRun, noise
from disagg.engines.base import Engine, EngineUnavailable, TransferError, create_engine
from disagg.plan.bind import CopyBatch
from kvpool.device import Device, DeviceUnavailable, get_device
from kvpool.layout import Slab

READER_TIMEOUT = 60.0
"""Seconds to wait for the peer process or a read."""
WAIT_SECONDS = 0.1
REFUSED = (EngineUnavailable, TransferError, DeviceUnavailable, MemoryError, NotImplementedError)


class PeerReader:
    """An engine connected to the same engine in the peer process.

    `memory` is this side's; the peer's, at pointer `base`, holds `pattern`.
    """

    def __init__(self, engine: Engine, peer: Any, base: int, memory: torch.Tensor) -> None:
        self.engine, self.peer, self.base, self.memory = engine, peer, base, memory
        self._told, self._tells = os.pipe()
        os.set_blocking(self._told, False)
        os.set_blocking(self._tells, False)
        engine.notify(self._tells)

    def close(self) -> None:
        """Closes the engine."""
        self.engine.close()
        os.close(self._told)
        os.close(self._tells)

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
        """Until the engine tells that a transfer may have ended."""
        if select.select([self._told], [], [], WAIT_SECONDS)[0]:
            os.read(self._told, 4096)


class PeerReaders:
    """Readers by engine, one at a time. The peer process starts with the first reader; each side
    has `nbytes` of the device's memory.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device, self._nbytes = device, nbytes
        self._other: PeerProcess | None = None
        self._last: tuple[str, PeerReader | str] | None = None

    def reader(self, name: str) -> PeerReader:
        """The reader of an engine; closes the previous one. Raises CannotRun if the engine does
        not work here or with this device's memory.
        """
        if self._last is None or self._last[0] != name:
            self._give_up()
            self._last = name, self._connect(name)
        found = self._last[1]
        if isinstance(found, str):
            raise CannotRun(found)
        return found

    def close(self) -> None:
        """Closes the engine, and ends the process."""
        self._give_up()
        if self._other is not None:
            self._other.close()
            self._other = None

    def _connect(self, name: str) -> PeerReader | str:
        try:
            engine = create_engine(name)
        except EngineUnavailable as error:
            return str(error)
        try:
            if self._other is None or not self._other.process.is_alive():
                self._other = PeerProcess(self._device, self._nbytes)
            memory = self._other.memory
            engine.register([_slab(memory)])
            peer = engine.connect(self._other.metadata(name))
        except REFUSED as error:
            engine.close()
            return str(error)
        return PeerReader(engine, peer, self._other.base, memory)

    def _give_up(self) -> None:
        if self._last is not None and isinstance(self._last[1], PeerReader):
            self._last[1].close()
        self._last = None


class OtherProcess:
    """A process that runs `serve(pipe, *arguments)`, which answers calls."""

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, there = spawn.Pipe()
        self.process = spawn.Process(target=serve, args=(there, *arguments), daemon=True)
        self.process.start()
        there.close()

    def call(self, name: str, *arguments: Any) -> Any:
        """The answer to a call. Raises TransferError."""
        self.post(name, *arguments)
        return self.answer()

    def post(self, name: str, *arguments: Any) -> None:
        """Makes a call, of which `answer` is to be taken."""
        self._pipe.send((name, arguments))

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def answer(self) -> Any:
        """The process's next answer. Raises TransferError with its error, if it sends one."""
        try:
            if not self._pipe.poll(READER_TIMEOUT):
                self.close()
                raise TransferError(f"the other process did not answer in {READER_TIMEOUT:.0f} s.")
            said = self._pipe.recv()
        except EOFError:
            self.process.join()
            raise TransferError(
                f"the other process ended with status {self.process.exitcode}."
            ) from None
        if isinstance(said, str):
            raise TransferError(f"in the other process: {said}")
        return said


class PeerProcess(OtherProcess):
    """The peer process, its memory at `base`, and as much `memory` of this process."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self.memory = device.allocate(nbytes)
        super().__init__(serve, device.name, nbytes)
        self.base: int = self.answer()

    def metadata(self, engine: str) -> bytes:
        """Metadata of the peer's engine of that name, which replaces its previous one."""
        said: bytes = self.call("metadata", engine)
        return said


def pattern(nbytes: int) -> torch.Tensor:
    """The contents of the peer's memory."""
    return noise(nbytes, seed=7)


def serve(pipe: Connection, device: str, nbytes: int) -> None:
    """The peer process: serves the engine requested last until the pipe is closed; errors are sent
    as str.
    """
    torch.set_num_threads(1)
    engine: Engine | None = None
    try:
        there = get_device(device)
        memory = there.allocate(nbytes)
        memory.copy_(pattern(nbytes))
        there.record().synchronize()
        pipe.send(memory.data_ptr())
        while True:
            if engine is not None and not pipe.poll(engine.progress_seconds):
                engine.progress()
                continue
            _, (name,) = pipe.recv()
            if engine is not None:
                engine.close()
                engine = None
            try:
                engine = create_engine(name)
                engine.register([_slab(memory)])
                pipe.send(engine.metadata())
            except REFUSED as error:
                pipe.send(str(error))
    except (EOFError, KeyboardInterrupt):
        pass
    except REFUSED as error:
        pipe.send(str(error))


def _slab(memory: torch.Tensor) -> Slab:
    return Slab(memory.data_ptr(), memory.numel(), str(memory.device))
