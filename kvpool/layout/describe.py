"""Layouts of existing memory: buffers and regions from a torch tensor, or a pointer, shape and
strides, and the names of the dims.

Nothing is copied or allocated. This is the only place that reads strides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from typing_extensions import Unpack

from kvpool.layout.dtypes import ITEMSIZE, dtype_name
from kvpool.layout.template import Template, item_bytes, item_regions
from kvpool.layout.text import ranges
from kvpool.layout.types import HOST, Axis, Buffer, Described, LayoutError, Region

if TYPE_CHECKING:
    import torch

NOT_INNER = ("item", "layer", "role")
"""Dims that lie outside an item, or say which region it is."""
Dims = Sequence[str]
"""A name for each dimension of a tensor, in order."""
Shards = Mapping[str, tuple[int, int]]
"""(start, total) of sharded axes, by name."""


class DescribeOptions(TypedDict, total=False):
    """The options of RegionOptions that all `describe_*` take."""

    space: str
    owner: str
    shards: Shards
    buffer: Buffer | None
    padding: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOptions:
    """What the regions of one tensor have in common."""

    space: str = "kv"
    owner: str = "target"
    shards: Shards = field(default_factory=dict)
    buffer: Buffer | None = None
    """From `describe_buffer`: several slices of one tensor become regions of one buffer."""
    padding: bool = False
    """Bytes between the described ones are foreign: transfers neither read nor write them. Where
    the caller owns the whole tensor and nothing uses them, this lets them travel with their
    neighbours, which makes runs longer.
    """
    cell: str | None = "dim"
    dtype: str | torch.dtype | None = None


def describe(
    tensor: torch.Tensor,
    dims: Dims,
    *,
    role: str | Sequence[str],
    layer: int | Sequence[int],
    cell: str | None = "dim",
    dtype: str | torch.dtype | None = None,
    **options: Unpack[DescribeOptions],
) -> Described:
    """Describes `tensor`, one name in `dims` for each of its dimensions.

    - `item`: what one id addresses (required)
    - `layer`, `role`: stacked layers or roles (K and V in one tensor); the arguments `layer` and
      `role` name them in order
    - `cell`: the dim whose elements are contiguous and not sharded (None: each element is a cell)
    - any other name is an axis; `entry` follows positions

    `dtype` is that of the bytes of a uint8 tensor. `options` of all `describe_*`: `space` ("kv"),
    `owner` ("target"), `shards` ((first, total) of this rank's steps, by axis), `buffer` (from
    `describe_buffer`, for slices of one tensor), `padding` (nothing uses the bytes between).

    Raises LayoutError where names, strides and buffer do not fit together.
    """
    array = array_of(tensor, dims)
    return describe_array(array, role, layer, RegionOptions(cell=cell, dtype=dtype, **options))


def describe_pointers(
    ptr: int,
    shape: Sequence[int],
    strides: Sequence[int] | None,
    dtype: str | torch.dtype,
    dims: Dims,
    *,
    role: str | Sequence[str],
    layer: int | Sequence[int],
    memory: str = HOST,
    cell: str | None = "dim",
    **options: Unpack[DescribeOptions],
) -> Described:
    """Describes memory by its pointer alone, as `describe` does a tensor: `shape`
    elements of `dtype`, `strides` elements apart (None: contiguous), in `memory` (`"cuda:0"`).

    Nothing is read: the caller says what is there. Raises LayoutError as `describe` does, and where
    `shape` and `strides` are not of the same dims.
    """
    if strides is None:
        strides = [prod(shape[number + 1 :]) for number in range(len(shape))]
    if len(strides) != len(shape) or min((*shape, *strides, ptr), default=0) < 0:
        raise LayoutError(
            f"pointer {ptr}, shape {tuple(shape)}, strides {tuple(strides)}: as many strides as "
            "dims, and none of these numbers negative."
        )
    sizes, steps = _by_dim(dims, tuple(shape), strides, dtype)
    array = Array(pointer=ptr, sizes=sizes, strides=steps, dtype=dtype, memory=memory)
    return describe_array(array, role, layer, RegionOptions(cell=cell, **options))


def describe_items(
    tensor: torch.Tensor,
    dims: Dims,
    item: Template,
    *,
    layer: int,
    packing: str = "",
    **options: Unpack[DescribeOptions],
) -> Described:
    """Describes `tensor`, in which a kernel keeps what the template `item` says.

    `dims` name its first dims, with strides of their own: `item`, and axes such as `head` and
    `entry`. The dims behind them are contiguous and hold one `item` each:
    `describe_items(rows, ("item", "entry"), Seq(Cell("latent", 512, "bf16"), Cell("rope", 64,
    "bf16")), layer=0)`. What the template skips is foreign, unless `padding`. The other arguments
    are those of `describe`.

    `packing`: the name of a form that kvpool does not know. There is no `entry` then: an item moves
    whole, and only between regions of the same packing, with items of the same bytes and entries.
    The name must say all that decides where a byte lies: `"cpu-amx.bf16"`.

    Raises LayoutError as `describe` does, and where those dims have other bytes than `item`.
    """
    shared = RegionOptions(cell="inside", **options)
    inside = item_regions(item, owner=shared.owner, layer=layer, buffer="?")
    if not inside:
        raise LayoutError(f"{shared.owner} layer {layer}: {item} has no cell. Name what is inside.")
    roles = "+".join(region.role for region in inside)
    subject = f"{shared.owner} layer {layer} {roles}"
    flat = _flat(tensor, dims, subject)
    size, nbytes = flat.shape[-1] * flat.element_size(), item_bytes(item)
    if size != nbytes:
        raise LayoutError(f"{subject}: {size} bytes behind dims {tuple(dims)}, {nbytes} are known.")
    described = describe_array(array_of(flat, (*dims, "inside")), roles, layer, shared)
    (whole,) = described.regions
    regions = []
    for region in inside:
        offset, axes = whole.offset + region.offset, (*whole.axes, *region.axes)
        placed = replace(region, buffer=whole.buffer, offset=offset, axes=axes, packing=packing)
        regions.append(placed)
    return Described(described.buffers, tuple(regions))


def describe_buffer(
    tensor: torch.Tensor, dims: Dims, *, name: str, space: str = "kv", padding: bool = False
) -> Buffer:
    """The buffer whose items are all dims of `tensor` but `item`; its slices can be regions.
    `padding`: nothing uses bytes outside the regions; see RegionOptions.
    """
    array = array_of(tensor, dims)
    inner = sum((array.sizes[dim] - 1) * array.strides[dim] for dim in dims if dim != "item")
    options = RegionOptions(space=space, padding=padding)
    return _buffer(array, name, array.pointer, inner + array.itemsize, options)


class Array(NamedTuple):
    """What is read of a tensor. `sizes` and `strides`, in bytes, are by the names of its dims."""

    pointer: int
    sizes: Mapping[str, int]
    strides: Mapping[str, int]
    dtype: str | torch.dtype
    memory: str

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[dtype_name(self.dtype)]


def array_of(tensor: torch.Tensor, dims: Dims) -> Array:
    """What is read of a tensor whose dims have these names. Raises TypeError for what is none."""
    if not hasattr(tensor, "data_ptr"):
        raise TypeError(
            f"a tensor: a torch.Tensor, got {type(tensor).__name__}. Other memory is described by "
            "its pointer: describe_pointers."
        )
    if tensor.device.type == "meta":  # no memory: counts from the start of its storage
        pointer = int(tensor.storage_offset()) * tensor.element_size()
    else:
        pointer = tensor.data_ptr()
    sizes, strides = _by_dim(dims, tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return Array(
        pointer=pointer, sizes=sizes, strides=strides, dtype=tensor.dtype, memory=str(tensor.device)
    )


def describe_array(
    array: Array, role: str | Sequence[str], layer: int | Sequence[int], options: RegionOptions
) -> Described:
    """As `describe`, of memory whose strides were read."""
    sizes, strides, owner = array.sizes, array.strides, options.owner
    roles = [role] if isinstance(role, str) else list(role)
    layers = [layer] if isinstance(layer, int) else list(layer)
    subject = f"{owner} layer{'s' * (len(layers) > 1)} {ranges(layers)} {', '.join(roles)}"
    for dim, named in (("layer", len(layers)), ("role", len(roles))):
        if named != sizes.get(dim, 1):
            holds = f"holds {sizes[dim]}" if dim in sizes else "has no such dim"
            raise LayoutError(f"{subject}: {named} of {dim} named, but the tensor {holds}.")
    if options.buffer is not None and options.padding and not options.buffer.padding:
        raise LayoutError(
            f"{subject}: padding=True, but buffer {options.buffer.name} has padding=False. "
            "Give describe_buffer padding=True."
        )
    meaning = dtype_name(array.dtype if options.dtype is None else options.dtype)
    width, axes = _grid(array, options, subject)
    if width % ITEMSIZE[meaning]:
        raise LayoutError(f"{subject}: a cell of {width} bytes is no multiple of {meaning}.")
    inner = sum((axis.size - 1) * axis.stride for axis in axes) + width
    # roles whose entries interleave are regions of one buffer
    shared = len(roles) > 1 and strides["role"] < inner
    reach = inner + (len(roles) - 1) * strides["role"] if shared else inner
    buffers: dict[str, Buffer] = {}
    regions = []
    for number, layer_id in enumerate(layers):
        first = array.pointer + number * strides.get("layer", 0)
        for index, name in enumerate(roles):
            start = first + index * strides.get("role", 0)
            home_name = f"{owner}.{'+'.join(roles) if shared else name}.{layer_id}"
            home_start = first if shared else start
            home = options.buffer or _buffer(array, home_name, home_start, reach, options)
            buffers[home.name] = home
            region = Region(
                owner=owner,
                layer=layer_id,
                role=name,
                buffer=home.name,
                offset=max(start - home.base, 0),  # one that is negative is refused below
                dtype=meaning,
                axes=axes,
                width=width,
            )
            _check_home(region, home, start, array)
            regions.append(region)
    return Described(tuple(buffers.values()), tuple(regions))


def _by_dim(
    dims: Dims, shape: tuple[int, ...], strides: Sequence[int], dtype: str | torch.dtype
) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes and strides in bytes by dim name, of strides in elements."""
    if len(dims) != len(shape):
        raise LayoutError(f"dims {tuple(dims)}: {len(dims)} names for a tensor of shape {shape}.")
    if len(set(dims)) != len(dims) or "item" not in dims:
        raise LayoutError(f"dims {tuple(dims)}: each name once, and one of them 'item'.")
    if 0 in shape:
        raise LayoutError(f"a tensor of shape {shape} is empty.")
    itemsize = ITEMSIZE[dtype_name(dtype)]
    return dict(zip(dims, shape)), {dim: step * itemsize for dim, step in zip(dims, strides)}


def _grid(array: Array, options: RegionOptions, subject: str) -> tuple[int, tuple[Axis, ...]]:
    """The width of a region's cells, and its axes."""
    sizes, strides, cell = array.sizes, array.strides, options.cell
    width = array.itemsize
    if cell is not None:
        if cell not in sizes or cell in NOT_INNER:
            raise LayoutError(
                f"{subject}: cell {cell!r} is no inner dim of {tuple(sizes)}. Name the dim whose "
                "elements are a cell, or cell=None if each element is one."
            )
        if sizes[cell] > 1 and strides[cell] != width:
            raise LayoutError(
                f"{subject}: elements of {cell!r} are {strides[cell]} bytes apart, those of a cell "
                f"must be {width} apart. Make it an axis (cell=None), or describe a tensor in "
                "which it is contiguous."
            )
        width *= sizes[cell]
    dims = [dim for dim in sizes if dim not in (*NOT_INNER, cell)]
    unknown = set(options.shards) - set(dims)
    if unknown:
        raise LayoutError(f"{subject}: shards names {sorted(unknown)}, the axes are {dims}.")
    axes = []
    for dim in dims:
        start, total = options.shards.get(dim, (0, sizes[dim]))
        try:
            axis = Axis(dim, sizes[dim], strides[dim], start=start, total=total)
        except LayoutError as error:
            raise LayoutError(f"{subject}: {error} shards: (first, total) by axis.") from None
        axes.append(axis)
    return width, tuple(axes)


def _buffer(array: Array, name: str, start: int, nbytes: int, options: RegionOptions) -> Buffer:
    items, stride = array.sizes["item"], array.strides["item"]
    return Buffer(
        name=name,
        space=options.space,
        base=start,
        # torch has no meaningful stride for a single item
        item_stride=stride if items > 1 else max(stride, nbytes),
        item_bytes=nbytes,
        items=items,
        memory=array.memory,
        padding=options.padding,
    )


def _check_home(region: Region, home: Buffer, start: int, array: Array) -> None:
    """Refuses a region, from pointer `start` on, that does not lie in item 0 of its buffer."""
    items, stride = array.sizes["item"], array.strides["item"]
    if items != home.items or (items > 1 and stride != home.item_stride):
        raise LayoutError(
            f"{region}: {items} items every {stride} bytes, but buffer {home.name} has "
            f"{home.items} every {home.item_stride}."
        )
    if array.memory != home.memory:
        raise LayoutError(f"{region}: is on {array.memory}, buffer {home.name} on {home.memory}.")
    end = start + region.end - region.offset
    if start < home.base or end > home.base + home.item_bytes:
        raise LayoutError(
            f"{region}: bytes {start} to {end} are outside item 0 of buffer {home.name} "
            f"({home.base} to {home.base + home.item_bytes})."
        )


def _flat(tensor: torch.Tensor, dims: Dims, subject: str) -> torch.Tensor:
    """The tensor with the dims behind `dims` as one."""
    if len(dims) >= tensor.dim():
        raise LayoutError(
            f"{subject}: dims {tuple(dims)} name all of a tensor of shape {tuple(tensor.shape)}. "
            "Name only those before what lies inside."
        )
    try:
        return tensor.view((*tensor.shape[: len(dims)], -1))
    except RuntimeError:
        raise LayoutError(
            f"{subject}: the dims after {tuple(dims)} are not contiguous (shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}). Name those that are apart."
        ) from None
