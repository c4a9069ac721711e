"""Tensors whose items look inside as a template says, described."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kvpool.describe import describe_buffer, describe_items
from kvpool.item import Cell, Repeat, Seq, Skip, item_regions
from kvpool.layout import LayoutError, PoolLayout, Space
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
