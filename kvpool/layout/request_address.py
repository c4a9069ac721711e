"""Where one request's state lies: item ids per space, and how many tokens they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import index
from types import MappingProxyType
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

MAX_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Item ids of one space, int64 `[I]`; `ids[0]` is item number `first_item` of the request.

    A window that starts elsewhere, or a list without its dead head, is a larger `first_item`.
    """

    ids: npt.NDArray[np.int64]
    first_item: int = 0

    def __post_init__(self) -> None:
        given = np.asarray(self.ids)
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(f"span ids: a flat list of integers, got {given.dtype}{given.shape}.")
        ids = np.array(given, dtype=np.int64)  # a copy: the caller's list stays his own
        if ids.size:
            ordered = np.sort(ids)
            if ordered[0] < 0:
                raise ValueError(f"span ids: {int(ordered[0])} is negative.")
            if ids.size > 1 and not (ordered[1:] != ordered[:-1]).all():
                twice = int(ordered[1:][ordered[1:] == ordered[:-1]][0])
                raise ValueError(f"span ids: item {twice} is listed twice.")
        object.__setattr__(self, "first_item", _count(self.first_item, "span first_item"))
        ids.flags.writeable = False
        object.__setattr__(self, "ids", ids)


@dataclass(frozen=True, slots=True, eq=False)
class RequestAddress:
    """The first `num_tokens` positions of one request, by space name."""

    num_tokens: int
    spans: Mapping[str, Span]

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", _count(self.num_tokens, "num_tokens"))
        spans = dict(self.spans)
        for name, span in spans.items():
            if not isinstance(span, Span):
                raise ValueError(f"space {name}: a Span of ids, got {type(span).__name__}.")
        object.__setattr__(self, "spans", MappingProxyType(spans))


def _count(value: SupportsIndex, what: str) -> int:
    """A plain int (numpy's integers count), bounded."""
    try:
        number = index(value)
    except TypeError:
        raise ValueError(f"{what}: a whole number, got {value!r}.") from None
    if not 0 <= number <= MAX_TOKENS:
        raise ValueError(f"{what}: 0 to {MAX_TOKENS}, got {number}.")
    return number
