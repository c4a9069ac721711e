"""How a kernel walks strided tensors: which axes fuse, and how wide an access can be.

Sizes become constants of a kernel, so that its divisions are cheap. Strides and pointers stay
arguments, so that another batch length compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import NamedTuple

WIDEST = 16
"""Bytes of the widest access of a lane."""


class Dim(NamedTuple):
    """One dimension of tensors that are walked together: its size, and its stride in each."""

    size: int
    strides: tuple[int, ...]


def fused(axes: Iterable[Dim]) -> list[Dim]:
    """The same walk with as few dimensions as possible, innermost first in the last tensor."""
    left: list[Dim] = []
    for axis in sorted((a for a in axes if a.size > 1), key=lambda a: (a.strides[-1], a.size)):
        inner = left[-1] if left else None
        if inner and axis.strides == tuple(inner.size * stride for stride in inner.strides):
            left[-1] = Dim(inner.size * axis.size, inner.strides)
        else:
            left.append(axis)
    return left


def divisor(numbers: Iterable[int]) -> int:
    """The largest power of two up to `WIDEST` that divides all of `numbers`."""
    return gcd(WIDEST, *numbers)


class AccessPattern(NamedTuple):
    """A walk in units of `unit` bytes: `sizes` innermost first, and each tensor's strides in
    units.
    """

    unit: int
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]

    @property
    def units(self) -> int:
        """Units in all."""
        return prod(self.sizes)


def access_pattern(axes: Sequence[Dim], itemsize: int, fixed: Iterable[int]) -> AccessPattern:
    """The walk over elements of `itemsize` bytes at axes with strides in bytes. Units are as wide
    as the strides and the `fixed` byte counts (pointers, row strides) allow.
    """
    tensors = len(axes[0].strides)
    inner, *outer = fused((Dim(itemsize, (1,) * tensors), *axes)) or [Dim(1, (1,) * tensors)]
    run = inner.size if set(inner.strides) == {1} else 1
    if run == 1:
        outer.insert(0, inner)
    unit = divisor((run, *fixed, *(stride for axis in outer for stride in axis.strides)))
    steps = [Dim(run // unit, (1,) * tensors)] if run > unit or not outer else []
    steps += [Dim(a.size, tuple(stride // unit for stride in a.strides)) for a in outer]
    strides = tuple(zip(*(axis.strides for axis in steps)))
    return AccessPattern(unit, tuple(axis.size for axis in steps), strides)


def power_of_two(number: int) -> int:
    """The smallest power of two from `number` on."""
    return 1 << (number - 1).bit_length()


def columns(units: int, most: int) -> int:
    """Units of a row for one program: the largest power of two, from 16 (or the row) to `most`,
    that leaves at most one unit in eight idle; if there is none, the one that leaves the fewest.
    """
    sizes = [min(power_of_two(units), most)]
    while sizes[-1] > 16:
        sizes.append(sizes[-1] // 2)
    taken = {size: -(-units // size) * size for size in sizes}
    enough = max(min(taken.values()), units * 9 // 8)
    return next(size for size in sizes if taken[size] <= enough)
