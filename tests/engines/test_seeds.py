"""Pairs by seed: DeepSeek-V4 in vLLM's layout to `DSv4Pool` and back into other blocks."""

from __future__ import annotations

import random

import pytest
import torch

from disagg.plan import plan
from kvpool import DSv4Pool
from tests import oracle
from tests.engines.deepseek_v4 import Model, Rank


@pytest.mark.parametrize("seed", range(24))
def test_vllms_deepseek_v4_and_kvpools_own_pool(seed):
    """Layers, ratios, windows, blocks, pages and lengths by seed; every other pool has its rings in
    pages.
    """
    draw = random.Random(seed)
    ratios = [draw.choice((0, 4, 128)) for _ in range(draw.randint(1, 8))]
    window, tokens = draw.choice((32, 64, 96, 128, 200)), draw.randint(1, 700)
    blocks = [draw.choice((128, 256, 384, 512)) for _ in range(2)]
    there, back = (
        Rank(Model(ratios=ratios, window=window, block=block), range(len(ratios)), seed + number)
        for number, block in enumerate(blocks)
    )
    pool = DSv4Pool(
        layers=range(len(ratios)), compress_ratios=ratios, window=window - 1, num_pages=8,
        num_window_pages=8, num_slots=3, page_size=draw.choice((128, 256)), packing="fp8",
        page_rings=seed % 2 == 1,
    )  # fmt: skip
    address, held, wanted = oracle.place(pool, tokens), there.blocks(tokens), back.blocks(tokens)
    there.write(held, tokens)
    into, out = plan([there.seen.layout], pool.layout), plan([pool.layout], back.seen.layout)
    oracle.copy(into.bind(0, there.address(held, tokens), address, tokens=range(tokens)))
    oracle.copy(out.bind(0, address, back.address(wanted, tokens), tokens=range(tokens)))
    got = back.raw.clone()
    live = back.write(wanted, tokens)
    assert live.any()
    assert torch.equal(got[live], back.raw[live])
