"""Slots of linear attention: a conv state and a temporal state.

The conv state's channels are sections with heads of their own: q, k and v of delta nets, x, B and C
of Mamba-2. Ranks of tensor parallelism share each section's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from kvpool.layout.dtypes import ITEMSIZE, dtype_name
from kvpool.layout.formats.heads import Heads
from kvpool.layout.template import Cell, Repeat, Seq, Skip, Template


class ConvSection(NamedTuple):
    """Channels of a convolution: `dim` of each of `heads`. Its role is `conv.` and `name`."""

    name: str
    heads: Heads
    dim: int

    @property
    def channels(self) -> int:
        """Channels on this rank."""
        return self.heads.size * self.dim

    @property
    def role(self) -> str:
        """The role of its state."""
        return f"conv.{self.name}"

    def of(self, inside: Template) -> Template:
        """`inside` for each channel."""
        return self.heads.of(Repeat("dim", self.dim, inside))


def conv_state(
    sections: Sequence[ConvSection], taps: int, dtype: str, *, taps_first: bool, spare: int = 0
) -> Template:
    """The last `taps` inputs of a convolution: `[channel, tap]`, or `[tap, channel]` if
    `taps_first`. `spare` more taps behind them are not used.
    """
    size = ITEMSIZE[dtype_name(dtype)]
    parts = []
    for section in sections:
        cell: Template = Cell(section.role, 1, dtype)
        if not taps_first:
            cell = Repeat("tap", taps, cell)
            cell = Seq(cell, Skip(spare * size)) if spare else cell
        parts.append(section.of(cell))
    channels = Seq(*parts)
    if not taps_first:
        return channels
    inputs = Repeat("tap", taps, channels)
    count = sum(section.channels for section in sections)
    return Seq(inputs, Skip(spare * count * size)) if spare else inputs


def temporal_state(heads: Heads, shape: Sequence[int], dtype: str, axis: str = "") -> Template:
    """A state of `shape` for each head. `axis`: the first dim as an axis of that name, for states
    that an engine transposes.
    """
    if axis:
        first, *inner = shape
        return heads.of(Repeat(axis, first, Cell("temporal", prod(inner), dtype)))
    return heads.of(Cell("temporal", prod(shape), dtype))
