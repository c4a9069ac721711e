"""The parts of a layout: axes, regions, buffers and slabs, each validated by itself, and what is
described with them; spaces are in `kvpool.layout.spaces`. What bounds all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Annotated

from msgspec import Meta

from kvpool.layout.dtypes import ITEMSIZE, dtype_name
from kvpool.layout.text import PRINTABLE, is_printable

MAX_INT = (1 << 63) - 1
MAX_NAME = 128
MAX_AXES = 8
MAX_PARTS = 1 << 16
MAX_REASON = 4096
"""Characters of one reason, in an error, a message or the log."""
SCALE = ".scale"
"""How the role of scales ends, after that of the values that they are of."""
HOST = "cpu"
"""The memory of the host, as buffers and slabs name it."""

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=PRINTABLE)]
"""What messages call something by."""
Key = tuple[str, int, str]


class LayoutError(ValueError):
    """A layout that is inconsistent, malformed or of another version."""


def need_name(name: str, subject: str) -> None:
    if not 0 < len(name) <= MAX_NAME:
        raise LayoutError(f"{subject}: a name of 1 to {MAX_NAME} characters, got {name!r}.")
    if not is_printable(name):
        raise LayoutError(f"{subject}: a name of printable characters, got {name!r}.")


def need_int(value: int, low: int, subject: str, high: int = MAX_INT) -> None:
    """Raises LayoutError unless `low <= value <= high`."""
    if not low <= value <= high:
        most = "2**63-1" if high == MAX_INT else high
        raise LayoutError(f"{subject}: {low} to {most}, got {value}.")


@dataclass(frozen=True, slots=True)
class Axis:
    """A dimension; this rank holds steps `start` to `start + size` of `total`, `stride` bytes
    apart. `total` 0 means `size`: not sharded.

    `Axis("head", 4, 256, start=4, total=8)` is heads 4 to 7 of 8: the second of two ranks.
    """

    name: str
    size: int
    stride: int
    start: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        need_name(self.name, "axis")
        subject = f"axis {self.name}"
        need_int(self.size, 1, f"{subject} size")
        need_int(self.stride, 0, f"{subject} stride")
        need_int(self.start, 0, f"{subject} start")
        if self.total == 0:
            object.__setattr__(self, "total", self.size)
        if self.stop > self.total:
            raise LayoutError(
                f"{subject}: steps {self.start} to {self.stop} exceed the total of {self.total}."
            )

    @property
    def stop(self) -> int:
        """The step after the last one that is held."""
        return self.start + self.size


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of one (owner, layer, role): `width` contiguous bytes at each point of a grid.

    Axes are sorted: entry, head, then by name. Their order has no meaning; their strides do. Keys
    of 16 entries and 8 heads of 128 bf16 have a `width` of 256 and axes of 16 steps of 2,048 bytes
    and 8 of 256: `nbytes` is 16 * 8 * 256 = 32,768.

    With `packing`, how an item lies inside is known by that name only: there is no entry axis
    in any space, and its bytes move whole, between regions of the same packing.
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
        need_name(self.owner, "region owner")
        need_name(self.role, f"{self.owner} layer {self.layer} role")
        need_int(self.layer, 0, f"{self.owner} {self.role} layer")
        need_name(self.buffer, f"{self} buffer")
        need_int(self.offset, 0, f"{self} offset")
        try:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        except ValueError as error:
            raise LayoutError(f"{self}: {error}") from None
        size = ITEMSIZE[self.dtype]
        need_int(self.width, 1, f"{self} width")
        if self.width % size:
            raise LayoutError(
                f"{self} width: {self.width} bytes are not a multiple of {self.dtype} ({size})."
            )
        if len(self.axes) > MAX_AXES:
            raise LayoutError(f"{self}: {len(self.axes)} axes, at most {MAX_AXES} are supported.")
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise LayoutError(f"{self}: {names} names an axis twice.")
        if self.packing:
            need_name(self.packing, f"{self} packing")
        if self.packing and "entry" in names:
            raise LayoutError(
                f"{self}: packing {self.packing!r} and an entry axis: of an item whose inside is "
                "unknown no entry can be found. Leave out one of them."
            )
        axes = sorted(self.axes, key=lambda a: ({"entry": 0, "head": 1}.get(a.name, 2), a.name))
        object.__setattr__(self, "axes", tuple(axes))

    def __str__(self) -> str:
        return f"{self.owner} layer {self.layer} {self.role}"

    @property
    def key(self) -> Key:
        """(owner, layer, role), by which regions of two layouts are matched."""
        return self.owner, self.layer, self.role

    @property
    def nbytes(self) -> int:
        """Bytes of this region in one item."""
        return self.width * prod(axis.size for axis in self.axes)

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
        """The axis of that name, if there is one."""
        return next((axis for axis in self.axes if axis.name == name), None)


@dataclass(frozen=True, slots=True)
class Buffer:
    """`items` items of `item_bytes` bytes, `item_stride` bytes apart, from pointer `base`.

    `memory` is `cpu`, `cuda:0`, `npu:3`, or `meta` (no memory; `base` counts from 0). Bytes of an
    item that no region claims are foreign: a transfer neither reads nor writes them. With
    `padding` the memory's owner says that nothing else uses them: they may travel along.

    Item n begins at `base + n * item_stride`. 3 items of 4,000 bytes every 4,096 from 1,000 on end
    at 1,000 + 2 * 4,096 + 4,000 = 13,192.
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
        need_name(self.name, "buffer")
        subject = f"buffer {self.name}"
        need_name(self.space, f"{subject} space")
        need_name(self.memory, f"{subject} memory")
        for field, low in (("base", 0), ("item_bytes", 1), ("item_stride", 1), ("items", 1)):
            need_int(getattr(self, field), low, f"{subject} {field}")
        if self.items > 1 and self.item_bytes > self.item_stride:
            raise LayoutError(
                f"{subject}: items of {self.item_bytes} bytes overlap at a stride of "
                f"{self.item_stride}."
            )
        need_int(self.end, 0, f"{subject} end")

    @property
    def on_host(self) -> bool:
        """Whether the CPU can address it."""
        return self.memory == HOST

    @property
    def end(self) -> int:
        """The pointer after the last item."""
        return self.base + (self.items - 1) * self.item_stride + self.item_bytes


@dataclass(frozen=True, slots=True)
class Slab:
    """A contiguous stretch of memory, as engines register it."""

    base: int
    nbytes: int
    memory: str = HOST

    @property
    def on_host(self) -> bool:
        """Whether the CPU can address it."""
        return self.memory == HOST

    @property
    def end(self) -> int:
        """The pointer after the slab."""
        return self.base + self.nbytes


@dataclass(frozen=True, slots=True)
class Described:
    """Buffers and the regions that lie in them."""

    buffers: tuple[Buffer, ...]
    regions: tuple[Region, ...]

    @staticmethod
    def join(described: Iterable[Described]) -> Described:
        """All regions, and all buffers once: that of `describe_buffer` comes with each slice.

        Raises TypeError for what is no description, LayoutError where a state is described twice or
        two buffers have one name.
        """
        buffers: dict[str, Buffer] = {}
        regions: dict[Key, Region] = {}
        for number, part in enumerate(described):
            if not isinstance(part, Described):
                raise TypeError(
                    f"argument {number}: what describe(...) returned, got {type(part).__name__}."
                )
            for region in part.regions:
                first = regions.setdefault(region.key, region)
                if first is not region:
                    raise LayoutError(
                        f"{region}: described twice, in buffers {first.buffer} and "
                        f"{region.buffer}. Give each state its layer, role and owner "
                        "(owner='draft' for a draft model)."
                    )
            for buffer in part.buffers:
                twin = buffers.setdefault(buffer.name, buffer)
                if twin != buffer:
                    raise LayoutError(
                        f"buffer {buffer.name}: two of this name, at {twin.base:#x} in space "
                        f"{twin.space} and at {buffer.base:#x} in space {buffer.space}. Give "
                        "describe_buffer another name for each."
                    )
        return Described(tuple(buffers.values()), tuple(regions.values()))
