"""FP4 between vLLM and SGLang, where both have the same scales in one order. What each keeps is
laid out here by hand, as tests of either engine find it in its own classes
(`tests/engines/test_nvfp4.py`, `tests/engines/sglang/test_fp4.py`).
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from disagg import IncompatibleLayouts
from disagg.connectors.blocks import block_table
from disagg.connectors.sglang.pools import engine_layout as sglang_layout
from disagg.connectors.sglang.states import Ranks
from disagg.connectors.vllm.layout import engine_layout as vllm_layout
from disagg.connectors.vllm.registered import Platform
from disagg.plan import plan
from kvpool.layout import RequestAddress, Span
from tests import oracle
from tests.disagg.connectors.vllm import engines

HEADS, DIM, PAGES, TOKENS, U8 = 2, 64, 12, 43, torch.uint8
CODES, SCALES = DIM // 2, DIM // 16


class Vllm:
    """Pages of `[K codes | K scales | V codes | V scales]`, heads outermost."""

    def __init__(self, page, tiles=False):
        content, name = CODES + SCALES, engines.name(0)
        self.memory = torch.zeros(PAGES, 2 * HEADS, page, content, dtype=U8)
        mode = SimpleNamespace(name="NVFP4")
        spec = engines.spec(
            "FullAttentionSpec", page, num_kv_heads=HEADS, head_size=DIM, kv_quant_mode=mode
        )
        config = engines.config({name: engines.module("FLASHINFER", kv_cache_dtype="nvfp4")})
        caches, views = engines.caches(PAGES, [([name], spec)]), {name: self.memory}
        seen = vllm_layout(config, caches, views, Platform(scale_tiles=tiles))
        ids = [5, 2, 7, 1, 9, 3][: -(-TOKENS // page)]
        self.layout, self.table = seen.layout, block_table(seen.groups, (ids,), TOKENS)
        self.page, self.ids = page, np.array(ids)

    def cells(self):
        """By name, `[token, head, content]`."""
        halves = self.memory.view(PAGES, 2, -1)
        cut = HEADS * self.page * CODES
        for side, half in zip("kv", halves.unbind(1)):
            for what, part in (("", half[:, :cut]), (" scale", half[:, cut:])):
                rows = part.view(PAGES, HEADS, self.page, -1).transpose(1, 2)
                yield side + what, rows, (self.ids[AT // self.page], AT % self.page)


class Sglang:
    """Codes and scales `[location, head, content]`, of a method of quantisation."""

    def __init__(self, page, method="nvfp4"):
        kind, shapes = type("MHATokenToKVPool", (), {}), {"buffer": CODES, "scale_buffer": SCALES}
        self.pool = kind()
        vars(self.pool).update(
            is_quantized_kv_cache=True, quant_method=SimpleNamespace(name=method), head_num=HEADS,
            page_size=page, start_layer=0, layer_num=1,
        )  # fmt: skip
        for side in "kv":
            for name, size in shapes.items():
                tensor = torch.zeros(PAGES * page, HEADS, size, dtype=U8)
                setattr(self.pool, f"{side}_{name}", [tensor])
        ranks = Ranks(total_kv_heads=HEADS)
        self.layout = sglang_layout(self.pool, ranks, state_types=[], total_layers=8).layout
        ids = [4, 8, 1, 6, 10, 2][: -(-TOKENS // page)]
        self.table = RequestAddress(TOKENS, {"kv": Span(ids)})
        self.page, self.ids = page, np.array(ids)

    def cells(self):
        at = self.ids[AT // self.page] * self.page + AT % self.page
        for side in "kv":
            for what, name in (("", "buffer"), (" scale", "scale_buffer")):
                yield side + what, getattr(self.pool, f"{side}_{name}")[0], (at,)


AT = np.arange(TOKENS)


@pytest.mark.parametrize(
    ("source", "dest"),
    [
        (lambda: Vllm(16), lambda: Sglang(32)),
        (lambda: Sglang(16), lambda: Vllm(32)),
        (lambda: Sglang(8), lambda: Sglang(16)),
    ],
)
def test_linear_scales_move_between_the_engines(source, dest):
    source, dest = source(), dest()
    random, values = np.random.default_rng(1), {}
    for name, rows, index in source.cells():
        shape = TOKENS, *rows.shape[-2:]
        values[name] = torch.from_numpy(random.integers(1, 256, shape, dtype=np.uint8))
        rows[index] = values[name]
    (batch,) = plan([source.layout], dest.layout).bind_all([source.table], dest.table)
    oracle.copy(batch)
    assert len(values) == 4
    for name, rows, index in dest.cells():
        assert rows[index].equal(values[name]), name


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (lambda: Vllm(16, tiles=True), [r"v.scale: prefill offers no such region"]),
        (lambda: Sglang(16, "fp4_mx_block16"), ["k.scale: float8_e8m0fnu", "float8_e4m3fn"]),
    ],
)
def test_scales_that_mean_something_else_are_refused_by_name(source, words):
    with pytest.raises(IncompatibleLayouts) as refused:
        plan([source().layout], Sglang(16).layout)
    assert all(word in str(refused.value) for word in words), refused.value
