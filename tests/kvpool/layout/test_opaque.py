"""Tensors of whose items nobody knows how they lie inside, described."""

from __future__ import annotations

import pytest
import torch

from kvpool.describe import describe, describe_opaque
from kvpool.layout import Axis, LayoutError, PoolLayout, Region, Space
from kvpool.render.svg import svg
from kvpool.render.text import layout_table

PAGED = Space("kv", entries_per_item=16)


def lay(seen, space=PAGED):
    return PoolLayout(seen.buffers, seen.regions, (space,), 9)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_named_dims_are_axes_and_the_rest_is_one_cell(device):
    tensor = torch.zeros(5, 4, 8, 2, 3, dtype=torch.bfloat16, device=device)
    seen = describe_opaque(
        tensor[:, :2], ("item", "head"), packing="amx", role="k", layer=3, shards={"head": (2, 4)}
    )
    (region,), (buffer,) = seen.regions, seen.buffers
    axes = (Axis("head", 2, 96, 2, 4),)
    assert region == Region("target", 3, "k", buffer.name, 0, "bfloat16", axes, 96, "amx")
    assert (buffer.item_bytes, buffer.item_stride, buffer.items) == (192, 384, 5)
    lay(seen)


@pytest.mark.parametrize(
    ("tensor", "dims", "packing", "says"),
    [
        (torch.zeros(5, 4, 8), ("item", "head"), "", "target k: packing '', give the name"),
        (torch.zeros(5, 4, 8), ("item", "head"), "a\nb", "a name of printable characters"),
        (torch.zeros(5, 8), ("item", "head"), "amx", r"dims \('item', 'head'\) name all of a"),
        (torch.zeros(5, 8), ("head",), "amx", "one of them 'item'"),
        (torch.zeros(5, 8, 4).transpose(1, 2), ("item",), "amx", "are not contiguous"),
        (torch.zeros(5, 4, 8), ("item", "entry"), "amx", "packing 'amx' and an entry axis"),
    ],
)
def test_what_is_no_packed_item_is_refused(tensor, dims, packing, says):
    with pytest.raises(LayoutError, match=says):
        describe_opaque(tensor, dims, packing=packing, role="k", layer=0)


def test_pictures_and_tables_name_the_packing():
    seen = describe_opaque(
        torch.zeros(5, 4, 32), ("item", "head"), packing="amx[red]", role="k", layer=0
    )
    layout = lay(seen)
    assert "packing amx[red], moved whole" in svg(layout)
    cells = [str(cell) for column in layout_table(layout).columns for cell in column.cells]
    assert any(r"packing amx\[red]" in cell for cell in cells)


def test_a_layout_without_packings_has_no_packed_space():
    plain = lay(describe(torch.zeros(5, 16, 8), ("item", "entry", "dim"), role="k", layer=0))
    assert plain.packed_spaces == {}
    packed = describe_opaque(torch.zeros(5, 9), ("item",), packing="amx", role="k", layer=0)
    assert lay(packed).packed_spaces == {"kv": packed.regions[0]}
