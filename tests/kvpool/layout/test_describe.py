"""Tensors described: every region's address formula lands where torch says the element is."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
import torch

from kvpool.describe import describe, describe_buffer
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
    dims = ("item", "entry", "dim")
    home = describe_buffer(tensor, dims, name="kv.0")
    assert (home.items, home.item_stride, home.item_bytes) == (5, 73_728, 73_728)
    latent = describe(tensor[..., :512], dims, role="latent", layer=0, buffer=home)
    rope = describe(tensor[..., 512:], dims, role="rope", layer=0, buffer=home)
    assert_lands(latent, tensor[..., :512], dims, roles=("latent",))
    assert_lands(rope, tensor[..., 512:], dims, roles=("rope",))
    assert (latent.regions[0].offset, rope.regions[0].offset) == (0, 1024)
    assert latent.buffers == rope.buffers == (home,)
    spaces = (Space("kv", entries_per_item=64),)
    PoolLayout((home,), latent.regions + rope.regions, spaces, 1)


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
    says = r"\['k'\]: padding=True, but buffer b has padding=False. Give describe_buffer"
    with pytest.raises(LayoutError, match=says):
        describe(tensor[..., :8], THREE, role="k", layer=0, buffer=home, padding=True)
    home = replace(home, padding=True)
    part = tensor[..., :8]
    assert describe(part, THREE, role="k", layer=0, buffer=home, padding=True).buffers == (home,)


def test_a_buffer_of_a_padded_tensor_ends_with_its_last_element():
    flat = torch.zeros(4000, dtype=torch.float32)
    part = flat.as_strided((3, 4, 8), (1000, 100, 1), 5)
    home = describe_buffer(part, ("item", "entry", "dim"), name="b", space="swa")
    assert (home.name, home.space, home.base) == ("b", "swa", flat.data_ptr() + 20)
    assert (home.item_stride, home.item_bytes) == (4000, (3 * 100 + 8) * 4)
    assert home.end == part[2, 3, 7].data_ptr() + 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, "float8_e4m3fn", "e4m3"])
def test_bytes_that_mean_fp8(dtype):
    tensor = torch.zeros(5, 16, 128, dtype=torch.uint8)
    dims = ("item", "entry", "dim")
    seen = describe(tensor, dims, role="index_key", layer=0, dtype=dtype)
    assert (seen.regions[0].dtype, seen.regions[0].width) == ("float8_e4m3fn", 128)
    assert_lands(seen, tensor, dims, roles=("index_key",))


@DEVICES
def test_one_item(device):
    """Of one item torch keeps no meaningful stride."""
    tensor = torch.zeros(4, 16, 8, dtype=torch.float32, device=device)[:1]
    dims = ("item", "entry", "dim")
    for one in (
        tensor,
        tensor.as_strided((1, 16, 8), (1, 8, 1)),
        tensor.as_strided((1, 16, 8), (0, 8, 1)),
    ):
        seen = describe(one, dims, role="k", layer=0)
        assert_lands(seen, one, dims)
        assert seen.buffers[0].items == 1
        assert seen.buffers[0].end - seen.buffers[0].base == 512
        PoolLayout(seen.buffers, seen.regions, (Space("kv", entries_per_item=16, reserved=0),), 1)


def test_one_item_fits_a_buffer_of_one_item_whatever_its_stride():
    tensor = torch.zeros(1, 16, 8)
    home = describe_buffer(tensor, ("item", "entry", "dim"), name="b")
    odd = tensor.as_strided((1, 16, 4), (77, 8, 1), 4)
    seen = describe(odd, ("item", "entry", "dim"), role="k", layer=0, buffer=home)
    assert_lands(seen, odd, ("item", "entry", "dim"))


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
        (THREE, {"shards": {"entry": (1, 16)}}, r"axis entry: steps 1 to 17 exceed .* 16"),
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
