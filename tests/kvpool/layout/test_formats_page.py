"""docs/formats.md as a reader uses it: its sections against the templates of the kinds that they
name, and its formulas against numbers written by hand.

The numbers are worked out from the words of the formats ("all 576-byte rows, then all 8-byte scale
rows"), never from templates.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvpool import layout
from kvpool.layout import formats

TEXT = (Path(__file__).parents[3] / "docs" / "formats.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", TEXT, re.S | re.M))
KIND = re.compile(r"^`(\w+\(.*\))`(?:, packing `(\w+)`)?(?:, \w+s of (\d+) entries)?", re.M)
SUMMARY = {
    title: (entry, whole)
    for title, entry, whole in re.findall(r"^\| \[(.*)]\(.*\) \| ([\d,]*) \| (.*) \|$", TEXT, re.M)
}


def number(digits):
    return int(digits.replace(",", "")) if digits else None


def rows(text):
    """role -> (dtype, first byte, width, {axis: (steps, stride)}) of the list of regions."""
    table = {}
    region = r"^- (.+?): (\S+), ([\d,]+) bytes at ([\d,]+), (.+)$"
    for roles, dtype, width, first, axes in re.findall(region, text, re.M):
        steps = re.findall(r"(\w+) ([\d,]+) x ([\d,]+)", axes)
        grid = {name: (number(size), number(stride)) for name, size, stride in steps}
        table |= dict.fromkeys(roles.split(", "), (dtype, number(first), number(width), grid))
    return table


def begins(title, role, **steps):
    """Where the document says that a cell begins."""
    _, first, _, grid = rows(SECTIONS[title])[role]
    return first + sum(steps[axis] * stride for axis, (_, stride) in grid.items())


def items(title):
    """Bytes of an item of each buffer, bytes an entry and bytes of padding of a section."""
    entry, whole = SUMMARY[title]
    padding = re.search(r"([\d,]+) bytes of an item are padding", SECTIONS[title])
    sizes = list(map(number, whole.split(" + ")))
    return sizes, number(entry) or 0, number(padding[1]) if padding else 0


@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_is_what_the_templates_of_its_kind_say(title):
    text = SECTIONS[title]
    ((kind, packing, entries),) = KIND.findall(text)
    table = rows(text)
    at = formats.At(
        layers=(0,),
        space="kv",
        entries=int(entries or 1),
        shard=formats.Shard(),
        packing=packing or "bf16",
        prefix=re.match(r"(swa\.|c4\.|c128\.)?", next(iter(table)))[0],
    )
    buffers = list(eval(kind, vars(formats)).buffers(at))
    regions = [region for buffer in buffers for region in buffer.regions("target")]
    assert list(table) == [region.role for region in regions]
    for region in regions:
        dtype, first, width, grid = table[region.role]
        axes = tuple(layout.Axis(name, *steps) for name, steps in grid.items())
        assert (dtype, first, width) == (region.dtype, region.offset, region.width)
        assert sorted(axes, key=str) == sorted(region.axes, key=str)
        last = {name: size - 1 for name, (size, _) in grid.items()}
        assert begins(title, region.role, **last) == region.end - region.width
    sizes, _, padding = items(title)
    assert sizes == [buffer.item_bytes for buffer in buffers]
    assert padding == sum(sizes) - sum(region.nbytes for region in regions)
    assert re.search(r"^Source: .*(\d\.\d+\.\d|kvpool's own)", text, re.M)


@pytest.mark.parametrize(
    ("title", "role", "steps", "byte"),
    [
        ("MHA bf16, NHD", "k", {"entry": 5, "head": 3}, (5 * 8 + 3) * 128 * 2),
        ("MHA bf16, HND", "k", {"entry": 5, "head": 3}, (3 * 64 + 5) * 128 * 2),
        ("MHA fp8, NHD", "k.scale", {"entry": 5, "head": 0}, 160),
        ("MHA mxfp8, NHD", "v.scale", {"entry": 5, "head": 3}, 5 * 32 + 3 * 4),
        ("Sliding-window MHA bf16", "swa.v", {"entry": 127, "head": 0}, 127 * 1_024),
        ("MLA bf16", "rope", {"entry": 63}, 73_728 - 128),
        ("MLA fp8, 656 bytes", "latent.scale", {"entry": 5}, 3_792),
        ("MLA fp8, 656 bytes", "rope", {"entry": 63}, 41_984 - 128),
        ("Index key fp8, 132 bytes", "index_key.scale", {"entry": 5}, 8_212),
        ("DeepSeek-V4 window latent bf16", "swa.rope", {"entry": 1}, 1_024 + 896),
        ("DeepSeek-V4 window latent fp8, 584 bytes", "swa.rope", {"entry": 127}, 73_600),
        ("DeepSeek-V4 window latent fp8, 584 bytes", "swa.latent.scale", {"entry": 127}, 74_744),
        ("DeepSeek-V4 compressed latent fp8, ratio 4", "c4.latent.scale", {"entry": 63}, 37_368),
        ("DeepSeek-V4 compressed latent fp8, ratio 128", "c128.latent.scale", {"entry": 1}, 1_160),
        ("DeepSeek-V4 index key fp8", "c4.index_key.scale", {"entry": 63}, 8_444),
        ("DeepSeek-V4 compressor state, ratio 4", "c4.state", {"entry": 7}, 57_344),
        ("DeepSeek-V4 compressor state, ratio 128", "c128.state", {"entry": 127}, 520_192),
        # channels first: a channel is 3 taps of 2 bytes; q and k have 2,048 channels, v 4,096
        ("Gated DeltaNet, channels first", "conv.k", {"head": 0, "dim": 0, "tap": 0}, 2_048 * 6),
        (
            "Gated DeltaNet, channels first",
            "conv.v",
            {"head": 31, "dim": 127, "tap": 2},
            49_152 - 2,
        ),
        # taps first: a tap is 8,192 channels of 2 bytes
        (
            "Gated DeltaNet, taps first",
            "conv.v",
            {"head": 2, "dim": 3, "tap": 1},
            16_384 + (4_096 + 2 * 128 + 3) * 2,
        ),
        (
            "Gated DeltaNet, taps first",
            "temporal",
            {"head": 31, "key": 5},
            (31 * 128 + 5) * 128 * 4,
        ),
        (
            "Kimi Delta Attention, taps first",
            "conv.k",
            {"head": 1, "dim": 2, "tap": 2},
            2 * 12_288 * 2 + (4_096 + 130) * 2,
        ),
        (
            "Kimi Delta Attention, channels first",
            "conv.k",
            {"head": 1, "dim": 2, "tap": 2},
            (4_096 + 130) * 6 + 4,
        ),
        # x has 8,192 channels, B and C 1,024 each
        ("Mamba-2, channels first", "conv.b", {"head": 7, "dim": 127, "tap": 2}, 9_216 * 6 - 2),
        ("Mamba-2, taps first", "conv.c", {"head": 0, "dim": 0, "tap": 1}, 20_480 + 9_216 * 2),
        ("Mamba-2, taps first", "temporal", {"head": 127}, 127 * 64 * 128 * 4),
        # every channel is a head
        ("Mamba-1, channels first", "conv.x", {"head": 9, "dim": 0, "tap": 2}, 9 * 6 + 4),
        ("Mamba-1, channels first", "temporal", {"head": 8_191}, 8_191 * 64),
        ("Short convolution, channels first", "conv.x", {"head": 9, "dim": 0, "tap": 1}, 38),
        ("Lightning attention", "temporal", {"head": 63}, 63 * 128 * 128 * 2),
        (
            "Compressed convolutional attention",
            "conv.k",
            {"head": 1, "dim": 3, "tap": 1},
            (1_024 + 128 + 3) * 4 + 2,
        ),
    ],
)
def test_a_cell_begins_where_it_was_worked_out_by_hand(title, role, steps, byte):
    assert begins(title, role, **steps) == byte
    grid = rows(SECTIONS[title])[role][3]
    assert set(steps) == set(grid) and all(steps[axis] < grid[axis][0] for axis in steps)


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("MHA bf16, NHD", [(131_072, 2_048, None)] * 2),
        ("MHA fp8, NHD", [(65_536, 1_024, None)] * 2 + [(2_048, 32, None)] * 2),
        ("Sliding-window MHA bf16", [(131_072, 1_024, None)] * 2),
        ("MLA bf16", [(73_728, 1_152, None)]),
        ("MLA fp8, 656 bytes", [(41_984, 656, None)]),
        ("Index key bf16", [(16_384, 256, None)]),
        ("Index key fp8, 132 bytes", [(8_448, 132, None)]),
        ("DeepSeek-V4 window latent fp8, 584 bytes", [(74_880, 584, 128 + 128)]),
        ("DeepSeek-V4 compressed latent fp8, ratio 4", [(37_440, 584, 64 + 64)]),
        ("DeepSeek-V4 compressed latent fp8, ratio 128", [(1_728, 584, 2 + 560)]),
        ("DeepSeek-V4 index key fp8", [(8_448, 132, None)]),
        ("DeepSeek-V4 compressor state, ratio 4", [(65_536, 8_192, None)]),
        ("DeepSeek-V4 compressor state, ratio 128", [(524_288, 4_096, None)]),
        ("Gated DeltaNet, channels first", [(49_152, None, None), (2 << 20, None, None)]),
        ("Kimi Delta Attention, taps first", [(73_728, None, None), (2 << 20, None, None)]),
        ("Mamba-2, taps first", [(61_440, None, None), (4 << 20, None, None)]),
        ("Mamba-1, channels first", [(49_152, None, None), (524_288, None, None)]),
        ("Short convolution, channels first", [(8_192, None, None)]),
        ("Lightning attention", [(2 << 20, None, None)]),
        ("Compressed convolutional attention", [(5_120, None, None), (256, None, None)]),
    ],
)
def test_an_item_has_the_bytes_that_were_worked_out_by_hand(title, expected):
    sizes, entry, padding = items(title)
    assert sizes == [size for size, _, _ in expected]
    assert entry == sum(each or 0 for _, each, _ in expected)
    assert padding == sum(spare or 0 for _, _, spare in expected)


def test_the_summary_has_every_section():
    assert [*SUMMARY] == [*SECTIONS]
