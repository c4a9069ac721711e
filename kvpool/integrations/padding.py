"""Columns of a batch whose rows have different lengths, and which of them are tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.layout import Space

PADDING = -2
"""The location of a column that is no token. -1, as ever, is a token whose state is gone."""


@dataclass(frozen=True, slots=True)
class Padding:
    """`before`, `[B]`: the columns before each row's first token; `columns`: those that end with
    the tokens that rows have.
    """

    before: tuple[int, ...]
    columns: int

    @classmethod
    def of(cls, padding: npt.ArrayLike, lengths: Sequence[int], spaces: Sequence[Space]) -> Padding:
        """Padding of rows that have `lengths` `[B]` tokens. Raises ValueError unless these end in
        one column, and rows without any begin after it.
        """
        numbers = np.asarray(padding)
        if numbers.dtype.kind not in "iu" or numbers.shape not in ((), (len(lengths),)):
            raise ValueError(
                f"padding: a whole number, or one for each of {len(lengths)} rows, got {padding!r}."
            )
        before = np.broadcast_to(numbers, len(lengths)).tolist()
        if min(before) < 0:
            raise ValueError(f"padding: 0 or more, got {before}.")
        ends = {n + p for n, p in zip(lengths, before) if n}
        columns = max(ends, default=0)
        if len(ends) > 1 or any(p < columns for n, p in zip(lengths, before) if not n):
            fits = [max(lengths) - n for n in lengths]
            raise ValueError(
                f"requests: {list(lengths)} tokens with padding {before} do not end in one column. "
                f"Give padding={fits}, and the model what inputs() returns."
            )
        compressed = [space for space in spaces if space.tokens_per_entry > 1]
        if any(before) and compressed:
            raise ValueError(
                f"space {compressed[0].name}: padding {before}, but the model compresses windows "
                f"of {compressed[0].tokens_per_entry} columns. Make a batch of each length."
            )
        return cls(tuple(before), columns)

    def tokens(self, columns: int) -> list[int]:
        """How many of the first columns are tokens, of each row."""
        return [max(columns - before, 0) for before in self.before]


def right_aligned(rows: Sequence[npt.NDArray[np.int64]], columns: int) -> npt.NDArray[np.int64]:
    """Locations of rows of different lengths as `[B, columns]`, after PADDING."""
    aligned = np.full((len(rows), columns), PADDING, dtype=np.int64)
    for row, located in enumerate(rows):
        aligned[row, columns - len(located) :] = located
    return aligned
