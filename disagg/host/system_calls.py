"""System calls that return at once, with the GIL kept: a busy host gives it back 5 ms later."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Callable
from typing import Any

MAX_EVENTS = 256
"""Files that one `ready` names; others come with the next."""

_libc = ctypes.PyDLL(None, use_errno=True)


class _EpollEvent(ctypes.Structure):
    """struct epoll_event, which the kernel packs on x86-64 only."""

    if platform.machine() == "x86_64":
        _pack_ = 1
    _fields_ = (("mask", ctypes.c_uint32), ("data", ctypes.c_uint64))


def _call(name: str, *arguments: Any, result: Any = ctypes.c_ssize_t) -> Callable[..., int]:
    function = getattr(_libc, name)
    function.argtypes, function.restype = arguments, result
    return function  # type: ignore[no-any-return]


_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_recv = _call("recv", _int, _pointer, _size, _int)
_send = _call("send", _int, _pointer, _size, _int)
_read = _call("read", _int, _pointer, _size)
_write = _call("write", _int, _pointer, _size)
_epoll_wait = _call("epoll_wait", _int, _pointer, _int, _int, result=_int)
_epoll_ctl = _call("epoll_ctl", _int, _int, _int, _pointer, result=_int)
ADD, MODIFY = 1, 3


class Scratch:
    """Memory to receive into; `view` is what was received."""

    def __init__(self, nbytes: int) -> None:
        self._memory = ctypes.create_string_buffer(nbytes)
        self.view = memoryview(self._memory).cast("B")

    def receive(self, descriptor: int, most: int, flags: int) -> int:
        """Bytes that a non-blocking socket had, at most `most`. Raises OSError."""
        return _checked(_recv(descriptor, self._memory, most, flags))

    def read(self, descriptor: int) -> None:
        """Takes what a non-blocking pipe holds."""
        _read(descriptor, self._memory, len(self.view))


def send(descriptor: int, data: bytes, flags: int) -> int:
    """Bytes that a non-blocking socket took. Raises OSError."""
    return _checked(_send(descriptor, data, len(data), flags))


def write_byte(descriptor: int) -> None:
    """Writes a byte to a non-blocking pipe, unless it is full."""
    _write(descriptor, b"\0", 1)


class Waker:
    """A duplicate of a non-blocking descriptor, which wakes the thread that waits at its other end,
    and whose owner may close it at any time; -1 until one is `set`. Any thread may `wake`.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._lock = threading.Lock()

    def set(self, descriptor: int) -> None:
        """Takes a duplicate, if none is there."""
        with self._lock:
            if self.descriptor < 0:
                self.descriptor = os.dup(descriptor)

    def wake(self) -> None:
        """Writes a byte, unless no thread waits any more."""
        with self._lock:
            if self.descriptor >= 0:
                write_byte(self.descriptor)

    def close(self) -> None:
        with self._lock:
            if self.descriptor >= 0:
                os.close(self.descriptor)
                self.descriptor = -1


class ReadyFiles:
    """What an epoll set has now."""

    def __init__(self, epoll: int) -> None:
        self._epoll, self._events = epoll, (_EpollEvent * MAX_EVENTS)()

    def watch(self, descriptor: int, mask: int) -> None:
        """Watches a file, which may be watched already. Raises OSError."""
        event = _EpollEvent(mask, descriptor)
        done = _epoll_ctl(self._epoll, MODIFY, descriptor, ctypes.byref(event))
        if done < 0 and ctypes.get_errno() == errno.ENOENT:
            done = _epoll_ctl(self._epoll, ADD, descriptor, ctypes.byref(event))
        _checked(done)

    def take(self) -> list[tuple[int, int]]:
        """File numbers and masks, without waiting. Raises OSError."""
        count = _checked(_epoll_wait(self._epoll, self._events, MAX_EVENTS, 0))
        return [(event.data & 0xFFFFFFFF, event.mask) for event in self._events[:count]]


def _checked(result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
