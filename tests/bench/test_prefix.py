"""Prompts of 8,192 tokens and a million kept pages, beside dicts of tuples.

The reference is `dict[page before, tokens of a page] -> page`, and an OrderedDict of pages that
nobody holds. It begins with Python lists, ours with arrays; and all but the pages that are asked
for have keys of one token there, which makes it faster.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import cycle

import numpy as np
import pytest

from kvpool import Allocator, MHAPool, PrefixCache

ASKED = 64


class Filled:
    """An allocator all of whose pages are kept, and the reference; `asked` prompts are in both."""

    def __init__(self, page, timed):
        self.page, self.tokens = page, 8192 if timed else 8 * page
        self.pages = self.tokens // page
        prompts = 1_000_000 // self.pages if timed else 8
        pool = MHAPool(
            layers=[0],
            num_pages=prompts * self.pages + 1,
            page_size=page,
            num_kv_heads=1,
            head_dim=8,
            dtype="bf16",
            device="meta",
        )
        self.allocator = Allocator(pool, prefix=PrefixCache())
        for seed in range(prompts):
            self.serve(self.prompt(seed))
        asked = min(ASKED, prompts)
        self.asked = [self.prompt(n) for n in range(0, prompts, prompts // asked)][:asked]
        self.table = {(-1, (n,)): n for n in range(asked * self.pages, prompts * self.pages)}
        self.keys = dict(zip(self.table.values(), self.table))
        self.idle = OrderedDict.fromkeys(self.table.values())
        for number, row in enumerate(self.asked):
            self.store(row.tolist(), range(number * self.pages, (number + 1) * self.pages))

    def prompt(self, seed):
        return np.random.default_rng(seed).integers(0, 150_000, self.tokens)

    def serve(self, row):
        request = self.allocator.new_request(row)
        found = request.num_tokens
        self.allocator.extend(request, self.tokens - found)
        self.allocator.store(request, row[found:])
        self.allocator.free(request)
        return found

    def lookup(self, row):
        parent, found = -1, []
        for at in range(0, self.tokens, self.page):
            parent = self.table.get((parent, tuple(row[at : at + self.page])))
            if parent is None:
                break
            found.append(parent)
        return found

    def store(self, row, ids):
        parent = -1
        for at, item in enumerate(ids):
            key = parent, tuple(row[at * self.page : (at + 1) * self.page])
            parent = self.table[key] = item
            self.keys[item] = key
        for item in reversed(ids):
            self.idle[item] = None

    def serve_reference(self, row):
        ids = self.lookup(row)
        for _ in range(len(ids), self.pages):
            item, _ = self.idle.popitem(last=False)
            del self.table[self.keys.pop(item)]
            ids.append(item)
        self.store(row, ids)


@pytest.fixture(params=[64, 16], ids=["pages of 64", "pages of 16"], scope="module")
def filled(request, timed):
    return Filled(request.param, timed)


def test_a_prompt_that_is_there_is_looked_up(paired, filled):
    arrays, lists = cycle(filled.asked), cycle([row.tolist() for row in filled.asked])

    def ours():
        assert filled.allocator.prefix.lookup(next(arrays)) == filled.tokens

    def reference():
        assert len(filled.lookup(next(lists))) == filled.pages

    paired(ours, reference, rounds=300)


def test_a_prompt_that_is_not_there_takes_the_oldest_pages(paired, filled):
    rows = [filled.prompt((1 << 40) + n) for n in range(64)]
    mine, theirs = iter(rows), iter([row.tolist() for row in rows])
    paired(
        lambda: filled.serve(next(mine)),
        lambda: filled.serve_reference(next(theirs)),
        rounds=50,
    )
    filled.allocator.check_integrity()
