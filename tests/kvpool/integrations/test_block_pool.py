"""Models decode over a block pool as over transformers' own cache, bit for bit, whatever other kind
of state had a block before.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvpool import Allocator  # noqa: E402
from kvpool.integrations.transformers import PoolCache  # noqa: E402
from tests.kvpool.integrations.caches import model_of, pool_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("gemma3_text", "qwen3_next", "deepseek_v4")


class Run:
    """One row of tokens over a cache, and what the model says of them over transformers' own."""

    def __init__(self, model: Any, cache: Any, seed: int) -> None:
        self.model, self.cache, self.seed = model, cache, seed
        self.theirs = transformers.DynamicCache(config=model.config)
        self.count = 0

    @torch.no_grad()
    def step(self, tokens: int) -> None:
        """`tokens` more tokens, compared bit by bit."""
        random = torch.Generator().manual_seed(1000 * self.seed + self.count)
        ids = torch.randint(0, 128, (1, tokens), generator=random)
        ours, theirs = (
            self.model(ids, past_key_values=cache, use_cache=True).logits
            for cache in (self.cache, self.theirs)
        )
        assert torch.equal(ours, theirs), f"run {self.seed} after {self.count} tokens"
        self.count += tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_take_over_one_another_s_blocks_decode_bit_equal(family):
    model = model_of(family, torch.bfloat16)
    page_size = 1 if family == "deepseek_v4" else 4
    pool = pool_of(model, page_size, 250, placement="block")
    assert len(pool.layout.slabs()) == 1 and len(pool.layout.block_pools["blocks"]) > 2
    # NaN in every type: what is read of a block before it is written shows
    for buffer in pool.layout.buffers:
        pool.item_bytes_view(buffer).fill_(0xFF)
    alloc = Allocator(pool)
    live, held = [], dict.fromkeys(pool.layout.block_pools["blocks"], frozenset())
    for seed in range(4):
        run = Run(model, PoolCache.new(pool, alloc), seed)
        run.step(20 + 9 * seed)
        live.append(run)
        for each in live * 3:
            each.step(1)
        for each in live:
            for name, span in each.cache.requests[0].address().spans.items():
                held[name] |= set(span.ids.tolist())
        alloc.check_integrity()
        if seed % 2:  # its blocks are those of the next
            alloc.free(live.pop(0).cache.requests[0])
    used = [*held.values()]
    assert any(one & other for n, one in enumerate(used) for other in used[:n])
