"""Memory, batches and reads for tests of engines, and processes whose memory engines read."""

from __future__ import annotations

import mmap
import os
import signal
import time
from contextlib import contextmanager

import numpy as np

from disagg.engines.base import create_engine
from disagg.plan.bind import CopyBatch
from kvpool.device.cpu import CPUDevice
from kvpool.layout import Slab
from tests.processes import Child, stands_still, until


def pattern(size: int) -> np.ndarray:
    """Memory in which no byte is 0 or 0xEE."""
    steps = np.arange(size, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(13)
    return (steps % np.uint32(0xED) + np.uint32(1)).astype(np.uint8)


def memory_of(kind: str, size: int) -> np.ndarray:
    """Zeroed memory: private, shared as the CPU device shares it, or in a file that may shrink."""
    if kind == "shared":
        return CPUDevice().allocate(size).numpy()
    if kind == "private":
        return np.zeros(size, dtype=np.uint8)
    handle = os.memfd_create("unsealed")
    os.ftruncate(handle, size)
    return np.frombuffer(mmap.mmap(handle, size), dtype=np.uint8)


def slab_of(memory: np.ndarray, name: str = "cpu") -> Slab:
    return Slab(memory.ctypes.data, memory.nbytes, name)


def batch_of(*runs) -> CopyBatch:
    """Of (source pointer, destination pointer, bytes)."""
    return CopyBatch(*np.array(runs, dtype=np.int64).reshape(-1, 3).T)


def finish(engine, *transfers, owner=None) -> None:
    """Polls until all are complete; an owner in this process must make progress too."""
    deadline = time.monotonic() + 60
    while not all(engine.poll(transfer) for transfer in transfers):
        assert time.monotonic() < deadline, "the reads do not end"
        if owner is not None:
            owner.progress()


def read(engine, peer, batch) -> None:
    finish(engine, engine.read(peer, batch))


@contextmanager
def engine_of(name: str, *memories: np.ndarray, **options):
    engine = create_engine(name, **options)
    try:
        if memories:
            engine.register([slab_of(memory) for memory in memories])
        yield engine
    finally:
        engine.close()


def serve(pipe, name: str, size: int, kind: str, options: dict) -> None:
    """Registers a pattern and serves; orders switch to single steps, back, or end it."""
    memory = memory_of(kind, size)
    memory[:] = pattern(size)
    with engine_of(name, memory, **options) as engine:
        pipe.send((engine.metadata(), memory.ctypes.data))
        order: tuple[str] | None = ("serve",)
        while order:
            if order == ("serve",):
                while not pipe.poll(0.001):
                    engine.progress()
            else:
                engine.progress()
                pipe.send(None)
            order = pipe.recv()


class Owner(Child):
    """A process with `size` bytes of a pattern, registered with an engine."""

    def __init__(self, engine: str, size: int, kind: str = "private", **options) -> None:
        super().__init__(serve, engine, size, kind, options)
        self.metadata, self.base = self.answer()

    def step(self) -> None:
        self.ask("step")

    def stop(self) -> None:
        """Stops every thread by a signal, and returns once all have stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        until(lambda: stands_still(self.process.pid))

    def go_on(self) -> None:
        """Continues the process, which serves again."""
        self.pipe.send(("serve",))
        os.kill(self.process.pid, signal.SIGCONT)
