# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Device memory in kernels: integer words of 8, 4, 2 or 1 bytes at pointers given as integers. The
compiler merges two adjacent words of 8 bytes into one access of 16.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def words_at(address, WORD: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer to words of `WORD` bytes; the address is a multiple of `ALIGNED` bytes."""
    if WORD == 8:
        pointer = address.to(tl.pointer_type(tl.int64))
    elif WORD == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    elif WORD == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, ALIGNED)


@triton.jit
def copy_units(src, dst, nbytes, UNIT: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr):
    """Copies `nbytes` bytes, `WORDS` words at a time; pointers and length are multiples of
    `UNIT` bytes.
    """
    first = nbytes * 0
    while first < nbytes // WORD:
        word = first + tl.arange(0, WORDS)
        inside = word // (UNIT // WORD) < nbytes // UNIT
        values = tl.load(words_at(src, WORD, UNIT) + word, mask=inside)
        tl.store(words_at(dst, WORD, UNIT) + word, values, mask=inside)
        first += WORDS


@triton.jit
def copy_bytes(src, dst, nbytes, WORDS: tl.constexpr):
    """Copies `nbytes` bytes with the widest accesses that pointers and length allow."""
    low = src | dst | nbytes
    if low % 16 == 0:
        copy_units(src, dst, nbytes, 16, 8, WORDS)
    elif low % 4 == 0:
        copy_units(src, dst, nbytes, 4, 4, WORDS)
    else:
        copy_units(src, dst, nbytes, 1, 1, WORDS)
