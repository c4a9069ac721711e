"""Copies of many runs outside Python: `runs.c`, loaded by ctypes where it was compiled, together
with `rows.c` and `convert.c` (`kvpool.device.host_rows`, `kvpool.device.host_conversion`).

A thread that copies run by run in Python asks for the GIL after each run, and a busy main thread
gives it back 5 ms later. Here one call takes all runs: `copy` lets the GIL go once, and a `Worker`
copies in a thread that never needs it. Without the compiled file, or with KVPOOL_NATIVE=0, there is
neither, and callers copy in Python.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ABI = 4
PEER_ENDED = -1
"""`Job.error` if the process at the other end has gone, so that its number may be another's."""
_WAITS, _RUNS, _DONE, _FAILED, _CANCELLED = range(5)

Column = npt.NDArray[np.int64]


class _RunArrays(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("src", "dst", "nbytes")),
        *((f"{name}_step", ctypes.c_int64) for name in ("src", "dst", "nbytes")),
        ("count", ctypes.c_int64),
    )


class _JobStruct(ctypes.Structure):
    _fields_ = (
        ("runs", _RunArrays),
        *((name, ctypes.c_int32) for name in ("pid", "peer", "state", "cancelled", "error")),
        ("next", ctypes.c_void_p),
    )


class _Library:
    """The compiled functions. Those of `quick` return within microseconds and keep the GIL."""

    def __init__(self, path: str) -> None:
        self.slow, self.quick = ctypes.CDLL(path), ctypes.PyDLL(path)
        pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        # whether all was done; roles and how many, locations and how many, to store, threads
        rows = i32, pointer, i64, pointer, i64, i32, i32
        # whether all was done; conversions and how many, locations of both, how many, threads
        convert = i32, pointer, i64, pointer, pointer, i64, i32
        for library, name, result, *arguments in (
            (self.quick, "kvpool_abi", ctypes.c_int64),
            (self.quick, "kvpool_job_bytes", ctypes.c_int64),
            (self.slow, "kvpool_copy", None, pointer),
            (self.quick, "kvpool_worker", pointer, ctypes.c_int32),
            (self.quick, "kvpool_post", None, pointer, pointer),
            (self.quick, "kvpool_run", None, pointer),
            (self.quick, "kvpool_state", ctypes.c_int32, pointer),
            (self.quick, "kvpool_cancel", None, pointer),
            (self.slow, "kvpool_close", None, pointer),
            (self.slow, "kvpool_rows", *rows),
            (self.quick, "kvpool_rows", *rows),
            (self.slow, "kvpool_convert", *convert),
            (self.quick, "kvpool_convert", *convert),
        ):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments


@lru_cache(maxsize=1)
def _load() -> tuple[_Library | None, str]:
    """The library; or None, and what is missing."""
    if sys.platform != "linux":
        return None, f"needs Linux, this is {sys.platform}."
    libraries = sorted(Path(__file__).parent.glob("runs*.so"))
    if not libraries:
        return None, (
            "was not compiled when kvpool was installed: a C compiler was missing. Install one "
            "(on Debian: apt-get install gcc libc6-dev) and install kvpool again."
        )
    try:
        library = _Library(str(libraries[0]))
        abi, nbytes = library.quick.kvpool_abi(), library.quick.kvpool_job_bytes()
    except (OSError, AttributeError) as error:
        return None, f"cannot be loaded: {error}. Install kvpool again."
    if (abi, nbytes) != (ABI, ctypes.sizeof(_JobStruct)):
        return None, (
            f"is of another release of kvpool (version {abi}, this one needs {ABI}). Install "
            "kvpool again."
        )
    return library, ""


def _library() -> _Library | None:
    return None if os.environ.get("KVPOOL_NATIVE") == "0" else _load()[0]


def availability() -> str | None:
    """None if runs are copied outside Python, else the reason why not."""
    if os.environ.get("KVPOOL_NATIVE") == "0":
        return "turned off by KVPOOL_NATIVE=0."
    return _load()[1] or None


def copy(src: Column, dst: Column, nbytes: Column) -> bool:
    """Copies `nbytes` bytes from each pointer `src` to each pointer `dst`, int64 `[N]` each,
    without the GIL; False, and nothing is done, where that is not available.
    """
    library = _library()
    if library is None:
        return False
    runs, keep = _runs(src, dst, nbytes)
    library.slow.kvpool_copy(ctypes.byref(runs))
    del keep
    return True


class Job:
    """Runs that a worker copies. Their memory must stay until it has `ended`; it keeps `keep`."""

    def __init__(self, library: _Library, job: _JobStruct, keep: Any, mine: set[Job]) -> None:
        self._library, self._job, self._keep, self._mine = library, job, keep, mine
        self._at = ctypes.addressof(job)
        mine.add(self)

    @property
    def ended(self) -> bool:
        """Whether no byte is copied any more."""
        if self._keep is None:
            return True
        if self._library.quick.kvpool_state(self._at) < _DONE:
            return False
        self._keep = None
        self._mine.discard(self)
        return True

    @property
    def done(self) -> bool:
        """Whether every byte was copied."""
        return self.ended and self._job.state == _DONE

    @property
    def cancelled(self) -> bool:
        """Whether it ended because it was cancelled."""
        return self.ended and self._job.state == _CANCELLED

    @property
    def error(self) -> int:
        """Why it failed, once it has ended: an errno, or PEER_ENDED."""
        return int(self._job.error)

    def cancel(self) -> None:
        """Copies nothing more, soon; `ended` says when."""
        self._library.quick.kvpool_cancel(self._at)


class Worker:
    """A thread that copies jobs in order, outside Python. Whenever one has ended it writes a byte
    to `tell`, a non-blocking descriptor that must stay open until `close`, or -1.
    """

    def __init__(self, tell: int = -1) -> None:
        library = _library()
        if library is None:
            raise RuntimeError(f"kvpool's compiled copy {availability()}")
        handle = library.quick.kvpool_worker(tell)
        if not handle:
            raise MemoryError("no thread can be made to copy memory.")
        self._library, self._handle = library, handle
        self._jobs: set[Job] = set()
        # also if it is never closed: no thread may copy into memory that has been given back
        self.close = weakref.finalize(self, _close, library, handle, self._jobs, os.getpid())

    def post(
        self,
        src: Column,
        dst: Column,
        nbytes: Column,
        *,
        pid: int = 0,
        peer: int = -1,
        keep: Any = None,
        at_once: bool = False,
    ) -> Job:
        """Copies runs, see `copy`; the columns must not change until the job has ended: `at_once`
        in this call, which keeps the GIL. To wake a thread takes as long as to copy a few KiB.

        With `pid` the sources are that process's (`process_vm_readv`), and `peer` is a connection
        to it over which nothing comes as long as it lives.
        """
        runs, columns = _runs(src, dst, nbytes)
        job = _JobStruct(runs=runs, pid=pid, peer=peer)
        posted = Job(self._library, job, (columns, keep), self._jobs)
        if at_once:
            self._library.quick.kvpool_run(ctypes.addressof(job))
        else:
            self._library.quick.kvpool_post(self._handle, ctypes.addressof(job))
        return posted


def _close(library: _Library, handle: int, jobs: set[Job], pid: int) -> None:
    """Cancels what is left, and ends the thread, which a forked child does not have."""
    if os.getpid() != pid:
        return
    for job in jobs:
        job.cancel()
    library.slow.kvpool_close(handle)
    jobs.clear()


def _runs(*columns: Column) -> tuple[_RunArrays, tuple[Column, ...]]:
    """Columns as the library takes them; they must live as long."""
    src, dst, nbytes = arrays = tuple(np.asarray(column, dtype=np.int64) for column in columns)
    if not src.shape == dst.shape == nbytes.shape == (src.size,):
        shapes: Iterable[Any] = (column.shape for column in arrays)
        raise ValueError(f"runs in columns of shapes {', '.join(map(str, shapes))}: [N] each.")
    return _RunArrays(
        *(column.ctypes.data for column in arrays),
        *(column.strides[0] for column in arrays),
        src.size,
    ), arrays
