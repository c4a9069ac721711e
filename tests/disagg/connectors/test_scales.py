"""Scales of a whole layer are conventions: equal on both sides, or refused with the layer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from disagg.connectors.scales import LayerScale, scale_conventions
from disagg.connectors.sglang.scales import rank_scales
from disagg.connectors.tensors import UnknownFormat
from disagg.connectors.vllm.registered import module_scales
from disagg.protocol.agreement import differences
from disagg.protocol.messages import checked_conventions
from kvpool.item import Cell, Repeat, Seq, item_bytes, item_regions
from kvpool.layout import Buffer, PoolLayout, Space
from kvpool.layout.formats import fp4_cells, fp8_latent_row, nvfp4_latent_row, scaled
from tests.disagg.connectors.vllm import engines


def layout(*layers):
    """Layers of (owner, number, what a token has)."""
    buffers, regions = [], []
    for owner, number, row in layers:
        page = Repeat("entry", 16, row)
        size, name = item_bytes(page), f"{owner}.{number}"
        base = 4096 * 64 * (1 + len(buffers))
        buffers.append(Buffer(name, "kv", base=base, items=4, item_bytes=size, item_stride=size))
        regions += item_regions(page, owner=owner, layer=number, buffer=name)
    spaces = (Space("kv", entries_per_item=16),)
    return PoolLayout(tuple(buffers), tuple(regions), spaces, 1 + len(layers))


def heads(dtype, prefix=""):
    return Seq(*(Cell(prefix + role, 8, dtype) for role in "kv"))


def scale(role, value, layer=3, owner="target"):
    return LayerScale(owner=owner, layer=layer, role=role, value=value)


FP8 = layout(("target", 3, heads("e4m3")))


def test_a_layer_has_a_convention_for_keys_and_one_for_values():
    said = scale_conventions(FP8, [scale("k", torch.tensor(0.5)), scale("v", 0.25)])
    assert said == {"k_scale of layer 3": 0.5, "v_scale of layer 3": 0.25}
    assert checked_conventions(said) == said


def test_without_a_scale_it_is_1():
    said = {"k_scale of layer 3": 1.0, "v_scale of layer 3": 1.0}
    assert scale_conventions(FP8, [scale("k", None)]) == said
    assert scale_conventions(FP8, []) == said


def test_a_drafts_are_its_own():
    both = layout(("target", 0, heads("e4m3")), ("draft", 0, heads("e4m3")))
    said = scale_conventions(both, [scale("k", 2.0, 0, "draft"), scale("k", 4.0, 0)])
    assert (said["draft.k_scale of layer 0"], said["k_scale of layer 0"]) == (2.0, 4.0)


def test_differing_scales_are_refused_with_layer_role_and_both_values():
    sides = [scale_conventions(FP8, [scale("k", value)]) for value in (0.5, 0.25)]
    (difference,) = differences(*sides)
    assert difference.startswith("k_scale of layer 3: 0.5 on prefill, 0.25 on decode. Run the same")


def test_a_number_of_a_file_is_that_of_a_checkpoint():
    assert scale_conventions(FP8, [scale("k", 0.0123)]) == scale_conventions(
        FP8, [scale("k", torch.tensor([0.0123]))]
    )


@pytest.mark.parametrize(
    ("row", "names"),
    [
        (heads("bf16"), []),
        (heads("e4m3", "swa."), ["k", "v"]),
        (Seq(*scaled("k", 8), *scaled("v", 8)), []),
        (Seq(*fp4_cells("k", 32), *fp4_cells("v", 32)), ["k", "v"]),
        (Seq(*fp4_cells("k", 32, "ue8m0"), *fp4_cells("v", 32, "ue8m0")), []),
        (Seq(fp4_cells("v", 32)[0], Cell("v.scale.tiles", 2, "e4m3")), ["v"]),
        (Seq(Cell("latent", 32, "e4m3"), Cell("rope", 8, "e4m3")), ["k"]),
        (Seq(Cell("swa.latent", 32, "e4m3")), ["k"]),
        (fp8_latent_row(), []),
        (nvfp4_latent_row(), []),
    ],
)
def test_what_has_all_its_scales_in_its_pages_needs_none(row, names):
    said = scale_conventions(layout(("target", 0, row)), [])
    assert [*said] == [f"{name}_scale of layer 0" for name in names]


def test_of_two_modules_over_one_cache_one_has_the_scale():
    """SGLang's MLA: `attn_mqa` has it, `attn_mha` has 1."""
    latents = layout(("target", 3, Cell("latent", 32, "e4m3")))
    for order in ([0.5, 1.0], [1.0, 0.5], [None, 0.5]):
        said = scale_conventions(latents, [scale("k", value) for value in order])
        assert said == {"k_scale of layer 3": 0.5}
    with pytest.raises(UnknownFormat, match=r"target layer 3: modules with k scales of 0.25 and 0"):
        scale_conventions(latents, [scale("k", 0.5), scale("k", 0.25)])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor([0.5, 0.25]), "target layer 3: k scales of 2 heads are not known"),
        (-1.0, "target layer 3: k scales of -1.0: not a positive number"),
        (float("nan"), "k scales of nan"),
    ],
)
def test_what_is_not_one_number_a_layer_is_refused(value, words):
    with pytest.raises(UnknownFormat, match=words):
        scale_conventions(FP8, [scale("k", value)])


def test_what_scales_nothing_is_not_looked_at():
    floats = layout(("target", 3, heads("bf16")))
    assert scale_conventions(floats, [scale("k", -1.0), scale("v", torch.tensor([1.0, 2.0]))]) == {}


def test_heads_of_one_scale_have_that_one():
    said = scale_conventions(FP8, [scale("k", torch.tensor([0.5, 0.5]))])
    assert said["k_scale of layer 3"] == 0.5


def test_vllms_modules_say_theirs_by_name():
    engine = engines.Layers(
        "FLASH_ATTN", 32, dtype=torch.uint8, mode="FP8_PER_TENSOR", kv_cache_dtype="fp8", layers=2
    )
    modules = {
        name: engines.module("FLASH_ATTN", _k_scale=torch.tensor(0.5 + n), _v_scale=None)
        for n, name in enumerate(engine.names)
    }
    said = scale_conventions(engine.layout, module_scales(modules, engine.seen.layers))
    assert said == {
        "k_scale of layer 0": 0.5, "v_scale of layer 0": 1.0,
        "k_scale of layer 1": 1.5, "v_scale of layer 1": 1.0,
    }  # fmt: skip


class Model(torch.nn.Module):
    """Attention modules of (layer, scale of keys)."""

    def __init__(self, *attention):
        super().__init__()
        self.parts = torch.nn.ModuleList()
        for layer, key in attention:
            module = torch.nn.Module()
            module.layer_id, module.k_scale, module.v_scale = layer, key, None
            self.parts.append(module)


def test_sglangs_modules_say_theirs_and_a_drafts_modules_are_numbered_one_after_the_other():
    plain = SimpleNamespace(quant_method=None)
    runners = [
        SimpleNamespace(model=Model(*attention), token_to_kv_pool=plain)
        for attention in ([(2, 0.5), (2, None), (3, 0.25)], [(61, 2.0)], [(0, 4.0)])
    ]
    keys = [
        (said.owner, said.layer, said.value) for said in rank_scales(runners) if said.role == "k"
    ]
    assert keys == [
        ("target", 2, 0.5), ("target", 2, None), ("target", 3, 0.25),
        ("draft", 0, 2.0), ("draft", 1, 4.0),
    ]  # fmt: skip
