"""A request's block table: the ids of its items, by space, and how many tokens they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt
from typing_extensions import Self

if TYPE_CHECKING:
    from kvpool.layout.pin import Holder

MAX_TOKENS = 1 << 40


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """A block table's ids of one space, int64 `[I]`. `ids[0]` is item number `first_item` of the
    request: more than 0 where items before a window were freed.
    """

    ids: npt.NDArray[np.int64]
    first_item: int = 0

    def __post_init__(self) -> None:
        ids = np.array(_flat(self.ids), dtype=np.int64)  # a copy: the caller may change its list
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

    @classmethod
    def from_blocks(
        cls, blocks: npt.ArrayLike, null: int = 0, items_per_block: SupportsIndex = 1
    ) -> Self:
        """The span of a list of block ids `[B]`, item 0 first, in which `null` stands for blocks
        before a window that are no longer held (vLLM's null block). Each is `items_per_block` items
        (`Space.items_per_block`).

        `Span.from_blocks([0, 0, 5, 2])` is `Span([5, 2], first_item=2)`, and of 3 items a block
        `Span([15, 16, 17, 6, 7, 8], first_item=6)`. Raises ValueError if a null block stands after
        a live one.
        """
        listed = _flat(blocks)
        live = listed != null
        first = int(live.argmax()) if live.any() else listed.size
        if not live[first:].all():
            dead = first + int(live[first:].argmin())
            raise ValueError(
                f"span blocks: null block {null} at index {dead}, after live ones from index "
                f"{first} on. Null blocks stand only before the live ones; leave out what follows "
                "those."
            )
        size = _count(items_per_block, "span items_per_block", 1)
        items = listed[first:, None].astype(np.int64) * size + np.arange(size)
        return cls(items.ravel(), first * size)


@dataclass(frozen=True, slots=True, eq=False)
class RequestAddress:
    """The block table of a request's first `num_tokens` positions: spans by space name.

    `holder` is the request that `Request.address()` is of. Endpoints pin it; without one, whoever
    made the block table sees to it that its items stay what they are.
    """

    num_tokens: int
    spans: Mapping[str, Span]
    holder: Holder | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", _count(self.num_tokens, "num_tokens"))
        spans = dict(self.spans)
        for name, span in spans.items():
            if not isinstance(span, Span):
                raise ValueError(f"space {name}: a Span of ids, got {type(span).__name__}.")
        object.__setattr__(self, "spans", MappingProxyType(spans))


def _flat(ids: npt.ArrayLike) -> npt.NDArray[Any]:
    """A list of integers as an array `[I]`."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"span ids: a flat list of integers, got {array.dtype}{array.shape}.")
    return array


def _count(value: SupportsIndex, what: str, low: int = 0) -> int:
    """An int from `low` to MAX_TOKENS; numpy's integers are taken."""
    try:
        number = index(value)
    except TypeError:
        raise ValueError(f"{what}: a whole number, got {value!r}.") from None
    if not low <= number <= MAX_TOKENS:
        raise ValueError(f"{what}: {low} to {MAX_TOKENS}, got {number}.")
    return number
