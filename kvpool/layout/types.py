"""The parts of a layout: axes, regions, buffers, spaces and slabs, each validated by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, get_args

from msgspec import Meta

from kvpool.layout.dtypes import ITEMSIZE, dtype_name
from kvpool.layout.sentences import PRINTABLE, is_printable

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_INT = (1 << 63) - 1
MAX_NAME = 128
MAX_AXES = 8
MAX_PARTS = 1 << 16
MAX_RANKS = 1 << 10
"""Ranks over which a space's positions are interleaved."""
MAX_ITEMS_PER_BLOCK = 1 << 12
"""Items that one block of a block pool is."""
MAX_ROUND = 1 << 40
"""Positions of one stretch of every rank."""
MAX_REASON = 4096
"""Characters of one reason, in an error, a message or the log."""
HOST = "cpu"
"""The memory of the host, as buffers and slabs name it."""

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=PRINTABLE)]
"""What messages call something by."""
SpaceKind = Literal["paged", "slot", "ring"]
Key = tuple[str, int, str]


class LayoutError(ValueError):
    """A layout that is inconsistent, malformed or of another version."""


def _need(true: bool, where: str, sentence: str) -> None:
    if not true:
        raise LayoutError(f"{where}: {sentence}")


def _need_name(name: str, where: str) -> None:
    _need(0 < len(name) <= MAX_NAME, where, f"a name of 1 to {MAX_NAME} characters, got {name!r}.")
    _need(is_printable(name), where, f"a name of printable characters, got {name!r}.")


def _need_int(value: int, low: int, where: str) -> None:
    _need(low <= value <= MAX_INT, where, f"{low} to 2**63-1, got {value}.")


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension of which this rank holds steps `start` to `start + size` of `total`, `stride`
    bytes apart. `total` 0 means `size`: not sharded.
    """

    name: str
    size: int
    stride: int
    start: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        _need_name(self.name, "axis")
        where = f"axis {self.name}"
        _need_int(self.size, 1, f"{where} size")
        _need_int(self.stride, 0, f"{where} stride")
        _need_int(self.start, 0, f"{where} start")
        if self.total == 0:
            object.__setattr__(self, "total", self.size)
        _need(
            self.start + self.size <= self.total,
            where,
            f"steps {self.start} to {self.start + self.size} exceed the total of {self.total}.",
        )

    @property
    def stop(self) -> int:
        """`start + size`."""
        return self.start + self.size


def _axis_order(axis: Axis) -> tuple[int, str]:
    return {"entry": 0, "head": 1}.get(axis.name, 2), axis.name


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of one (owner, layer, role): `width` contiguous bytes at each point of a grid.

    Axes are sorted: entry, head, then by name. Their order has no meaning; their strides do.

    With `packing`, how an item lies inside is known by that name only: there is no entry axis,
    whatever the space, and its bytes move whole, between regions of the same packing.
    """

    owner: str
    layer: int
    role: str
    buffer: str
    offset: int
    dtype: str
    axes: tuple[Axis, ...]
    width: int
    packing: str = ""

    def __post_init__(self) -> None:
        _need_name(self.owner, "region owner")
        _need_name(self.role, f"{self.owner} layer {self.layer} role")
        _need_int(self.layer, 0, f"{self.owner} {self.role} layer")
        _need_name(self.buffer, f"{self} buffer")
        _need_int(self.offset, 0, f"{self} offset")
        try:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        except ValueError as error:
            raise LayoutError(f"{self}: {error}") from None
        size = ITEMSIZE[self.dtype]
        _need_int(self.width, 1, f"{self} width")
        _need(
            self.width % size == 0,
            f"{self} width",
            f"{self.width} bytes are not a multiple of {self.dtype} ({size}).",
        )
        _need(
            len(self.axes) <= MAX_AXES,
            f"{self}",
            f"{len(self.axes)} axes, at most {MAX_AXES} are supported.",
        )
        names = [axis.name for axis in self.axes]
        _need(len(set(names)) == len(names), f"{self}", f"{names} names an axis twice.")
        if self.packing:
            _need_name(self.packing, f"{self} packing")
            _need(
                "entry" not in names,
                f"{self}",
                f"packing {self.packing!r} and an entry axis: of an item whose inside is unknown "
                "no entry can be found. Leave out one of them.",
            )
        object.__setattr__(self, "axes", tuple(sorted(self.axes, key=_axis_order)))

    def __str__(self) -> str:
        return f"{self.owner} layer {self.layer} {self.role}"

    @property
    def key(self) -> Key:
        """(owner, layer, role), by which regions of two layouts are matched."""
        return self.owner, self.layer, self.role

    @property
    def nbytes(self) -> int:
        """Bytes of this region in one item."""
        total = self.width
        for axis in self.axes:
            total *= axis.size
        return total

    @property
    def end(self) -> int:
        """Offset in the item after the region's last byte."""
        return self.offset + sum((a.size - 1) * a.stride for a in self.axes) + self.width

    @property
    def inner_axes(self) -> tuple[Axis, ...]:
        """The axes other than `entry`: those that ranks may shard."""
        return tuple(axis for axis in self.axes if axis.name != "entry")

    @property
    def axes_by_stride(self) -> list[Axis]:
        """The axes, largest stride first."""
        return sorted(self.axes, key=lambda axis: -axis.stride)

    def axis(self, name: str) -> Axis | None:
        """The axis of that name, or None."""
        return next((axis for axis in self.axes if axis.name == name), None)


@dataclass(frozen=True, slots=True)
class Buffer:
    """`items` items of `item_bytes` bytes, `item_stride` bytes apart, from pointer `base`.

    `memory` is `cpu`, `cuda:0`, `npu:3`, or `meta` (no memory; `base` counts from 0). Bytes of an
    item that no region claims are foreign: a transfer neither reads nor writes them. With
    `padding` the owner of the memory says that nobody else uses them: they may travel with their
    neighbours.
    """

    name: str
    space: str
    base: int
    item_stride: int
    item_bytes: int
    items: int
    memory: str = HOST
    padding: bool = False

    def __post_init__(self) -> None:
        _need_name(self.name, "buffer")
        where = f"buffer {self.name}"
        _need_name(self.space, f"{where} space")
        _need_name(self.memory, f"{where} memory")
        _need_int(self.base, 0, f"{where} base")
        _need_int(self.item_bytes, 1, f"{where} item_bytes")
        _need_int(self.item_stride, 1, f"{where} item_stride")
        _need_int(self.items, 1, f"{where} items")
        _need(
            self.items == 1 or self.item_bytes <= self.item_stride,
            where,
            f"items of {self.item_bytes} bytes overlap at a stride of {self.item_stride}.",
        )
        _need_int(self.end, 0, f"{where} end")

    @property
    def on_host(self) -> bool:
        """Whether the host reads and writes it directly."""
        return self.memory == HOST

    @property
    def end(self) -> int:
        """The pointer after the last item."""
        return self.base + (self.items - 1) * self.item_stride + self.item_bytes


_Numbers = TypeVar("_Numbers", int, "npt.NDArray[np.int64]")


@dataclass(frozen=True, slots=True)
class Interleave:
    """What rank `rank` of `ranks` holds of consecutive numbers (positions, or entries): every
    `ranks`-th stretch of `size`, so number x if `x // size % ranks == rank`.

    The numbers that it holds are counted densely: its `index` 0, 1, ... are the first, the second.
    """

    size: int
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        _need_int(self.size, 1, "interleave size")
        _need(
            1 <= self.ranks <= MAX_RANKS,
            "interleave ranks",
            f"1 to {MAX_RANKS}, got {self.ranks}.",
        )
        _need(
            0 <= self.rank < self.ranks,
            "interleave rank",
            f"0 to {self.ranks - 1} of {self.ranks} ranks, got {self.rank}.",
        )
        _need(
            self.size * self.ranks <= MAX_ROUND,
            "interleave",
            f"stretches of {self.size} over {self.ranks} ranks: at most 2**40 in all.",
        )

    def number(self, index: _Numbers) -> _Numbers:
        """The number at an index."""
        return (index // self.size * self.ranks + self.rank) * self.size + index % self.size

    def index(self, number: _Numbers) -> _Numbers:
        """The index of a number that this rank holds."""
        return number // (self.size * self.ranks) * self.size + number % self.size

    def below(self, number: int) -> int:
        """How many numbers below `number` this rank holds."""
        rounds, rest = divmod(number, self.size * self.ranks)
        return rounds * self.size + min(max(rest - self.rank * self.size, 0), self.size)

    def part(self, numbers: range) -> range:
        """Indices of those of consecutive numbers that this rank holds."""
        return range(self.below(numbers.start), self.below(numbers.stop))


EVERY = Interleave(MAX_ROUND, 0, 1)
"""One rank holds all, in one stretch."""


@dataclass(frozen=True, slots=True)
class Space:
    """Which list of ids addresses a buffer's items, and which positions an item holds.

    - `paged`: position p is entry `p // tokens_per_entry`, found in item `ids[entry //
      entries_per_item]`
    - `slot`: one item per request, no entries
    - `ring`: one item per request; entry e is at step `e % entries_per_item`

    Slots and rings belong to one request and change as it grows: they are transferred whole, with
    its last position. `window`: of n entries those from `n // window_step * window_step - window`
    are alive (None: all). The first `reserved` items are padding. `ids`: the space whose id list
    this one shares (None: it has its own).

    `block_pool`: the pool of blocks that the ids come from (None: ids of its own). A block is in
    use by one of the pool's id lists at a time, so their buffers may lie over one another, block
    over block. Block b is items `b * items_per_block` to `(b + 1) * items_per_block - 1` of an id
    list.

    `interleave`: the positions of which this rank holds the entries, where ranks share them out
    (context parallelism; paged spaces only). Its entries are then numbered densely, as those of a
    request that has no others: entry e of this rank is entry `held.number(e)` of the request,
    and lies in item `ids[e // entries_per_item]`. Windows and `RequestAddress.num_tokens` count
    the whole request's. A stretch is a multiple of `tokens_per_entry`, so that each entry is one
    rank's. None: this rank holds them all.

    `ring`: (paged) an item has room for so many of its entries, the last ones that were written:
    entry e is at step `e % ring` of its item. A row may change until its window closes, so entries
    are transferred with the last position of their `window_step`. None: for all.
    """

    name: str
    kind: SpaceKind = "paged"
    entries_per_item: int = 1
    tokens_per_entry: int = 1
    window: int | None = None
    reserved: int = 1
    ids: str | None = None
    window_step: int = 1
    block_pool: str | None = None
    interleave: Interleave | None = None
    items_per_block: int = 1
    ring: int | None = None

    def __post_init__(self) -> None:
        _need_name(self.name, "space")
        where = f"space {self.name}"
        kinds = get_args(SpaceKind)
        _need(self.kind in kinds, f"{where} kind", f"one of {', '.join(kinds)}, got {self.kind!r}.")
        _need_int(self.entries_per_item, 1, f"{where} entries_per_item")
        _need_int(self.tokens_per_entry, 1, f"{where} tokens_per_entry")
        _need_int(self.reserved, 0, f"{where} reserved")
        if self.kind == "slot":
            numbers = self.entries_per_item, self.tokens_per_entry, self.window_step
            whole = numbers == (1, 1, 1) and self.window is None
            _need(
                whole,
                where,
                "a slot has no entries: entries_per_item, tokens_per_entry and window_step are 1, "
                "window None.",
            )
        _need_int(self.window_step, 1, f"{where} window_step")
        if self.window is not None:
            _need_int(self.window, 1 if self.window_step == 1 else 0, f"{where} window")
        elif self.window_step != 1:
            _need(False, where, f"a window_step of {self.window_step} needs a window.")
        if self.ids is not None:
            _need_name(self.ids, f"{where} ids")
        if self.block_pool is not None:
            _need_name(self.block_pool, f"{where} block_pool")
            _need(
                self.ids is None,
                where,
                f"its ids are those of space {self.ids}: give that space block_pool "
                f"{self.block_pool!r}, and this one none.",
            )
        _need(
            1 <= self.items_per_block <= MAX_ITEMS_PER_BLOCK,
            f"{where} items_per_block",
            f"1 to {MAX_ITEMS_PER_BLOCK}, got {self.items_per_block}.",
        )
        _need(
            self.items_per_block == 1 or self.block_pool is not None,
            where,
            f"items_per_block {self.items_per_block} without a block_pool. Name the pool (of ids "
            "that are another space's, there), or leave items_per_block out.",
        )
        if self.interleave is not None and self.interleave.ranks == 1:
            object.__setattr__(self, "interleave", None)  # one rank holds all, whatever the size
        if self.interleave is not None:
            _need(
                self.kind == "paged",
                f"{where} interleave",
                f"a {self.kind} is one request's whole state, of which a rank cannot hold some "
                "positions. Only paged spaces are interleaved.",
            )
            _need(
                self.interleave.size % self.tokens_per_entry == 0,
                f"{where} interleave",
                f"stretches of {self.interleave.size} positions would cut entries of "
                f"{self.tokens_per_entry}: a multiple of {self.tokens_per_entry} is needed.",
            )
        if self.ring is not None:
            _need_int(self.ring, 1, f"{where} ring")
            _need(
                self.kind == "paged" and self.interleave is None,
                f"{where} ring",
                "of the entries of a page, which one rank holds all of: leave it out of slots, "
                "rings and interleaved spaces.",
            )
            _need(
                self.entries_per_item % self.ring == self.entries_per_item % self.window_step == 0,
                f"{where} ring",
                f"{self.ring} entries, in steps of {self.window_step}, do not divide an item of "
                f"{self.entries_per_item}.",
            )
        if self.wraps:
            keeps = None if self.window is None else self.window + self.window_step - 1
            _need(
                keeps is not None and keeps <= self.steps,
                where,
                f"window: at most {self.steps - self.window_step + 1} in a ring of "
                f"{self.steps} entries and steps of {self.window_step}, "
                f"got {self.window}.",
            )

    @property
    def per_request(self) -> bool:
        """Whether a request has exactly one item: slots and rings."""
        return self.kind != "paged"

    @property
    def wraps(self) -> bool:
        """Whether entries of an item are overwritten by later ones: rings, of requests or pages."""
        return self.kind == "ring" or self.ring is not None

    @property
    def steps(self) -> int:
        """Entries for which an item has room: entry e is at step `e % steps` of its item."""
        return self.ring or self.entries_per_item

    @property
    def grows(self) -> bool:
        """Whether the items of a request grow with its tokens: pages without a window."""
        return self.kind == "paged" and self.window is None

    @property
    def held(self) -> Interleave:
        """Which entries of a request this rank holds."""
        if self.interleave is None:
            return EVERY
        size = self.interleave.size // self.tokens_per_entry
        return Interleave(size, self.interleave.rank, self.interleave.ranks)

    def alive(self, tokens: int) -> range:
        """Live entries of a request of `tokens` tokens, in this rank's numbers. A slot is one
        entry.
        """
        return self.held.part(self.alive_in_request(tokens))

    def alive_in_request(self, tokens: int) -> range:
        """Live entries of a request of `tokens` tokens on all ranks, in the request's numbers."""
        if self.kind == "slot":
            return range(min(tokens, 1))
        entries = tokens // self.tokens_per_entry
        if self.window is None:
            return range(entries)
        first = entries // self.window_step * self.window_step - self.window
        return range(max(0, first), entries)

    def alive_items(self, tokens: int) -> range:
        """Items with live entries of a request of `tokens` tokens, by number in the request."""
        alive = self.alive(tokens)
        if self.per_request or not alive:
            return range(min(len(alive), 1))
        return range(
            alive.start // self.entries_per_item, (alive.stop - 1) // self.entries_per_item + 1
        )

    @property
    def id_list(self) -> str:
        """Name of the space whose id list this one uses."""
        return self.ids or self.name

    @property
    def tokens_per_item(self) -> int:
        """Positions that one item of a paged space holds."""
        return self.entries_per_item * self.tokens_per_entry

    @property
    def item_span(self) -> int:
        """Positions that lie in items of one number on all ranks together: of a paged space whose
        stretches divide an item, item i of every rank holds positions from `i * item_span` on.
        """
        return self.tokens_per_item * self.held.ranks


@dataclass(frozen=True, slots=True)
class Slab:
    """A contiguous stretch of memory, as engines register it."""

    base: int
    nbytes: int
    memory: str = HOST

    @property
    def on_host(self) -> bool:
        """Whether the host reads and writes it directly."""
        return self.memory == HOST

    @property
    def end(self) -> int:
        """The pointer after the slab."""
        return self.base + self.nbytes
