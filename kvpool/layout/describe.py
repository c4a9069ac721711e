"""Layouts of existing memory: buffers and regions from a torch tensor, or a pointer, shape and
strides, and the names of the dims.

Nothing is copied or allocated. This is the only place that reads strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from kvpool.layout.described import Described
from kvpool.layout.dtypes import ITEMSIZE, dtype_name
from kvpool.layout.types import HOST, Axis, Buffer, LayoutError, Region

if TYPE_CHECKING:
    import torch

WHOLE: Mapping[str, tuple[int, int]] = {}


class _Array(NamedTuple):
    """What is read of a tensor. `strides` are in elements."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str | torch.dtype
    memory: str

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[dtype_name(self.dtype)]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a dim that `describe_sections` cuts: its role, and the sizes of the dims that its
    elements are, outermost first: `{"head": 4, "dim": 128}`. `shards` is (start, total) of those
    that are sharded.
    """

    role: str
    dims: Mapping[str, int]
    shards: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def describe(
    tensor: torch.Tensor,
    dims: Sequence[str],
    *,
    role: str | Sequence[str],
    layer: int | Sequence[int],
    space: str = "kv",
    owner: str = "target",
    cell: str | None = "dim",
    shards: Mapping[str, tuple[int, int]] = WHOLE,
    dtype: str | torch.dtype | None = None,
    buffer: Buffer | None = None,
    padding: bool = False,
) -> Described:
    """Describes `tensor`, one name in `dims` for each of its dimensions.

    - `item`: what one id addresses (required)
    - `layer`, `role`: stacked layers or roles (K and V in one tensor); the arguments `layer` and
      `role` name them in order
    - `cell`: the dim whose elements are contiguous and not sharded (None: each element is a cell)
    - any other name is an axis; `entry` follows positions; `shards` gives (start, total) of sharded
      axes

    `dtype` is that of the bytes of a uint8 tensor. With `buffer` (from `describe_buffer`) several
    slices of one tensor become regions of one buffer.

    Bytes between the described ones are foreign: transfers neither read nor write them. Where the
    caller owns the whole tensor and nobody uses them, `padding=True` lets them travel with their
    neighbours, which makes runs longer.

    Raises LayoutError where names, strides and buffer do not fit together.
    """
    return _describe(
        _array(tensor), dims, role, layer, space, owner, cell, shards, dtype, buffer, padding
    )


def describe_pointers(
    ptr: int,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    dtype: str | torch.dtype,
    dims: Sequence[str],
    *,
    role: str | Sequence[str],
    layer: int | Sequence[int],
    memory: str = HOST,
    space: str = "kv",
    owner: str = "target",
    cell: str | None = "dim",
    shards: Mapping[str, tuple[int, int]] = WHOLE,
    buffer: Buffer | None = None,
    padding: bool = False,
) -> Described:
    """Describes memory of which only a pointer is known, as `describe` does a tensor: `shape`
    elements of `dtype`, `strides` elements apart (None: contiguous), in `memory` (`"cuda:0"`).

    Nothing is read: the caller says what is there. Raises LayoutError as `describe` does, and where
    `shape` and `strides` are not of the same dims.
    """
    if strides is None:
        strides = [prod(shape[at + 1 :]) for at in range(len(shape))]
    if len(strides) != len(shape) or min((*shape, *strides, ptr), default=0) < 0:
        raise LayoutError(
            f"pointer {ptr}, shape {tuple(shape)}, strides {tuple(strides)}: as many strides as "
            "dims, and none of these numbers negative."
        )
    array = _Array(ptr, tuple(shape), tuple(strides), dtype, memory)
    return _describe(array, dims, role, layer, space, owner, cell, shards, None, buffer, padding)


def _describe(
    array: _Array,
    dims: Sequence[str],
    role: str | Sequence[str],
    layer: int | Sequence[int],
    space: str,
    owner: str,
    cell: str | None,
    shards: Mapping[str, tuple[int, int]],
    dtype: str | torch.dtype | None,
    buffer: Buffer | None,
    padding: bool,
) -> Described:
    sizes, strides = _read(array, dims)
    roles = [role] if isinstance(role, str) else list(role)
    layers = [layer] if isinstance(layer, int) else list(layer)
    for dim, named in (("layer", len(layers)), ("role", len(roles))):
        if named != sizes.get(dim, 1):
            held = f"holds {sizes[dim]}" if dim in sizes else "has no such dim"
            raise LayoutError(f"{owner} {roles}: {named} of {dim} named, but the tensor {held}.")
    if buffer is not None and padding and not buffer.padding:
        raise LayoutError(
            f"{owner} {roles}: padding=True, but buffer {buffer.name} has padding=False. Give "
            "describe_buffer padding=True."
        )
    meaning = dtype_name(array.dtype if dtype is None else dtype)
    width, axes = _grid(sizes, strides, cell, shards, array.itemsize, f"{owner} {roles}")
    if width % ITEMSIZE[meaning]:
        raise LayoutError(f"{owner} {roles}: a cell of {width} bytes is no multiple of {meaning}.")
    inner = sum((axis.size - 1) * axis.stride for axis in axes) + width
    # roles whose entries interleave are regions of one buffer
    shared = len(roles) > 1 and strides["role"] < inner
    reach = inner + (len(roles) - 1) * strides["role"] if shared else inner
    buffers: dict[str, Buffer] = {}
    regions = []
    for number, layer_id in enumerate(layers):
        for index, meant in enumerate(roles):
            at = array.pointer + number * strides.get("layer", 0)
            start = at + index * strides.get("role", 0)
            region = Region(owner, layer_id, meant, "?", 0, meaning, axes, width)
            home = buffer
            if home is None:
                name = f"{owner}.{'+'.join(roles) if shared else meant}.{layer_id}"
                first = at if shared else start
                home = _buffer(name, space, first, reach, array, sizes, strides, padding)
                buffers[name] = home
            _check_home(region, home, start, sizes["item"], strides["item"], array.memory)
            regions.append(replace(region, buffer=home.name, offset=start - home.base))
    return Described((buffer,) if buffer else tuple(buffers.values()), tuple(regions))


def describe_sections(
    tensor: torch.Tensor,
    dims: Sequence[str],
    cut: str,
    sections: Sequence[Section],
    *,
    layer: int,
    space: str = "kv",
    owner: str = "target",
    cell: str | None = "dim",
    shards: Mapping[str, tuple[int, int]] = WHOLE,
    dtype: str | torch.dtype | None = None,
    buffer: Buffer | None = None,
    padding: bool = False,
) -> Described:
    """Describes `tensor`, of which the dim `cut` holds several roles one after the other: q, k and
    v of a convolution's channels, each with heads of its own.

    A section's dims take the place of `cut`, and the cell may be one of them. All sections are
    regions of one buffer, `buffer` or one of the whole tensor. The other arguments are those of
    `describe`.

    Raises LayoutError as `describe` does, and where the sections are not all of `cut`.
    """
    sizes, _ = _read(_array(tensor), dims)
    roles = [section.role for section in sections]
    lengths = [prod(section.dims.values()) for section in sections]
    if cut not in sizes or cut in ("item", "layer", "role"):
        raise LayoutError(f"{owner} {roles}: {cut!r} is no inner dim of {tuple(dims)}.")
    if sum(lengths) != sizes[cut] or min(lengths, default=0) < 1:
        parts = ", ".join(f"{role} {length}" for role, length in zip(roles, lengths)) or "none"
        raise LayoutError(
            f"{owner}: {cut} has {sizes[cut]} elements, its sections {sum(lengths)} ({parts}). "
            "Name every section, with its sizes on this rank."
        )
    home = buffer
    if home is None:
        name = f"{owner}.{'+'.join(roles)}.{layer}"
        home = describe_buffer(tensor, dims, name=name, space=space, padding=padding)
    at = list(dims).index(cut)
    regions: list[Region] = []
    for section, part in zip(sections, tensor.split_with_sizes(lengths, at)):
        shape = *part.shape[:at], *section.dims.values(), *part.shape[at + 1 :]
        seen = describe(
            part.view(shape),
            (*dims[:at], *section.dims, *dims[at + 1 :]),
            role=section.role,
            layer=layer,
            space=space,
            owner=owner,
            cell=cell,
            shards={**shards, **section.shards},
            dtype=dtype,
            buffer=home,
            padding=padding,
        )
        regions.extend(seen.regions)
    return Described((home,), tuple(regions))


def describe_buffer(
    tensor: torch.Tensor,
    dims: Sequence[str],
    *,
    name: str,
    space: str = "kv",
    padding: bool = False,
) -> Buffer:
    """The buffer whose items are all dims of `tensor` but `item`; its slices can be regions.
    `padding`: nobody uses what is in no region; see `describe`.
    """
    array = _array(tensor)
    sizes, strides = _read(array, dims)
    inner = sum((sizes[dim] - 1) * strides[dim] for dim in sizes if dim != "item")
    return _buffer(
        name, space, array.pointer, inner + array.itemsize, array, sizes, strides, padding
    )


def _array(tensor: torch.Tensor) -> _Array:
    if tensor.device.type == "meta":  # no memory: counts from the start of its storage
        pointer = int(tensor.storage_offset()) * tensor.element_size()
    else:
        pointer = tensor.data_ptr()
    return _Array(pointer, tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device))


def _read(array: _Array, dims: Sequence[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes and strides in bytes by dim name."""
    if len(dims) != len(array.shape):
        raise LayoutError(
            f"dims {tuple(dims)}: {len(dims)} names for a tensor of shape {array.shape}."
        )
    if len(set(dims)) != len(dims) or "item" not in dims:
        raise LayoutError(f"dims {tuple(dims)}: each name once, and one of them 'item'.")
    if 0 in array.shape:
        raise LayoutError(f"a tensor of shape {array.shape} is empty.")
    size = array.itemsize
    return dict(zip(dims, array.shape)), {
        dim: stride * size for dim, stride in zip(dims, array.strides)
    }


def _grid(
    sizes: Mapping[str, int],
    strides: Mapping[str, int],
    cell: str | None,
    shards: Mapping[str, tuple[int, int]],
    element: int,
    where: str,
) -> tuple[int, tuple[Axis, ...]]:
    width = element
    if cell is not None:
        if cell not in sizes or cell in ("item", "layer", "role"):
            raise LayoutError(
                f"{where}: cell {cell!r} is no inner dim of {tuple(sizes)}. Name the dim whose "
                "elements are a cell, or cell=None if each element is one."
            )
        if sizes[cell] > 1 and strides[cell] != element:
            raise LayoutError(
                f"{where}: elements of {cell!r} are {strides[cell]} bytes apart, those of a cell "
                f"must be {element} apart. Make it an axis (cell=None), or describe a tensor in "
                "which it is contiguous."
            )
        width *= sizes[cell]
    axes = [dim for dim in sizes if dim not in ("item", "layer", "role", cell)]
    unknown = set(shards) - set(axes)
    if unknown:
        raise LayoutError(f"{where}: shards names {sorted(unknown)}, the axes are {axes}.")

    def axis(dim: str) -> Axis:
        start, total = shards.get(dim, (0, sizes[dim]))
        return Axis(dim, sizes[dim], strides[dim], start, total)

    return width, tuple(map(axis, axes))


def _buffer(
    name: str,
    space: str,
    start: int,
    nbytes: int,
    array: _Array,
    sizes: Mapping[str, int],
    strides: Mapping[str, int],
    padding: bool,
) -> Buffer:
    # torch has no meaningful stride for a single item
    stride = strides["item"] if sizes["item"] > 1 else max(strides["item"], nbytes)
    return Buffer(name, space, start, stride, nbytes, sizes["item"], array.memory, padding)


def _check_home(
    region: Region, home: Buffer, start: int, items: int, stride: int, memory: str
) -> None:
    if items != home.items or (items > 1 and stride != home.item_stride):
        raise LayoutError(
            f"{region}: {items} items every {stride} bytes, but buffer {home.name} has "
            f"{home.items} every {home.item_stride}."
        )
    if memory != home.memory:
        raise LayoutError(f"{region}: is on {memory}, buffer {home.name} on {home.memory}.")
    if not 0 <= start - home.base <= home.item_bytes - region.end:
        raise LayoutError(
            f"{region}: bytes {start} to {start + region.end} are outside item 0 of buffer "
            f"{home.name} ({home.base} to {home.base + home.item_bytes})."
        )
