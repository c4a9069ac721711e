"""Processes that NIXL reads, and one that reads; they import neither torch nor pools."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from disagg.engines.base import create_engine
from disagg.plan.bind import CopyBatch
from kvpool.layout import Slab


def pattern(size: int) -> np.ndarray:
    """Memory with a value in every byte, none of them 0xEE."""
    steps = np.arange(size, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(13)
    return (steps % np.uint32(0xEE)).astype(np.uint8)


def owner(pipe, size: int, options: dict) -> None:
    """Registers a pattern and serves; orders switch to single steps, back, or end it."""
    memory, engine = pattern(size), create_engine("nixl", **options)
    engine.register([Slab(memory.ctypes.data, size)])
    pipe.send((engine.metadata(), memory.ctypes.data))
    order: str | None = "serve"
    while order:
        if order == "serve":
            while not pipe.poll(0.001):
                engine.progress()
        elif order == "step":
            engine.progress()
            pipe.send(None)
        order = pipe.recv()
    engine.close()


class Owner:
    """A process with registered memory."""

    def __init__(self, size: int, **options) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, there = spawn.Pipe()
        self.process = spawn.Process(target=owner, args=(there, size, options), daemon=True)
        self.process.start()
        there.close()
        assert self.pipe.poll(60), "the owner does not answer"
        self.metadata, self.base = self.pipe.recv()

    def step(self) -> None:
        """Makes progress once."""
        self.pipe.send("step")
        assert self.pipe.poll(60), "the owner does not answer"
        self.pipe.recv()

    def stop(self) -> None:
        """Stops the process by a signal."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Continues the process, which serves again."""
        self.pipe.send("serve")
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> int | None:
        """Ends the process; its exit status."""
        self.pipe.send(None)
        self.process.join(20)
        return self.process.exitcode


@contextmanager
def owners(count: int, size: int, **options):
    """Owners, killed at the end."""
    found: list[Owner] = []
    try:
        for _ in range(count):
            found.append(Owner(size, **options))
        yield found
    finally:
        for each in found:
            each.process.kill()
            each.process.join(20)


def usage() -> tuple[int, int, int]:
    """Open files, threads, and resident pages of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident


def come_and_go(pipe, metadata: bytes, base: int, size: int, options: dict, cycles: int) -> None:
    """Creates, uses and closes engines; sends its usage after each cycle."""
    memory, truth = np.zeros(size, dtype=np.uint8), pattern(size)
    for _ in range(cycles):
        memory[:] = 0
        engine = create_engine("nixl", **options)
        engine.register([Slab(memory.ctypes.data, size)])
        peer = engine.connect(metadata)
        starts = np.arange(0, size, 4096)
        lengths = np.full(starts.size, 4096)
        transfer = engine.read(peer, CopyBatch(base + starts, memory.ctypes.data + starts, lengths))
        while not engine.poll(transfer):
            pass
        assert engine.fence(peer, 0)
        engine.close()
        assert np.array_equal(memory, truth)
        pipe.send(usage())
