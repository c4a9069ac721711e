"""What formats share: which heads a rank holds, values with scales, and kinds of state.

A kind is a frozen dataclass of the model's numbers, beside its format in this folder. `buffers(at)`
gives its buffers for the layers, space, shard and packing in `at`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from kvpool.layout import Region
from kvpool.layout.dtypes import PACKINGS, dtype_name
from kvpool.layout.template import (
    Cell,
    Repeat,
    Template,
    alignment,
    item_bytes,
    item_regions,
    prefixed,
)


class Heads(NamedTuple):
    """`size` heads, of `total` in the model, from number `start` on."""

    start: int
    size: int
    total: int

    def of(self, inside: Template) -> Repeat:
        return Repeat(axis="head", size=self.size, of=inside, start=self.start, total=self.total)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of the sharded axes a pool holds: `rank` of `size` equal parts."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"shard: rank {self.rank} of {self.size}. The rank is 0 to size-1.")

    def of(self, total: int) -> tuple[int, int]:
        """(start, size) of the steps held, of `total`; with fewer steps than parts, several parts
        hold the same step: rank 3 of 8 holds head 1 of 4.
        """
        if total % self.size == 0:
            return self.rank * (total // self.size), total // self.size
        if self.size % total == 0:
            return self.rank // (self.size // total), 1
        raise ValueError(
            f"shard: {total} heads cannot be split over {self.size} ranks. One must divide the "
            "other."
        )

    def heads(self, total: int) -> Heads:
        """The heads held, of `total`."""
        start, size = self.of(total)
        return Heads(start, size, total)


def scale_role(role: str) -> str:
    return f"{role}.scale"


def scaled(
    role: str, count: int, block: int = 0, scale: str = "f32", *, dtype: str = "e4m3"
) -> tuple[Cell, Cell]:
    """The cells of `count` values of `dtype` and of their scales, one for each `block` values (0,
    or more than there are: one for all).

    Raises ValueError if `count` is not a multiple of `block`.
    """
    block = min(block or count, count)
    if count % block:
        raise ValueError(
            f"{role}: {count} elements are not a multiple of the block size {block}. Use a "
            "packing without scales."
        )
    return Cell(role, count, dtype), Cell(scale_role(role), count // block, scale)


class StateType(str, Enum):
    """State components other than the main cache, by the names of SGLang 0.5.23.

    Names of older releases are accepted: `StateType("nsa")` and `StateType.NSA` are `DSA`,
    `StateType("dsv4")` and `StateType.DSV4` are `DSV4_REQUEST_STATE`.
    """

    SWA = "swa"
    """Pages of a window, and rings of those pages."""
    DSA = "dsa"
    """Index keys of sparse attention, in token pages."""
    MAMBA = "mamba"
    """Slots of linear attention."""
    DSV4_REQUEST_STATE = "c128_state"
    """DeepSeek-V4's rings, one a request."""
    NSA = DSA
    DSV4 = DSV4_REQUEST_STATE

    @classmethod
    def _missing_(cls, value: object) -> StateType | None:
        return {"nsa": cls.DSA, "dsv4": cls.DSV4_REQUEST_STATE}.get(str(value))


@dataclass(frozen=True, slots=True)
class BufferSpec:
    """Buffers of one name: one for each of `layers`, in `space`, with items of template `item`.

    `state` is the component under which connectors list them (None: the main cache). `item_bytes`:
    those of an item, rounded up to `alignment`.
    """

    name: str
    layers: tuple[int, ...]
    space: str
    item: Template
    _: KW_ONLY
    state: StateType | None = None
    alignment: int = field(init=False, repr=False, compare=False)
    item_bytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # once: placements ask for them at every size that is tried
        multiple = alignment(self.item)
        object.__setattr__(self, "alignment", multiple)
        object.__setattr__(self, "item_bytes", -(-item_bytes(self.item) // multiple) * multiple)

    def buffer_name(self, owner: str, layer: int) -> str:
        """As layouts name it: `target.k.3`."""
        return f"{owner}.{self.name}.{layer}"

    def regions(self, owner: str) -> list[Region]:
        """What the items hold, for each layer."""
        names = {layer: self.buffer_name(owner, layer) for layer in self.layers}
        return [
            region
            for layer, buffer in names.items()
            for region in item_regions(self.item, owner=owner, layer=layer, buffer=buffer)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class At:
    """Where a pool puts a kind of state: in which layers and space, and how it is stored.

    `entries`: entries an item. `packing`: a float dtype, or a quantised packing of the kind.
    `prefix`: prepended to roles and buffer names. `state`: the component under which connectors
    list the buffers (None: the main cache).
    """

    layers: tuple[int, ...]
    space: str
    entries: int
    shard: Shard
    packing: str
    prefix: str = ""
    state: StateType | None = None

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            object.__setattr__(self, "packing", dtype_name(self.packing))

    def buffer(self, name: str, item: Template) -> BufferSpec:
        """One buffer a layer, with such items."""
        item = prefixed(item, self.prefix)
        return BufferSpec(self.prefix + name, self.layers, self.space, item, state=self.state)

    def takes(self, kind: object, *packings: str) -> bool:
        """Whether the packing is one of `packings`; raises ValueError for another quantised one."""
        if self.packing in PACKINGS and self.packing not in packings:
            names = ", ".join((*packings, "any float dtype"))
            raise ValueError(f"packing: {type(kind).__name__} takes {names}, got {self.packing!r}.")
        return self.packing in packings


class Kind(Protocol):
    """A kind of state."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Roles that a write takes, in order, without prefix and without scales."""

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """The buffers of this kind, one specification per role or row."""


class Attention:
    """A kind whose inputs are keys and values; with `shared_kv`, parts of a tensor that is both."""

    __slots__ = ()
    shared_kv = False


class PerRequest:
    """A kind that a request has once: pools place it in slots, and it has no window."""

    __slots__ = ()
