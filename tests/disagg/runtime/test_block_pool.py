"""A hybrid cache whose groups lie over one another in one allocation, handed over in one room."""

from __future__ import annotations

import pytest

from disagg import RoomError
from kvpool import Allocator
from kvpool.item import Cell, Pad, Repeat, Seq, Skip
from kvpool.layout import RequestAddress, Space, Span
from tests import pools
from tests.disagg.runtime.sides import TOKENS, arrives, connected, moves, request, succeeds
from tests.oracle import assert_holds, blank, built, elsewhere, fill, overlaid, place, state, write

WINDOW, ITEMS = 24, 64


def hybrid(how, page=16, short=8, padding=False, cut=1):
    """Two layers of keys and values, `cut` pages of which are a block, three of a window's, and one
    of a state.
    """
    rows = Seq(Repeat("head", 2, Cell("k", 8, "bf16")), Repeat("head", 2, Cell("v", 8, "bf16")))
    state = Seq(Repeat("tap", 3, Cell("conv", 8, "f32")), Skip(8), Cell("temporal", 64, "f32"))
    parts = {
        "kv": [(n, Repeat("entry", page, rows)) for n in (0, 3)],
        "swa": [
            (n, Pad(256, Repeat("entry", short, Cell("latent", 24, "bf16")))) for n in (1, 2, 5)
        ],
        "state": [(4, state)],
    }
    pool = None if how == "static" else "blocks"
    spaces = (
        Space("kv", "paged", page, reserved=cut, block_pool=pool, items_per_block=cut),
        Space("swa", entries_per_item=short, window=WINDOW, block_pool=pool),
        Space("state", "slot", block_pool=pool),
    )
    if pool is None:
        return built([(n, s, ITEMS, t) for s, held in parts.items() for n, t in held], spaces)
    return overlaid(parts, spaces, ITEMS, padding=padding, tensors=how == "tensors")


@pytest.mark.parametrize("staging", [0, 16 << 20], ids=["direct", "staged"])
@pytest.mark.parametrize(
    ("there", "here"),
    [
        (("blocks",), ("blocks",)),
        (("blocks", 16, 8, True), ("blocks", 16, 8, True)),
        (("blocks", 8, 16), ("tensors", 16, 4)),
        (("tensors",), ("static",)),
        (("static", 32), ("blocks", 16, 8, True)),
        (("blocks", 2, 8, False, 33), ("blocks", 66, 16)),
        (("tensors", 66, 8), ("blocks", 2, 4, True, 33)),
        (("blocks", 4, 8, False, 5), ("tensors", 1, 8, True, 33)),
        (("blocks", 8, 4, True, 2), ("static",)),
    ],
)
def test_a_hybrid_cache_arrives_in_one_room(there, here, staging):
    source, dest = hybrid(*there), hybrid(*here)
    offered, wanted = request(source, dest)
    before = source.memory[0].copy()
    write(dest, beside := elsewhere(dest, wanted), range(TOKENS))
    with connected(source, dest, verify="checksum", staging=staging) as (prefill, decode):
        decode.receive("r", wanted)
        prefill.send("r", offered, tokens=range(40), last=False)
        prefill.send("r", offered)
        succeeds(decode, "r")
        succeeds(prefill, "r")
    assert_holds(dest, wanted, also=[beside])
    assert (source.memory[0] == before).all()


def test_a_block_that_a_window_freed_may_be_another_space_s_between_chunks():
    source, dest = hybrid("blocks"), hybrid("static")
    offered, wanted = place(source, TOKENS, 1), place(dest, TOKENS, 2)
    first, free = offered.spans["swa"].ids[0], offered.spans["swa"].ids[1:]
    pages = offered.spans["kv"].ids.copy()
    pages[-1] = first  # of positions 64 to 74: the window's first page is given to keys
    later = {**offered.spans, "kv": Span(pages), "swa": Span(free, 1)}
    fill(source, offered, range(40))
    blank(dest)
    with connected(source, dest) as (prefill, decode):
        decode.receive("r", wanted)
        spans = {**offered.spans, "kv": Span(pages[:3])}
        prefill.send("r", RequestAddress(40, spans), last=False)
        write(source, offered := RequestAddress(TOKENS, later), range(TOKENS))
        prefill.send("r", offered)
        arrives(decode, "r", dest, wanted)


def test_send_and_receive_refuse_an_id_that_is_listed_for_two_spaces():
    source, dest = hybrid("blocks"), hybrid("blocks")
    good = place(source, TOKENS)
    item = int(good.spans["kv"].ids[0])
    bad = RequestAddress(TOKENS, {**good.spans, "state": Span([item])})
    says = rf"room 'r': block {item} of block pool blocks is listed in spaces kv .* and state"
    with connected(source, dest) as (prefill, decode):
        for call in (prefill.send, decode.receive):
            with pytest.raises(RoomError, match=says):
                call("r", bad)
        fill(source, good)
        blank(dest)
        moves(prefill, good, decode, dest, good)


def second_request(pool, tokens, **options):
    """The second request of an allocator, whose first has grown and shrunk its window before."""
    alloc = Allocator(pool)
    first, request = alloc.new_request(), alloc.new_request()
    for count in (9, 5, 1):
        alloc.extend(first, count)
    if options:
        alloc.extend(request, tokens, **options)
    for _ in range(0 if options else tokens):
        alloc.extend(request, 1)
    return first, request


@pytest.mark.parametrize("name", ["swa", "hybrid nsa", "dsv4"])
@pytest.mark.parametrize("placements", [("block", "layer"), ("layer", "block")], ids="-".join)
def test_a_pool_of_our_own_in_blocks_hands_over_to_a_static_one_and_back(name, placements):
    tokens = 27
    source, dest = (
        pools.CLASSES[name](placement=each, num_pages=90, num_window_pages=40)
        for each in placements
    )
    _, there = second_request(source, tokens)
    other, here = second_request(dest, tokens, received=True)
    fill(source, offered := there.address())
    before = state(source).memory[0].copy()
    blank(dest)
    write(dest, beside := other.address(), range(beside.num_tokens))
    with connected(source, dest, verify="checksum") as (prefill, decode):
        decode.receive("r", wanted := here.address())
        prefill.send("r", offered)
        succeeds(decode, "r")
        succeeds(prefill, "r")
    assert_holds(dest, wanted, also=[beside])
    assert (state(source).memory[0] == before).all()
