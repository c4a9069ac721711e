"""DSA whose layers share an indexer (GLM-5), as vLLM lays it out: only layers that compute a top-k
have index keys. Groups and tensors are made by its planner on a CPU, and rows lie where its slots
say: computed here, without layouts.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import MLAAttentionSpec, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg import IncompatibleLayouts
from disagg.connectors.blocks import block_table
from disagg.connectors.vllm.layout import engine_layout
from disagg.plan import plan
from tests import oracle
from tests.disagg.connectors.vllm import engines
from tests.engines.cross.latents import TOKENS, value

try:
    from vllm.v1.core import kv_cache_planning as planner
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as planner

PATTERN, BLOCKS, FILL = "FFSSFSSS", 12, 0xEE
WHOLE, HALVES, QUARTERS = (
    [range(8)],
    [range(3), range(3, 8)],
    [range(n, n + 2) for n in (0, 2, 4, 6)],
)
ONE = {"num_kv_heads": 1, "dtype": torch.uint8}


class Engine:
    """A rank with layers of the model: vLLM's tensors, and the blocks of a request."""

    def __init__(self, layers, seed, *, block=64, order="BLHNC", pattern=PATTERN, rank=0, ranks=1):
        self.block, modules, specs = block, {}, {}
        for layer in layers:
            stem = f"model.layers.{layer}.self_attn"
            modules[f"{stem}.attn"] = engines.module("FLASHMLA_SPARSE", kv_cache_dtype="fp8_ds_mla")
            specs[f"{stem}.attn"] = MLAAttentionSpec(
                block_size=block, head_size=576, cache_dtype_str="fp8_ds_mla",
                state_content_bytes=656, **ONE,
            )  # fmt: skip
            if pattern[layer] == "F":  # DeepseekV2MLAAttention builds an indexer
                modules[f"{stem}.indexer.k_cache"] = engines.module("DEEPSEEK_V32_INDEXER")
                keys = MLAAttentionSpec(block_size=block, head_size=132, **ONE)
                specs[f"{stem}.indexer.k_cache"] = keys
        config = engines.config(modules, layers=len(pattern), tp=ranks, rank=rank)
        layout = KVCacheLayout[order]
        config.cache_config = SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        )
        config.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
        config.attention_config = SimpleNamespace(hisparse_config=None)
        groups = planner.get_kv_cache_groups(config, specs)
        planned = planner.get_kv_cache_config_from_groups(config, groups, 1 << 40)
        tensors = planned.kv_cache_tensors
        self.raw, self.views = torch.full((tensors[0].size,), FILL, dtype=torch.uint8), {}
        for tensor in tensors:
            views = create_kv_cache_views(
                self.raw.view(torch.int8), specs[tensor.layers[0]], BLOCKS, layout, tensor, None
            )
            self.views |= zip(tensor.layers, views)
        self.seen = engine_layout(config, planned, self.views)
        count = -(-TOKENS // block)
        ids = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS))[:count]
        self.ids = tuple(ids.tolist())
        self.table = block_table(self.seen.groups, (self.ids,), TOKENS)

    def rows(self):
        """Where live rows are: layer, what, token, first byte and size."""
        for name, view in self.views.items():
            layer, base = int(name.split(".")[2]), view.data_ptr() - self.raw.data_ptr()
            for token in range(TOKENS):
                block, slot = divmod(token, self.block)
                item = base + self.ids[block] * view.stride(0)
                if name.endswith("k_cache"):
                    yield layer, "key", token, item + slot * 128, 128
                    yield layer, "scale", token, item + self.block * 128 + slot * 4, 4
                else:
                    yield layer, "row", token, item + slot * view.stride(2), 656

    def write(self):
        """Writes what each row must be; returns which bytes were written."""
        written = torch.zeros_like(self.raw, dtype=torch.bool)
        for layer, what, token, first, size in self.rows():
            self.raw[first : first + size] = torch.from_numpy(value(layer, what, token, size))
            assert not written[first : first + size].any()
            written[first : first + size] = True
        return written


@pytest.mark.parametrize("order", ["BLHNC", "LBHNC"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("blocks", [(64, 64), (64, 128), (128, 32)], ids=str)
@pytest.mark.parametrize(
    ("there", "here"),
    [(WHOLE, WHOLE), (QUARTERS, HALVES), (WHOLE, QUARTERS)],
    ids=["whole", "4 to 2", "1 to 4"],
)
def test_every_row_is_where_the_other_engine_has_it(there, here, blocks, ranks, order):
    sources = []
    for layers in there:
        for rank in range(ranks):
            sources.append(Engine(layers, 1, block=blocks[0], order=order, rank=rank, ranks=ranks))
            sources[-1].write()
    for layers in here:
        dest = Engine(layers, 7, block=blocks[1])
        made = plan([source.seen.layout for source in sources], dest.seen.layout)
        for number, source in enumerate(sources):
            oracle.copy(made.bind(number, source.table, dest.table, tokens=range(TOKENS)))
        got = dest.raw.clone()
        live = dest.write()
        assert torch.equal(got[live], dest.raw[live])
        others = sorted({*range(BLOCKS)} - {*dest.ids})
        assert (got.view(BLOCKS, -1)[others] == FILL).all()


def test_only_layers_with_an_indexer_have_index_keys():
    regions = Engine(range(8), 1).seen.layout.regions
    assert {r.layer for r in regions if r.role == "latent"} == {*range(8)}
    assert {r.layer for r in regions if r.role == "index_key"} == {0, 1, 4}


def test_another_pattern_is_refused_by_layer():
    there, here = (Engine(range(8), 1, pattern=one) for one in (PATTERN, "FSSFSSSS"))
    words = "target layer 3 index_key: prefill offers no such"
    with pytest.raises(IncompatibleLayouts, match=words):
        plan([there.seen.layout], here.seen.layout)
