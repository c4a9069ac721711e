"""NSA, SWA, HybridLinear and DSv4 pools: their bytes by hand, what is written comes back, and what
cannot be is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kvpool import (
    MHA,
    MLA,
    Allocator,
    DSv4Pool,
    IndexKey,
    LayeredPool,
    LayoutError,
    LinearState,
    MHAPool,
    Shard,
    State,
    gated_delta_net,
)
from kvpool.item import Cell, Repeat, Seq
from kvpool.layout.formats import Attention
from tests.pools import (
    KDA,
    MAMBA2,
    ROW,
    dsv4,
    every_class,
    every_packing,
    hybrid,
    hybrid_mla,
    hybrid_nsa,
    mha,
    mla,
    nsa,
    swa,
)

LARGE = {"num_pages": 2, "num_window_pages": 2, "num_slots": 2, "device": "meta"}
CONV_LAYOUTS = ("channels_first", "taps_first")
PLACEMENTS = ("layer", "page")


def items(pool, layer=0) -> dict[str, int]:
    """Bytes of an item of a layer's buffers, by what follows the owner in their names."""
    found = {buffer.name: buffer.item_bytes for buffer in pool.layout.buffers}
    return {
        name.removeprefix("target.").removesuffix(f".{layer}"): size
        for name, size in found.items()
        if name.endswith(f".{layer}")
    }


def draw(*shape, dtype=torch.bfloat16, seed=1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# sizes, with the models' own numbers (bytes by hand)


@pytest.mark.parametrize(
    ("packing", "sizes"),
    [
        ("bf16", {"k": 16 * 8 * 192 * 2, "v": 16 * 8 * 128 * 2}),
        (
            "fp8",
            {"k": 16 * 8 * 192, "v": 16 * 8 * 128, "k.scale": 16 * 8 * 4, "v.scale": 16 * 8 * 4},
        ),
        (
            "mxfp8",
            {"k": 16 * 8 * 192, "v": 16 * 8 * 128, "k.scale": 16 * 8 * 6, "v.scale": 16 * 8 * 4},
        ),
    ],
)
@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_a_page_of_16_tokens_of_8_heads(packing, sizes, order):
    given = {"num_kv_heads": 8, "head_dim": 192, "v_head_dim": 128, "order": order}
    assert items(MHAPool(layers=[0], page_size=16, packing=packing, **given, **LARGE)) == sizes


# per buffer of DeepSeek-V4: window pages of 128, token pages of 256 (64 entries of 4, 2 of 128)
V4_SIZES = {
    "fp8": {"swa.latent": 74_880, "c4.latent": 37_440, "c4.index_key": 8_448, "c128.latent": 1_728},
    "bf16": {
        "swa.latent": 131_072,
        "c4.latent": 65_536,
        "c4.index_key": 8_448,
        "c128.latent": 2_048,
    },
}


@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("packing", ["fp8", "bf16"])
def test_a_v4_layer_of_either_ratio(packing, speculation):
    pool = DSv4Pool(
        layers=range(3),
        compress_ratios=(0, 4, 128),
        page_size=256,
        packing=packing,
        speculation=speculation,
        **LARGE,
    )
    rings = 2 if speculation else 1
    expected = {
        **V4_SIZES[packing],
        "c4.state": rings * 8 * 2 * 2 * 512 * 4,
        "c4.index_state": rings * 8 * 2 * 2 * 128 * 4,
        "c128.state": rings * 128 * 2 * 512 * 4,
    }
    assert items(pool, 0) == {"swa.latent": expected["swa.latent"]}
    assert items(pool, 1) == {
        name: size for name, size in expected.items() if not name.startswith("c128")
    }
    assert items(pool, 2) == {
        name: size for name, size in expected.items() if not name.startswith("c4")
    }
    spaces = pool.layout.space_by_name
    assert {
        name: (space.entries_per_item, space.tokens_per_entry, space.id_list)
        for name, space in spaces.items()
    } == {
        "kv": (256, 1, "kv"),
        "swa": (128, 1, "swa"),
        "ring": (1, 1, "ring"),
        "c4": (64, 4, "kv"),
        "c4.ring": (rings * 8, 1, "ring"),
        "c128": (2, 128, "kv"),
        "c128.ring": (rings * 128, 1, "ring"),
    }
    assert list(spaces["c4.ring"].alive(7)) == [0, 1, 2, 3, 4, 5, 6]
    assert list(spaces["c4.ring"].alive(8)) == [4, 5, 6, 7]
    assert list(spaces["c128.ring"].alive(259)) == [256, 257, 258]
    assert spaces["c128.ring"].alive(256) == range(256, 256)


def test_rings_of_pages_share_the_ids_of_the_window():
    """As SGLang addresses them on NVIDIA: row `swa_page * ring + swa_loc % ring`."""
    pool = dsv4(page_rings=True, window_page_size=8)
    ring = pool.layout.space_by_name["c2.ring"]
    assert (ring.id_list, ring.entries_per_item, ring.steps) == ("swa", 8, 4)
    assert pool.view("c2.state", 1).shape[:2] == (11, 4)
    allocator = Allocator(pool)
    allocator.extend(allocator.new_request(), 3)
    where = allocator.extend(allocator.new_request(), 13)
    rows = [loc // 8 * 4 + loc % 4 for loc in where["swa"].tolist()]
    last = [p for p in range(13) if p in range(4, 8) or p in range(9, 13)]  # of each page
    assert where["c2.ring"].tolist() == [rows[p] if p in last else -1 for p in range(13)]


# what every pool holds


@every_packing
def test_placements_differ_in_base_and_stride_only(build):
    one, two = (build(placement=p, device="meta").layout for p in PLACEMENTS)
    assert one.regions == two.regions and one.spaces == two.spaces
    for left, right in zip(
        sorted(one.buffers, key=lambda b: b.name), sorted(two.buffers, key=lambda b: b.name)
    ):
        assert replace(left, base=0, item_stride=1 << 20) == replace(
            right, base=0, item_stride=1 << 20
        )


@every_class
@pytest.mark.parametrize("layers", [[0], [1], [2], [3], [0, 2], [1, 3], [2, 3], [0, 1]])
def test_a_stage_holds_what_the_whole_model_has_in_its_layers(build, layers):
    """Stages without any full, linear or compressed layer among them."""
    whole, stage = build(device="meta"), build(layers=iter(layers), total_kv_layers=4)
    stage.check_integrity()
    assert stage.layout.regions == tuple(r for r in whole.layout.regions if r.layer in layers)
    assert stage.total_kv_layers == 4
    assert (stage.start_layer, stage.end_layer) == (layers[0], layers[-1] + 1)
    used = {buffer.space for buffer in stage.layout.buffers}
    used |= {stage.layout.space_by_name[name].id_list for name in used}
    assert {space.name for space in stage.layout.spaces} == used
    assert all(whole.layout.space_by_name[s.name] == s for s in stage.layout.spaces)


@pytest.mark.parametrize(
    "build", [mha, swa, hybrid, hybrid_mla, hybrid_nsa], ids=["mha", "swa", "gdn", "kda", "mamba2"]
)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("packing", ["bf16", "fp8"])
def test_the_shards_of_a_group_tile_every_sharded_axis(build, size, packing):
    whole = build(packing=packing, device="meta").layout
    held: dict[tuple, list[int]] = {}
    for rank in range(size):
        pool = build(packing=packing, device="meta", shard=Shard(rank, size))
        pool.check_integrity()
        for region in pool.layout.regions:
            assert region.dtype == whole.region_by_key[region.key].dtype
            for axis in region.axes:
                held.setdefault((region.key, axis.name), []).extend(range(axis.start, axis.stop))
    for region in whole.regions:
        for axis in region.axes:
            steps = held[region.key, axis.name]
            copies = size if axis.name != "head" else max(1, size // axis.total)
            assert sorted(steps) == sorted([*range(axis.size)] * copies), (region, axis)


# what is written through the typed accessors comes back; the kit compares bytes by role

LOCATIONS = [9, 30, 11, 4]  # no order, three pages
WIDE_MLA, V4 = mla.but(kv_lora_rank=256), dsv4.but(latent_dim=128, speculation=True)
# pool, layer, part, and the shapes of a token's K and V, or of its latent and rope key
ATTENTION = {
    "mha": (mha.but(head_dim=96, v_head_dim=64), 1, "", (4, 96), (4, 64)),
    "mha hnd": (mha.but(order="hnd", placement="page"), 3, "", (4, 8), (4, 16)),
    "mla": (WIDE_MLA, 3, "", (256,), (8,)),
    "mla without rope": (WIDE_MLA.but(qk_rope_head_dim=0), 3, "", (256,), (0,)),
    "full layer of swa": (swa, 1, "", (4, 8), (4, 16)),
    "window layer of swa": (swa.but(num_window_pages=17), 2, "", (16,), (8,)),
    "full layer of hybrid": (hybrid, 3, "", (4, 8), (4, 16)),
    "full layer of hybrid mla": (hybrid_mla, 3, "", (16,), (8,)),
    "window of v4": (V4, 0, "", (128,), (4,)),
    "entries of v4": (V4, 1, "c2", (128,), (4,)),
    "few entries of v4": (V4.but(num_pages=32), 2, "c8", (128,), (4,)),
}


def dtype_of(packing: str) -> torch.dtype:
    return torch.float32 if packing == "f32" else torch.bfloat16


def assert_same(read: torch.Tensor, written: torch.Tensor, packing: str) -> None:
    """Equal, but for what fp8 rounds."""
    error = {"rtol": 2.0**-3, "atol": 0.05} if packing == "fp8" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(read, written, **error)


@pytest.mark.parametrize("packing", ["bf16", "f32", "fp8"])
@pytest.mark.parametrize("name", ATTENTION)
def test_keys_and_values_or_latents_and_ropes_come_back(name, packing):
    build, layer, part, *shapes = ATTENTION[name]
    pool = build(packing=packing)
    written = [
        draw(4, *shape, dtype=dtype_of(packing), seed=n) for n, shape in enumerate(shapes, 1)
    ]
    pool.set_kv_buffer(layer, LOCATIONS, *written, part=part)
    for read, values in zip(pool.get_kv_buffer(layer, LOCATIONS, part=part), written):
        assert_same(read, values, packing)
    for region in pool.layout.regions:
        if region.layer != layer:
            assert not pool.view(region.role, region.layer).view(torch.uint8).any()


@pytest.mark.parametrize("packing", ["bf16", "f32", "fp8"])
@pytest.mark.parametrize(("build", "layer", "dim"), [(nsa, 3, 16), (hybrid_nsa, 3, 16), (V4, 1, 8)])
def test_index_keys_come_back_in_a_packing_of_their_own(build, layer, dim, packing):
    pool = build(packing="bf16", index_packing=packing)
    keys = draw(4, dim)
    pool.set_index_key(layer, LOCATIONS, keys)
    assert_same(pool.get_index_key(layer, LOCATIONS), keys, packing)


@pytest.mark.parametrize("packing", ["bf16", "f32", "fp8"])
def test_rows_that_an_indexer_pools_are_not_quantised(packing):
    states = {0: (State(ROW), State(IndexKey(16, pooled=True)))}
    pool = LayeredPool(
        states=states, layers=[0], num_pages=9, num_slots=2, page_size=4, packing=packing
    )
    rows = draw(4, 33, dtype=dtype_of(packing))
    pool.set_index_key(0, LOCATIONS, rows)
    assert torch.equal(pool.get_index_key(0, LOCATIONS), rows)


@pytest.mark.parametrize(
    ("error", "call", "says"),
    [
        (KeyError, lambda: nsa().get_index_key(2, [4]), r"layer 2: no IndexKey .* MLA\)"),
        (KeyError, lambda: hybrid().get_kv_buffer(0, [4]), "0: no Attention .* LinearState"),
        (
            KeyError,
            lambda: dsv4().get_kv_buffer(0, [4], part="c2"),
            r"layer 0: no c2.Attention \(the layer has swa.V4Latent\)",
        ),
        (IndexError, lambda: swa().get_kv_buffer(2, [22]), "layer 2 swa.latent: location 22 of 22"),
        (IndexError, lambda: dsv4().get_kv_buffer(2, [9], part="c8"), "location 9 of 9"),
        (
            ValueError,
            lambda: mla(qk_rope_head_dim=0).set_kv_buffer(3, [4], draw(1, 16), draw(1, 8)),
            r"target layer 3 latent: it has no rope key, got .*1, 8",
        ),
    ],
)
def test_what_a_layer_does_not_hold_is_refused(error, call, says):
    with pytest.raises(error, match=says):
        call()


LINEAR = {"gdn": gated_delta_net(2, 4, 3, 5, 4), "kda": KDA, "mamba2": MAMBA2}


@pytest.mark.parametrize("linear", LINEAR.values(), ids=LINEAR.keys())
@pytest.mark.parametrize("conv_layout", CONV_LAYOUTS)
@pytest.mark.parametrize("packing", ["bf16", "fp8"])
def test_linear_states_come_back_and_channels_lie_as_the_taps_say(linear, conv_layout, packing):
    pool = hybrid(linear=replace(linear, conv_layout=conv_layout), packing=packing)
    dtype = dtype_of(packing)
    channels = sum(heads * dim for _, heads, dim in linear.sections)
    conv = draw(2, channels, 3, dtype=dtype)
    temporal = draw(2, 4, *linear.state_shape, dtype=torch.float32, seed=2)
    pool.set_linear_state(1, [3, 1], conv, temporal)
    read = pool.get_linear_state(1, [3, 1])
    assert torch.equal(read[0], conv) and torch.equal(read[1], temporal)
    assert [r.dtype for r in read] == [dtype, torch.float32]
    buffer = pool.layout.buffer_by_name["target.conv.1"]
    stored = pool.item_bytes_view(buffer)[1].view(dtype)  # of the second state
    shape = (channels, 3) if conv_layout == "channels_first" else (3, channels)
    expected = conv[1] if conv_layout == "channels_first" else conv[1].t()
    assert torch.equal(stored.reshape(shape), expected)
    state = pool.item_bytes_view(pool.layout.buffer_by_name["target.temporal.1"])[1]
    assert torch.equal(state.view(torch.float32).reshape(temporal.shape[1:]), temporal[1])
    assert not pool.view("temporal", 0).any() and not pool.view("temporal", 1)[2].any()


@pytest.mark.parametrize("linear", LINEAR.values(), ids=LINEAR.keys())
@pytest.mark.parametrize("conv_layout", CONV_LAYOUTS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_holds_its_heads_of_every_section(linear, conv_layout, size):
    linear = replace(linear, conv_layout=conv_layout)
    temporal = draw(1, 4, *linear.state_shape, dtype=torch.float32)
    sections = {name: draw(1, h, d, 3, seed=h * d) for name, h, d in linear.sections}
    for rank in range(size):
        pool = hybrid(linear=linear, shard=Shard(rank, size))
        parts = []
        for name, heads, _ in linear.sections:
            mine = heads * rank // size
            parts.append(sections[name][:, mine : mine + max(1, heads // size)])
        conv = torch.cat([part.flatten(1, 2) for part in parts], dim=1)
        own = temporal[:, 4 * rank // size : 4 * (rank + 1) // size]
        pool.set_linear_state(0, [2], conv, own)
        for (name, _, _), part in zip(linear.sections, parts):
            assert torch.equal(pool.view(f"conv.{name}", 0)[2, ..., 0], part[0])
        assert torch.equal(pool.get_linear_state(0, [2])[0], conv)
        assert torch.equal(pool.get_linear_state(0, [2])[1], own)


def test_conv_and_temporal_are_written_apart_too_and_none_of_no_slots():
    pool = hybrid()
    conv, temporal = draw(1, 32, 3), draw(1, 4, 3, 5, dtype=torch.float32)
    pool.set_linear_state(0, [2], conv=conv)
    pool.set_linear_state(0, [2], temporal=temporal)
    assert torch.equal(pool.get_linear_state(0, [2])[0], conv)
    assert torch.equal(pool.get_linear_state(0, [2])[1], temporal)
    pool.set_linear_state(0, [], torch.zeros(0, 32, 3).bfloat16(), torch.zeros(0, 4, 3, 5))
    assert [part.shape for part in pool.get_linear_state(0, [])] == [(0, 32, 3), (0, 4, 3, 5)]


# values that a pool does not take


@pytest.mark.parametrize(
    ("packing", "given"), [("fp8", "float16"), ("fp8", "float32"), ("bf16", "bfloat16")]
)
def test_a_quantised_pool_takes_any_float(packing, given):
    pool = mla(packing=packing)
    dtype = getattr(torch, given)
    pool.set_kv_buffer(0, [5], torch.ones(1, 16, dtype=dtype), torch.ones(1, 8, dtype=dtype))
    assert torch.equal(pool.get_kv_buffer(0, [5])[0], torch.ones(1, 16).bfloat16())


@pytest.mark.parametrize("packing", ["bf16", "float16", "e4m3", "e5m2"])
def test_nothing_is_rounded_into_a_pool_of_floats(packing):
    pool = mla(packing=packing)
    for given in (torch.float32, torch.float64):
        with pytest.raises(ValueError, match=r"target layer 0 latent: values .* the pool takes"):
            pool.set_kv_buffer(
                0, [5], torch.ones(1, 16, dtype=given), torch.ones(1, 8, dtype=given)
            )
    assert not pool.view("latent", 0).view(torch.uint8).any()


def test_values_without_their_scales_are_refused_and_with_them_taken():
    pool = mla(packing="fp8")
    held, rope = torch.ones(1, 16).to(torch.float8_e4m3fn), torch.ones(1, 8)
    with pytest.raises(ValueError, match=r"layer 0 latent: .* without latent.scale"):
        pool.set_kv_buffer(0, [5], held, rope)
    assert not pool.view("rope", 0).any()
    scales = torch.full((1, 1), 3.0)
    pool.write(0, [5], {"latent": held, "latent.scale": scales, "rope": rope})
    assert (pool.get_kv_buffer(0, [5])[0] == 3).all()


@pytest.mark.parametrize(
    ("conv", "temporal", "says"),
    [
        (
            (1, 33, 3),
            (1, 4, 3, 5),
            r"conv: \[1, 33, 3\], this shard takes \[N, 32, 3\]: the channels of q, k, v",
        ),
        ((1, 32, 4), (1, 4, 3, 5), r"conv: \[1, 32, 4\], this shard takes \[N, 32, 3\]"),
        ((1, 32, 6), (1, 4, 3, 5), r"conv: \[1, 32, 6\], this shard takes \[N, 32, 3\]"),
        ((1, 3, 32), (1, 4, 3, 5), r"conv: \[1, 3, 32\], this shard takes \[N, 32, 3\]"),
        ((1, 32), (1, 4, 3, 5), r"conv: \[1, 32\], this shard takes \[N, 32, 3\]"),
        ((1, 32, 3), (1, 4, 5, 3), r"temporal: \[1, 4, 5, 3\], a state is \[N, head, 3, 5\]"),
        ((1, 32, 3), (1, 4, 15), r"temporal: \[1, 4, 15\], a state is \[N, head, 3, 5\]"),
        ((1, 32, 3), (1, 2, 3, 5), r"layer 0 temporal: values \(1, 2, 3, 5\)"),
        ((2, 32, 3), (1, 4, 3, 5), r"layer 0 conv.q: values \(2, 2, 3, 3, 1\)"),
    ],
)
def test_linear_states_of_another_shape_are_refused_whole(conv, temporal, says):
    pool = hybrid()
    with pytest.raises(ValueError, match=says):
        pool.set_linear_state(0, [2], torch.ones(conv).bfloat16(), torch.ones(temporal))
    assert not pool._slab.any()


# arguments that cannot be

ODD = LinearState((("q", 3, 2),), 3, 4, (3, 5))
WRONG = {
    "MLA has no mxfp8": (mla, {"packing": "mxfp8"}, "MLA takes fp8, any float dtype, got 'mxfp8'"),
    "NSA has no mxfp8": (nsa, {"packing": "mxfp8"}, "packing: MLA takes fp8, any float dtype"),
    "V4 has no mxfp8": (dsv4, {"packing": "mxfp8"}, "packing: V4Latent takes fp8, any float dtype"),
    "keys have no mxfp8": (nsa, {"index_packing": "mxfp8"}, "packing: IndexKey takes fp8, any"),
    "a conv has no fp8": (hybrid, {"conv_dtype": "fp8"}, "LinearState takes any float dtype, got"),
    "packing that is not known": (mha, {"packing": "fp4"}, "dtype 'fp4' is not known"),
    "index packing that is not known": (nsa, {"index_packing": "fp4"}, "dtype 'fp4' is not known"),
    "two names": (mha, {"packing": "bf16", "dtype": "f32"}, "dtype float32, packing bfloat16"),
    "integers of fp8": (mla, {"packing": "fp8", "dtype": "int8"}, "A quantised pool takes and"),
    "fp8 of fp8": (mha, {"packing": "mxfp8", "dtype": "e4m3"}, "dtype float8_e4m3fn, packing 'mx"),
    "no name": (mha, {"packing": None}, "target: a dtype or a packing must be given"),
    "blocks that do not fill": (mha, {"packing": "mxfp8", "head_dim": 80}, "80 elements are not"),
    "latents that do not fill": (mla, {"packing": "fp8", "kv_lora_rank": 200}, "200 elements are"),
    "rings across pages": (
        dsv4,
        {"page_rings": True, "window_page_size": 6},
        "window pages of 6 tokens are not a multiple of rings of 4",
    ),
    "rings of freed pages": (
        dsv4,
        {"page_rings": True, "window": 2},
        "a compressor reads the last 3 tokens, a window of 2 has freed their pages",
    ),
    "no whole entries": (dsv4, {"page_size": 12}, "pages of 12 tokens are not a multiple of 8"),
    "a negative ratio": (dsv4, {"compress_ratios": (0, -2, 8, 2)}, "not a multiple of -2"),
    "a layer without a ratio": (
        dsv4,
        {"layers": [4], "total_kv_layers": 5},
        "compress_ratios: 4 layers, but layer 4 is",
    ),
    "no window": (swa, {"window": 0}, r"space swa window: 1 to 2\*\*63-1, got 0"),
    "no window of V4": (dsv4, {"window": 0}, r"space swa window: 1 to 2\*\*63-1, got 0"),
    "no window pages": (swa, {"num_window_pages": 1}, "num_window_pages: 2 or more, got 1. Item 0"),
    "no window page size": (swa, {"window_page_size": -1}, r"axis entry size: 1 to"),
    "no slots": (hybrid, {"num_slots": 0}, "target num_slots: 2 or more, got 0. Item 0 of space"),
    "no rings": (dsv4, {"num_slots": 1}, "num_slots: 2 or more, got 1. Item 0 of space 'ring'"),
    "heads that do not divide": (hybrid, {"shard": Shard(0, 3)}, "4 heads cannot be split over 3"),
    "sections that do not divide": (
        hybrid,
        {"linear": ODD, "shard": Shard(0, 2)},
        "3 heads cannot",
    ),
    "no page size": (swa, {"page_size": 0}, "target page_size: 1 or more, got 0"),
    "no page size of V4": (dsv4, {"page_size": 0}, "target page_size: 1 or more, got 0"),
}


@pytest.mark.parametrize(("build", "wrong", "says"), WRONG.values(), ids=WRONG.keys())
def test_arguments_that_cannot_be_are_refused_with_a_sentence(build, wrong, says):
    with pytest.raises(ValueError, match=says):
        build(**wrong)


def test_taps_lie_first_or_last():
    with pytest.raises(ValueError, match=r"conv_layout: one of .*'channels_first', 'taps_first'"):
        gated_delta_net(2, 4, 3, 5, 4, "middle")


def test_a_layout_error_says_which_elements_are_not_aligned():
    with pytest.raises(LayoutError, match=r"target layer 0 latent.scale: .* is not aligned to 4"):
        mla(packing="fp8", kv_lora_rank=3, qk_rope_head_dim=1, page_size=1)


@dataclass(frozen=True)
class Summed(Attention):
    """Keys, and values with a sum of each."""

    dim: int
    inputs = ("k", "v")

    def buffers(self, at):
        row = Seq(Cell("k", self.dim, at.packing), Cell("v", self.dim + 1, at.packing))
        yield at.buffer("rows", Repeat("entry", at.entries, row))


def test_a_kind_of_ones_own_is_placed_written_and_named_like_the_others():
    states = {0: (State(Summed(6)),), 1: (State(Summed(8), window=3), State(IndexKey(16)))}
    pool = LayeredPool(
        states=states, layers=[0, 1], num_pages=5, num_window_pages=5, page_size=4, dtype="bf16"
    )
    pool.check_integrity()
    assert items(pool, 0) == {"rows": 4 * 13 * 2}
    assert items(pool, 1) == {"swa.rows": 4 * 17 * 2, "index_key": 4 * (16 + 4)}
    for layer, dim in ((0, 6), (1, 8)):
        k, v = draw(2, dim), draw(2, dim + 1, seed=2)
        pool.set_kv_buffer(layer, [9, 6], k, v)
        assert all(map(torch.equal, pool.get_kv_buffer(layer, [9, 6]), (k, v)))


def test_a_pool_lists_its_kinds_of_state():
    pool = hybrid_nsa()
    assert [(kind, at.layers, at.space) for kind, at in pool.kinds] == [
        (MLA(16, 8), (1, 3), "kv"),
        (IndexKey(16), (3,), "kv"),
        (MAMBA2, (0, 2), "state"),
    ]


def test_the_dtypes_of_linear_states_are_options_of_layers_that_need_not_be_alike():
    linear, rest = State(LinearState((("x", 4, 8),), 3, 4, (8, 8))), (State(MHA(4, 8)),)
    numbers = {"layers": [0, 1], "num_pages": 2, "num_slots": 3, "page_size": 16, "dtype": "bf16"}

    def dtypes(**given):
        pool = LayeredPool(states={0: (linear,), 1: rest}, **numbers, **given)
        return {r.role: r.dtype for r in pool.layout.regions if r.layer == 0}

    assert dtypes() == {"conv.x": "bfloat16", "temporal": "float32"}
    assert dtypes(temporal_dtype="bf16") == {"conv.x": "bfloat16", "temporal": "bfloat16"}
    assert dtypes(conv_dtype="f32") == {"conv.x": "float32", "temporal": "float32"}
    for name in ("conv_dtype", "temporal_dtype"):
        with pytest.raises(ValueError, match=f"{name}: no layer has a linear state"):
            LayeredPool(states={0: rest, 1: rest}, **numbers, **{name: "f32"})


@pytest.mark.parametrize("dtype", ["bf16", torch.float16])
def test_linear_states_have_the_dtypes_that_are_asked_for(dtype):
    pool = hybrid(conv_dtype="f32", temporal_dtype=dtype)
    assert pool.view("conv.q", 0).dtype == torch.float32
    named = torch.bfloat16 if dtype == "bf16" else dtype
    state = torch.randn(1, 4, 3, 5).to(named)
    pool.set_linear_state(0, [2], temporal=state)
    assert pool.view("temporal", 0).dtype == named
    assert torch.equal(pool.get_linear_state(0, [2])[1], state)
    assert hybrid().view("temporal", 0).dtype == torch.float32
