"""Spaces that take their ids from one block pool, and lie over one another for it, pair with any
others: every byte of both sides is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from disagg.plan import plan
from disagg.plan.lookup import id_clash
from disagg.plan.proof import prove
from disagg.plan.routes import records_of
from kvpool import Shard
from kvpool.item import Cell, Pad, Repeat, Seq, Skip
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from tests.oracle import (
    State,
    assert_holds,
    blank,
    built,
    copy,
    copy_through_buffer,
    covered,
    elsewhere,
    fill,
    hand_off,
    move,
    overlaid,
    place,
    staged,
    write,
)
from tests.pools import dsv4, hybrid, hybrid_mla, hybrid_nsa, nsa, swa

POOL = "blocks"


@dataclass(frozen=True)
class Side:
    """How one side holds the layers of a model: in which groups, each a space, and how these lie.

    `groups` are (kind, layers), each with its page and the byte of a block from which on it lies.
    `how` is `static` (memory and ids of its own for every space), `blocks` (all spaces in blocks of
    one allocation) or `tensors` (the n-th layers of all spaces in blocks of the n-th tensor).
    `cuts`: how many items of a group are a block.
    """

    groups: Sequence[tuple[str, Sequence[int]]]
    pages: Sequence[int]
    how: str
    ring: int
    heads_first: bool
    padding: bool
    leads: Sequence[int]
    cuts: Sequence[int]

    def state(self, window: int, tokens: int) -> State:
        pool = None if self.how == "static" else POOL
        spaces, parts = [], {}
        for number, ((kind, layers), page) in enumerate(zip(self.groups, self.pages)):
            name, cut = f"{kind}{number}", 1 if pool is None else self.cuts[number]
            parts[name] = [(layer, self.template(kind, page)) for layer in layers]
            ids = {"reserved": cut, "block_pool": pool, "items_per_block": cut}
            spaces.append(
                {
                    "full": Space(name, "paged", page, **ids),
                    "window": Space(name, "paged", page, window=window, **ids),
                    "state": Space(name, "slot", **ids),
                    "ring": Space(name, "ring", self.ring, window=4, **ids),
                }[kind]
            )
        # two requests, the reserved item, and two more
        items = 2 * sum(-(-tokens // page) for page in self.pages) + 3
        if pool is None:
            rows = [(n, s, items, t) for s, held in parts.items() for n, t in held]
            return built(rows, spaces, padding=self.padding)
        options = {"padding": self.padding, "leads": dict(zip(parts, self.leads))}
        return overlaid(parts, spaces, items, tensors=self.how == "tensors", **options)

    def template(self, kind: str, page: int):
        if kind == "full":
            heads = [Repeat("head", 2, Cell(role, 2, "bf16")) for role in ("k", "v")]
            if self.heads_first:
                return Seq(*(Repeat("head", 2, Repeat("entry", page, each.of)) for each in heads))
            return Repeat("entry", page, Seq(*heads))
        if kind == "window":
            row = Seq(Cell("latent", 3, "bf16"), Cell("rope", 1, "bf16"), Skip(2))
            return Pad(16, Repeat("entry", page, row))
        if kind == "ring":
            return Repeat("entry", self.ring, Cell("c.state", 3, "f32"))
        conv = Repeat("tap", 3, Cell("conv", 2, "f32"))
        return Seq(conv, Skip(4), Repeat("head", 2, Cell("temporal", 5, "f32")))


@st.composite
def sides(draw, kinds):
    """Layers of a kind in one group or two."""
    groups = []
    for kind in dict.fromkeys(kinds):
        layers = [number for number, each in enumerate(kinds) if each == kind]
        cut = draw(st.integers(0, len(layers) - 1))
        groups += [(kind, part) for part in (layers[:cut], layers[cut:]) if part]
    groups = draw(st.permutations(groups))
    return Side(
        groups,
        [draw(st.integers(1, 5)) for _ in groups],
        draw(st.sampled_from(("static", "blocks", "tensors"))),
        draw(st.sampled_from((4, 6))),
        draw(st.booleans()),
        draw(st.booleans()),
        [draw(st.sampled_from((0, 0, 7, 40))) for _ in groups],
        [draw(st.sampled_from((1, 1, 2, 3))) for _ in groups],
    )


@st.composite
def transfers(draw):
    """A source with a request, a destination, and where it and another request are there."""
    kinds = draw(
        st.lists(st.sampled_from(("full", "window", "state", "ring")), min_size=1, max_size=6)
    )
    tokens, window = draw(st.integers(1, 14)), draw(st.integers(1, 6))
    source, dest = (draw(sides(kinds)).state(window, tokens) for _ in range(2))
    there, here = (place(side, tokens, draw(st.integers(0, 999))) for side in (source, dest))
    return source, dest, there, here, elsewhere(dest, here)


def theirs(side: State, address: RequestAddress) -> np.ndarray:
    """Bytes of a side's memory that are the request's: in a region of one of its items, or in
    declared padding of one.
    """
    found, memory = np.zeros(side.memory[0].size, dtype=bool), side.memory[0]
    base = memory.ctypes.data
    for buffer in side.layout.buffers:
        space = side.layout.space_by_name[buffer.space]
        for item in address.spans[space.ids or space.name].ids.tolist():
            at = buffer.base + item * buffer.item_stride - base
            found[at : at + buffer.item_bytes] |= buffer.padding
    marks = memory.copy()
    memory[...] = 0
    for region in side.layout.regions:
        space = side.layout.space_of(region)
        side.views[region.key][address.spans[space.ids or space.name].ids] = 1
    found |= memory.astype(bool)
    memory[...] = marks
    return found


@settings(max_examples=400)
@given(transfers(), st.data())
def test_any_spaces_of_a_block_pool_pair_with_any_others_to_the_byte(transfer, data):
    source, dest, there, here, other = transfer
    tokens = here.num_tokens
    kept = range(data.draw(st.sampled_from((0, 0, tokens // 2)), label="prefix"))
    fill(source, there)
    before = source.memory[0].copy()
    blank(dest)
    write(dest, other, range(tokens))
    write(dest, here, kept, salt=1)
    made = plan([source.layout], dest.layout)
    batch = made.bind(0, there, here, tokens=range(kept.stop, tokens))
    assert not (covered(source.memory[0], batch.src, batch.nbytes) & ~theirs(source, there)).any()
    copy(batch)
    assert_holds(dest, here, range(kept.stop, tokens), kept=kept, also=[other])
    assert (source.memory[0] == before).all()


@settings(max_examples=200)
@given(transfers())
def test_a_read_through_a_buffer_reads_what_some_space_describes(transfer):
    source, dest, there, here, other = transfer
    fill(source, there)
    blank(dest)
    write(dest, other, range(other.num_tokens))
    batch = plan([source.layout], dest.layout).bind(0, there, here)
    read = copy_through_buffer(batch, source.layout)
    if read is None:
        return
    items = {b.space: np.arange(b.items) for b in source.layout.buffers}
    described = theirs(source, RequestAddress(0, {s: Span(ids) for s, ids in items.items()}))
    assert not (covered(source.memory[0], read.src, read.nbytes) & ~described).any()
    assert_holds(dest, here, also=[other])


# one page of keys, one of a window's, over one another


def pair(padding=False, items=6):
    """A block of 16 bytes: 8 of keys in space `kv`, or all 16 of latents in space `swa`."""
    parts = {"kv": [(0, Cell("k", 4, "bf16"))], "swa": [(1, Cell("latent", 8, "bf16"))]}
    spaces = Space("kv", block_pool=POOL), Space("swa", window=4, block_pool=POOL)
    return overlaid(parts, spaces, items, padding=padding)


def table(kv, swa, tokens=2):
    return RequestAddress(tokens, {"kv": Span(kv), "swa": Span(swa)})


def test_what_another_space_claims_of_a_block_is_not_moved_with_it():
    for padding, nbytes in ((False, 2 * 8 + 2 * 16), (True, 16 + 8 + 2 * 16)):
        source, dest = pair(padding), pair(padding)
        made = plan([source.layout], dest.layout)
        batch = made.bind(0, table([1, 2], [3, 4]), table([3, 4], [1, 2]))
        assert batch.total == nbytes  # padding between kv's own blocks may travel


def test_a_run_over_what_only_another_space_claims_is_refused_by_the_proof():
    both = [pair(padding=True).layout for _ in range(2)]
    made = plan([both[0]], both[1])
    bare = [
        replace(each, buffers=tuple(replace(b, padding=False) for b in each.buffers))
        for each in both
    ]
    for source, dest, who in ((bare[0], both[1], "source"), (both[0], bare[1], "destination")):
        with pytest.raises(
            RuntimeError, match=rf"layer 0 k: on the {who}.* one run, and 8 of them"
        ):
            prove(records_of([source, dest]), made.parts, made.routes)


@pytest.mark.parametrize("who", ["source", "destination"])
def test_an_id_in_two_spaces_of_a_block_pool_is_refused_by_name(who):
    made = plan([pair().layout], pair().layout)
    good, bad = table([1, 2], [3, 4]), table([1, 4], [3, 4])
    tables = (bad, good) if who == "source" else (good, bad)
    listed = r"kv \(item 4\) and swa \(item 4\)"
    says = rf"{who}: block 4 of block pool blocks is listed in spaces {listed}, but .*first_item"
    with pytest.raises(ValueError, match=says):
        made.bind(0, *tables)
    with pytest.raises(ValueError, match=says):
        made.bind(0, *tables, tokens=range(1))  # whatever is moved of it


def test_the_reserved_item_may_be_listed_for_all_spaces():
    source, dest = pair(), pair()
    there, here = table([0, 1, 2], [0, 3, 4], 3), table([0, 4, 5], [0, 1, 2], 3)
    made = plan([source.layout], dest.layout)
    made.bind(0, there, here, tokens=range(1, 3))
    with pytest.raises(ValueError, match="item 0 of space kv lies outside 1 to 5"):
        made.bind(0, there, here)  # nothing is read or written there


def test_spaces_of_two_block_pools_may_list_the_same_ids():
    spaces = Space("kv", block_pool="one"), Space("swa", window=4, block_pool="two")
    rows = [(0, "kv", 6, Cell("k", 4, "bf16")), (1, "swa", 6, Cell("latent", 8, "bf16"))]
    side = built(rows, spaces)
    made = plan([side.layout], side.layout)
    assert made.bind(0, table([1, 2], [1, 2]), table([3, 4], [3, 4])).total == 2 * 8 + 2 * 16


@settings(max_examples=300)
@given(st.data())
def test_the_blocks_of_any_number_of_spaces_are_compared(data):
    count = data.draw(st.integers(1, 4))
    reserved = data.draw(st.integers(0, 2))
    cuts = {f"s{n}": data.draw(st.sampled_from((1, 1, 2, 3))) for n in range(count)}
    spaces = [
        Space(name, reserved=reserved * cut, block_pool=POOL, items_per_block=cut)
        for name, cut in cuts.items()
    ]
    layout = PoolLayout((), (), (*spaces, Space("own")), 0)
    ids = {
        name: st.lists(st.integers(0, 9 * cut), max_size=4, unique=True)
        for name, cut in {**cuts, "own": 1}.items()
    }
    lists = {name: data.draw(each) for name, each in ids.items() if data.draw(st.booleans())}
    uses = {}  # of each block, by space, the first item that is listed
    for name, cut in cuts.items():
        for item in lists.get(name, ()):
            uses.setdefault(item // cut, {}).setdefault(name, item)
    twice = sorted(block for block, who in uses.items() if len(who) > 1 and block >= reserved)
    address = RequestAddress(4, {name: Span(found) for name, found in lists.items()})
    found = id_clash(layout, address)
    assert (found is not None) == bool(twice)
    if found:
        (one, first), (two, second) = [*uses[twice[0]].items()][:2]
        assert found.startswith(
            f"block {twice[0]} of block pool blocks is listed in spaces {one} (item {first}) and "
            f"{two} (item {second}), but"
        )


def cut_pair(cut, items=10):
    """`pair()`, but a block is `cut` pages of keys beside one of latents."""
    parts = {"kv": [(0, Cell("k", 4, "bf16"))], "swa": [(1, Cell("latent", 8, "bf16"))]}
    kv = Space("kv", reserved=cut, block_pool=POOL, items_per_block=cut)
    return overlaid(parts, (kv, Space("swa", window=4, block_pool=POOL)), items)


@pytest.mark.parametrize("cuts", [(2, 1), (1, 2), (2, 3), (33, 1)])
def test_spaces_of_other_items_a_block_pair(cuts):
    hand_off([cut_pair(cuts[0])], cut_pair(cuts[1]), 4)


def test_items_of_one_number_are_no_clash_and_items_of_one_block_are():
    """Of two items a block, item 4 is in block 2, and block 4 is items 8 and 9."""
    made = plan([cut_pair(2).layout], cut_pair(2).layout)
    made.bind(0, table([4, 5], [4, 3]), table([8, 9], [5, 3]))
    for item in (8, 9):
        says = rf"block 4 of block pool blocks .*spaces kv \(item {item}\) and swa \(item 4\), but"
        with pytest.raises(ValueError, match=says):
            made.bind(0, table([4, item], [4, 3]), table([8, 9], [5, 3]))


# our own pools in blocks

POOLS = {
    "nsa": nsa.but(layers=range(5), total_kv_layers=5),
    "swa": swa.but(layers=range(7), total_kv_layers=7, window_layers=(0, 1, 3, 4, 6)),
    "hybrid": hybrid.but(layers=range(6), total_kv_layers=6, linear_layers=(0, 1, 2, 4)),
    "hybrid mla": hybrid_mla.but(layers=range(5), total_kv_layers=5),
    "hybrid nsa": hybrid_nsa,
    "dsv4": dsv4.but(layers=range(6), total_kv_layers=6, compress_ratios=(0, 2, 8, 2, 0, 8)),
}
RATIO = {"dsv4": 8}  # every compress ratio must divide a page


@st.composite
def ranks(draw, name, placement):
    """Arguments of every rank of a side."""
    more = {"placement": placement, "num_pages": 900, "num_window_pages": 300, "num_slots": 5}
    more["page_size"] = RATIO.get(name, 1) * draw(st.integers(1, 4))
    if name in ("swa", "dsv4"):
        more["window_page_size"] = draw(st.integers(1, 5))
    size = draw(st.sampled_from((1, 2)))
    layers = POOLS[name].arguments["layers"]
    cut = draw(st.integers(0, len(layers) - 1))
    stages = [part for part in (layers[:cut], layers[cut:]) if part]
    return [
        {**more, "shard": Shard(rank, size), "layers": part, "total_kv_layers": len(layers)}
        for part in stages
        for rank in range(size)
    ]


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(POOLS)),
    st.sampled_from([("block", "layer"), ("page", "block"), ("block", "block")]),
    st.integers(1, 40),
    st.data(),
)
def test_any_pool_in_blocks_pairs_with_any_other_to_the_byte(name, placements, tokens, data):
    sources, dests = (data.draw(ranks(name, placement)) for placement in placements)
    build, packing = POOLS[name], data.draw(st.sampled_from(("bf16", "fp8")))
    into = build(packing=packing, **data.draw(st.sampled_from(dests)))
    pools = [build(packing=packing, **more) for more in sources]
    prefix = data.draw(st.sampled_from((0, 0, tokens // 2)), label="prefix")
    there, here = staged(pools, into, tokens, prefix=prefix)
    write(into, other := elsewhere(into, here), range(tokens))
    move(pools, into, there, here, range(prefix, tokens))
    assert_holds(into, here, range(prefix, tokens), kept=range(prefix), also=[other])
