"""Item templates against a painting of every byte; formats are checked in test_formats_page.py."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, strategies as st

from kvpool.item import Cell, Pad, Repeat, Seq, Skip, alignment, item_bytes, item_regions
from kvpool.layout import Region
from kvpool.layout.dtypes import ITEMSIZE


def regions_of(template) -> dict[str, Region]:
    regions = item_regions(template, owner="target", layer=5, buffer="b")
    assert len({region.role for region in regions}) == len(regions)
    assert sorted(region.offset for region in regions) == [region.offset for region in regions]
    assert {(r.owner, r.layer, r.buffer) for r in regions} <= {("target", 5, "b")}
    return {region.role: region for region in regions}


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
            start, size, rest = (
                draw(st.integers(0, 3)),
                draw(st.integers(1, 3)),
                draw(st.integers(0, 3)),
            )
            inside = draw(templates(depth - 1, count))
            return Repeat(f"a{depth}", size, inside, start, start + size + rest)
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


def test_an_item_is_aligned_for_its_widest_element():
    row = Cell("latent", 512, "e4m3"), Cell("latent.scale", 4, "f32"), Cell("rope", 64, "bf16")
    assert [alignment(part) for part in (Seq(*row), row[2], Skip(8))] == [4, 2, 1]


def test_short_names_of_dtypes_are_spelled_out():
    assert Cell("k", 1, "bf16") == Cell("k", 1, torch.bfloat16) == Cell("k", 1, "bfloat16")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Cell("k", 0, "bf16"), r"cell k count: 1 or more, got 0"),
        (lambda: Cell("k", 1, "bf17"), r"dtype 'bf17' is not known. Known: .*bfloat16"),
        (lambda: Cell("k", 1, "fp8"), r"dtype 'fp8' is not known.* It is a packing: packing='fp8'"),
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
