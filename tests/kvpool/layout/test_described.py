"""`PoolLayout.of`: several descriptions become one layout."""

from __future__ import annotations

import pytest
import torch

from kvpool.describe import Described, describe, describe_buffer
from kvpool.layout import LayoutError, PoolLayout, Space

DIMS = ("item", "entry", "dim")
PAGES = Space("kv", entries_per_item=4)
KEPT = []


def rows(role="latent", layer=0, width=6, **options):
    tensor = torch.zeros(5, 4, width)
    # a tensor that is freed may give its address to the next one, and the two would overlap
    KEPT.append(tensor)
    return tensor, describe(tensor, DIMS, role=role, layer=layer, **options)


def test_descriptions_are_one_layout_that_points_at_every_tensor():
    (k, seen_k), (v, seen_v), (state, seen) = (
        rows("k"),
        rows("v", width=8),
        rows("k", 1, space="window"),
    )
    spaces = [PAGES, Space("window", entries_per_item=4, window=4)]
    layout = PoolLayout.of(seen_k, seen_v, seen, spaces=spaces, model="tiny")
    places = {region.key: layout.buffer_of(region) for region in layout.regions}
    assert {key: home.base for key, home in places.items()} == {
        ("target", 0, "k"): k.data_ptr(),
        ("target", 0, "v"): v.data_ptr(),
        ("target", 1, "k"): state.data_ptr(),
    }
    assert places["target", 1, "k"].space == "window"
    assert (layout.total_kv_layers, layout.model, layout.spaces) == (2, "tiny", tuple(spaces))


def test_slices_of_one_buffer_bring_it_once():
    tensor = torch.zeros(5, 4, 9)
    home = describe_buffer(tensor, DIMS, name="rows")
    parts = [
        describe(part, DIMS, role=role, layer=0, buffer=home)
        for role, part in (("latent", tensor[..., :6]), ("rope", tensor[..., 6:]))
    ]
    layout = PoolLayout.of(*parts, spaces=[PAGES])
    assert layout.buffers == (home,)
    assert [region.offset for region in layout.regions] == [0, 24]


@pytest.mark.parametrize(
    ("layers", "owner", "given", "total"),
    [((0, 1), "target", None, 2), ((3, 4), "target", 9, 9), ((0,), "draft", 61, 61)],
)
def test_layers_of_the_model_are_counted_or_given(layers, owner, given, total):
    parts = [rows(layer=layer, owner=owner)[1] for layer in layers]
    layout = PoolLayout.of(*parts, spaces=[PAGES], total_kv_layers=given)
    assert layout.total_kv_layers == total


@pytest.mark.parametrize("given", [{"target": 2}, "2", 2.5, [1], True])
def test_layers_of_the_model_are_one_number(given):
    with pytest.raises(LayoutError, match=r"target total_kv_layers: .* one whole number, got"):
        PoolLayout.of(rows()[1], spaces=[PAGES], total_kv_layers=given)


HOMES = [
    describe_buffer(tensor, DIMS, name="same", space=space)
    for tensor, space in zip(torch.zeros(2, 5, 4, 6), ("kv", "state"))
]
WRONG = {
    "a state twice": (
        lambda: [rows()[1], rows()[1]],
        {},
        r"target layer 0 latent: described twice, in buffers target.latent.0 and target.latent.0. "
        r"Give each state its layer, role and owner \(owner='draft' for a draft model\)",
    ),
    "two buffers of a name": (
        lambda: [Described((home,), ()) for home in HOMES],
        {},
        r"buffer same: two of this name, at 0x[0-9a-f]+ in space kv and at 0x[0-9a-f]+ in space "
        r"state. Give describe_buffer another name for each",
    ),
    "a space that is not said": (
        lambda: [rows(space="window")[1]],
        {},
        r"buffer target.latent.0: space 'window' is not declared \(declared: kv\)",
    ),
    "a stage alone": (
        lambda: [rows(layer=3)[1]],
        {},
        "target total_kv_layers: not given, and layers 3 alone do not say how many the target "
        "model has. Give total_kv_layers",
    ),
    "a draft alone": (lambda: [rows(owner="draft")[1]], {}, "draft total_kv_layers: not given"),
    "fewer layers than there are": (
        lambda: [rows(layer=3)[1]],
        {"total_kv_layers": 3},
        "target total_kv_layers: 3, but layer 3 is there",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_refused_by_name(name):
    parts, options, reason = WRONG[name]
    with pytest.raises(LayoutError, match=reason):
        PoolLayout.of(*parts(), spaces=[PAGES], **options)


def test_a_tensor_that_was_not_described_is_refused():
    with pytest.raises(TypeError, match=r"argument 1: what describe\(...\) returned, got Tensor"):
        PoolLayout.of(rows()[1], torch.zeros(5, 4, 6), spaces=[PAGES])
