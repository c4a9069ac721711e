"""Allocating, packing and binding, each against plain code that does the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from disagg.plan import plan
from kvpool import Allocator, DSv4Pool, MLAPool, RequestAddress, Span

LAYERS, REQUESTS, TOKENS = 61, 256, 131_072


def dsv4(**more):
    """DeepSeek-V4 of 61 layers, without memory."""
    ratios = [128, 128, *[4, 128] * 29, 4]
    sizes = {"num_pages": 4 * TOKENS // 256, "num_window_pages": 1024, "num_slots": 300}
    common = {"layers": range(LAYERS), "page_size": 256, "packing": "fp8", "device": "meta"}
    return DSv4Pool(compress_ratios=ratios, **{**common, **sizes, **more})


class Lists:
    """One request after the other, a Python list of ids each."""

    def __init__(self, requests):
        self.free = {"kv": list(range(1, 99_999)), "swa": list(range(1, 99_999))}
        self.held = [{"kv": [], "swa": [], "ring": number} for number in range(requests)]
        self.tokens = [0] * requests

    def extend(self):
        """One token more for each; its location in every space."""
        found = []
        for number, held in enumerate(self.held):
            at = self.tokens[number]
            for name, size in (("kv", 256), ("swa", 128)):
                if at % size == 0:
                    held[name].append(self.free[name].pop())
            if at % 128 == 0 and len(held["swa"]) > 2:
                self.free["swa"].append(held["swa"].pop(0))
            page, slot = held["kv"][-1], held["ring"]
            row = (
                held["swa"][-1] * 128 + at % 128,
                page * 64 + at % 256 // 4,
                page * 2 + at % 256 // 128,
                slot * 8 + at % 8,
                slot * 128 + at % 128,
            )
            found.append(row)
            self.tokens[number] += 1
        return np.array(found)


def test_extend_256_requests_by_a_token_in_five_spaces(paired):
    allocator, lists = Allocator(dsv4()), Lists(REQUESTS)
    requests = [allocator.new_request() for _ in range(REQUESTS)]
    names = ("swa", "c4", "c128", "c4.ring", "c128.ring")
    located = allocator.extend_batch(requests, 1)
    for row, expected in enumerate(lists.extend()):  # the same places, in pages of other numbers
        sizes = (128, 64, 2, 8, 128)
        steps = [int(located[n][row, 0]) % size for n, size in zip(names, sizes)]
        assert steps == [place % size for place, size in zip(expected, sizes)]
    paired(lambda: allocator.extend_batch(requests, 1), lists.extend, rounds=200)
    allocator.check_integrity()


@pytest.fixture
def one_thread():
    """As many as the reference needs; a second one waits for a core on small machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("packing", ["bf16", "fp8"])
def test_write_4096_latent_rows(paired, one_thread, packing):
    """Against rows of bf16 put by index into one plain tensor."""
    pool = MLAPool(layers=[0], num_pages=129, page_size=64, packing=packing)
    latent, rope = torch.randn(4096, 512).bfloat16(), torch.randn(4096, 64).bfloat16()
    where = torch.randperm(128 * 64)[:4096] + 64
    plain, rows = torch.zeros(129 * 64, 576, dtype=torch.bfloat16), torch.cat([latent, rope], 1)
    pool.set_kv_buffer(0, where, latent, rope)
    error = (pool.get_kv_buffer(0, where)[0] - latent).abs().max()
    assert error == 0 if packing == "bf16" else 0 < error < 0.3

    def put():
        plain[where] = rows

    paired(lambda: pool.set_kv_buffer(0, where, latent, rope), put)


def test_bind_128k_tokens_of_six_kinds_of_state(paired):
    """Against one Python tuple a page and buffer, as many as the spaces have."""
    pools = [dsv4(), dsv4()]
    made = plan([pools[0].layout], pools[1].layout)
    random, sides = np.random.default_rng(0), []
    for _ in pools:
        pages = 1 + random.permutation(3 * TOKENS // 256)[: TOKENS // 256]
        spans = {"kv": Span(pages), "swa": Span([7, 3], TOKENS // 128 - 2), "ring": Span([2])}
        sides.append(RequestAddress(TOKENS, spans))
    source, dest = (pool.layout for pool in pools)

    def ids(address, layout, buffer):
        return address.spans[layout.space_by_name[buffer.space].id_list].ids.tolist()

    def tuples():
        found = []
        for there, here in zip(source.buffers, dest.buffers):
            for src, dst in zip(ids(sides[0], source, there), ids(sides[1], dest, here)):
                at = there.base + src * there.item_bytes, here.base + dst * here.item_bytes
                found.append((*at, here.item_bytes))
        return found

    assert made.bind(0, *sides).runs >= len(tuples()) // 2
    paired(lambda: made.bind(0, *sides), tuples)
