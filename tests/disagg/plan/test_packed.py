"""Packed regions: items of which only the name says how they lie inside move whole, each once, and
only between equals.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from disagg import RoomError
from disagg.digest.digest import differing, digests, pieces
from disagg.plan import IncompatibleLayouts, IncompleteTransfer, plan
from kvpool import Allocator, MLAPool, RequestPinned
from kvpool.describe import describe, describe_buffer, describe_items
from kvpool.item import Cell
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.formats import Shard
from kvpool.layout.request_address import Pin
from tests.disagg.runtime.sides import connected, succeeds
from tests.oracle import assert_holds, blank, fill, hand_off, move, over, place, staged, write

PAGES, HEADS, DIM = 32, 4, 6


def cache(
    page=4,
    shard=Shard(),
    *,
    packing="amx",
    layers=2,
    dtype=torch.bfloat16,
    inside=None,
    axes=True,
    **space,
):
    """An engine's pages `[layer, item, head, (K | V)]`: K packed in its own way, V rows by token.
    Without `axes` heads lie inside K's packing too.
    """
    start, heads = shard.of(HEADS)
    keys = page * DIM if inside is None else inside
    slab = np.zeros(layers * PAGES * heads * (keys + page * DIM) * dtype.itemsize, dtype=np.uint8)
    whole = torch.from_numpy(slab).view(dtype).view(layers, PAGES, heads, -1)
    shards = {"head": (start, HEADS)}
    buffers, regions = [], []
    for layer, pages in enumerate(whole):
        dims = ("item", "head", "dim")
        home = describe_buffer(pages, dims, name=f"kv.{layer}")
        common = {"layer": layer, "buffer": home}
        k, v = pages[..., :keys], pages[..., keys:].unflatten(2, (page, DIM))
        if packing:
            cell = Cell("k", keys, k.dtype)
            packed = {"packing": packing, "shards": shards, **common}
            regions += describe_items(k, ("item", "head"), cell, **packed).regions
        else:
            rows = k.unflatten(2, (page, DIM))
            names = ("item", "head", "entry", "dim")
            regions += describe(rows, names, role="k", shards=shards, **common).regions
        names = ("item", "head", "entry", "dim")
        regions += describe(v, names, role="v", shards=shards, **common).regions
        buffers.append(home)
    per = space.get("tokens_per_entry", 1)
    made = Space(
        "kv", "paged", page, per, **{k: v for k, v in space.items() if k != "tokens_per_entry"}
    )
    return over(PoolLayout(tuple(buffers), tuple(regions), (made,), layers), slab)


def refusal(sources, dest):
    with pytest.raises(IncompatibleLayouts) as refused:
        plan([source.layout for source in sources], dest.layout)
    return str(refused.value)


@pytest.mark.parametrize("tokens", [1, 4, 33])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (4, 2)])
def test_packed_pages_move_whole_and_are_resharded_by_heads(prefill, decode, tokens):
    sources = [cache(shard=Shard(rank, prefill)) for rank in range(prefill)]
    for rank in range(decode):
        hand_off(sources, cache(shard=Shard(rank, decode)), tokens)


SPACES = st.one_of(
    st.just({}),
    st.builds(lambda window: {"window": window}, st.integers(1, 9)),
    st.builds(lambda per: {"tokens_per_entry": per}, st.integers(2, 3)),
    st.builds(
        lambda window, step: {"window": window, "window_step": step},
        st.integers(0, 9),
        st.integers(2, 5),
    ),
)


@settings(deadline=None)
@given(
    page=st.integers(1, 5),
    tokens=st.integers(1, 25),
    more=SPACES,
    start=st.integers(0, 5),
    cuts=st.sets(st.integers(1, 24)),
    ahead=st.integers(0, 3),
)
def test_of_chunks_each_page_moves_once_when_it_is_complete(page, tokens, more, start, cuts, ahead):
    """`ahead`: prefill has computed more tokens than decode asks for."""
    source, dest = (cache(page, layers=1, **more) for _ in range(2))
    start = min(start * page * more.get("tokens_per_entry", 1), tokens)
    there, into = place(source, tokens + ahead, 1), place(dest, tokens, 2)
    if more.get("window") is not None:
        ahead, there = 0, place(source, tokens, 1)
    fill(source, RequestAddress(tokens, there.spans))
    blank(dest)
    write(dest, into, range(start), salt=1)
    edges = [start, *sorted(cut for cut in cuts if start < cut < tokens), tokens]
    made = plan([source.layout], dest.layout)
    written = np.zeros(dest.memory[0].size, dtype=int)
    for low, high in pairwise(edges):
        for batch in made.bind_all([there], into, tokens=range(low, high)):
            for dst, size in zip(batch.dst.tolist(), batch.nbytes.tolist()):
                at = dst - dest.memory[0].ctypes.data
                written[at : at + size] += 1
        move([source], dest, [there], into, range(low, high))
        # of what is not complete yet nothing has come
        assert_holds(dest, into, range(start, high), kept=range(start))
    assert written.max(initial=0) <= 1


def test_a_slot_may_be_packed():
    def state(packing="triton"):
        raw = np.zeros(5 * 48, dtype=np.uint8)
        slots = torch.from_numpy(raw).view(5, 48)
        cell = Cell("temporal", 48, "uint8")
        seen = describe_items(slots, ("item",), cell, packing=packing, layer=0, space="state")
        return over(PoolLayout(seen.buffers, seen.regions, (Space("state", "slot"),), 1), raw)

    source, dest = state(), state()
    (there,), into = staged([source], dest, 9)
    move([source], dest, [there], into, range(5))
    assert_holds(dest, into, range(5))
    move([source], dest, [there], into, range(5, 9))
    assert_holds(dest, into)
    assert "packing 'triton' on prefill, packing 'cuda' on decode" in refusal(
        [source], state("cuda")
    )


def test_other_packings_are_refused_by_name():
    for there, here in (("amx", "vec16"), ("amx", None), (None, "amx")):
        source, dest = cache(packing=there), cache(packing=here)
        one, two = (f"packing '{name}'" if name else "no packing" for name in (there, here))
        assert refusal([source], dest) == (
            f"1 reason.\n  target layers 0-1 k: {one} on prefill, {two} on decode. Packed items "
            "move only between equals: run the same backend, in the same version and on the same "
            "kind of device, on both sides, or describe the axes of both."
        )


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        ({"page": 8}, {}, "8 entries an item on prefill, 4 entries an item on decode. Items of "
         "packing 'amx' move whole: use the same page size on both sides."),
        ({"inside": 40}, {}, "40 elements per cell on prefill, 24 elements per cell on decode."),
        ({"dtype": torch.float16}, {}, "float16 on prefill, bfloat16 on decode."),
        ({"tokens_per_entry": 2}, {}, "2 tokens per entry on prefill, 1 tokens per entry on"),
    ],
)  # fmt: skip
def test_unequal_items_of_one_packing_are_refused(there, here, says):
    assert says in refusal([cache(**there)], cache(**here))


def test_what_the_source_does_not_hold_is_refused():
    source, dest = cache(), cache()
    made, into = plan([source.layout], dest.layout), place(dest, 9)
    short = RequestAddress(8, place(source, 9).spans)
    with pytest.raises(IncompleteTransfer, match="holds positions up to 7"):
        made.bind(0, short, into)
    few = RequestAddress(9, {"kv": Span(np.array([1, 2]))})
    with pytest.raises(IncompleteTransfer, match="needs items for positions 0 to 11"):
        made.bind(0, few, into)
    with pytest.raises(ValueError, match="item 99 of space kv lies outside 1 to 31"):
        made.bind(0, RequestAddress(9, {"kv": Span(np.array([1, 2, 99]))}), into)


def test_whole_pages_are_explained_and_adjacent_ones_are_one_run():
    raw = np.zeros(PAGES * 64, dtype=np.uint8)
    pages, cell = torch.from_numpy(raw).view(PAGES, 64), Cell("k", 64, "uint8")
    seen = describe_items(pages, ("item",), cell, packing="amx", layer=0)
    layout = PoolLayout(seen.buffers, seen.regions, (Space("kv", entries_per_item=4),), 1)
    made = plan([layout], layout)
    (row,) = made.explain(10).rows
    assert (row.how, row.runs, row.nbytes) == ("direct", 3, 3 * 64)
    assert row.why == "whole items of packing amx"
    table = RequestAddress(10, {"kv": Span(np.array([3, 4, 5]))})
    assert made.bind(0, table, table).nbytes.tolist() == [3 * 64]
    assert layout.live_bytes(10) == 3 * 64


def moved(tokens=10):
    source, dest = cache(), cache()
    (there,), into = staged([source], dest, tokens)
    made = move([source], dest, [there], into)
    return source, dest, there, into, pieces(made, 0, range(tokens), tokens)


def digested(held, address, asked, each=False):
    return np.concatenate([*digests(held.layout, address, asked, each)])


def test_digests_are_of_whole_pages_and_name_the_positions_of_a_page():
    source, dest, there, into, asked = moved()
    sizes = {piece.key[1:]: len(piece.entries) for piece in asked}
    assert sizes == {(0, "k"): 3, (0, "v"): 10, (1, "k"): 3, (1, "v"): 10}
    one = digested(source, there, asked)
    assert one.tolist() == digested(dest, into, asked).tolist()
    last = dest.views["target", 1, "k"][into.spans["kv"].ids[2]]
    last[3, -1] ^= 1  # in what may be dead: nobody knows
    two = digested(dest, into, asked)
    assert [piece.key for piece, wrong in zip(asked, one != two) if wrong] == [("target", 1, "k")]
    both = (digested(*side, asked, each=True) for side in ((source, there), (dest, into)))
    assert differing(asked, *both, dest.layout) == ["target layer 1 k: positions 8-11 differ."]


def test_digests_of_items_that_are_not_alive_are_refused():
    source, _, there, _, asked = moved()
    wrong = [asked[0]._replace(entries=range(4))]
    with pytest.raises(ValueError, match="has items 0 to 3, space kv keeps 0 to 2 alive"):
        digested(source, there, wrong)


@pytest.mark.parametrize(("start", "chunks"), [(0, (8, 11, 21, 22)), (8, (22,))])
def test_endpoints_hand_over_packed_pages_and_compare_them(start, chunks):
    source, dest = cache(), cache()
    (there,), into = staged([source], dest, 22, prefix=start)
    with connected(source, dest, verify="checksum") as (prefill, decode):
        decode.receive("r", into, start=start)
        low = 0
        for high in chunks:
            chunk = RequestAddress(high, there.spans)
            prefill.send("r", chunk, tokens=range(low, high), last=high == 22)
            low = high
        succeeds(decode, "r")
        succeeds(prefill, "r")
    assert_holds(dest, into, range(start, 22), kept=range(start))


def test_a_start_inside_a_packed_page_is_refused_and_says_where_to_start():
    source, dest = cache(), cache()
    with connected(source, dest) as (_, decode):
        table = place(dest, 22)
        with pytest.raises(RoomError) as refused:
            decode.receive("r", table, start=9)
        assert str(refused.value) == (
            "room 'r': start 9 lies inside a page of space kv, positions 8 to 11. target layer 1 k "
            "has packing 'amx', whose pages are written whole. Receive from 8 on, or from 12."
        )
        with pytest.raises(RoomError, match=r"Receive from 20 on, or from 22\."):
            decode.receive("r", table, start=21)
        decode.receive("r", table, start=12)  # nothing of the refused room is left


def test_a_start_inside_a_page_that_is_dead_is_taken():
    source, dest = cache(window=5), cache(window=5)
    (there,), into = staged([source], dest, 22)
    with connected(source, dest) as (prefill, decode):
        decode.receive("r", into, start=9)
        prefill.send("r", there)
        succeeds(decode, "r")
    assert_holds(dest, into)


@pytest.mark.parametrize("side", ["offered", "received"])
def test_a_pinned_request_may_not_go_on_in_its_packed_page(side):
    pool = MLAPool(
        layers=[0], kv_lora_rank=8, qk_rope_head_dim=4, num_pages=9, page_size=4, dtype="bf16"
    )
    (buffer,) = pool.layout.buffers
    seen = replace(
        pool.layout.regions[0], role="k", axes=(), width=buffer.item_bytes, packing="amx"
    )
    layout = replace(pool.layout, regions=(seen,))
    allocator = Allocator(pool)
    request, full = allocator.new_request(), allocator.new_request()
    allocator.extend(request, 6)
    allocator.extend(full, 8)
    held = [True]
    for each in (request, full):
        each.pin(Pin("r", side, each.address(), layout, True, lambda: held[0]))
    with pytest.raises(RequestPinned, match="it would lose the packed page in item 2 of space kv"):
        allocator.extend(request, 1)
    assert request.num_tokens == 6
    allocator.extend(request, 0)
    allocator.extend(full, 1)  # in a page of its own
    held[0] = False
    allocator.extend(request, 1)
