"""Context parallelism: ranks that share out positions hand over to ranks that share them out
otherwise, byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from disagg.digest.digest import Piece, digests, from_wire, pieces, to_wire
from disagg.plan import IncompatibleLayouts, IncompleteTransfer, plan
from disagg.plan.cache import PlanCache
from kvpool.item import Cell, Repeat, Seq
from kvpool.layout import Interleave, RequestAddress, Space, Span
from tests.oracle import apply, assert_holds, built, live, move, packed, place, staged

LAYERS, HEADS, COMPRESSED = 3, 4, 2
KV, SWA, C2 = "kv", "swa", "c2"


@dataclass(frozen=True)
class Side:
    """One side's cuts of the layers, shards of the heads, stretches and pages; `window_size` are
    stretches of window layers, of which every rank holds all where it is None.
    """

    cuts: tuple[int, ...] = (0, LAYERS)
    tp: int = 1
    cp: int = 1
    size: int = 2
    window_size: int | None = None
    page: int = 4
    heads_first: bool = False

    def ranks(self):
        return list(product(range(len(self.cuts) - 1), range(self.tp), range(self.cp)))

    def state(self, kind, window, tokens, stage=0, tp=0, cp=0):
        """The memory of a rank: `kind` of every layer, a window's of the first, compressed entries
        of the last.
        """

        def part(size):
            return Interleave(size, cp, self.cp) if size else None

        spaces = [
            Space(KV, "paged", self.page, interleave=part(self.size)),
            Space(SWA, "paged", self.page + 1, window=window, interleave=part(self.window_size)),
            Space(C2, "paged", self.page, COMPRESSED, interleave=part(COMPRESSED * self.size)),
        ]
        item = self._item(kind, tp)
        items = {space.name: tokens // space.tokens_per_item + 4 for space in spaces}
        parts = []
        for layer in range(self.cuts[stage], self.cuts[stage + 1]):
            parts.append((layer, KV, items[KV], item))
            if layer == 0:
                row = Repeat("entry", self.page + 1, Cell("swa", 3, "uint8"))
                parts.append((layer, SWA, items[SWA], row))
            if layer == LAYERS - 1:
                row = Repeat("entry", self.page, Cell("c2", 5, "uint8"))
                parts.append((layer, C2, items[C2], row))
        used = {space for _, space, _, _ in parts}
        return built(parts, [space for space in spaces if space.name in used])

    def _item(self, kind, rank):
        if kind == "mla":
            row = Seq(Cell("latent", 3, "bf16"), Cell("rope", 1, "bf16"))
            return Repeat("entry", self.page, row)
        held, first, cell = max(1, HEADS // self.tp), rank * HEADS // self.tp, Cell("k", 2, "uint8")
        if self.heads_first:
            return Repeat("head", held, Repeat("entry", self.page, cell), first, HEADS)
        return Repeat("entry", self.page, Repeat("head", held, cell, first, HEADS))


@st.composite
def sides(draw):
    return Side(
        draw(st.sampled_from([(0, LAYERS), (0, 1, LAYERS)])),
        draw(st.sampled_from([1, 2, 4, 8])),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 9)),
        draw(st.one_of(st.none(), st.integers(1, 5))),
        draw(st.integers(1, 9)),
        draw(st.booleans()),
    )


kinds = st.sampled_from(["mla", "heads"])
windows = st.integers(1, 40)


@given(kinds, windows, sides(), sides(), st.integers(1, 90), st.data())
def test_any_ranks_hand_over_to_any_ranks(kind, window, one, other, tokens, data):
    """TP, PP and CP of both sides, pages, windows, compression, prefixes and chunks."""
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=3), label="cuts"))
    start, *chunks = [*cuts, tokens]
    sources = [one.state(kind, window, tokens, *rank) for rank in one.ranks()]
    rank = data.draw(st.sampled_from(other.ranks()), label="rank")
    dest = other.state(kind, window, tokens, *rank)
    there, here = staged(sources, dest, tokens, prefix=start)
    before = [source.memory[0].copy() for source in sources]
    made = plan([source.layout for source in sources], dest.layout)
    for chunk in chunks:
        for batch in made.bind_all(there, here, tokens=range(start, chunk)):
            apply(batch, sources, dest)
        start = chunk
    first = [*cuts, tokens][0]
    assert_holds(dest, here, range(first, tokens), kept=range(first))
    assert all((old == source.memory[0]).all() for old, source in zip(before, sources))


@settings(max_examples=60)
@given(kinds, windows, sides(), sides(), st.integers(1, 60), st.data())
def test_both_sides_digest_the_same_entries(kind, window, one, other, tokens, data):
    """And all that was read: the pieces of all sources are the entries that decode holds."""
    start = data.draw(st.integers(0, tokens), label="start")
    sources = [one.state(kind, window, tokens, *rank) for rank in one.ranks()]
    dest = other.state(kind, window, tokens, *data.draw(st.sampled_from(other.ranks())))
    there, here = staged(sources, dest, tokens)
    made = move(sources, dest, there, here, range(start, tokens))
    seen = {}
    for number, (source, address) in enumerate(zip(sources, there)):
        given = from_wire(to_wire(pieces(made, number, range(start, tokens), tokens)))
        theirs, ours = (
            [*digests(*side, given, each=True)]
            for side in ((source.layout, address), (dest.layout, here))
        )
        assert [part.tolist() for part in theirs] == [part.tolist() for part in ours]
        for piece in given:
            entries = seen.setdefault((piece.key, piece.box), [])
            entries += piece.numbers().tolist()
    for (key, _), entries in seen.items():
        space = dest.layout.space_of(dest.layout.region_by_key[key])
        alive = live(space, range(start, tokens), tokens).tolist()
        if space.interleave is not None:
            alive = [entry for entry in alive if entry in packed(space, tokens)]
        assert sorted(entries) == alive


def layouts(sizes, page=4, kind="mla", **more):
    """A rank for each of `sizes`, (size, rank, ranks)."""
    found = []
    for size, rank, ranks in sizes:
        side = Side(cp=ranks, size=size, page=page, **more)
        found.append(side.state(kind, 8, 400, 0, 0, rank))
    return found


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        ([0, 1, 3], "rank 2 of 4 of prefill's space kv, in stretches of 2 positions, is"),
        ([1], "ranks 0, 2-3 of 4 of prefill's space kv, in stretches of 2 positions, are"),
    ],
)
def test_missing_ranks_are_refused_by_number(held, sentence):
    sources = layouts([(2, rank, 4) for rank in held])
    with pytest.raises(IncompatibleLayouts) as refused:
        plan([source.layout for source in sources], layouts([(1, 0, 1)])[0].layout)
    text = str(refused.value)
    assert f"target layers 0-2 latent: {sentence} missing. Plan with the" in text
    # compressed entries of two tokens lie in stretches twice as long
    assert "target layer 2 c2: " in text and "space c2, in stretches of 4 positions" in text
    assert "swa" not in text


def test_every_reason_is_given_where_ranks_and_shards_are_missing():
    heads = [(0, 0), (1, 0), (1, 1)]  # shard and rank; the second rank of shard 0 is not there
    sources = [Side(tp=2, cp=3).state("heads", 8, 60, 0, *each).layout for each in heads]
    with pytest.raises(IncompatibleLayouts) as refused:
        plan(sources, Side().state("heads", 8, 60).layout)
    text = str(refused.value)
    assert "layers 0-2 k: rank 2 of 3 of prefill's space kv" in text
    assert (
        "layers 0-2 k: decode needs head 0-3, prefill offers head 2-3 on rank 1 of 3 of its "
        "positions, which does not cover it exactly once." in text
    )


def test_ranks_that_hold_nothing_of_it_need_not_be_there():
    """Decode's rank 1 of 2 reads nothing of prefill's rank 0 of 2, whatever the pages."""
    (source,), (dest,) = layouts([(6, 1, 2)]), layouts([(6, 1, 2)], page=9)
    both = layouts([(6, 0, 2), (6, 1, 2)])
    made = plan([source.layout], dest.layout)
    assert made.contributors() == [0]
    wider = plan([each.layout for each in both], dest.layout)
    there, here = [place(each, 50) for each in both], place(dest, 50)
    batches = wider.bind_all(there, here)
    kept = {key[2] for route in wider.routes if route.source == 0 for key in route.keys}
    assert kept <= {"swa"} and batches[1].runs  # every rank holds the window's layer
    with pytest.raises(IncompatibleLayouts, match="rank 1 of 2 of prefill's space kv"):
        plan([both[0].layout], dest.layout)


def test_replicas_are_ranks_of_equal_stretches():
    """MLA on two shards of heads: each of two ranks has a replica, and the layers are shared."""
    side = Side(tp=2, cp=2)
    sources = [side.state("mla", 8, 60, *rank) for rank in side.ranks()]
    dest = Side().state("mla", 8, 60)
    made = plan([source.layout for source in sources], dest.layout)
    assert made.contributors() == [0, 1, 2, 3]
    for layer in range(LAYERS):
        key = "target", layer, "latent"
        chosen = [part.source for part in made.parts if key in part.keys]
        assert sorted(n % 2 for n in chosen) == [0, 1]


def test_equal_stretches_are_moved_page_by_page():
    """Interleaved alike, both sides' pages hold the same positions: they travel whole."""
    (source,), (dest,) = layouts([(1, 1, 4)], page=16), layouts([(1, 1, 4)], page=16)
    made = plan([source.layout], dest.layout)
    there, here = place(source, 400, None), place(dest, 400, None)
    (batch,) = made.bind_all([there], here)
    rows = {key[2]: runs for route, runs, _ in batch.shares for key in route.keys}
    assert rows["latent"] == LAYERS  # 100 positions of a layer, side by side: one run
    assert {row.how for row in made.explain(400).rows} == {"direct"}


def test_pages_of_whole_stretches_are_moved_whole():
    """Stretches of a page: rank r's pages are every second one of decode's."""
    sources, (dest,) = layouts([(16, 0, 2), (16, 1, 2)], page=16), layouts([(1, 0, 1)], page=16)
    made = plan([source.layout for source in sources], dest.layout)
    rows = [row for row in made.explain(320).rows if row.roles == ("latent", "rope")]
    assert [row.runs for row in rows] == [LAYERS * 10, LAYERS * 10]
    assert [row.nbytes for row in rows] == 2 * [LAYERS * 160 * 8]


def test_explain_says_who_holds_which_positions():
    sources, (dest,) = layouts([(2, 0, 2), (2, 1, 2)]), layouts([(1, 1, 3)])
    said = str(plan([source.layout for source in sources], dest.layout).explain(100))
    for rank in range(2):
        assert (
            f"rank {rank} of 2 in stretches of 2 tokens on the source, "
            "rank 1 of 3 in stretches of 1 token on the destination" in said
        )


def test_a_block_table_that_is_too_short_is_refused_by_positions():
    (source,), (dest,) = layouts([(4, 1, 2)]), layouts([(4, 1, 2)])
    made = plan([source.layout], dest.layout)
    there, here = place(source, 40), place(dest, 40)
    spans = {**there.spans, KV: Span(there.spans[KV].ids[:3])}
    said = "source: space kv needs items for positions 4 to 39, its block table covers 4 to 23"
    with pytest.raises(IncompleteTransfer, match=said):
        made.bind(0, RequestAddress(40, spans), here)
    with pytest.raises(IncompleteTransfer, match="its block table covers none"):
        made.bind(0, RequestAddress(40, {**spans, KV: Span(np.empty(0, dtype=np.int64))}), here)


def test_a_source_that_has_computed_less_is_refused_though_it_holds_none_of_the_rest():
    """Rank 0 holds positions 0 to 3: those that are missing are rank 1's, who is late too."""
    (source,), (dest,) = layouts([(4, 0, 2)]), layouts([(4, 0, 2)])
    made = plan([source.layout], dest.layout)
    with pytest.raises(IncompleteTransfer, match=r"holds positions up to 3, .* needs them up to 7"):
        made.bind(0, place(source, 4), place(dest, 8))


def test_plans_of_other_stretches_are_not_confused_by_the_cache():
    cache = PlanCache()
    (dest,) = layouts([(2, 0, 2)])
    for number in (0, 1):
        sources = layouts([(2, rank, 2) for rank in ((0, 1), (1, 0))[number]])
        made = cache.plan([source.layout for source in sources], dest.layout)
        kv = [route.source for route in made.routes if route.src.space.name == KV]
        assert kv == [number] * len(kv)
    assert (cache.hits, cache.misses) == (0, 2)


def test_many_pieces_of_few_entries_cost_as_much_as_all_of_them():
    """A peer names stretches of its own, of which hardly any entry is held here."""
    (source,) = layouts([(1, 1, 2)])
    address = place(source, 40)
    held = Interleave(1, 1, 2), Interleave(1, 1, 1024)
    (space,) = (space for space in source.layout.spaces if space.name == KV)
    piece = Piece(("target", 0, "latent"), (), range(40), held)
    most = source.layout.live_bytes(40) // (len(space.alive(40)) * 6)
    list(digests(source.layout, address, [piece] * most))
    with pytest.raises(ValueError, match="latent: the pieces up to this one exceed"):
        list(digests(source.layout, address, [piece] * (most + 1)))


def test_a_digest_of_other_ranks_entries_is_refused():
    (source,) = layouts([(2, 1, 2)])
    made = plan([source.layout], source.layout)
    piece = next(each for each in pieces(made, 0, range(40), 40) if each.key[2] == "latent")
    address = place(source, 40)
    assert len(list(digests(source.layout, address, [piece]))) == 1
    for wrong in (piece._replace(held=()), piece._replace(held=(Interleave(2, 0, 2),))):
        with pytest.raises(ValueError, match=r"latent: .* of all ranks, .* those of rank 1 of 2"):
            list(digests(source.layout, address, [wrong]))
    none = piece._replace(entries=range(2))
    with pytest.raises(ValueError, match="latent: a piece has no entries that all"):
        list(digests(source.layout, address, [none]))
