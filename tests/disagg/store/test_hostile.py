"""Bytes that a stranger put where a store's objects lie: what is not what it should be is a reason,
at little cost, and never another error, another state, or a tree without an end.
"""

from __future__ import annotations

import random
from contextlib import closing

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from disagg.store.catalogue import LENGTH, MAX_GEOMETRIES, Catalogue, catalogue_name
from disagg.store.chunks import ChunkLayout
from disagg.store.floors import open_floor
from disagg.store.floors.base import Listed
from disagg.store.geometry import MAX_ALL_BLOCKS, MAX_BYTES, Geometry, namespace_of
from disagg.store.objects import (
    NO_PARENT,
    START_BYTES,
    Damaged,
    ObjectId,
    decode_head,
    decode_start,
    encode_head,
    head_bytes,
)
from disagg.store.upkeep.check import check
from disagg.store.upkeep.collect import choose, last_uses
from disagg.store.upkeep.inventory import Held, geometry_name, object_name, take
from disagg.store.upkeep.tree import Chunk, linked, runs
from kvpool.layout import Axis, Buffer, PoolLayout, Region, Space
from tests.disagg.store.stores import fresh
from tests.fuzz import stored
from tests.fuzz.edits import edit_bytes
from tests.fuzz.guard import guarded
from tests.pools import mha

TOKENS = 24
GEOMETRY = Geometry.of([mha(num_pages=9).layout], {"model": "m"}, TOKENS)
NAMESPACE = namespace_of(GEOMETRY)[0]
LAYOUT = GEOMETRY.parts[0]["full"]
IDENTITY = ObjectId("full", bytes(range(32)), GEOMETRY.digest, 0, 3)
DATA = np.random.default_rng(1).integers(0, 256, LAYOUT.nbytes).astype(np.uint8)
HEAD = encode_head(IDENTITY, b"p" * 32, LAYOUT, DATA)
OBJECT = HEAD + DATA.tobytes()
CHEAP = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def small(regions, space, size=2):
    """A layout of one buffer of four items."""
    buffer = Buffer(name="b", space=space.name, base=0, item_stride=size, item_bytes=size, items=4)
    return PoolLayout((buffer,), tuple(regions), (space,), 1)


def encoded(layouts, tokens):
    """A geometry of many parts alike, as nobody would write it."""
    document = msgspec.msgpack.decode(Geometry.of([layouts[0]], {}, tokens).encoded)
    document["parts"] *= len(layouts)
    return msgspec.msgpack.encode(document)


# geometries


def test_many_small_parts_of_many_blocks_are_refused_at_little_cost():
    opaque = Region("target", 0, "k", "b", 0, "uint8", (), 2, packing="amx")
    layout = small([opaque], Space("kv", "paged", 1))
    data = encoded([layout] * 300, 1 << 15)
    assert guarded(lambda: stored.run(data), len(data)) == "refused"
    with pytest.raises(ValueError, match=f"more than {MAX_ALL_BLOCKS} blocks in all parts"):
        Geometry.decode(data)


def test_an_object_of_too_many_blocks_is_refused_before_they_are_counted_out():
    heads = Region("target", 0, "k", "b", 0, "uint8", (Axis("head", 1 << 17, 2),), 1)
    layout = small([heads], Space("kv", "slot"), 1 << 18)
    with pytest.raises(ValueError, match="an object of more than 65536 blocks"):
        ChunkLayout(layout, 24).blocks  # noqa: B018
    assert guarded(lambda: "refused" if refused(layout) else "read", 1000) == "refused"


def refused(layout):
    try:
        Geometry.decode(Geometry.of([layout], {}, 24).encoded)
    except ValueError:
        return True
    return False


@pytest.mark.parametrize("entries", [1 << 20, (1 << 20) - 3, 999_983])
def test_windows_of_very_long_chunks_cost_no_search_through_all_lengths(entries):
    entry = Axis("entry", 1, 2)
    space = Space("swa", "paged", 1, window=entries // 2 + 1)
    layout = small([Region("target", 0, "k", "b", 0, "uint8", (entry,), 2)], space)
    data = encoded([layout] * 60, entries)
    assert guarded(lambda: stored.run(data), len(data)) in ("read", "refused")


def test_what_packed_pools_write_is_read():
    opaque = Region("target", 0, "k", "b", 0, "uint8", (), 2, packing="amx")
    geometry = Geometry.of([small([opaque], Space("kv", "paged", 4))], {}, TOKENS)
    again = Geometry.decode(geometry.encoded)
    assert again.digest == geometry.digest
    assert again.parts[0]["full"].blocks.tolist() == [0, 2, 4, 6, 8, 10, 12]


# catalogues


@settings(max_examples=150, **CHEAP)
@given(source=st.randoms(use_true_random=False), cut=st.booleans())
def test_a_catalogue_skips_what_is_no_geometry(source, cut):
    entry = LENGTH.pack(len(GEOMETRY.encoded)) + GEOMETRY.encoded
    changed = source.choice((edit_bytes(entry, source), replaced(entry, source)))
    changed = (changed[: source.randrange(len(changed) + 1)] if cut else changed) or b"x"
    with closing(open_floor(fresh())) as floor:
        floor.put(catalogue_name(NAMESPACE, 0), [changed])
        floor.put(catalogue_name(NAMESPACE, 1), [entry])
        catalogue = Catalogue(floor, NAMESPACE)
        guarded(lambda: str(len(catalogue.refresh())), len(changed))
        assert [*catalogue.geometries] == [GEOMETRY.digest]
        read = changed[: len(entry)] == entry  # what goes on behind it is not looked at
        assert read == (0 not in catalogue.refused)
        catalogue.publish(GEOMETRY)
        assert len([*floor.list(NAMESPACE)]) == 2


def replaced(entry, source):
    """An entry with a document that was edited, and its length."""
    document = stored.mutate(entry[LENGTH.size :], source, 1 << 16)
    return LENGTH.pack(len(document)) + document


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        (LENGTH.pack(MAX_BYTES + 1), "16777217 bytes: at most 16777216 are read"),
        (LENGTH.pack(1 << 63), "at most 16777216 are read"),
        (LENGTH.pack(5) + b"abc", "ends at byte 11, before 13"),
        (b"abc", "ends at byte 3, before 8"),
        (LENGTH.pack(3) + b"abc", "malformed"),
        (LENGTH.pack(0), "malformed"),
    ],
)
def test_a_catalogue_says_why_an_entry_is_none(entry, why):
    with closing(open_floor(fresh())) as floor:
        floor.put(catalogue_name(NAMESPACE, 0), [entry])
        catalogue = Catalogue(floor, NAMESPACE)
        assert catalogue.refresh() == []
        assert why in catalogue.refused[0]


def test_a_geometry_of_another_namespace_is_refused():
    """Also one of the same model in chunks of another length: positions would not fit."""
    for other in (
        Geometry.of([mha(num_pages=9).layout], {"model": "n"}, TOKENS),
        Geometry.of([mha(num_pages=9).layout], {"model": "m"}, 2 * TOKENS),
    ):
        with closing(open_floor(fresh())) as floor:
            entry = LENGTH.pack(len(other.encoded)) + other.encoded
            floor.put(catalogue_name(NAMESPACE, 0), [entry])
            catalogue = Catalogue(floor, NAMESPACE)
            assert catalogue.refresh() == []
            assert f"belongs to namespace {namespace_of(other)[0]}" in catalogue.refused[0]


def test_a_catalogue_of_very_many_geometries_is_not_read_on():
    with closing(open_floor(fresh())) as floor:
        for number in range(MAX_GEOMETRIES + 5):
            floor.put(f"{NAMESPACE}/geometry/{number:02}", [b"x"])
        catalogue = Catalogue(floor, NAMESPACE)
        catalogue.refresh()
        assert len(catalogue.refused) == MAX_GEOMETRIES


# heads and objects


@settings(max_examples=300, **CHEAP)
@given(source=st.randoms(use_true_random=False), edits=st.integers(1, 4))
def test_a_head_that_was_changed_is_damaged(source, edits):
    changed = HEAD
    for _ in range(edits):
        changed = edit_bytes(changed, source)
    if changed == HEAD:
        return
    with pytest.raises(Damaged):
        decode_head(changed, IDENTITY, LAYOUT)
    try:
        start = decode_start(changed)
    except Damaged:
        return
    assert start.identity.kind in ("full", "window", "state")
    assert (start.identity.chunk == 0) == (start.parent == NO_PARENT)


@settings(max_examples=300, **CHEAP)
@given(st.binary(max_size=4 * START_BYTES))
def test_any_bytes_are_a_head_or_damaged(data):
    for read in (decode_start, lambda head: decode_head(head, IDENTITY, LAYOUT)):
        with pytest.raises(Damaged):
            read(data)


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "window"},
        {"key": b"k" * 32},
        {"geometry": b"g" * 16},
        {"part": 1},
        {"chunk": 2},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_sound_head_of_another_object_is_damaged(other):
    head = encode_head(IDENTITY._replace(**other), b"p" * 32, LAYOUT, DATA)
    with pytest.raises(Damaged, match="its head says"):
        decode_head(head, IDENTITY, LAYOUT)


@settings(max_examples=100, **CHEAP)
@given(source=st.randoms(use_true_random=False))
def test_a_check_finds_whatever_was_changed(source):
    changed = edit_bytes(OBJECT, source)
    name = IDENTITY.name(NAMESPACE)
    namespaces = {NAMESPACE: Held(NAMESPACE, {0: GEOMETRY})}
    with closing(open_floor(fresh())) as floor:
        floor.put(name, [changed or b"x"])
        verdict = check(floor, Listed(name, len(changed), None), namespaces)
    if changed == OBJECT:
        assert verdict.state == "sound"
    else:
        assert verdict.state == ("cut" if len(changed) < len(OBJECT) else "damaged")
        assert verdict.why


def test_the_head_is_as_the_format_says():
    """By the table at the top of disagg/store/objects.py, and not by its code."""
    assert HEAD[:16] == b"KVPOOL\0\1" + bytes(8)
    assert HEAD[16:48] == bytes(range(32))
    assert HEAD[48:64] == GEOMETRY.digest
    numbers = [int.from_bytes(HEAD[a:b], "little") for a, b in ((64, 68), (68, 72), (72, 80))]
    assert numbers == [0, 3, len(DATA)]
    assert HEAD[80:112] == b"p" * 32
    assert head_bytes(LAYOUT) == len(HEAD) == 112 + 8 * (len(LAYOUT.blocks) - 1) + 8


# names and trees


@pytest.mark.parametrize(
    "name",
    [
        f"{NAMESPACE}/{'0' * 64}/{'0' * 32}.0.other",
        f"{NAMESPACE}/{'0' * 64}/{'0' * 32}.00.full",
        f"{NAMESPACE}/{'0' * 64}/{'0' * 32}.12345.full",
        f"{NAMESPACE}/{'0' * 63}/{'0' * 32}.0.full",
        f"{NAMESPACE.upper()}/{'0' * 64}/{'0' * 32}.0.full",
        f"{NAMESPACE}/{'0' * 64}/{'0' * 32}.\u0661.full",
        f"a/{NAMESPACE}/{'0' * 64}/{'0' * 32}.0.full",
        f"{NAMESPACE}/geometry/1",
        f"{NAMESPACE}/geometry/001",
    ],
)
def test_other_names_are_nobodys(name):
    assert object_name(name) is None and geometry_name(name) is None


def test_an_objects_name_is_read_as_it_is_made():
    named = object_name(IDENTITY._replace(part=11, kind="state").name(NAMESPACE))
    assert (named.namespace, named.key, named.geometry) == (NAMESPACE, *IDENTITY[1:3])
    assert (named.part, named.kind) == (11, "state")


heads = st.lists(st.tuples(st.integers(0, 7), st.integers(-1, 7), st.integers(0, 4)), max_size=24)


@settings(max_examples=300, **CHEAP)
@given(heads)
def test_trees_of_any_heads_have_each_chunk_once_and_an_end(heads):
    """Parents that are their own children, circles, numbers that do not follow."""
    chunks = {}
    for key, parent, number in heads:
        after = NO_PARENT if parent < 0 else bytes([parent]) * 32
        chunk = Chunk("n", bytes([key]) * 32, nbytes=1, used=float(60 * number))
        chunk.number, chunk.parent = number, after
        chunks[key] = chunk
    forest = linked([*chunks.values()])
    listed = [chunk for root in forest.roots for run in runs(root) for chunk in run.chunks]
    assert sorted(chunk.key for chunk in listed) == sorted(chunk.key for chunk in chunks.values())
    for chunk in listed:
        assert all(child.number == chunk.number + 1 for child in chunk.children)
        assert all(last_uses(forest)[child] <= last_uses(forest)[chunk] for child in chunk.children)
    removal = choose(forest, keep=len(chunks) // 2)
    gone = set(removal.chunks)
    assert len(chunks) - len(gone) == len(chunks) // 2
    for chunk in listed:  # none goes before what follows it
        assert chunk not in gone or gone.issuperset(chunk.children)


def test_a_very_long_prompt_is_one_run():
    keys = [random.Random(n).randbytes(32) for n in range(20_000)]
    chunks = [Chunk("n", key) for key in keys]
    for number, chunk in enumerate(chunks):
        chunk.number, chunk.parent = number, keys[number - 1] if number else NO_PARENT
    (root,) = linked(chunks[::-1]).roots
    (run,) = runs(root)
    assert run.chunks == tuple(chunks)


def test_an_inventory_takes_no_geometry_from_a_name_alone():
    with closing(open_floor(fresh())) as floor:
        floor.put(f"{NAMESPACE}/geometry/00", [b"x"])
        floor.put("someone/elses", [b"abc"])
        inventory = take(floor)
        assert inventory.namespaces[NAMESPACE].geometries == {}
        assert "ends at byte 1" in inventory.namespaces[NAMESPACE].refused[0]
        assert (inventory.foreign.objects, inventory.foreign.nbytes) == (1, 3)
