"""Item templates against the sizes of the formats and against views that are sliced by hand."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from kvpool.item import Cell, Pad, Repeat, Seq, Skip, alignment, item_bytes, item_regions
from kvpool.layout import Axis, LayoutError, Region
from kvpool.layout.dtypes import ITEMSIZE

ITEMS = 3
BF16, F32 = torch.bfloat16, torch.float32
E4M3, UE8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


# Each format: its template, the bytes of an item, and its roles as typed views `[item, axes in a
# region's order, element]` of a uint8 tensor `[item, byte]`, sliced by hand.


def mha_nhd(page=16, heads=4, dim=32):
    template = Repeat("entry", page, Repeat("head", heads, Cell("k", dim, "bf16")))
    return template, page * heads * dim * 2, {"k": lambda raw: rows(raw, BF16, page, heads, dim)}


def mha_hnd(page=16, heads=4, dim=32):
    template = Repeat("head", heads, Repeat("entry", page, Cell("k", dim, "bf16")))

    def k(raw):
        return rows(raw, BF16, heads, page, dim).transpose(1, 2)

    return template, page * heads * dim * 2, {"k": k}


def mla(page=64):
    """512 latent, then 64 rope, one row per token."""
    template = Repeat("entry", page, Seq(Cell("latent", 512, "bf16"), Cell("rope", 64, "bf16")))
    return (
        template,
        73_728,
        {
            "latent": lambda raw: rows(raw, BF16, page, 576)[..., :512],
            "rope": lambda raw: rows(raw, BF16, page, 576)[..., 512:],
        },
    )


def mla_fp8(page=64):
    """512 e4m3, 4 fp32 scales, 64 bf16 rope, one row per token."""
    row = Seq(Cell("latent", 512, "e4m3"), Cell("latent.scale", 4, "f32"), Cell("rope", 64, "bf16"))

    def line(raw):
        return rows(raw, torch.uint8, page, 656)

    return (
        Repeat("entry", page, row),
        41_984,
        {
            "latent": lambda raw: line(raw)[..., :512].view(E4M3),
            "latent.scale": lambda raw: line(raw)[..., 512:528].view(F32),
            "rope": lambda raw: line(raw)[..., 528:].view(BF16),
        },
    )


def index_key(page=64):
    """All 128-byte e4m3 keys, then all fp32 scales."""
    template = Seq(
        Repeat("entry", page, Cell("index_key", 128, "e4m3")),
        Repeat("entry", page, Cell("index_key.scale", 1, "f32")),
    )
    keys = 128 * page
    return (
        template,
        8_448,
        {
            "index_key": lambda raw: raw[:, :keys].unflatten(1, (page, 128)).view(E4M3),
            "index_key.scale": lambda raw: raw[:, keys:].unflatten(1, (page, 4)).view(F32),
        },
    )


def dsv4_fp8(page=64):
    """All data rows (448 e4m3 + 64 bf16 rope), then all 8-byte scale rows (7 ue8m0 + 1 pad)."""
    template = Pad(
        576,
        Seq(
            Repeat("entry", page, Seq(Cell("latent", 448, "e4m3"), Cell("rope", 64, "bf16"))),
            Repeat("entry", page, Seq(Cell("latent.scale", 7, "ue8m0"), Skip(1))),
        ),
    )
    data, end = 576 * page, 584 * page
    return (
        template,
        37_440,
        {
            "latent": lambda raw: raw[:, :data].unflatten(1, (page, 576))[..., :448].view(E4M3),
            "rope": lambda raw: raw[:, :data].unflatten(1, (page, 576))[..., 448:].view(BF16),
            "latent.scale": lambda raw: (
                raw[:, data:end].unflatten(1, (page, 8))[..., :7].view(UE8M0)
            ),
        },
    )


HEADS = {"conv.q": 16, "conv.k": 16, "conv.v": 32}
SECTION = {"conv.q": slice(0, 16), "conv.k": slice(16, 32), "conv.v": slice(32, 64)}


def gdn_conv(dim=8, taps=3):
    """Conv `(channels, kernel-1)`, channels in three sections q, k, v, each of whole heads."""
    template = Seq(
        *(
            Repeat("head", heads, Repeat("dim", dim, Cell(role, taps, "bf16")))
            for role, heads in HEADS.items()
        )
    )

    def section(role):
        return lambda raw: rows(raw, BF16, 64 * dim, taps).unflatten(1, (64, dim))[:, SECTION[role]]

    return template, 64 * dim * taps * 2, {role: section(role) for role in HEADS}


def kda_conv(dim=8, taps=3):
    """Conv `(kernel-1, channels)`: each tap holds a row of the same three sections."""
    template = Repeat(
        "tap",
        taps,
        Seq(*(Repeat("head", heads, Cell(role, dim, "bf16")) for role, heads in HEADS.items())),
    )

    def section(role):
        def view(raw):
            conv = rows(raw, BF16, taps, 64 * dim).unflatten(2, (64, dim))
            return conv[:, :, SECTION[role]].transpose(1, 2)  # head before tap, as a region's axes

        return view

    return template, 64 * dim * taps * 2, {role: section(role) for role in HEADS}


def temporal(heads=4, dk=8, dv=16):
    """Temporal `(v_heads, Dk, Dv)` fp32 per slot."""
    template = Repeat("head", heads, Repeat("dim", dk, Cell("temporal", dv, "f32")))
    return (template, heads * dk * dv * 4, {"temporal": lambda raw: rows(raw, F32, heads, dk, dv)})


def ring(entries=8, dim=512):
    """2 x 2 x head_dim floats per token: kv and score, two series."""
    template = Repeat("entry", entries, Cell("c4.state", 2 * 2 * dim, "f32"))
    return (
        template,
        entries * 2 * 2 * dim * 4,
        {"c4.state": lambda raw: rows(raw, F32, entries, 2, 2, dim).flatten(2)},
    )


FORMATS = {
    build.__name__: build()
    for build in (
        mha_nhd,
        mha_hnd,
        mla,
        mla_fp8,
        index_key,
        dsv4_fp8,
        gdn_conv,
        kda_conv,
        temporal,
        ring,
    )
}
CASES = [(name, role) for name, (_, _, views) in FORMATS.items() for role in views]
formats = pytest.mark.parametrize("name", FORMATS)


def rows(raw: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Whole items as `[item, *shape]` of `dtype`."""
    return raw.view(dtype).view(raw.shape[0], *shape)


def regions_of(template) -> dict[str, Region]:
    found = item_regions(template, owner="target", layer=5, buffer="b")
    assert len({region.role for region in found}) == len(found)
    return {region.role: region for region in found}


@formats
def test_a_format_has_exactly_its_roles_in_order_of_offset(name):
    template, _, views = FORMATS[name]
    found = item_regions(template, owner="target", layer=5, buffer="b")
    assert list(views) == [region.role for region in found]
    assert sorted(region.offset for region in found) == [region.offset for region in found]
    assert {(region.owner, region.layer, region.buffer) for region in found} == {("target", 5, "b")}


@pytest.mark.parametrize(("name", "role"), CASES)
def test_every_element_lies_where_the_hand_sliced_view_has_it(name, role):
    template, size, views = FORMATS[name]
    raw = torch.zeros(ITEMS, size, dtype=torch.uint8)
    view, region = views[role](raw), regions_of(template)[role]
    assert str(view.dtype) == f"torch.{region.dtype}"
    assert view.shape[0] == ITEMS
    assert tuple(view.shape[1:-1]) == tuple(axis.size for axis in region.axes)
    assert view.shape[-1] * view.element_size() == region.width
    steps = [range(ITEMS), *(range(axis.size) for axis in region.axes), range(view.shape[-1])]
    corners = list(product(*({0, len(step) - 1} for step in steps)))
    draw = random.Random(f"{name} {role}")
    for item, *axes, element in corners + [[draw.choice(s) for s in steps] for _ in range(200)]:
        address = raw.data_ptr() + item * size + region.offset + element * view.element_size()
        address += sum(step * axis.stride for step, axis in zip(axes, region.axes))
        assert view[(item, *axes, element)].data_ptr() == address


@formats
def test_the_regions_of_a_format_claim_all_bytes_but_padding_once(name):
    template, size, _ = FORMATS[name]
    assert item_bytes(template) == size
    padding = {"dsv4_fp8": 64 + 64}  # a byte a scale row, and the round-up: 37,440 - 584 * 64
    claimed = torch.zeros(size, dtype=torch.int64)
    for region in regions_of(template).values():
        for step in product(*(range(axis.size) for axis in region.axes)):
            at = region.offset + sum(a * axis.stride for a, axis in zip(step, region.axes))
            claimed[at : at + region.width] += 1
    assert claimed.max() == 1
    assert int((claimed == 0).sum()) == padding.get(name, 0)


def test_nhd_and_hnd_are_the_same_axes_with_other_strides():
    one, two = (regions_of(FORMATS[name][0])["k"] for name in ("mha_nhd", "mha_hnd"))
    assert [(a.name, a.size, a.stride) for a in one.axes] == [("entry", 16, 256), ("head", 4, 64)]
    assert [(a.name, a.size, a.stride) for a in two.axes] == [("entry", 16, 64), ("head", 4, 1024)]


# shards


def test_a_shard_of_heads_says_which_they_are_of_how_many():
    part = Repeat("entry", 16, Repeat("head", 2, Cell("k", 32, "bf16"), start=4, total=8))
    assert item_bytes(part) == 16 * 2 * 32 * 2
    assert regions_of(part)["k"].axis("head") == Axis("head", 2, 64, start=4, total=8)


def test_a_repeat_without_shard_is_whole():
    assert Repeat("head", 8, Cell("k", 1, "uint8")).total == 8


def test_sections_shard_on_their_own():
    """Two ranks of a GDN conv state: half of q, half of k, half of v."""
    halves = Seq(
        *(
            Repeat("head", heads // 2, Cell(role, 6, "bf16"), start=heads // 2, total=heads)
            for role, heads in HEADS.items()
        )
    )
    got = {
        role: (region.offset, region.axis("head").start, region.axis("head").total)
        for role, region in regions_of(halves).items()
    }
    assert got == {"conv.q": (0, 8, 16), "conv.k": (96, 8, 16), "conv.v": (192, 16, 32)}


# templates of any shape, against a painting of every byte


def paint(template) -> list[tuple | None]:
    """Each byte of an item as (role, steps by axis name, byte of the cell), None for padding."""
    match template:
        case Cell():
            size = template.count * ITEMSIZE[template.dtype]
            return [(template.role, (), byte) for byte in range(size)]
        case Skip():
            return [None] * template.nbytes
        case Seq():
            return [byte for part in template.parts for byte in paint(part)]
        case Repeat():
            inner = paint(template.of)
            return [
                byte and (byte[0], ((template.axis, step), *byte[1]), byte[2])
                for step in range(template.size)
                for byte in inner
            ]
        case Pad():
            inner = paint(template.of)
            while len(inner) % template.multiple:
                inner.append(None)
            return inner


@st.composite
def templates(draw, depth=4, count=None):
    count = [0] if count is None else count
    kinds = ["cell", "repeat", "seq", "pad"] if depth else ["cell"]
    match draw(st.sampled_from(kinds)):
        case "cell":
            count[0] += 1
            dtype = draw(st.sampled_from(["uint8", "e4m3", "bf16", "f32"]))
            return Cell(f"r{count[0]}", draw(st.integers(1, 3)), dtype)
        case "repeat":
            return Repeat(f"a{depth}", draw(st.integers(1, 3)), draw(templates(depth - 1, count)))
        case "seq":
            parts = st.lists(
                st.builds(Skip, st.integers(1, 5)) | templates(depth - 1, count),
                min_size=1,
                max_size=3,
            )
            return Seq(*draw(parts))
        case _:
            return Pad(draw(st.integers(1, 12)), draw(templates(depth - 1, count)))


@given(templates())
def test_regions_are_the_bytes_that_a_painting_shows(template):
    painted = paint(template)
    assert item_bytes(template) == len(painted)
    derived = {}
    for role, region in regions_of(template).items():
        for step in product(*(range(axis.size) for axis in region.axes)):
            at = region.offset + sum(a * axis.stride for a, axis in zip(step, region.axes))
            name = frozenset((axis.name, a) for a, axis in zip(step, region.axes))
            derived |= {at + byte: (role, name, byte) for byte in range(region.width)}
    expected = {
        at: (byte[0], frozenset(byte[1]), byte[2]) for at, byte in enumerate(painted) if byte
    }
    assert derived == expected


def test_pad_rounds_up_and_leaves_whole_multiples_alone():
    assert item_bytes(Pad(8, Cell("k", 9, "uint8"))) == 16
    assert item_bytes(Pad(8, Cell("k", 16, "uint8"))) == 16
    assert item_bytes(Pad(8, Pad(3, Cell("k", 1, "uint8")))) == 8


def test_padding_inside_a_repeat_widens_its_stride():
    padded = regions_of(Repeat("entry", 4, Pad(16, Cell("k", 5, "bf16"))))["k"]
    assert (padded.axes, padded.width) == ((Axis("entry", 4, 16),), 10)


def test_skip_moves_what_follows():
    assert regions_of(Seq(Skip(3), Cell("k", 2, "uint8")))["k"].offset == 3


def test_an_item_is_aligned_for_its_widest_element():
    assert alignment(FORMATS["mla_fp8"][0]) == 4
    assert alignment(FORMATS["mla"][0]) == 2
    assert alignment(Skip(8)) == 1


def test_short_names_of_dtypes_are_spelled_out():
    assert Cell("k", 1, "bf16") == Cell("k", 1, torch.bfloat16) == Cell("k", 1, "bfloat16")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Cell("k", 0, "bf16"), r"cell k count: 1 or more, got 0"),
        (lambda: Cell("k", 1, "bf17"), r"dtype 'bf17' is not known. Known: .*bfloat16"),
        (lambda: Skip(0), r"skip nbytes: 1 or more, got 0"),
        (lambda: Pad(0, Skip(1)), r"pad multiple: 1 or more, got 0"),
        (lambda: Seq(), r"seq: at least one part"),
        (lambda: Repeat("head", 0, Skip(1)), r"axis head size: 1 to 2\*\*63-1, got 0"),
        (lambda: Repeat("", 1, Skip(1)), r"axis: a name .* got ''"),
        (
            lambda: Repeat("head", 2, Skip(1), start=7, total=8),
            r"axis head: steps 7 to 9 exceed the total of 8",
        ),
        (
            lambda: regions_of(Repeat("head", 2, Repeat("head", 2, Cell("k", 1, "uint8")))),
            r"target layer 5 k: \['head', 'head'\] names an axis twice",
        ),
    ],
)
def test_a_template_that_cannot_be_is_refused(build, says):
    with pytest.raises(ValueError, match=says):
        build()


def test_what_is_refused_for_its_shape_is_a_layout_error():
    with pytest.raises(LayoutError):
        Cell("k", -1, "bf16")
