"""SGLang's pools of FP4, of its own classes on CPU tensors: codes and scales are handed over to
pages of another size and to other ranks, and are found by SGLang's own indexing of its tensors.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.quantization import fp4_kv_cache_quant_method as methods
from sglang.srt.layers.quantization.kvfp4_tensor import FP4MXBlock16KVQuantizeUtil
from sglang.srt.mem_cache import memory_pool

from disagg import IncompatibleLayouts
from disagg.connectors.sglang.pools import engine_layout
from disagg.connectors.sglang.states import Ranks
from disagg.connectors.tensors import UnknownFormat
from disagg.plan import plan
from kvpool.layout import RequestAddress, Span
from tests import oracle
from tests.engines.sglang import sides

HEADS, DIM, LAYERS, TOKENS = 4, 32, 2, 75
FP4 = torch.float4_e2m1fn_x2
LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 16}


@pytest.fixture(autouse=True)
def one_rank():
    with sides.alone():
        yield


def mha(page, heads=HEADS, method=None):
    more = {} if method is None else {"quant_method": method}
    return sides.mha(page, heads, LAYERS, dim=DIM, dtype=FP4, **more)


def nvfp4(page, heads=HEADS):
    return mha(page, heads, methods.NVFP4KVCacheMethod(LAYERS, "cpu", page, False))


def mx(page, heads=HEADS):
    return mha(page, heads, methods.FP4MXBlock16KVCacheMethod())


def named_class(page, heads=HEADS):
    return sides.mha(page, heads, LAYERS, dim=DIM, dtype=FP4, cls="MHATokenToKVPoolFP4")


def mla(page, heads=1):
    pool = memory_pool.MLATokenToKVPoolFP4
    return pool(dtype=FP4, **LATENT, **sides.shape(page, LAYERS, 0))


class Rank:
    """A pool, which of the heads it has, and where a request's tokens are."""

    def __init__(self, make, page, heads=HEADS, rank=0, ranks=1, seed=0):
        self.pool, self.first = make(page, heads // ranks), rank * (heads // ranks)
        place = Ranks(tp_rank=rank, tp_size=ranks, total_kv_heads=heads)
        self.layout = engine_layout(self.pool, place, state_types=[], total_layers=LAYERS).layout
        random = np.random.default_rng(seed)
        self.pages = random.permutation(np.arange(1, sides.PAGES))[: -(-TOKENS // page)]
        tokens = np.arange(TOKENS)
        self.at = torch.from_numpy(self.pages[tokens // page] * page + tokens % page)
        self.table = RequestAddress(TOKENS, {"kv": Span(self.pages)})

    def tensors(self):
        """By layer and what they hold: `[location, head, content]`, or without heads."""
        heads = getattr(self.pool, "head_num", 1)
        for name in ("k_buffer", "k_scale_buffer", "v_buffer", "v_scale_buffer", "kv_buffer",
                     "kv_scale_buffer"):  # fmt: skip
            for layer, tensor in enumerate(getattr(self.pool, name, ())):
                yield (layer, name), tensor.view(torch.uint8).view(len(tensor), heads, -1)

    def fill(self, seed):
        """Random bytes, the same for a head wherever it is."""
        for (layer, name), tensor in self.tensors():
            tensor.random_(0, 256, generator=torch.Generator().manual_seed(99))
            for n in range(tensor.shape[1]):
                key = crc32(f"{layer} {name} {self.first + n} {seed}".encode())
                random = torch.Generator().manual_seed(key)
                size = TOKENS, tensor.shape[2]
                tensor[self.at, n] = torch.randint(0, 256, size, generator=random).to(torch.uint8)

    def snapshot(self):
        return {key: tensor.clone() for key, tensor in self.tensors()}


def hand_over(sources, dest):
    for source in sources:
        source.fill(1)
    dest.fill(2)
    before = dest.snapshot()
    made = plan([source.layout for source in sources], dest.layout)
    for batch in made.bind_all([source.table for source in sources], dest.table):
        oracle.copy(batch)
    found = dest.snapshot()
    dest.fill(1)
    for key, tensor in dest.tensors():
        expected = before[key]
        expected[dest.at] = tensor[dest.at]
        assert found[key].equal(expected), key
        assert not before[key].equal(torch.zeros_like(tensor))


KINDS = {"nvfp4": nvfp4, "mx": mx, "MHATokenToKVPoolFP4": named_class, "MLATokenToKVPoolFP4": mla}


@pytest.mark.parametrize("pages", [(16, 64), (64, 16), (1, 16)], ids=str)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_codes_and_scales_move_to_pages_of_another_size(make, pages, monkeypatch):
    monkeypatch.setattr(sides, "PAGES", 90)
    heads = 1 if make is mla else HEADS
    hand_over([Rank(make, pages[0], heads)], Rank(make, pages[1], heads, seed=1))


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2), (4, 2)], ids=str)
@pytest.mark.parametrize("make", [nvfp4, mx, named_class])
def test_codes_and_scales_move_to_other_ranks(make, ranks):
    sources = [Rank(make, 16, rank=n, ranks=ranks[0], seed=n) for n in range(ranks[0])]
    for n in range(ranks[1]):
        hand_over(sources, Rank(make, 32, rank=n, ranks=ranks[1], seed=9))


def test_what_sglang_stores_of_a_token_is_read_back_from_the_copy():
    """By its own quantisation and its own `get_key_buffer` and `get_value_buffer`."""
    source, dest = Rank(named_class, 16), Rank(named_class, 32, seed=1)
    key, value = (torch.randn(TOKENS, HEADS, DIM) for _ in "kv")
    quantise = FP4MXBlock16KVQuantizeUtil.batched_quantize.__wrapped__
    for values, codes, scales in (
        (key, source.pool.k_buffer, source.pool.k_scale_buffer),
        (value, source.pool.v_buffer, source.pool.v_scale_buffer),
    ):
        codes[0][source.at], scales[0][source.at] = quantise(values)
    for batch in plan([source.layout], dest.layout).bind_all([source.table], dest.table):
        oracle.copy(batch)
    restore = FP4MXBlock16KVQuantizeUtil.batched_dequantize.__wrapped__
    read = restore(dest.pool.k_buffer[0][dest.at], dest.pool.k_scale_buffer[0][dest.at])
    expected = restore(*quantise(key))
    assert read.equal(expected) and read.float().sub(key).abs().mean() < 0.2


def test_scales_of_another_dtype_are_refused_by_both_names():
    with pytest.raises(IncompatibleLayouts, match=r"layers 0-1 k\.scale: float8_e4m3fn") as refused:
        plan([Rank(nvfp4, 16).layout], Rank(mx, 16).layout)
    assert "float8_e8m0fnu on decode" in str(refused.value)


def test_scales_in_the_order_of_trt_llms_kernels_are_refused():
    method = methods.NVFP4KVCacheMethod(LAYERS, "cpu", 16, True)
    pool = sides.mha(16, HEADS, LAYERS, dim=64, dtype=FP4, quant_method=method)
    with pytest.raises(UnknownFormat, match="target: MHATokenToKVPool: KV quantised by nvfp4"):
        engine_layout(pool, Ranks(total_kv_heads=4), state_types=[], total_layers=LAYERS)
