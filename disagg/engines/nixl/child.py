"""A process of its own that peers read host memory from: UCX ends it where a reader over TCP
disappears at a bad moment, and not the process whose pool that memory is (docs/engines.md).

`Child` is what the parent has of it. It maps the parent's shared files where they lie there, so
that what peers know of the layout holds, and may only read them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from disagg.engines.base import TransferError
from disagg.engines.nixl.agent import Agent, memory_of
from disagg.engines.shared_files import PRIVATE, Files
from kvpool.layout import Slab
from kvpool.layout.text import one_line
from kvpool.layout.types import HOST, MAX_REASON

START_SECONDS = 20.0
"""How long a child may take to start, on a host that has no time."""
STARTS = 5
"""Children that are tried: in one, the parent's addresses may be taken."""
END_SECONDS = 5.0
"""How long an ended child may take to be gone: the kernel may write its memory to a file."""
PACE_SECONDS = 0.002
"""How often the parent asks for progress while a peer may be reading."""
AWAKE_SECONDS, AWAKE_PAUSE_SECONDS = 0.004, 0.0002
"""After each of those, progress is made for so long, with pauses."""
IDLE_PAUSE_SECONDS = 0.02
MAP_FIXED_NOREPLACE = 0x100000
READY, FAILED = b"+", b"-"


class Serve(msgspec.Struct, frozen=True):
    """What a child is told: its agent's backend, the registered slabs, the files that they lie in
    as (pointer, descriptor), and where it answers.
    """

    backend: str
    options: dict[str, str]
    slabs: list[Slab]
    files: list[tuple[int, int]]
    answer: int


class Child:
    """A child that serves `slabs`. Raises TransferError if none can be started, or if a part of the
    slabs lies in no shared file.
    """

    def __init__(self, backend: str, options: Mapping[str, str], slabs: Sequence[Slab]) -> None:
        self._backend, self._options = backend, dict(options)
        self._slabs, self._files = list(slabs), Files()
        memory = next((slab.memory for slab in slabs if not slab.on_host), None)
        if memory is not None:
            raise TransferError(f"memory on {memory}: a child serves the host's. Leave child out.")
        segments = [segment for slab in slabs for segment in self._files.find(slab)]
        private = next((segment for segment in segments if segment.file == PRIVATE), None)
        if private is not None:
            self._files.close()
            raise TransferError(
                f"{private.nbytes} bytes at {private.base:#x} are private memory of this process, "
                "which no other can serve. Allocate the pool on kvpool's CPU device."
            )
        self._places = sorted({(s.base - s.offset, self._files.handles[s.file]) for s in segments})
        self.metadata = b""
        try:
            self.start()
        except BaseException:
            self._files.close()
            raise

    def start(self) -> None:
        """Starts it, again if it has ended: its `metadata` is another then."""
        for _ in range(STARTS):
            problem = self._start()
            if problem is None:
                return
        raise TransferError(f"no process can be started that serves reads: {problem}")

    def _start(self) -> str | None:
        """Why it has not started."""
        answer = os.memfd_create("answer", os.MFD_CLOEXEC)
        order = os.memfd_create("order", os.MFD_CLOEXEC)
        self._link, childs_end = socket.socketpair()
        try:
            serve = Serve(
                backend=self._backend,
                options=self._options,
                slabs=self._slabs,
                files=self._places,
                answer=answer,
            )
            os.write(order, msgspec.msgpack.encode(serve))
            link = childs_end.fileno()
            # it imports what this process would
            program = (
                f"import sys; sys.path[:] = {sys.path}\n"
                f"from {__name__} import main\nmain({order}, {link})"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=(answer, order, link, *self._files.handles),
            )
            # else its end would not be seen here
            childs_end.close()
            self._link.settimeout(START_SECONDS)
            state = b""
            with suppress(OSError):  # it is silent, or has ended
                state = self._link.recv(1)
            self._link.setblocking(False)
            answered = os.pread(answer, os.fstat(answer).st_size, 0)
            if state == READY:
                self.metadata = answered
                return None
            how = self.end()
            return answered.decode(errors="replace") if state == FAILED else f"it {how}."
        except OSError as error:
            self._link.close()
            return str(error)
        finally:
            childs_end.close()
            os.close(answer)
            os.close(order)

    def progress(self) -> str | None:
        """Lets peers' reads proceed; how the child has ended, if it has."""
        try:
            self._link.send(b"\0", socket.MSG_NOSIGNAL)
        except BlockingIOError:  # it has enough of them
            return None
        except OSError:
            return self.end()
        return None

    def end(self) -> str:
        """Ends the process, if it has not ended; how it did."""
        self._link.close()
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        if status >= 0:
            return f"ended with status {status}"
        return f"was ended by {signal.Signals(-status).name}"

    def close(self) -> None:
        """Ends the process: peers' reads fail."""
        self.end()
        self._files.close()

    def abandon(self) -> None:
        """Closes the descriptors of a forked process, so that the child sees when its parent
        ends.
        """
        self._link.close()
        self._files.close()


def main(order: int, link: int) -> None:
    """What the child runs: `order` is a file with what to serve, `link` a socket to its parent."""
    # of a terminal: the parent decides when it ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve = msgspec.msgpack.decode(os.pread(order, os.fstat(order).st_size, 0), type=Serve)
    os.close(order)
    try:
        agent = _agent(serve)
        answer, state = agent.metadata(), READY
    except Exception as error:
        answer, state = one_line(str(error), MAX_REASON).encode(), FAILED
    with suppress(OSError):  # the parent has ended
        os.write(serve.answer, answer)
        os.write(link, state)
        os.close(serve.answer)
        if state == READY:
            _progress(agent, link)
    # destroying the agent would let UCX go on for a while
    os._exit(state == FAILED)


def _agent(serve: Serve) -> Agent:
    """An agent with the parent's memory."""
    for base, handle in serve.files:
        _map_at(base, handle)
        os.close(handle)
    agent = Agent(serve.backend, serve.options)
    agent.register(serve.slabs, memory_of(HOST))
    return agent


def _map_at(base: int, handle: int) -> None:
    """Maps a file at an address, to be read. Raises TransferError if something else lies there."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_SHARED | MAP_FIXED_NOREPLACE
    nbytes = os.fstat(handle).st_size
    if libc.mmap(base, nbytes, mmap.PROT_READ, flags, handle, 0) != base:
        reason = os.strerror(ctypes.get_errno())
        raise TransferError(f"{nbytes} bytes cannot be mapped at {base:#x} ({reason}).")


def _progress(agent: Agent, link: int) -> None:
    """Makes progress until the parent hangs up."""
    awake_until = 0.0
    # poll() of Python has whole milliseconds only, and select() numbers below 1,024
    link = os.dup(link)
    while True:
        awake = time.monotonic() < awake_until
        if select.select([link], (), (), AWAKE_PAUSE_SECONDS if awake else IDLE_PAUSE_SECONDS)[0]:
            if not os.read(link, 4096):
                return
            awake_until = time.monotonic() + AWAKE_SECONDS
        agent.progress()
