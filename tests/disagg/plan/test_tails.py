"""The last page of a request moves whole where that saves runs, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from disagg.plan import plan
from disagg.plan.shapes import BYTES_PER_RUN
from kvpool.describe import describe, describe_buffer
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from tests.oracle import assert_holds, blank, fill, hand_off, move, over, place, staged


def cache(page=16, heads=2, dim=4, pages=12, layers=1, *, gap=0, padding=False, **space):
    """Pages `[item, head, (K transposed [dim, entry] | V [entry, dim])]`, bfloat16; of each page
    the last `gap` bytes are not described.
    """
    size = heads * 2 * page * dim * 2 + gap
    slab = np.zeros(layers * pages * size, dtype=np.uint8)
    buffers, regions = [], []
    for layer, raw in enumerate(torch.from_numpy(slab).view(layers, pages, size)):
        home = describe_buffer(raw, ("item", "dim"), name=f"kv.{layer}", padding=padding)
        planes = raw[:, : size - gap].view(torch.bfloat16).unflatten(1, (heads, 2, page * dim))
        common = {"layer": layer, "buffer": home}
        k, v = planes[:, :, 0].unflatten(2, (dim, page)), planes[:, :, 1].unflatten(2, (page, dim))
        names = ("item", "head", "dim", "entry")
        regions += describe(k, names, role="k", cell=None, **common).regions
        names = ("item", "head", "entry", "dim")
        regions += describe(v, names, role="v", **common).regions
        buffers.append(home)
    made = Space("kv", entries_per_item=page, **space)
    return over(PoolLayout(tuple(buffers), tuple(regions), (made,), layers), slab)


def table(tokens, ids, first_item=0):
    return RequestAddress(tokens, {"kv": Span(np.array(ids), first_item)})


@pytest.mark.parametrize("tokens", [1, 16, 47])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_partly_filled_page_is_one_run_where_k_is_transposed(tokens, layers):
    source, dest = cache(layers=layers), cache(layers=layers)
    made, _ = hand_off([source], dest, tokens)
    pages = list(range(1, 2 + (tokens - 1) // 16))
    batch = made.bind(0, table(tokens, pages), table(tokens, pages))
    assert batch.nbytes.tolist() == [len(pages) * 512] * layers
    assert made.explain(tokens).nbytes == len(pages) * 512 * layers


def runs_of(source, dest, tokens, low=0, high=None):
    made = plan([source.layout], dest.layout)
    pages = -(-tokens // 16)
    ids = np.arange(2 * pages, 0, -2)
    high = tokens if high is None else high
    return made.bind(0, table(tokens, ids), table(tokens, ids), tokens=range(low, high)).runs


EXACT = 2 * (4 + 1)  # of each head, K's rows and V's tokens


def test_only_a_page_that_no_later_chunk_writes_and_no_earlier_one_has_written_moves_whole():
    source, dest = cache(), cache()
    assert runs_of(source, dest, 25) == 2
    assert runs_of(source, dest, 25, 16) == 1
    assert runs_of(source, dest, 25, 17) == EXACT  # positions before are kept, perhaps shared
    assert runs_of(source, dest, 25, 0, 24) == 1 + EXACT  # the next chunk writes the page again
    assert runs_of(source, dest, 32, 0, 24) == 1 + EXACT


def test_a_page_whose_first_entries_left_the_window_is_exact():
    source, dest = cache(window=7), cache(window=7)
    assert runs_of(source, dest, 25) == EXACT
    assert runs_of(source, dest, 23) == 1  # from the page's first position on
    assert runs_of(source, dest, 21) == 2 * (4 + 1) + 1


def test_items_of_other_sizes_are_exact():
    source, dest = cache(), cache(8)
    assert hand_off([source], dest, 25)[1] == [25 * 32]


def test_a_ring_that_is_not_full_is_exact():
    def ring():
        raw = np.zeros(5 * 8 * 2 * 4, dtype=np.uint8)
        names = ("item", "head", "entry", "dim")
        rows = torch.from_numpy(raw).view(5, 2, 8, 4)
        seen = describe(rows, names, role="state", layer=0, space="ring")
        space = Space("ring", "ring", 8, window=8)
        return over(PoolLayout(seen.buffers, seen.regions, (space,), 1), raw)

    source, dest = ring(), ring()
    made, _ = hand_off([source], dest, 5)
    assert made.bind(0, place(source, 5, 1), place(dest, 5)).nbytes.tolist() == [20, 20]


@pytest.mark.parametrize("padding", [False, True])
def test_foreign_bytes_of_a_page_that_moves_whole_are_not_touched(padding):
    source, dest = cache(gap=10, padding=padding), cache(gap=10, padding=padding)
    made, _ = hand_off([source], dest, 20)
    batch = made.bind(0, place(source, 20, 1), place(dest, 20))
    assert batch.runs == 2 and batch.total == 2 * 512


def test_pages_of_others_and_a_prefix_that_is_kept_are_not_touched():
    source, dest = cache(), cache()
    for start in (0, 5, 16, 20, 32, 33, 37):
        (there,), into = staged([source], dest, 37, prefix=start)
        move([source], dest, [there], into, range(start, 37))
        assert_holds(dest, into, range(start, 37), kept=range(start))


def test_a_page_moves_whole_only_if_that_costs_less_than_the_runs_it_saves():
    """V by head and token: a page of one head is one run either way."""
    tokens, page = 4, 4096
    for heads in (1, 2):
        raw = np.zeros(2 * heads * page * 16, dtype=np.uint8)
        names = ("item", "head", "entry", "dim")
        rows = torch.from_numpy(raw).view(2, heads, page, 16)
        seen = describe(rows, names, role="v", layer=0)
        space = Space("kv", entries_per_item=page)
        layout = PoolLayout(seen.buffers, seen.regions, (space,), 1)
        made = plan([layout], layout)
        batch = made.bind(0, table(tokens, [1]), table(tokens, [1]))
        assert batch.nbytes.tolist() == [tokens * 16] * heads
        # the other way round once what is dead is no more than one run's worth
        most = heads * page * 16
        full = next(n for n in range(page, 0, -1) if most - n * heads * 16 > BYTES_PER_RUN) + 1
        for n, runs in ((full - 1, heads), (full, 1)):
            assert made.bind(0, table(n, [1]), table(n, [1])).runs == runs


def test_what_prefill_computed_beyond_the_request_does_no_harm():
    source, dest = cache(), cache()
    there, into = place(source, 27, 1), place(dest, 25, 2)
    fill(source, there)
    blank(dest)
    move([source], dest, [there], into)
    assert_holds(dest, into)


def test_31_pages_and_127_tokens_of_transposed_k_are_one_run_a_layer():
    """vLLM's CPU backend: 8 heads of 64, pages of 128. Exact tails made them 8,336 runs."""
    held = cache(128, heads=8, dim=64, pages=34, layers=16)
    made, near = plan([held.layout], held.layout), table(32 * 128 - 1, np.arange(1, 33))
    batch = made.bind(0, near, near)
    assert (batch.runs, batch.total) == (16, 16 * 32 * 8 * 2 * 64 * 128 * 2)
