"""A process that gives up a read, and then ends the agent that made it in one of several ways. It
sends None when each step is done, and waits for an answer before the next.
"""

from __future__ import annotations

import gc
import sys
from multiprocessing.connection import Connection

import numpy as np

from disagg.engines.base import Engine, create_engine
from tests.disagg.engines.owners import batch_of, read, slab_of

PART = 1 << 20
OPEN: list[Engine] = []
"""What is there until the interpreter ends."""


def give_up(
    pipe: Connection, end: str, path: str, owner: tuple[bytes, int], transports: str
) -> None:
    """`end`: "close" the engine, "drop" it, or leave it to the "exit" of the process, or so before
    the read is given up ("reading"). The memory is the file at `path`.
    """
    memory, (metadata, base) = np.memmap(path, dtype=np.uint8, mode="r+"), owner
    start = memory.ctypes.data
    engine = create_engine("nixl", patience=0.0, transports=transports)
    engine.register([slab_of(memory)])
    peer = engine.connect(metadata)
    read(engine, peer, batch_of((base, start, 8)))
    _done(pipe)
    parts = [(base + at, start + at, PART) for at in range(0, memory.size, PART)]
    engine.read(peer, batch_of(*parts))
    if end != "reading":
        assert engine.fence(peer)
    _done(pipe)
    if end == "close":
        engine.close()
    if end == "drop":
        del engine, peer
        gc.collect()
    else:
        OPEN.append(engine)
    _done(pipe)


def _done(pipe: Connection) -> None:
    pipe.send(None)
    pipe.recv()


if __name__ == "__main__":
    line = Connection(int(sys.argv[1]))
    give_up(line, *line.recv())
