"""Processes whose memory engines read; they import neither torch nor pools."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np

from disagg.engines.base import create_engine
from kvpool.layout import Slab
from tests.processes import stands_still


def pattern(size: int) -> np.ndarray:
    """Memory in which no byte is 0 or 0xEE."""
    steps = np.arange(size, dtype=np.uint32) * np.uint32(2654435761) >> np.uint32(13)
    return (steps % np.uint32(0xED) + np.uint32(1)).astype(np.uint8)


def serve(pipe, name: str, size: int, options: dict) -> None:
    """Registers a pattern and serves; orders switch to single steps, back, or end it."""
    memory, engine = pattern(size), create_engine(name, **options)
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


def until(condition, seconds=30):
    """Waits; the limit is for overloaded machines, not for what is tested."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Owner:
    """A process with `size` bytes of memory, registered with an engine; killed on exit."""

    def __init__(self, engine: str, size: int, **options) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, there = spawn.Pipe()
        given = there, engine, size, options
        self.process = spawn.Process(target=serve, args=given, daemon=True)
        self.process.start()
        there.close()
        self.metadata, self.base = self._answer()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.join(20)

    def _answer(self):
        assert self.pipe.poll(60), "the owner does not answer"
        return self.pipe.recv()

    def step(self) -> None:
        """Makes progress once."""
        self.pipe.send("step")
        self._answer()

    def stop(self) -> None:
        """Stops every thread by a signal, and returns once all have stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        until(lambda: stands_still(self.process.pid))

    def go_on(self) -> None:
        """Continues the process, which serves again."""
        self.pipe.send("serve")
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> int | None:
        """Ends the process; its exit status."""
        self.pipe.send(None)
        self.process.join(20)
        return self.process.exitcode
