"""Tensors described: every region's address formula lands where torch says the element is, also of
pointers; and `PoolLayout.of`, which makes one layout of several descriptions.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from kvpool.describe import Described, describe, describe_buffer, describe_pointers
from kvpool.layout import Axis, LayoutError, PoolLayout, Space

DEVICES = pytest.mark.parametrize("device", ["cpu", "meta"])


def address(tensor: torch.Tensor, index: tuple[int, ...]) -> int:
    """Where torch says an element is; on `meta`, from the start of the storage."""
    element = tensor[index]
    if tensor.device.type == "meta":
        return element.storage_offset() * element.element_size()
    return element.data_ptr()


def assert_lands(seen, tensor, dims, *, roles=("k",), layers=(0,), cell="dim", owner="target"):
    """Each region's formula agrees with torch at the corners and at random indices."""
    buffers = {buffer.name: buffer for buffer in seen.buffers}
    regions = {region.key: region for region in seen.regions}
    assert set(regions) == {(owner, layer, role) for layer in layers for role in roles}
    corners = product(*({0, size - 1} for size in tensor.shape))
    draw = random.Random(0)
    inside = ([draw.randrange(size) for size in tensor.shape] for _ in range(200))
    for index in (*corners, *map(tuple, inside)):
        at = dict(zip(dims, index))
        layer, role = layers[at.pop("layer", 0)], roles[at.pop("role", 0)]
        region = regions[owner, layer, role]
        home = buffers[region.buffer]
        byte = at.pop(cell, 0) * tensor.element_size()
        assert 0 <= byte < region.width
        where = home.base + at.pop("item") * home.item_stride + region.offset + byte
        assert set(at) == {axis.name for axis in region.axes}
        where += sum(at[axis.name] * axis.stride for axis in region.axes)
        assert where == address(tensor, index)


def lay(seen, entries=1, space="kv"):
    """The description as a whole layout, which validates it."""
    spaces = (Space(space, entries_per_item=entries),)
    return PoolLayout(seen.buffers, seen.regions, spaces, 100)


NHD = ("item", "entry", "head", "dim")


@DEVICES
def test_a_contiguous_tensor(device):
    tensor = torch.zeros(5, 16, 4, 32, dtype=torch.bfloat16, device=device)
    seen = describe(tensor, NHD, role="k", layer=7)
    assert_lands(seen, tensor, NHD, layers=(7,))
    (buffer,), (region,) = seen.buffers, seen.regions
    assert (buffer.name, buffer.space, buffer.memory) == ("target.k.7", "kv", device)
    assert (buffer.items, buffer.item_stride, buffer.item_bytes) == (5, 4096, 4096)
    assert (region.offset, region.width, region.dtype) == (0, 64, "bfloat16")
    assert region.axes == (Axis("entry", 16, 256), Axis("head", 4, 64))
    lay(seen, 16)


THREE = ("item", "entry", "dim")
BF16, F32 = torch.bfloat16, torch.float32
# a tensor on a device, its dims, what else is said of it, and entries an item
CASES = {
    "HND memory": (
        lambda on: torch.zeros(5, 4, 16, 32, dtype=BF16, device=on),
        ("item", "head", "entry", "dim"),
        {},
        16,
    ),
    "a slice of items, entries and heads": (
        lambda on: torch.zeros(9, 16, 8, 32, device=on)[2:8:2, 4:12, 3:5],
        NHD,
        {},
        8,
    ),
    "a strided view with holes": (
        lambda on: torch.zeros(10_000, device=on).as_strided((4, 6, 3, 8), (1000, 100, 20, 1), 37),
        NHD,
        {},
        6,
    ),
    "K and V and layers in one tensor": (  # NPU MHA
        lambda on: torch.zeros(2, 3, 5, 16, 4, 8, dtype=BF16, device=on),
        ("role", "layer", *NHD),
        {"role": ("k", "v"), "layer": (4, 9, 6)},
        16,
    ),
    "K and V side by side in each page": (
        lambda on: torch.zeros(5, 2, 16, 4, 8, dtype=BF16, device=on),
        ("item", "role", *NHD[1:]),
        {"role": ("k", "v")},
        16,
    ),
    "all layers of a page side by side": (
        lambda on: torch.zeros(5, 3, 16, 8, device=on),
        ("item", "layer", *THREE[1:]),
        {"layer": range(3)},
        16,
    ),
    "a view as another dtype": (
        lambda on: torch.zeros(5, 16, 656, dtype=torch.uint8, device=on)[..., 512:528].view(F32),
        THREE,
        {},
        16,
    ),
    "a shard of heads": (
        lambda on: torch.zeros(5, 16, 2, 32, dtype=BF16, device=on),
        NHD,
        {"shards": {"head": (4, 8)}},
        16,
    ),
    "another owner and space": (
        lambda on: torch.zeros(5, 16, 8, device=on),
        THREE,
        {"role": "swa.k", "layer": 3, "owner": "draft", "space": "swa"},
        16,
    ),
    "a cell of another name": (
        lambda on: torch.zeros(5, 16, 4, device=on),
        ("item", "entry", "scale"),
        {"cell": "scale"},
        16,
    ),
    "a cell of one element": (lambda on: torch.zeros(5, 16, 8, device=on)[..., :1], THREE, {}, 16),
    "elements whose channels may be reordered": (
        lambda on: torch.zeros(5, 16, 24, dtype=BF16, device=on).transpose(1, 2),
        ("item", "channel", "entry"),
        {"cell": None},
        16,
    ),
}


@DEVICES
@pytest.mark.parametrize("case", CASES)
def test_every_element_is_where_torch_says(case, device):
    build, dims, more, entries = CASES[case]
    tensor, names = build(device), {"role": ("k",), "layer": (0,), **more}
    seen = describe(tensor, dims, **names)
    roles, layers = (
        (value,) if isinstance(value, str | int) else tuple(value)
        for value in (names["role"], names["layer"])
    )
    options = {name: more[name] for name in ("cell", "owner") if name in more}
    assert_lands(seen, tensor, dims, roles=roles, layers=layers, **options)
    lay(seen, entries, more.get("space", "kv"))
    assert {f"torch.{region.dtype}" for region in seen.regions} == {str(tensor.dtype)}
    for region in seen.regions:
        for name, (start, total) in more.get("shards", {}).items():
            assert (region.axis(name).start, region.axis(name).total) == (start, total)


@DEVICES
def test_slices_of_one_fused_row_are_regions_of_one_buffer(device):
    tensor = torch.zeros(5, 64, 576, dtype=torch.bfloat16, device=device)
    home = describe_buffer(tensor, THREE, name="kv.0")
    assert (home.items, home.item_stride, home.item_bytes) == (5, 73_728, 73_728)
    latent = describe(tensor[..., :512], THREE, role="latent", layer=0, buffer=home)
    rope = describe(tensor[..., 512:], THREE, role="rope", layer=0, buffer=home)
    assert_lands(latent, tensor[..., :512], THREE, roles=("latent",))
    assert_lands(rope, tensor[..., 512:], THREE, roles=("rope",))
    assert (latent.regions[0].offset, rope.regions[0].offset) == (0, 1024)
    assert latent.buffers == rope.buffers == (home,)
    layout = PoolLayout.of(latent, rope, spaces=[Space("kv", entries_per_item=64)])
    assert layout.buffers == (home,)


def test_what_lies_between_is_padding_only_where_the_owner_says_so():
    tensor = torch.zeros(5, 16, 24)
    for part in (tensor[..., :8], tensor):
        for padding in ({}, {"padding": False}, {"padding": True}):
            seen = describe(part, THREE, role="k", layer=0, **padding)
            home = describe_buffer(part, THREE, name="b", **padding)
            assert seen.buffers[0].padding is home.padding is (padding == {"padding": True})
            inside = describe(part, THREE, role="k", layer=0, buffer=home)
            assert inside.buffers == (home,)


def test_padding_is_said_of_the_buffer_that_several_slices_share():
    tensor = torch.zeros(5, 16, 24)
    home = describe_buffer(tensor, THREE, name="b")
    says = r"target layer 0 k: padding=True, but buffer b has padding=False. Give describe_buffer"
    with pytest.raises(LayoutError, match=says):
        describe(tensor[..., :8], THREE, role="k", layer=0, buffer=home, padding=True)
    home = replace(home, padding=True)
    part = tensor[..., :8]
    assert describe(part, THREE, role="k", layer=0, buffer=home, padding=True).buffers == (home,)


def test_a_buffer_of_a_padded_tensor_ends_with_its_last_element():
    flat = torch.zeros(4000, dtype=torch.float32)
    part = flat.as_strided((3, 4, 8), (1000, 100, 1), 5)
    home = describe_buffer(part, THREE, name="b", space="swa")
    assert (home.name, home.space, home.base) == ("b", "swa", flat.data_ptr() + 20)
    assert (home.item_stride, home.item_bytes) == (4000, (3 * 100 + 8) * 4)
    assert home.end == part[2, 3, 7].data_ptr() + 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, "float8_e4m3fn", "e4m3"])
def test_bytes_that_mean_fp8(dtype):
    tensor = torch.zeros(5, 16, 128, dtype=torch.uint8)
    seen = describe(tensor, THREE, role="index_key", layer=0, dtype=dtype)
    assert (seen.regions[0].dtype, seen.regions[0].width) == ("float8_e4m3fn", 128)
    assert_lands(seen, tensor, THREE, roles=("index_key",))


@DEVICES
def test_one_item(device):
    """Of one item torch keeps no meaningful stride."""
    tensor = torch.zeros(4, 16, 8, dtype=torch.float32, device=device)[:1]
    for one in (
        tensor,
        tensor.as_strided((1, 16, 8), (1, 8, 1)),
        tensor.as_strided((1, 16, 8), (0, 8, 1)),
    ):
        seen = describe(one, THREE, role="k", layer=0)
        assert_lands(seen, one, THREE)
        assert seen.buffers[0].items == 1
        assert seen.buffers[0].end - seen.buffers[0].base == 512
        PoolLayout(seen.buffers, seen.regions, (Space("kv", entries_per_item=16, reserved=0),), 1)


def test_one_item_fits_a_buffer_of_one_item_whatever_its_stride():
    tensor = torch.zeros(1, 16, 8)
    home = describe_buffer(tensor, THREE, name="b")
    odd = tensor.as_strided((1, 16, 4), (77, 8, 1), 4)
    seen = describe(odd, THREE, role="k", layer=0, buffer=home)
    assert_lands(seen, odd, THREE)


# errors


@pytest.mark.parametrize(
    ("dims", "more", "says"),
    [
        (
            ("item", "dim"),
            {},
            r"dims \('item', 'dim'\): 2 names for a tensor of shape \(5, 16, 8\)",
        ),
        (("page", "entry", "dim"), {}, r"dims .*: each name once, and one of them 'item'"),
        (("item", "item", "dim"), {}, r"dims .*: each name once"),
        (("item", "dim", "entry"), {}, r"elements of 'dim' are 32 bytes apart, .* 4 apart"),
        (THREE, {"layer": (0, 1)}, r"2 of layer named, but the tensor has no such dim"),
        (THREE, {"role": ("k", "v")}, r"2 of role named, but the tensor has no such dim"),
        (THREE, {"layer": ()}, r"0 of layer named, but the tensor has no such dim"),
        (("layer", "item", "dim"), {"layer": (0, 1)}, r"2 of layer named, but the tensor holds 5"),
        (("layer", "item", "dim"), {}, r"1 of layer named, but the tensor holds 5"),
        (("role", "item", "dim"), {"role": ("k", "v")}, r"2 of role named, .* holds 5"),
        (THREE, {"shards": {"head": (0, 8)}}, r"shards names \['head'\], the axes are \['entry'\]"),
        (THREE, {"shards": {"dim": (0, 8)}}, r"shards names \['dim'\]"),
        (
            THREE,
            {"shards": {"entry": (1, 16)}},
            r"layer 0 k: axis entry: steps 1 to 17 exceed .*16",
        ),
        (THREE, {"dtype": "bf17"}, r"dtype 'bf17' is not known"),
        (THREE, {"dtype": "f64", "cell": None}, r"a cell of 4 bytes is no multiple of float64"),
        (THREE, {"layer": -1}, r"target k layer: 0 to 2\*\*63-1, got -1"),
        (("entry", "item", "dim"), {}, r"items of \d+ bytes overlap at a stride of 32"),
    ],
)
def test_names_that_do_not_fit_a_tensor_are_refused(dims, more, says):
    with pytest.raises(ValueError, match=says):
        describe(torch.zeros(5, 16, 8), dims, **{"role": "k", "layer": 0, **more})


def key(tensor, dims=THREE, **options):
    return describe(tensor, dims, role="k", layer=0, **options)


WHOLE = torch.zeros(6, 16, 24)
HOME = describe_buffer(WHOLE[..., 8:16], THREE, name="b")
SHARED = torch.zeros(1, 16, 8)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        *((lambda s=s: key(torch.zeros(s)), "is empty") for s in ((0, 16, 8), (5, 0, 8))),
        (lambda: describe_buffer(torch.zeros(5, 16, 0), THREE, name="b"), r"shape .* is empty"),
        (
            lambda: key(torch.zeros(5, 16, 8, dtype=torch.complex64)),
            r"dtype torch.complex64 is not known",
        ),
        # strides of 0: heads, items and layers that share their bytes
        (
            lambda: lay(key(torch.zeros(5, 16, 1, 32).expand(5, 16, 8, 32), NHD), 16),
            "target layer 0 k: overlaps itself",
        ),
        (lambda: key(SHARED.expand(5, 16, 8)), "buffer target.k.0 item_stride: 1 to .* got 0"),
        (
            lambda: lay(
                describe(
                    torch.zeros(1, 5, 16, 8).expand(2, 5, 16, 8),
                    ("layer", *THREE),
                    role="k",
                    layer=(0, 1),
                ),
                16,
            ),
            r"buffer target.k.1: base .* lies inside buffer target.k.0",
        ),
        # not in item 0 of the buffer, or of other items
        *(
            (
                lambda part=part: key(WHOLE[..., part], buffer=HOME),
                r"target layer 0 k: .* outside item 0 of buffer b",
            )
            for part in (slice(0, 8), slice(16, 24), slice(4, 12), slice(12, 20))
        ),
        (
            lambda: key(WHOLE[1:, :, 8:16], buffer=replace(HOME, items=5)),
            "outside item 0 of buffer b",
        ),
        (
            lambda: key(WHOLE[:5, :, 8:16], buffer=HOME),
            "5 items every 1536 bytes, but buffer b has 6 every 1536",
        ),
        (
            lambda: key(WHOLE[::2, :, 8:16], buffer=HOME),
            "3 items every 3072 bytes, but buffer b has 6 every 1536",
        ),
        (lambda: key(WHOLE[..., 8:16], buffer=replace(HOME, memory="cuda:0")), r"buffer b.* cuda"),
    ],
)
def test_what_is_no_layout_or_does_not_fit_its_buffer_is_refused(build, says):
    with pytest.raises(ValueError, match=says):
        build()


def test_a_slice_of_a_buffer_s_item_is_a_region_of_it():
    assert key(WHOLE[..., 10:12], buffer=HOME).buffers == (HOME,)


# memory described by its pointer is described as the tensor that it is


def told(tensor: torch.Tensor):
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


STACKED = torch.zeros(2, 3, 10, 16, 4, 8, dtype=torch.bfloat16)
PAGED = torch.zeros(10, 2, 16, 4, 8, dtype=torch.float16)
HEADS = torch.zeros(10, 16, 8, 8)[:, :, 2:6]
POINTED = {
    "stacked": (
        STACKED,
        ("role", "layer", *NHD),
        {"role": ("k", "v"), "layer": range(3), "shards": {"head": (4, 8)}},
    ),
    "side by side": (PAGED, ("item", "role", *NHD[1:]), {"role": ("k", "v"), "layer": 5}),
    "a slice": (HEADS, NHD, {"role": "k", "layer": 0, "owner": "draft", "padding": True}),
    "transposed": (
        HEADS.permute(0, 2, 3, 1),
        ("item", "head", "dim", "entry"),
        {"role": "k", "layer": 0, "cell": None, "space": "swa"},
    ),
}


@pytest.mark.parametrize(("tensor", "dims", "names"), POINTED.values(), ids=POINTED)
def test_a_pointer_is_described_as_its_tensor(tensor, dims, names):
    assert describe_pointers(*told(tensor), dims, **names) == describe(tensor, dims, **names)


def test_without_strides_it_is_contiguous():
    ptr, shape, _, dtype = told(STACKED[0, 0])
    seen = describe_pointers(ptr, shape, None, dtype, NHD, role="k", layer=0)
    assert seen == describe(STACKED[0, 0], NHD, role="k", layer=0)


def test_memory_and_dtype_are_those_that_are_named():
    seen = describe_pointers(
        1 << 40, (8, 64, 576), None, "e4m3", THREE, role="latent", layer=3,
        memory="cuda:1",
    )  # fmt: skip
    (home,), (region,) = seen.buffers, seen.regions
    assert (home.base, home.item_bytes, home.items, home.memory) == (1 << 40, 36864, 8, "cuda:1")
    assert (region.dtype, region.width) == ("float8_e4m3fn", 576)


@pytest.mark.parametrize(
    ("ptr", "shape", "strides", "dims", "said"),
    [
        (4096, (4, 16, 8), (128, 8), NHD, "as many strides as dims"),
        (4096, (4, 16, 2, 8), (-256, 16, 8, 1), NHD, "none of these numbers negative"),
        (-1, (4, 16, 2, 8), None, NHD, "pointer -1"),
        (4096, (4, 16, 2, 8), (128, 16, 8, 1), NHD, "overlap"),
    ],
)
def test_what_does_not_fit_is_refused(ptr, shape, strides, dims, said):
    with pytest.raises(LayoutError) as refused:
        describe_pointers(ptr, shape, strides, "f32", dims, role="k", layer=0)
    assert said in str(refused.value)


def test_a_buffer_of_other_memory_is_refused():
    home = describe_buffer(HEADS, NHD, name="k.0")
    with pytest.raises(LayoutError, match=r"is on cuda:0, buffer k\.0 on cpu"):
        describe_pointers(*told(HEADS), NHD, role="k", layer=0, buffer=home, memory="cuda:0")


# several descriptions become one layout

PAGES = Space("kv", entries_per_item=4)
KEPT = []


def rows(role="latent", layer=0, width=6, **options):
    tensor = torch.zeros(5, 4, width)
    # a tensor that is freed may give its address to the next one, and the two would overlap
    KEPT.append(tensor)
    return tensor, describe(tensor, THREE, role=role, layer=layer, **options)


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
    describe_buffer(tensor, THREE, name="same", space=space)
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
