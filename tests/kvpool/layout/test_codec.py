"""Layouts that travel: exact round trips, and decoders that take nothing on trust. The fuzzer's
targets of layouts mutate them.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import MISSING, fields, replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvpool.item import Cell, Repeat, Seq, item_bytes, item_regions, prefixed
from kvpool.layout import VERSION, Axis, Buffer, Interleave, LayoutError, PoolLayout, Region, Space
from kvpool.layout.codec import MAX_BYTES, MAX_PARTS
from tests.kvpool.layout.test_template import templates

CODECS = {
    "msgpack": (PoolLayout.to_msgpack, PoolLayout.from_msgpack, msgspec.msgpack.encode),
    "json": (PoolLayout.to_json, PoolLayout.from_json, msgspec.json.encode),
}
both = pytest.mark.parametrize(("write", "read", "encode"), list(CODECS.values()), ids=list(CODECS))


def sample() -> PoolLayout:
    """Two MLA layers of pages, one compressed space that shares their ids, one ring. Two ranks
    share out the positions.
    """
    row = Seq(Cell("latent", 8, "bf16"), Cell("rope", 4, "bf16"))
    page = Repeat("entry", 4, row)
    short = Repeat("entry", 1, Repeat("head", 2, Cell("c4.latent", 8, "e4m3"), 2, 8))
    ring = Repeat("entry", 8, Cell("c4.state", 2, "f32"))
    parts = [("kv", 0, page), ("kv", 5, page), ("c4", 0, short), ("ring", 0, ring)]
    buffers, regions = [], []
    for n, (space, layer, item) in enumerate(parts):
        size = item_bytes(item)
        buffers.append(Buffer(f"b{n}", space, n << 20, size, size, 9))
        regions += item_regions(item, owner="target", layer=layer, buffer=f"b{n}")
    spaces = (
        Space("kv", "paged", 4, interleave=Interleave(4, 1, 2)),
        Space("c4", "paged", 1, 4, ids="kv", interleave=Interleave(4, 1, 2)),
        Space("ring", "ring", 8, window=4, reserved=0),
    )
    return PoolLayout(tuple(buffers), tuple(regions), spaces, 6, "model", "life")


def raw() -> dict:
    """The sample as plain maps and lists, to be spoilt."""
    return msgspec.msgpack.decode(sample().to_msgpack())


# exact round trips

NAMES = st.text(st.characters().filter(str.isprintable), min_size=1, max_size=6)
INTERLEAVES = st.builds(
    Interleave, st.sampled_from([128, 512]), st.integers(0, 1), st.integers(2, 1024)
)


@st.composite
def layouts(draw):
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))
    spaces = [
        Space(
            name,
            "paged",
            draw(st.integers(1, 4)),
            draw(st.sampled_from([1, 4, 128])),
            draw(st.none() | st.integers(1, 9)),
            draw(st.integers(0, 2)),
            interleave=draw(st.none() | INTERLEAVES),
        )
        for name in names
    ]
    spaces.append(Space("s", "slot")) if "s" not in names else None
    spaces.append(Space("r", "ring", 4, window=2)) if "r" not in names else None
    count, buffers, regions = [0], [], []
    base = draw(st.sampled_from([0, 64, 1 << 47, (1 << 63) - (1 << 40)]))
    prefix = draw(NAMES)

    for n in range(draw(st.integers(0, 4))):
        space = draw(st.sampled_from(spaces))
        item = prefixed(draw(templates(2, count)), prefix)
        if space.kind != "slot":
            item = Repeat("entry", space.entries_per_item, item)
        size = item_bytes(item)
        stride, items = size + draw(st.integers(0, 100)), draw(st.integers(3, 1000))
        padding = draw(st.booleans())
        buffers.append(
            Buffer(f"{prefix}{n}", space.name, base, stride, size, items, padding=padding)
        )
        owner, layer = draw(st.sampled_from(["target", "draft"])), draw(st.integers(0, 1 << 40))
        for region in item_regions(item, owner=owner, layer=layer, buffer=f"{prefix}{n}"):
            if draw(st.booleans()) and region.axis("entry") is None:
                region = replace(region, packing=draw(NAMES))
            regions.append(region)
        base += stride * items
    return PoolLayout(
        tuple(buffers),
        tuple(regions),
        tuple(spaces),
        draw(st.integers(0, 100)),
        draw(st.text(st.characters().filter(str.isprintable), max_size=9)),
        draw(st.text(st.characters().filter(str.isprintable), max_size=9)),
    )


@both
@given(held=layouts())
def test_a_round_trip_is_exact(write, read, encode, held):
    back = read(write(held))
    assert back == held
    assert repr(back) == repr(held)  # the same types down to the last tuple
    assert write(back) == write(held)
    assert back.fingerprint() == held.fingerprint()


@both
def test_the_largest_integers_survive(write, read, encode):
    top = (1 << 63) - 1
    held = PoolLayout(
        (Buffer("b", "kv", top - 3, 1, 1, 3),),
        (Region("target", top, "k", "b", 0, "uint8", (Axis("head", 1, top, top - 1, top),), 1),),
        (Space("kv", tokens_per_entry=top, window=top),),
        top,
    )
    assert read(write(held)) == held


@both
def test_integers_of_numpy_are_written_as_integers(write, read, encode):
    held = sample()
    layers = np.arange(len(held.regions))
    regions = [replace(region, layer=n) for region, n in zip(held.regions, layers)]
    plain = [replace(region, layer=int(n)) for region, n in zip(held.regions, layers)]
    given, meant = replace(held, regions=tuple(regions)), replace(held, regions=tuple(plain))
    assert write(given) == write(meant) and given.fingerprint() == meant.fingerprint()


def test_json_is_read_as_text_and_as_bytes():
    text = sample().to_json()
    assert PoolLayout.from_json(text) == PoolLayout.from_json(text.encode()) == sample()


@both
def test_fields_that_are_left_out_have_their_defaults(write, read, encode):
    buffer = {"name": "b", "space": "s", "base": 0, "item_stride": 8, "item_bytes": 8, "items": 2}
    region = {"owner": "target", "layer": 0, "role": "k", "buffer": "b", "offset": 0}
    region |= {"dtype": "uint8", "axes": [], "width": 8}
    spare = {"version": VERSION, "buffers": [], "regions": [], "spaces": [], "total_kv_layers": 0}
    assert read(encode(spare)) == PoolLayout((), (), (), 0)
    parts = {"buffers": [buffer], "regions": [region], "spaces": [{"name": "s"}]}
    whole = Buffer("b", "s", 0, 8, 8, 2), Region("target", 0, "k", "b", 0, "uint8", (), 8)
    assert read(encode(spare | parts)) == PoolLayout(whole[:1], whole[1:], (Space("s"),), 0)


# malformed


@both
def test_every_cut_is_refused(write, read, encode):
    whole = write(sample())
    for end in range(len(whole)):
        with pytest.raises(LayoutError, match=r"malformed layout: .*truncated"):
            read(whole[:end])


@both
@given(data=st.binary(max_size=200))
def test_random_bytes_are_refused(write, read, encode, data):
    with pytest.raises(LayoutError, match=r"malformed layout|layout version"):
        read(data)


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(LayoutError, match="malformed layout"):
        PoolLayout.from_json("\ud800")


def test_bytes_that_are_no_unicode_are_refused():
    data = sample().to_msgpack().replace(b"latent", b"\xff\xfe\xff\xfe\xff\xfe")
    # msgspec's words: of 0.22 "'utf-8' codec can't decode", of 0.23 "Invalid UTF-8 encoded string"
    with pytest.raises(LayoutError, match=r"malformed layout: .*(?i:utf-8)"):
        PoolLayout.from_msgpack(data)
    with pytest.raises(LayoutError, match=r"malformed layout: .*(?i:utf-8)"):
        PoolLayout.from_json(sample().to_json().encode().replace(b"latent", b"\xff\xfe\xff"))


@pytest.mark.parametrize(
    "inner",
    [
        b"\x91\x81\x80\x01",  # a map as a key
        b"\x91\x81\x91\x80\x01",  # a list of a map as a key
        b"\x91\xd7\xff" + b"\xff" * 8,  # a timestamp that is none
        b"\x91\xd4\x05\x00",  # an extension
        b"\x91\xc1",  # a byte that means nothing
        b"\xdd\xff\xff\xff\xff",  # a list that says it has 2**32-1 parts
        b"\x91\xdf\xff\xff\xff\xff",
        b"\x91\xdb\xff\xff\xff\xff",
        b"\x91" * 100_000,  # deeper than any stack
    ],
)
def test_hostile_msgpack_is_refused(inner):
    head = b"\x82\xa7version\x01\xa7buffers"
    with pytest.raises(LayoutError, match="malformed layout"):
        PoolLayout.from_msgpack(head + inner)


@pytest.mark.parametrize(
    "inner", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "1e999", '"\\ud800"']
)
def test_hostile_json_is_refused(inner):
    with pytest.raises(LayoutError, match="malformed layout"):
        PoolLayout.from_json('{"version":1,"buffers":' + inner)
    with pytest.raises(LayoutError, match="malformed layout"):
        PoolLayout.from_json('{"version":1,"buffers":[' + inner + "]}")


PARTS = {
    "layout": PoolLayout,
    "buffers": Buffer,
    "regions": Region,
    "spaces": Space,
    "axes": Axis,
    "interleave": Interleave,
}


def part(spoilt: dict, where: str) -> dict:
    """One part of a kind, in a raw layout."""
    if where == "layout":
        return spoilt
    if where == "interleave":
        return spoilt["spaces"][0]["interleave"]
    return spoilt["regions"][0]["axes"][0] if where == "axes" else spoilt[where][0]


FIELDS = [(where, field) for where, kind in PARTS.items() for field in fields(kind)]
named = pytest.mark.parametrize(
    ("where", "field"), FIELDS, ids=[f"{where}.{field.name}" for where, field in FIELDS]
)
VALUES = {"None": None, "bool": True, "float": 1.0, "int": 1, "str": "1", "tuple": [0], "map": {}}


@both
@named
def test_a_value_of_another_type_is_refused(write, read, encode, where, field):
    wrong = [value for kind, value in VALUES.items() if kind not in field.type]
    assert len(wrong) >= 5
    for value in wrong:
        spoilt = raw()
        part(spoilt, where)[field.name] = value
        with pytest.raises(LayoutError, match="malformed layout"):
            read(encode(spoilt))


@both
@named
def test_a_missing_field_is_refused_by_name(write, read, encode, where, field):
    spoilt = raw()
    del part(spoilt, where)[field.name]
    if field.default is MISSING:
        with pytest.raises(LayoutError, match=rf"malformed layout: .*{field.name}"):
            read(encode(spoilt))
    else:
        with suppress(LayoutError):  # the default need not fit the rest
            read(encode(spoilt))


@both
@pytest.mark.parametrize("where", PARTS)
def test_an_unknown_field_is_refused_by_name(write, read, encode, where):
    spoilt = raw()
    part(spoilt, where)["surprise"] = 1
    with pytest.raises(LayoutError, match=r"malformed layout: .*unknown field `surprise`"):
        read(encode(spoilt))


@both
def test_an_inconsistent_layout_is_refused_as_by_the_constructor(write, read, encode):
    spoilt = raw()
    spoilt["regions"][0]["offset"] = 2
    with pytest.raises(LayoutError, match=r"target layer 0 latent: overlaps target layer 0 rope"):
        read(encode(spoilt))
    spoilt["spaces"][0]["interleave"]["rank"] = 2
    with pytest.raises(LayoutError, match=r"interleave rank: 0 to 1 of 2 ranks, got 2"):
        read(encode(spoilt))
    spoilt["spaces"][0]["interleave"]["rank"] = 1
    spoilt["regions"][0]["dtype"] = "float7"
    with pytest.raises(LayoutError, match=r"target layer 0 latent: dtype 'float7' is not known"):
        read(encode(spoilt))


# another version


@both
@pytest.mark.parametrize("version", [0, 2, -1, 1 << 40])
def test_another_version_is_refused_by_its_number(write, read, encode, version):
    spoilt = {**raw(), "version": version}
    with pytest.raises(
        LayoutError, match=rf"layout version {version}: this kvpool reads version 1"
    ):
        read(encode(spoilt))


@both
def test_another_version_is_named_before_its_unknown_fields(write, read, encode):
    with pytest.raises(LayoutError, match=r"layout version 2: this kvpool reads version 1"):
        read(encode({"version": 2, "pools": [{"shape": 1}]}))


# too large


@both
def test_more_than_the_largest_size_is_refused_unread(write, read, encode):
    with pytest.raises(LayoutError, match=f"{MAX_BYTES + 1} bytes: at most {MAX_BYTES}"):
        read(b"\x00" * (MAX_BYTES + 1))


@both
def test_a_layout_that_no_decoder_would_take_is_not_written(write, read, encode):
    names = ["x" * 100 + str(number) for number in range(MAX_PARTS)]
    huge = PoolLayout((), (), tuple(map(Space, names)), 0)
    with pytest.raises(LayoutError, match=rf"bytes: at most {MAX_BYTES}"):
        write(huge)


def comb(count: int) -> PoolLayout:
    """One buffer of `count` regions of one byte."""
    return PoolLayout(
        (Buffer("b", "kv", 0, count, count, 2),),
        tuple(Region("t", n, "k", "b", n, "uint8", (), 1) for n in range(count)),
        (Space("kv"),),
        count,
    )


@both
@pytest.mark.parametrize("where", ["buffers", "regions", "spaces"])
def test_more_than_the_largest_number_of_parts_is_refused(write, read, encode, where):
    spoilt = raw()
    spoilt[where] = spoilt[where][:1] * (MAX_PARTS + 1)
    with pytest.raises(LayoutError, match=rf"length <= {MAX_PARTS} - at|at most {MAX_BYTES}"):
        read(encode(spoilt))


def test_the_largest_number_of_regions_travels():
    whole = comb(MAX_PARTS)
    assert PoolLayout.from_msgpack(whole.to_msgpack()) == whole


def test_more_regions_than_a_decoder_takes_are_not_written():
    with pytest.raises(LayoutError, match=f"at most {MAX_PARTS}"):
        comb(MAX_PARTS + 1).to_msgpack()


@pytest.mark.parametrize("where", ["model", "generation"])
def test_text_that_no_codec_can_write_is_no_layout(where):
    with pytest.raises(LayoutError, match=where):
        PoolLayout((), (), (), 0, **{where: "\ud800"})
