"""The parts of a layout: axes, regions, buffers, spaces and slabs, each checked by itself.

All types are frozen and validated at construction. Needs numpy and msgspec only.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.layout.dtypes import ITEMSIZE, dtype_name

MAX_INT = (1 << 63) - 1
MAX_NAME = 128
MAX_AXES = 8
MAX_PARTS = 1 << 16
MAX_REASON = 4096
"""Characters of one reason, in an error, a message or the log."""
HOST = "cpu"
"""The memory of the host, as buffers and slabs name it."""
KINDS = ("paged", "slot", "ring")

Key = tuple[str, int, str]


class LayoutError(ValueError):
    """A statement about bytes that cannot be true, or that cannot be read."""


def _need(true: bool, where: str, sentence: str) -> None:
    if not true:
        raise LayoutError(f"{where}: {sentence}")


def _need_name(name: str, where: str) -> None:
    _need(0 < len(name) <= MAX_NAME, where, f"a name of 1 to {MAX_NAME} characters, got {name!r}.")
    _need(name.isprintable(), where, f"a name of printable characters, got {name!r}.")


def _need_int(value: int, low: int, where: str) -> None:
    _need(low <= value <= MAX_INT, where, f"{low} to 2**63-1, got {value}.")


@dataclass(frozen=True, slots=True)
class Axis:
    """`size` steps of `stride` bytes here, of `total` in the model, the first being number `start`.

    `total` 0 means `size`: the axis is whole.
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
            f"steps {self.start} to {self.start + self.size} do not fit in a total of "
            f"{self.total}.",
        )

    @property
    def stop(self) -> int:
        """The first step after those held here."""
        return self.start + self.size


def _axis_order(axis: Axis) -> tuple[int, str]:
    return {"entry": 0, "head": 1}.get(axis.name, 2), axis.name


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of one (owner, layer, role): `width` contiguous bytes at each point of a grid.

    The order of axes carries no meaning (strides do); they are kept as entry, head, then by name.
    """

    owner: str
    layer: int
    role: str
    buffer: str
    offset: int
    dtype: str
    axes: tuple[Axis, ...]
    width: int

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
            f"{self.width} bytes are no whole {self.dtype} ({size}).",
        )
        _need(
            len(self.axes) <= MAX_AXES,
            f"{self}",
            f"{len(self.axes)} axes, at most {MAX_AXES} are supported.",
        )
        names = [axis.name for axis in self.axes]
        _need(len(set(names)) == len(names), f"{self}", f"an axis is named twice in {names}.")
        object.__setattr__(self, "axes", tuple(sorted(self.axes, key=_axis_order)))

    def __str__(self) -> str:
        return f"{self.owner} layer {self.layer} {self.role}"

    @property
    def key(self) -> Key:
        """(owner, layer, role): the only thing by which regions are paired."""
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
        """First byte after the region's last, from the start of its item."""
        return self.offset + sum((a.size - 1) * a.stride for a in self.axes) + self.width

    def axis(self, name: str) -> Axis | None:
        """The axis of that name, or None."""
        return next((axis for axis in self.axes if axis.name == name), None)


@dataclass(frozen=True, slots=True)
class Buffer:
    """`items` items of `item_bytes` bytes, `item_stride` bytes apart, from address `base` of
    `memory`.

    `memory` is `cpu`, `cuda:0`, `npu:3`, or `meta` (sizes without memory; `base` counts from 0).
    Bytes of an item that no region claims are padding.
    """

    name: str
    space: str
    base: int
    item_stride: int
    item_bytes: int
    items: int
    memory: str = HOST

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
        """First address after the last item."""
        return self.base + (self.items - 1) * self.item_stride + self.item_bytes


@dataclass(frozen=True, slots=True)
class Space:
    """Which list of ids addresses a buffer's items, and which positions an item holds.

    - `paged`: position p is entry `p // tokens_per_entry`, found in item `ids[entry //
      entries_per_item]`
    - `slot`: one item a request, no entries
    - `ring`: one item a request; entry e lies at step `e % entries_per_item`

    Slots and rings are a request's own and change as it grows: they are handed over whole, with its
    last position. `window`: of n entries those from `n // window_step * window_step - window` on
    are alive (None: all). The first `reserved` items are padding. `ids` names the space whose id
    list this one shares (None: its own).
    """

    name: str
    kind: str = "paged"
    entries_per_item: int = 1
    tokens_per_entry: int = 1
    window: int | None = None
    reserved: int = 1
    ids: str | None = None
    window_step: int = 1

    def __post_init__(self) -> None:
        _need_name(self.name, "space")
        where = f"space {self.name}"
        _need(self.kind in KINDS, f"{where} kind", f"one of {', '.join(KINDS)}, got {self.kind!r}.")
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
        if self.kind == "ring":
            keeps = None if self.window is None else self.window + self.window_step - 1
            _need(
                keeps is not None and keeps <= self.entries_per_item,
                where,
                f"a ring of {self.entries_per_item} entries cannot keep a window of {self.window} "
                f"alive in steps of {self.window_step}.",
            )

    @property
    def per_request(self) -> bool:
        """Whether a request has one item of its own here."""
        return self.kind != "paged"

    def alive(self, tokens: int) -> range:
        """Entries that are alive once a request has `tokens` tokens. A slot is one entry."""
        if self.kind == "slot":
            return range(min(tokens, 1))
        entries = tokens // self.tokens_per_entry
        if self.window is None:
            return range(entries)
        first = entries // self.window_step * self.window_step - self.window
        return range(max(0, first), entries)

    @property
    def id_list(self) -> str:
        """Name of the space in whose id list this one's items are found."""
        return self.ids or self.name

    @property
    def tokens_per_item(self) -> int:
        """Positions that one item of a paged space holds."""
        return self.entries_per_item * self.tokens_per_entry


@dataclass(frozen=True, slots=True)
class Slab:
    """One stretch of memory: what an engine registers."""

    base: int
    nbytes: int
    memory: str = HOST

    @property
    def on_host(self) -> bool:
        """Whether the host reads and writes it directly."""
        return self.memory == HOST

    @property
    def end(self) -> int:
        """First address after the slab."""
        return self.base + self.nbytes
