"""Entries of several tokens that fill token by token: the last one moves before it is full."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.plan import plan
from disagg.plan.bind import Count
from kvpool.describe import describe_items
from kvpool.item import Cell
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from tests import oracle

TILE, WIDTH, PAGES = 4, 24, 12


def space(page, window=None):
    return Space(
        "kv", entries_per_item=page // TILE, tokens_per_entry=TILE, window=window, partial=True
    )


class Side:
    """Pages of tiles, with a byte at random in every place."""

    def __init__(self, page, tokens, seed, window=None):
        random = np.random.default_rng(seed)
        shape = PAGES, page // TILE, WIDTH
        self.memory = torch.from_numpy(random.integers(0, 256, shape, dtype=np.uint8))
        described = describe_items(
            self.memory, ("item", "entry"), Cell("k", WIDTH, "uint8"), layer=0
        )
        self.layout = PoolLayout.of(described, spaces=[space(page, window)])
        self.ids = random.permutation(np.arange(1, PAGES))[: -(-tokens // page)]
        self.table, self.page = RequestAddress(tokens, {"kv": Span(self.ids)}), page

    def tiles(self, tokens):
        """Of each tile that has a token."""
        at = np.arange(-(-tokens // TILE))
        return self.ids[at * TILE // self.page], at % (self.page // TILE)


def test_the_last_entry_is_alive_and_moves_before_it_is_full():
    pages = space(8)
    assert [pages.written(n) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]
    assert pages.alive(7) == range(2)
    assert pages.needed_entries(range(6), 7) == range(1)
    assert pages.needed_entries(range(6, 7), 7) == range(1, 2)
    assert pages.needed_entries(range(7), 7) == range(2)


@pytest.mark.parametrize(("tokens", "first"), [(5, 0), (9, 1), (12, 1), (13, 2), (16, 2), (17, 3)])
def test_a_window_counts_tokens(tokens, first):
    """Of the last 5 tokens the first is in that entry."""
    assert space(8, 5).alive(tokens) == range((tokens - 5) // TILE, -(-tokens // TILE))
    assert space(8, 5).alive(tokens).start == first


@pytest.mark.parametrize("tokens", [1, 4, 30, 32, 43])
@pytest.mark.parametrize("pages", [(8, 16), (16, 8), (8, 8)], ids=str)
def test_a_number_of_tokens_that_is_learned_late_moves_the_same(pages, tokens):
    source, dest = Side(pages[0], tokens, 1), Side(pages[1], 48, 2)
    made = plan([source.layout], dest.layout)
    most, own = dest.table, RequestAddress(tokens, dest.table.spans)
    edges = sorted({0, *range(7, tokens, 7), tokens})
    for start, stop in pairwise(edges):
        part = {"tokens": range(start, stop), "count": Count.UNKNOWN}
        oracle.copy(made.bind(0, source.table, most, **part))
    rest = {"tokens": range(tokens), "count": Count.LEARNED}
    oracle.copy(made.bind(0, source.table, own, **rest))
    expected = Side(pages[1], 48, 2).memory
    expected[dest.tiles(tokens)] = source.memory[source.tiles(tokens)]
    assert dest.memory.equal(expected)


def test_endpoints_move_and_check_it():
    source, dest = Side(8, 43, 1), Side(16, 43, 2)
    with (
        PrefillEndpoint(source.layout, create_engine("local")) as prefill,
        DecodeEndpoint(dest.layout, create_engine("local"), verify="checksum") as decode,
    ):
        decode.connect([prefill.address], timeout=20)
        decode.receive("room", dest.table)
        prefill.send("room", source.table)
        assert decode.wait("room", 20) is KVPoll.Success, decode.failure("room")
    assert dest.memory[dest.tiles(43)].equal(source.memory[source.tiles(43)])
