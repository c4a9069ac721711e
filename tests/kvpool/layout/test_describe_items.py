"""Tensors whose items look inside as a template says, or as nobody knows, described."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kvpool.describe import describe, describe_buffer, describe_items
from kvpool.item import Cell, Repeat, Seq, Skip, item_regions
from kvpool.layout import Axis, LayoutError, PoolLayout, Region, Space
from kvpool.render.svg import svg
from kvpool.render.text import layout_table
from tests import oracle

ROW = Seq(Cell("latent", 6, "bf16"), Skip(2), Cell("rope", 1, "bf16"))


@given(st.permutations(["entry", "head"]), st.integers(0, 3))
def test_every_element_is_where_a_slice_of_the_tensor_has_it(inner, first):
    """Whatever the strides of the named dims are, and where the tensor begins."""
    order, sizes = ["item", *inner], {"item": 5, "entry": 4, "head": 3}
    raw = torch.arange(first + 5 * 4 * 3 * 8, dtype=torch.int16)
    tensor = raw[first:].view(*(sizes[dim] for dim in order), 8)
    dims = ("item", "head", "entry")
    view = tensor.permute(*(order.index(dim) for dim in dims), 3)
    seen = describe_items(view, dims, ROW, layer=2, shards={"head": (1, 6)})
    layout = PoolLayout(seen.buffers, seen.regions, (Space("kv", "paged", 4),), 3)
    held = oracle.over(layout, raw.numpy().view(np.uint8))
    rows = view.transpose(1, 2).contiguous().view(torch.uint8).numpy()  # [item, entry, head, byte]
    assert np.array_equal(held.views["target", 2, "latent"], rows[..., :12])
    assert np.array_equal(held.views["target", 2, "rope"], rows[..., 14:])
    assert {region.axis("head").start for region in seen.regions} == {1}


def test_items_that_are_contiguous_have_the_regions_of_their_template():
    page = Seq(Repeat("entry", 4, Cell("k", 6, "uint8")), Repeat("entry", 4, Cell("s", 1, "f32")))
    raw = torch.zeros(5, 40, dtype=torch.uint8)
    home = describe_buffer(raw, ("item", "byte"), name="pages")
    seen = describe_items(raw, ("item",), page, layer=0, buffer=home)
    assert seen.regions == tuple(item_regions(page, owner="target", layer=0, buffer="pages"))


@pytest.mark.parametrize(
    ("tensor", "dims", "says"),
    [
        (torch.zeros(5, 4, 7), ("item", "entry"), r"latent\+rope: 28 bytes .* 16 are known"),
        (torch.zeros(5, 4), ("item", "entry"), "name all of a tensor"),
        (torch.zeros(5, 4, 2).transpose(1, 2), ("item",), "are not contiguous"),
        (torch.zeros(5, 4, 4), ("head", "entry"), "one of them 'item'"),
    ],
)
def test_a_tensor_that_does_not_hold_the_item_is_refused(tensor, dims, says):
    with pytest.raises(LayoutError, match=says):
        describe_items(tensor, dims, ROW, layer=0)


def test_a_template_without_a_cell_is_refused():
    with pytest.raises(LayoutError, match=r"draft layer 3: Skip\(nbytes=8\) has no cell"):
        describe_items(torch.zeros(5, 2), ("item",), Skip(8), layer=3, owner="draft")


# items of which nobody knows how they lie inside

PAGED = Space("kv", entries_per_item=16)


def lay(seen, space=PAGED):
    return PoolLayout(seen.buffers, seen.regions, (space,), 9)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_named_dims_are_axes_and_the_rest_is_one_cell(device):
    tensor = torch.zeros(5, 4, 8, 2, 3, dtype=torch.bfloat16, device=device)
    cell, shards = Cell("k", 48, "bf16"), {"head": (2, 4)}
    seen = describe_items(
        tensor[:, :2], ("item", "head"), cell, packing="amx", layer=3, shards=shards
    )
    (region,), (buffer,) = seen.regions, seen.buffers
    axes = (Axis("head", 2, 96, 2, 4),)
    assert region == Region("target", 3, "k", buffer.name, 0, "bfloat16", axes, 96, "amx")
    assert (buffer.item_bytes, buffer.item_stride, buffer.items) == (192, 384, 5)
    lay(seen)


@pytest.mark.parametrize(
    ("dims", "packing", "says"),
    [
        (("item", "head"), "a\nb", "a name of printable characters"),
        (("item", "entry"), "amx", "packing 'amx' and an entry axis"),
    ],
)
def test_what_is_no_packed_item_is_refused(dims, packing, says):
    with pytest.raises(LayoutError, match=says):
        describe_items(torch.zeros(5, 4, 8), dims, Cell("k", 8, "f32"), packing=packing, layer=0)


def test_pictures_and_tables_name_the_packing():
    pages, cell = torch.zeros(5, 4, 32), Cell("k", 32, "f32")
    layout = lay(describe_items(pages, ("item", "head"), cell, packing="amx[red]", layer=0))
    assert "packing amx[red], moved whole" in svg(layout)
    cells = [str(cell) for column in layout_table(layout).columns for cell in column.cells]
    assert any(r"packing amx\[red]" in cell for cell in cells)


def test_a_layout_without_packings_has_no_packed_space():
    plain = lay(describe(torch.zeros(5, 16, 8), ("item", "entry", "dim"), role="k", layer=0))
    assert plain.packed_spaces == {}
    cell = Cell("k", 9, "f32")
    packed = describe_items(torch.zeros(5, 9), ("item",), cell, packing="amx", layer=0)
    assert lay(packed).packed_spaces == {"kv": packed.regions[0]}
