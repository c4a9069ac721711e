"""Layouts of existing tensors whose items have an inside: one that a template says, or an unknown
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvpool.layout.describe import WHOLE, describe, describe_buffer
from kvpool.layout.described import Described
from kvpool.layout.template import Template, item_bytes, item_regions
from kvpool.layout.types import Buffer, LayoutError

if TYPE_CHECKING:
    import torch


def describe_items(
    tensor: torch.Tensor,
    dims: Sequence[str],
    item: Template,
    *,
    layer: int,
    space: str = "kv",
    owner: str = "target",
    shards: Mapping[str, tuple[int, int]] = WHOLE,
    packing: str = "",
    buffer: Buffer | None = None,
    padding: bool = False,
) -> Described:
    """Describes `tensor`, in which a kernel keeps what the template `item` says.

    `dims` name its first dims, with strides of their own: `item`, and axes such as `head` and
    `entry`. The dims behind them are contiguous and hold one `item` each:
    `describe_items(rows, ("item", "entry"), Seq(Cell("latent", 512, "bf16"), Cell("rope", 64,
    "bf16")), layer=0)`. What the template skips is foreign, unless `padding`. `packing` is that of
    all its regions (`describe_opaque`). The other arguments are those of `describe`.

    Raises LayoutError as `describe` does, and where those dims have other bytes than `item`.
    """
    inside = item_regions(item, owner=owner, layer=layer, buffer="?")
    if not inside:
        raise LayoutError(f"{owner} layer {layer}: {item} has no cell. Name what lies inside.")
    roles = "+".join(region.role for region in inside)
    where = f"{owner} layer {layer} {roles}"
    flat = _flat(tensor, dims, where)
    held, known = flat.shape[-1] * flat.element_size(), item_bytes(item)
    if held != known:
        raise LayoutError(f"{where}: {held} bytes behind dims {tuple(dims)}, {known} are known.")
    names = (*dims, "inside")
    name = f"{owner}.{roles}.{layer}"
    home = buffer or describe_buffer(flat, names, name=name, space=space, padding=padding)
    whole = describe(
        flat,
        names,
        role=inside[0].role,
        layer=layer,
        owner=owner,
        cell="inside",
        shards=shards,
        buffer=home,
        padding=padding,
    ).regions[0]
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
    space: str = "kv",
    owner: str = "target",
    shards: Mapping[str, tuple[int, int]] = WHOLE,
    dtype: str | torch.dtype | None = None,
    buffer: Buffer | None = None,
    padding: bool = False,
) -> Described:
    """Describes `tensor`, whose items have a form that kvpool does not know.

    `dims` name its first dims, among them `item` and those that are axes of their own (`head`); the
    dims behind them are the unknown part, contiguous and never split. There is no `entry`: an item
    moves whole, and only between regions of the same `packing`, with items of the same bytes and
    entries. The name must say all that decides where a byte lies: `"cpu-amx.bf16"`. The other
    arguments are those of `describe`.

    Raises LayoutError as `describe` does.
    """
    where = f"{owner} {role if isinstance(role, str) else list(role)}"
    if not packing:
        raise LayoutError(f"{where}: packing '', give the name of what lies inside an item.")
    flat = _flat(tensor, dims, where)
    seen = describe(
        flat,
        (*dims, "inside"),
        role=role,
        layer=layer,
        space=space,
        owner=owner,
        cell="inside",
        shards=shards,
        dtype=dtype,
        buffer=buffer,
        padding=padding,
    )
    return Described(seen.buffers, tuple(replace(r, packing=packing) for r in seen.regions))


def _flat(tensor: torch.Tensor, dims: Sequence[str], where: str) -> torch.Tensor:
    """The tensor with the dims behind `dims` as one."""
    if len(dims) >= tensor.dim():
        raise LayoutError(
            f"{where}: dims {tuple(dims)} name all of a tensor of shape {tuple(tensor.shape)}. "
            "Name only those before what lies inside."
        )
    try:
        return tensor.view((*tensor.shape[: len(dims)], -1))
    except RuntimeError:
        raise LayoutError(
            f"{where}: the dims after {tuple(dims)} are not contiguous (shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()}). Name those that are apart."
        ) from None
