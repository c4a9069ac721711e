"""Digests of moved bytes: equal on both sides whatever the layouts, and of live bytes only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

import disagg.digest.cell_hash
import disagg.digest.digest
from disagg.digest.digest import Digester, Piece, differing, digests, from_wire, pieces, to_wire
from disagg.plan import TransferPlan, plan
from kvpool import MHA, PoolLayout, RequestAddress, Shard, Space, Span
from kvpool.item import Cell, Repeat, Seq, Skip
from kvpool.layout import Interleave
from kvpool.layout.types import MAX_PARTS
from tests.oracle import blank, built, fill, live, merged, move, place, state
from tests.pools import CLASSES, GDN, PACKED, mha, mla

TOKENS = 29
ROOM = {"num_pages": 12, "num_window_pages": 20}

EVERY = {
    "equal": ({}, {}),
    "page placement": ({}, {"placement": "page"}),
    "page size": ({"page_size": 8}, {"page_size": 16}),
    "tp up": ({"tp": 1}, {"tp": 2}),
    "tp down": ({"tp": 4}, {"tp": 1}),
    "pp": ({"pp": 2}, {"placement": "page"}),
}
SOME = {
    "swa": {"window pages": ({}, {"window_page_size": 4})},
    "mha": {
        "order": ({}, {"order": "hnd"}),
        "order and tp": ({"tp": 4}, {"order": "hnd", "tp": 2}),
    },
    "hybrid": {
        "order": ({}, {"full": MHA(4, 8, 16, order="hnd")}),
        "taps": ({"tp": 2}, {"linear": replace(GDN, conv_layout="taps_first")}),
    },
    "dsv4": {
        "ring": ({}, {"speculation": True}),
        "shorter ring": ({"speculation": True}, {"window_page_size": 8}),
    },
}
CASES = {
    f"{name}: {change}": (CLASSES[name], *sides)
    for name in CLASSES
    for change, sides in (EVERY | SOME.get(name, {})).items()
}
every = pytest.mark.parametrize("case", CASES)


@dataclass(repr=False)
class Moved:
    """A completed hand-off."""

    sources: list
    dest: object
    there: list[RequestAddress]
    here: RequestAddress
    made: TransferPlan

    def pieces(self, source, tokens=range(TOKENS)):
        return pieces(self.made, source, tokens, self.here.num_tokens)

    def digests(self, source, each=False, given=None):
        """Digests of the source's memory, and of the destination's."""
        given = self.pieces(source) if given is None else given
        return tuple(
            values(holder, address, given, each)
            for holder, address in (
                (self.sources[source], self.there[source]),
                (self.dest, self.here),
            )
        )

    def report(self):
        """The sentences of `differing`, over all sources."""
        found = []
        for source in range(len(self.sources)):
            sides = self.digests(source, each=True)
            found += differing(self.pieces(source), *sides, self.dest.layout)
        return found


def values(holder, address, given, each=False):
    """All steps of `digests`, concatenated."""
    return np.concatenate([*digests(holder.layout, address, given, each)])


def ranks(build, tp=1, pp=1, **more):
    stages = np.array_split(np.arange(4), pp)
    return [
        build(layers=stage.tolist(), total_kv_layers=4, shard=Shard(rank, tp), **ROOM, **more)
        for stage in stages
        for rank in range(tp)
    ]


def moved(sources, dest, tokens=TOKENS):
    there = [place(source, tokens, seed) for seed, source in enumerate(sources, 1)]
    here = place(dest, tokens)
    for source, address in zip(sources, there):
        fill(source, address)
    blank(dest)
    return Moved(sources, dest, there, here, move(sources, dest, there, here))


known: dict[str, list[Moved]] = {}


def case_of(name) -> list[Moved]:
    """One hand-off per decode rank of a case, cached."""
    if name not in known:
        build, source, dest = CASES[name]
        known[name] = [moved(ranks(build, **source), into) for into in ranks(build, **dest)]
    return known[name]


def nbytes(layout, piece):
    size = layout.region_by_key[piece.key].width * len(piece.entries)
    for _, low, high in piece.box:
        size *= high - low
    return size


@every
def test_both_sides_have_equal_digests_of_moved_bytes(case):
    for each in case_of(case):
        every_piece = 0
        for source in range(len(each.sources)):
            assert np.equal(*each.digests(source)).all()
            assert np.equal(*each.digests(source, each=True)).all()
            every_piece += sum(nbytes(each.dest.layout, piece) for piece in each.pieces(source))
        assert every_piece == each.dest.layout.live_bytes(TOKENS)
        assert each.report() == []


@pytest.mark.parametrize("name", PACKED)
def test_packings_of_all_pools_have_equal_digests_over_other_pages(name):
    each = moved([PACKED[name](**ROOM)], PACKED[name](**ROOM, page_size=8))
    assert np.equal(*each.digests(0)).all() and each.digests(0)[0].size


@settings(max_examples=150)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_a_flipped_byte_is_named_by_region_and_position(name, data):
    each = data.draw(st.sampled_from(case_of(name)), label="rank")
    layout = each.dest.layout
    region = data.draw(st.sampled_from(layout.regions), label="region")
    space = layout.space_of(region)
    entries = live(space, range(TOKENS), TOKENS)
    assume(entries.size)
    entry = data.draw(st.sampled_from(entries.tolist()), label="entry")
    row, at = entry_of(each.dest, each.here, region, entry), []
    for size in row.shape:
        at.append(data.draw(st.integers(0, size - 1)))
    flip = data.draw(st.integers(1, 255), label="flip")
    row[tuple(at)] ^= flip
    try:
        (sentence,) = each.report()
        differ = sum(int((a != b).sum()) for a, b in map(each.digests, range(len(each.sources))))
    finally:
        row[tuple(at)] ^= flip
    assert differ == 1
    assert sentence.startswith(f"{region.owner} layer {region.layer} {region.role}")
    size = space.tokens_per_entry
    first, last = entry * size, entry * size + size - 1
    what = f"position {first} differs" if size == 1 else f"positions {first}-{last} differ"
    assert sentence.endswith(": its state differs." if space.kind == "slot" else f": {what}.")
    assert not each.report()


def entry_of(holder, address, region, entry):
    """A view of the bytes of one entry, `[axes but entry, byte]`."""
    space, view = holder.layout.space_of(region), state(holder).views[region.key]
    ids = address.spans[space.id_list].ids
    item = view[ids[entry // space.entries_per_item if space.kind == "paged" else 0]]
    return item if region.axis("entry") is None else item[entry % space.entries_per_item]


@settings(max_examples=100)
@given(st.sampled_from(sorted(CASES)), st.data())
def test_bytes_that_are_not_live_do_not_change_a_digest(name, data):
    each = data.draw(st.sampled_from(case_of(name)), label="rank")
    (memory,) = state(each.dest).memory
    dead = np.flatnonzero(~alive(each.dest, each.here))
    chosen = data.draw(st.lists(st.integers(0, dead.size - 1), min_size=1), label="bytes")
    before = memory.copy()
    memory[dead[chosen]] ^= 0x5A
    try:
        assert not each.report()
    finally:
        memory[...] = before


def alive(holder, address):
    """Mask of the live bytes of a request in a pool's memory."""
    (memory,) = state(holder).memory
    before = memory.copy()
    memory[...] = 0
    for region in holder.layout.regions:
        for entry in live(holder.layout.space_of(region), range(TOKENS), TOKENS).tolist():
            entry_of(holder, address, region, entry)[...] = 1
    found = memory.astype(bool)
    memory[...] = before
    return found


@settings(max_examples=100)
@given(st.sampled_from(sorted(CASES)), st.sampled_from(("positions", "layers", "steps")), st.data())
def test_values_exchanged_between_positions_layers_or_steps_are_found(name, what, data):
    each = data.draw(st.sampled_from(case_of(name)), label="rank")
    layout = each.dest.layout
    region = other = data.draw(st.sampled_from(layout.regions), label="region")
    entries = live(layout.space_of(region), range(TOKENS), TOKENS).tolist()
    assume(entries)
    one = two = data.draw(st.sampled_from(entries), label="entry")
    if what == "positions":
        two = data.draw(st.sampled_from(entries), label="other entry")
    elif what == "layers":
        alike = [r for r in layout.regions if (r.owner, r.role) == (region.owner, region.role)]
        other = data.draw(st.sampled_from(alike), label="other layer")
    rows = [entry_of(each.dest, each.here, r, e) for r, e in ((region, one), (other, two))]
    if what == "steps":
        assume(rows[0].ndim > 1)
        steps = [data.draw(st.integers(0, rows[0].shape[0] - 1)) for _ in rows]
        rows = [row[step] for row, step in zip(rows, steps)]
    were = [row.copy() for row in rows]
    assume(not np.array_equal(*were))
    rows[0][...], rows[1][...] = were[1], were[0]
    try:
        found = set()
        for source in range(len(each.sources)):
            changed = np.not_equal(*each.digests(source)).tolist()
            found |= {piece.key for piece, differs in zip(each.pieces(source), changed) if differs}
        assert found == {region.key, other.key} and each.report()
    finally:
        rows[0][...], rows[1][...] = were


def test_the_digest_of_known_bytes_is_stable():
    """Other digests need another protocol version: two releases would disagree. Cells of 4,096
    bytes, a rest, and two heads.
    """
    heads = Repeat("head", 2, Seq(Skip(6), Cell("temporal", 4501, "bf16")), 1, 3)
    page = Repeat("entry", 2, Cell("latent", 3, "bf16"))
    source = built([(3, "kv", 4, page), (1, "s", 4, heads)], [Space("s", "slot")], page=2)
    address = place(source, 5, None)
    source.views["target", 3, "latent"][...] = np.arange(48).reshape(4, 2, 6)
    source.views["target", 1, "temporal"][...] = np.arange(2 * 9002).reshape(2, 9002) % 251
    latent = Piece(("target", 3, "latent"), (), range(1, 5))
    temporal = Piece(("target", 1, "temporal"), (("head", 1, 3),), range(1))
    found = values(source, address, [latent, temporal]).tolist()
    assert found == [3946965796553598967, 16990810962723765994]


# steps


@pytest.mark.parametrize("each", [False, True])
def test_work_comes_in_small_steps_and_the_result_is_the_same(monkeypatch, each):
    (this,) = case_of("hybrid: taps")
    given = this.pieces(0)
    whole = values(this.dest, this.here, given, each)
    monkeypatch.setattr(disagg.digest.digest, "STEP_BYTES", 1 << 10)
    monkeypatch.setattr(disagg.digest.cell_hash, "SLICE_BYTES", 1 << 9)
    parts = list(digests(this.dest.layout, this.here, given, each))
    assert len(parts) > sum(nbytes(this.dest.layout, piece) for piece in given) / 1024
    assert not all(part.size for part in parts)
    assert np.array_equal(np.concatenate(parts), whole)


def test_a_piece_that_is_repeated_is_refused():
    (this,) = case_of("mla: equal")
    given = this.pieces(0)
    with pytest.raises(ValueError, match="target layer 0 latent: the pieces up to this one exceed"):
        values(this.dest, this.here, [*given, given[0]])


# untrusted pieces

ROWS = Piece(("target", 1, "k"), (("head", 1, 3),), range(4, 9))
OUTSIDE = {
    "no such layer": (
        ROWS._replace(key=("target", 9, "k")),
        "'target' layer 9 'k': this layout has no",
    ),
    "no such role": (
        ROWS._replace(key=("target", 1, "k\n")),
        r"layer 1 'k\\n': this layout has no",
    ),
    "heads that are not held": (ROWS._replace(box=(("head", 1, 5),)), "k: a piece has head 1 to 4"),
    "heads below": (
        ROWS._replace(box=(("head", 0, 2),)),
        "k: a piece has head 0 to 1, the region 1 to 3",
    ),
    "no heads": (ROWS._replace(box=(("head", 2, 2),)), "k: a piece has head 2 to 1"),
    "another axis": (
        ROWS._replace(box=(("dim", 0, 1),)),
        r"k: a piece has axes \['dim'\], .* \['head'\]",
    ),
    "no axes": (ROWS._replace(box=()), r"k: a piece has axes \[\], the region"),
    "too many entries": (ROWS._replace(entries=range(4, 31)), "k: a piece has entries 4 to 30"),
    "very many entries": (
        ROWS._replace(entries=range(2**63 - 1)),
        "keeps 0 to 29 alive at 30 tokens",
    ),
    "no entries": (ROWS._replace(entries=range(4, 4)), "k: a piece has entries 4 to 3"),
}


@pytest.fixture(scope="module")
def three_heads():
    page = Repeat("entry", 4, Repeat("head", 3, Cell("k", 8, "bf16"), 1, 8))
    return built([(layer, "kv", 12, page) for layer in range(2)], page=4)


@pytest.mark.parametrize(("piece", "sentence"), OUTSIDE.values(), ids=OUTSIDE)
def test_pieces_outside_the_layout_are_refused_by_name(three_heads, piece, sentence):
    address = place(three_heads, 30)
    assert values(three_heads, address, [ROWS]).size == 1
    with pytest.raises(ValueError, match=sentence):
        values(three_heads, address, [ROWS, piece])


@pytest.mark.parametrize("ids", [[1, 2, 12], [1, 2, 0], [1], []])
def test_ids_outside_the_buffer_and_missing_pages_are_refused(three_heads, ids):
    address = RequestAddress(30, {"kv": Span(ids)})
    with pytest.raises(ValueError, match=r"target layer 1 k: (item|space kv needs)"):
        values(three_heads, address, [ROWS])
    with pytest.raises(ValueError, match="target layer 1 k: its block table has no ids"):
        values(three_heads, RequestAddress(30, {}), [ROWS])


def test_entries_that_have_left_a_window_are_refused():
    (this,) = case_of("dsv4: equal")
    piece = next(p for p in this.pieces(0) if p.key[2] == "swa.latent")
    early = piece._replace(entries=range(piece.entries.start - 1, piece.entries.stop))
    said = r"target layer 0 swa.latent: a piece has entries 22 to 28, .* 23 to 28 alive"
    with pytest.raises(ValueError, match=said):
        values(this.dest, this.here, [early])


def test_memory_of_a_device_that_cannot_be_read_is_refused_by_name():
    (this,) = case_of("mla: equal")
    pool = mla(device="meta", **ROOM)
    with pytest.raises(ValueError, match=r"buffer target.kv.0 on meta: .* has no memory"):
        values(pool, this.here, this.pieces(0))


numbers = st.one_of(st.integers(0, 40), st.integers(0, 2**63 - 1))
printable = st.text(st.characters().filter(str.isprintable), min_size=1, max_size=128)
names = st.one_of(st.sampled_from(("target", "k", "v", "head")), printable)
interleaves = st.builds(Interleave, st.integers(1, 8), st.integers(0, 1), st.integers(2, 1024))
wild = st.builds(
    Piece,
    st.tuples(names, numbers, names),
    st.lists(st.tuples(names, numbers, numbers), max_size=8).map(tuple),
    st.builds(range, numbers, numbers),
    st.lists(interleaves, max_size=2).map(tuple),
)


@given(st.lists(wild, max_size=20))
def test_pieces_survive_the_wire(given):
    assert from_wire(to_wire(given)) == given


KIND = ["target", "k", [["head", 0, 1]], 0, 4, []]
RUBBISH = {
    "a kind that is not there": [[KIND], [0, 1], [0, 1]],
    "a layer too few": [[KIND], [0, 0], [0]],
    "a negative layer": [[KIND], [0], [-1]],
    "a layer above 63 bits": [[KIND], [0], [2**63]],
    "too many pieces": [[KIND], [0] * (MAX_PARTS + 1), [0] * (MAX_PARTS + 1)],
    "a long name": [[["t" * 129, *KIND[1:]]], [0], [0]],
    "too many axes": [[[*KIND[:2], [["head", 0, 1]] * 9, 0, 4, []]], [0], [0]],
    "too many interleaves": [[[*KIND[:5], [[4, 0, 2]] * 3]], [0], [0]],
    "one thing more": [[KIND], [0], [0], 1],
}


@pytest.mark.parametrize("what", RUBBISH.values(), ids=RUBBISH)
def test_pieces_are_typed_and_bounded(what):
    assert from_wire(msgspec.msgpack.encode([[KIND], [0, 0], [0, 7]]))[1].key[1] == 7
    with pytest.raises(ValueError, match="malformed pieces"):
        from_wire(msgspec.msgpack.encode(what))


def test_too_many_pieces_are_not_sent():
    with pytest.raises(ValueError, match="65537 pieces: at most 65536"):
        to_wire([ROWS] * (MAX_PARTS + 1))


def test_pieces_of_many_layers_are_few_bytes():
    pool = mla(layers=range(61), total_kv_layers=61, device="meta")
    given = pieces(plan([pool.layout], pool.layout), 0, range(29), 29)
    assert len(given) == 122 and len(to_wire(given)) < 400


# sentences


def test_layers_with_equal_differences_share_a_sentence():
    this = moved(ranks(mha, tp=2), mha(**ROOM))
    ids = this.here.spans["kv"].ids.tolist()
    for layer in (0, 1, 3):
        for position in (5, 6, 7, 20):
            this.dest.view("k", layer)[ids[position // 4], position % 4, 1] += 1
    this.dest.view("v", 2)[ids[0], 0] += 1
    assert this.report() == [
        "target layers 0-1, 3 k (head 0-1 of 4): positions 5-7, 20 differ.",
        "target layer 2 v (head 0-1 of 4): position 0 differs.",
        "target layer 2 v (head 2-3 of 4): position 0 differs.",
    ]


def test_only_the_first_of_many_ranges_are_named():
    this = moved([mla(num_pages=40)], mla(num_pages=40), 128)
    ids = this.here.spans["kv"].ids.tolist()
    this.dest.view("rope", 2)[ids, ::2] += 1
    given = [piece for piece in this.pieces(0, range(128)) if piece.key[1:] == (2, "rope")]
    sides = this.digests(0, each=True, given=given)
    (sentence,) = differing(given, *sides, this.dest.layout)
    assert sentence == (
        "target layer 2 rope: positions 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 "
        "and 48 more ranges differ."
    )


def test_a_target_and_its_draft_are_distinguished():
    both = [merged(mla(**ROOM), mla(layers=range(1), owner="draft", **ROOM)) for _ in range(2)]
    this = moved(both[:1], both[1])
    assert isinstance(both[1].layout, PoolLayout)
    both[1].views["draft", 0, "latent"][...] += 1
    assert this.report() == [f"draft layer 0 latent: positions 0-{TOKENS - 1} differ."]


def test_whatever_goes_wrong_in_one_digest_the_next_is_made():
    """A device reports failed work by errors of its own."""
    (this,) = case_of("mla: equal")
    job, digester = (this.dest.layout, this.here, this.pieces(0), False), Digester()

    def gone():
        raise MemoryError("the device is gone")
        yield

    digester.enqueue("first", gone())
    digester.enqueue("second", digests(*job))
    assert digester.step() == ("first", None, "the device is gone")
    while (ended := digester.step()) is None:
        assert digester.busy
    assert ended == ("second", values(this.dest, this.here, this.pieces(0)).tobytes(), "")
