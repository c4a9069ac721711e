"""Layouts of existing tensors whose items have an inside: a template's, or an unknown one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from kvpool.layout.describe import array_of, describe_array, home_of
from kvpool.layout.described import Described, DescribeOptions, RegionOptions
from kvpool.layout.template import Template, item_bytes, item_regions
from kvpool.layout.types import LayoutError

if TYPE_CHECKING:
    import torch


def describe_items(
    tensor: torch.Tensor,
    dims: Sequence[str],
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
    "bf16")), layer=0)`. What the template skips is foreign, unless `padding`. `packing` is that of
    all its regions (`describe_opaque`). The other arguments are those of `describe`.

    Raises LayoutError as `describe` does, and where those dims have other bytes than `item`.
    """
    shared = RegionOptions(cell="inside", **options)
    inside = item_regions(item, owner=shared.owner, layer=layer, buffer="?")
    if not inside:
        raise LayoutError(
            f"{shared.owner} layer {layer}: {item} has no cell. Name what lies inside."
        )
    roles = "+".join(region.role for region in inside)
    subject = f"{shared.owner} layer {layer} {roles}"
    flat = _flat(tensor, dims, subject)
    size, expected = flat.shape[-1] * flat.element_size(), item_bytes(item)
    if size != expected:
        raise LayoutError(
            f"{subject}: {size} bytes behind dims {tuple(dims)}, {expected} are known."
        )
    names = (*dims, "inside")
    home = home_of(flat, names, f"{roles}.{layer}", shared)
    array = array_of(flat, names)
    whole = describe_array(array, inside[0].role, layer, replace(shared, buffer=home)).regions[0]
    regions = (
        replace(
            region,
            buffer=home.name,
            offset=whole.offset + region.offset,
            axes=(*whole.axes, *region.axes),
            packing=packing,
        )
        for region in inside
    )
    return Described((home,), tuple(regions))


def describe_opaque(
    tensor: torch.Tensor,
    dims: Sequence[str],
    *,
    packing: str,
    role: str | Sequence[str],
    layer: int | Sequence[int],
    dtype: str | torch.dtype | None = None,
    **options: Unpack[DescribeOptions],
) -> Described:
    """Describes `tensor`, whose items have a form that kvpool does not know.

    `dims` name its first dims, among them `item` and those that are axes of their own (`head`); the
    dims behind them are the unknown part, contiguous and never split. There is no `entry`: an item
    moves whole, and only between regions of the same `packing`, with items of the same bytes and
    entries. The name must say all that decides where a byte lies: `"cpu-amx.bf16"`. The other
    arguments are those of `describe`.

    Raises LayoutError as `describe` does.
    """
    shared = RegionOptions(cell="inside", dtype=dtype, packing=packing, **options)
    subject = f"{shared.owner} {role if isinstance(role, str) else list(role)}"
    if not packing:
        raise LayoutError(f"{subject}: packing '', give the name of what lies inside an item.")
    array = array_of(_flat(tensor, dims, subject), (*dims, "inside"))
    return describe_array(array, role, layer, shared)


def _flat(tensor: torch.Tensor, dims: Sequence[str], subject: str) -> torch.Tensor:
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
