"""Rings of the last tokens of a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvpool.layout.formats.kind import At, BufferSpec
from kvpool.layout.template import Cell, Repeat


@dataclass(frozen=True, slots=True)
class Ring:
    """`count` float32 values for each of the last tokens of a request, under one role."""

    role: str
    count: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """The role."""
        return (self.role,)

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """One row a token."""
        yield at.buffer(self.role, Repeat("entry", at.entries, Cell(self.role, self.count, "f32")))
