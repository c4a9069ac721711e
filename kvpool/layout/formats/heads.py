"""Which heads of the model a rank holds."""

from __future__ import annotations

from typing import NamedTuple

from kvpool.layout.template import Repeat, Template


class Heads(NamedTuple):
    """`size` heads, of `total` in the model, from number `start` on."""

    start: int
    size: int
    total: int

    def of(self, inside: Template) -> Repeat:
        """`inside` for each head."""
        return Repeat("head", self.size, inside, self.start, self.total)
