"""Signal handlers that wait until what they would tear apart is done.

Python runs handlers in the main thread, between any two lines, and what they raise goes on from
there: KeyboardInterrupt does, and so does every time limit made of SIGALRM. A change of an endpoint
that ends in the middle leaves rooms that never end. So it is made `with deferred_signals:`, and
handlers run when it is complete; their exceptions reach the caller then.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import threading
from types import FrameType
from typing import Any

_builtin: Any = importlib.import_module("_signal")  # module signal makes enums of all, in 2 us each
_sigaction = ctypes.PyDLL(None).sigaction
_sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_ACTION_BYTES = 256
"""At least struct sigaction's size."""
_NUMBERS = sorted(set(map(int, signal.valid_signals())) - {signal.SIGKILL, signal.SIGSTOP})


class _DeferredSignals:
    """A context manager for the main thread, which may be nested; in others it does nothing."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._noted: list[tuple[int, FrameType | None]] = []
        self._originals: dict[int, Any] = {}
        self._actions = {number: ctypes.create_string_buffer(_ACTION_BYTES) for number in _NUMBERS}
        self._handler = self._note  # one object, which `is` can compare
        os.register_at_fork(after_in_child=self._forked)

    def __enter__(self) -> None:
        if threading.get_ident() != self._main:
            return
        outer = self._depth
        try:  # a handler that is not replaced yet may raise anywhere
            self._depth = outer + 1
            if not outer:
                self._replace()
        except BaseException:
            if not outer:
                self._end()
            raise

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != self._main:
            return
        if self._depth > 1:
            self._depth -= 1
        else:
            self._end()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """The handler meanwhile. It can be left in place where a second signal comes while handlers
        are restored, and is as good as the original until the next change restores that.
        """
        if self._depth:
            self._noted.append((number, frame))
        else:
            self._originals[number](number, frame)

    def _replace(self) -> None:
        get = _builtin.getsignal
        for number in [number for number in _NUMBERS if callable(get(number))]:
            original = get(number)
            if original is not self._handler:
                _sigaction(number, None, self._actions[number])
                self._originals[number] = original
                _builtin.signal(number, self._handler)

    def _end(self) -> None:
        try:
            self._restore()
        finally:
            self._depth = 0
            self._run_noted()

    def _restore(self) -> None:
        try:
            for number, original in [*self._originals.items()]:
                if _builtin.getsignal(number) is self._handler:
                    _builtin.signal(number, original)
                if _builtin.getsignal(number) is original:  # and not one that was set meanwhile
                    # signal() forgets what siginterrupt() said, and a library's handler
                    _sigaction(number, self._actions[number], None)
                del self._originals[number]
        finally:  # one that is back may have raised
            if self._originals:
                self._restore()

    def _run_noted(self) -> None:
        while self._noted:
            number, frame = self._noted.pop(0)
            handler = _builtin.getsignal(number)
            try:
                if callable(handler):
                    handler(number, frame)
            finally:
                self._run_noted()

    def _forked(self) -> None:
        """In a child that another thread has forked: the main thread's change never ends there."""
        if threading.get_ident() != self._main:
            self._main, self._depth = threading.get_ident(), 0
            self._noted.clear()
            self._restore()


deferred_signals = _DeferredSignals()
