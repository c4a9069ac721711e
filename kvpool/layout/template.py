"""Item templates: five constructors from which sizes, offsets and regions are derived.

    Repeat("entry", 64, Seq(Cell("latent", 512, "bf16"), Cell("rope", 64, "bf16")))

is a page of 64 MLA rows of 1,152 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Union

from kvpool.layout.dtypes import ITEMSIZE, dtype_name
from kvpool.layout.types import Axis, LayoutError, Region


@dataclass(frozen=True, slots=True)
class Cell:
    """`count` contiguous elements of `dtype`, of role `role`."""

    role: str
    count: int
    dtype: str

    def __post_init__(self) -> None:
        _positive(self.count, f"cell {self.role} count")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))


@dataclass(frozen=True, slots=True)
class Skip:
    """`nbytes` bytes of padding."""

    nbytes: int

    def __post_init__(self) -> None:
        _positive(self.nbytes, "skip nbytes")


@dataclass(frozen=True, slots=True, init=False)
class Seq:
    """Parts one after the other."""

    parts: tuple[Template, ...]

    def __init__(self, *parts: Template) -> None:
        if not parts:
            raise LayoutError("seq: at least one part.")
        object.__setattr__(self, "parts", parts)


@dataclass(frozen=True, slots=True)
class Repeat:
    """`of`, `size` times: steps `start` to `start + size` of an axis of `total` (0: `size`)."""

    axis: str
    size: int
    of: Template
    start: int = 0
    total: int = 0

    def __post_init__(self) -> None:
        Axis(
            name=self.axis, size=self.size, stride=0, start=self.start, total=self.total
        )  # validates
        if self.total == 0:
            object.__setattr__(self, "total", self.size)


@dataclass(frozen=True, slots=True)
class Pad:
    """`of`, rounded up to a multiple of `multiple` bytes."""

    multiple: int
    of: Template

    def __post_init__(self) -> None:
        _positive(self.multiple, "pad multiple")


Template = Union[Cell, Skip, Seq, Repeat, Pad]


def _positive(value: int, subject: str) -> None:
    if value < 1:
        raise LayoutError(f"{subject}: 1 or more, got {value}.")


def item_bytes(template: Template) -> int:
    match template:
        case Cell():
            return template.count * ITEMSIZE[template.dtype]
        case Skip():
            return template.nbytes
        case Seq():
            return sum(item_bytes(part) for part in template.parts)
        case Repeat():
            return template.size * item_bytes(template.of)
        case Pad():
            return -(-item_bytes(template.of) // template.multiple) * template.multiple


def item_regions(template: Template, *, owner: str, layer: int, buffer: str) -> list[Region]:
    """The regions of one layer whose items look like `template`, in order of their offsets."""
    return [
        Region(
            owner=owner,
            layer=layer,
            role=cell.role,
            buffer=buffer,
            offset=offset,
            dtype=cell.dtype,
            axes=axes,
            width=item_bytes(cell),
        )
        for cell, offset, axes in _cells(template, 0, ())
    ]


def prefixed(template: Template, prefix: str) -> Template:
    """The same item with `prefix` before every role."""
    match template:
        case Cell():
            return replace(template, role=prefix + template.role)
        case Skip():
            return template
        case Seq():
            return Seq(*(prefixed(part, prefix) for part in template.parts))
        case Repeat() | Pad():
            return replace(template, of=prefixed(template.of, prefix))


def alignment(template: Template) -> int:
    """Bytes to which an item must be aligned: the largest element of its cells."""
    return max((ITEMSIZE[cell.dtype] for cell, _, _ in _cells(template, 0, ())), default=1)


def _cells(
    template: Template, offset: int, axes: tuple[Axis, ...]
) -> Iterator[tuple[Cell, int, tuple[Axis, ...]]]:
    match template:
        case Cell():
            yield template, offset, axes
        case Seq():
            for part in template.parts:
                yield from _cells(part, offset, axes)
                offset += item_bytes(part)
        case Repeat(name, size, of, start, total):
            axis = Axis(name=name, size=size, stride=item_bytes(of), start=start, total=total)
            yield from _cells(of, offset, (*axes, axis))
        case Pad():
            yield from _cells(template.of, offset, axes)
