"""How bytes of strided tensors are walked: which axes are one, and how wide a lane may be.

Sizes become constants of a kernel, so that its divisions are cheap; strides and addresses stay
arguments, so that a batch of another length compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import NamedTuple

WIDEST = 16
"""Bytes of the widest access of a lane."""
TILE = 1024
"""Words that a program of four warps moves at once: four accesses of 16 bytes a lane."""


class Axis(NamedTuple):
    """Steps, and what one is worth in each of the tensors walked together."""

    size: int
    strides: tuple[int, ...]


def fused(axes: Iterable[Axis]) -> list[Axis]:
    """The same walk with as few axes as can be, innermost first, by the last tensor's strides."""
    left: list[Axis] = []
    for axis in sorted((a for a in axes if a.size > 1), key=lambda a: (a.strides[-1], a.size)):
        inner = left[-1] if left else None
        if inner and axis.strides == tuple(inner.size * stride for stride in inner.strides):
            left[-1] = Axis(inner.size * axis.size, inner.strides)
        else:
            left.append(axis)
    return left


def divisor(numbers: Iterable[int]) -> int:
    """The largest power of two up to `WIDEST` that divides all of `numbers`."""
    return gcd(WIDEST, *numbers)


class Walk(NamedTuple):
    """A walk over bytes in units of `unit` bytes: `sizes` innermost first, and for each tensor its
    strides, in units too.
    """

    unit: int
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def units(self) -> int:
        """All of it."""
        return prod(self.sizes)


def walk(axes: Sequence[Axis], itemsize: int, fixed: Iterable[int]) -> Walk:
    """The walk over elements of `itemsize` bytes at axes with strides in bytes, every unit as wide
    as the strides and the `fixed` numbers of bytes (addresses, strides of rows) allow.
    """
    tensors = len(axes[0].strides)
    inner, *outer = fused((Axis(itemsize, (1,) * tensors), *axes)) or [Axis(1, (1,) * tensors)]
    run = inner.size if set(inner.strides) == {1} else 1
    if run == 1:
        outer.insert(0, inner)
    unit = divisor((run, *fixed, *(stride for axis in outer for stride in axis.strides)))
    steps = [Axis(run // unit, (1,) * tensors)] if run > unit or not outer else []
    steps += [Axis(a.size, tuple(stride // unit for stride in a.strides)) for a in outer]
    strides = tuple(zip(*(axis.strides for axis in steps)))
    return Walk(unit, tuple(axis.size for axis in steps), strides)


def power_of_two(number: int) -> int:
    """The next one from `number` on."""
    return 1 << (number - 1).bit_length()


def columns(units: int, most: int) -> int:
    """Units of a row that a program takes, a power of two up to `most` but no less than 16 of a
    longer row: as many as leave at most one in eight idle, else as many as leave the fewest so.
    """
    sizes = [min(power_of_two(units), most)]
    while sizes[-1] > 16:
        sizes.append(sizes[-1] // 2)
    taken = {size: -(-units // size) * size for size in sizes}
    enough = max(min(taken.values()), units * 9 // 8)
    return next(size for size in sizes if taken[size] <= enough)
