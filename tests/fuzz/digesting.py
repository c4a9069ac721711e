"""Digest requests of a peer: pieces of one's own memory, which lies between unreadable pages."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from functools import lru_cache

from disagg.digest.digest import digests, from_wire, pieces, to_wire
from disagg.plan import plan
from kvpool.layout import PoolLayout
from tests.fuzz import samples
from tests.fuzz.guard import Finding

PAGE = mmap.PAGESIZE
PROT_NONE = 0


@lru_cache
def layouts() -> tuple[PoolLayout, ...]:
    """Layouts of every case, over memory between unreadable pages."""
    return tuple(_fenced(case.own) for case in samples.CASES)


def _fenced(layout: PoolLayout) -> PoolLayout:
    low = min(buffer.base for buffer in layout.buffers)
    size = max(buffer.end for buffer in layout.buffers) - low
    pages = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, pages + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))  # keeps it mapped too
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for edge in (start, start + PAGE + pages):
        if protect(edge, PAGE, PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect")
    _kept.append(memory)
    return samples.moved(layout, start + PAGE + pages - size - low)


_kept: list[mmap.mmap] = []


def run(data: bytes) -> str:
    try:
        asked = from_wire(data[1:])
    except ValueError:
        return "refused"
    layout = layouts()[data[0] % len(samples.CASES)]
    outcome = "not alive"
    for each in (False, True):
        try:
            made = list(digests(layout, samples.address(layout), asked, each))
        except ValueError:
            continue
        count = sum(part.size for part in made)
        if count != sum(piece.numbers().size if each else 1 for piece in asked):
            raise Finding(f"{count} digests of {len(asked)} pieces.")
        outcome = "digested"
    return outcome


def seeds() -> Iterator[bytes]:
    """What decode asks for in every case."""
    for number, case in enumerate(samples.CASES):
        made = plan([case.own], case.own)
        for tokens in (range(samples.TOKENS), range(5, samples.TOKENS), range(9)):
            asked = pieces(made, 0, tokens, samples.TOKENS)
            yield bytes([number]) + to_wire(asked)
