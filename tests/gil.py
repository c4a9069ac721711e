"""A host whose main thread keeps the GIL."""

from __future__ import annotations

import sys
from contextlib import contextmanager


@contextmanager
def gil_held():
    """No other Python thread runs, as long as nothing lets the GIL go by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
