"""DeepSeek-V4 and V4.1 as vLLM lays them out on a CPU: specs by the classes of its models, groups
and tensors by its own planner. Rows are where its kernels write them
(`fused_compress_quant_cache.py`, `save_partial_states.py`, `sparse_swa.py`, `indexer_k_store.py`):
computed here, without layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch
from zlib import crc32

import numpy as np
import torch
from vllm.models.deepseek_v4 import attention as v4, compressor as v4_compressor
from vllm.models.deepseek_v41 import attention as v41, compressor as v41_compressor
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    SlidingWindowMLASpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg.connectors.blocks import block_table
from disagg.connectors.vllm.layout import engine_layout
from disagg.plan import plan
from tests import oracle
from tests.disagg.connectors.vllm import engines

try:
    from vllm.v1.core import kv_cache_planning as planner
except ImportError:  # before 0.33
    from vllm.v1.core import kv_cache_utils as planner

BLOCKS, FILL = 90, 0xEE
ORDER = KVCacheLayout.BLHNC
RECORDS = {
    584: (576, 7, 8),
    528: (512, 16, 16),
    288: (256, 32, 32),
    132: (128, 4, 4),
    68: (64, 4, 4),
}
"""Of packed entries, by their bytes: those of a row, its scales', and scales' strides."""


class Cache(NamedTuple):
    """What a layer keeps under a name: `tokens` an entry; 0: a row for each that is not yet
    compressed to one of `ratio`.
    """

    layer: int
    backend: str
    spec: Any
    tokens: int
    ratio: int


@dataclass(frozen=True, kw_only=True)
class Model:
    """What vLLM reads of a configuration and of its arguments. `ratios`: of each layer, 0 for none
    (of V4.1 also for layers that read another's); the last `drafts` are a drafter's. `record`:
    bytes an entry of V4.1's windows. `ring`: of V4.1's compressor.
    """

    ratios: Sequence[int] = (0, 4, 128, 4, 128, 4)
    window: int = 128
    block: int = 256
    dtype: str = "fp8_ds_mla"
    fp4_keys: bool = False
    version: str = "v4"
    record: int = 584
    ring: int = 8
    drafts: int = 0
    replay: bool = False

    def caches(self, layer: int) -> Iterator[tuple[str, Cache]]:
        """A layer's, by the end of its name."""
        packed = self.dtype.endswith("ds_mla")
        plain = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
        dtype = torch.uint8 if packed else plain[self.dtype]
        cache = SimpleNamespace(cache_dtype=self.dtype, block_size=self.block)
        config, ratio = SimpleNamespace(cache_config=cache), self.ratios[layer]
        newer = self.version == "v41"
        alignment = 512 if self.record == 528 else 576
        compressed = 288 if self.dtype == "nvfp4_ds_mla" else self.record
        swa = SimpleNamespace(
            bounded_replay=self.replay, block_size=32 if newer else 64, head_dim=512, dtype=dtype,
            window_size=self.window, cache_config=cache, packed_bytes_per_token=self.record,
            packed_page_alignment=alignment,
            packed_block_stride_alignment=lcm(528, compressed) if self.record == 528 else None,
        )  # fmt: skip
        spec = DeepseekV4SWACache.get_kv_cache_spec(swa, config)
        yield "attn.swa_cache", Cache(layer, "DEEPSEEK_SPARSE_SWA", spec, 1, 1)
        if not ratio:
            return
        module = v41 if newer else v4
        fields = {
            "head_dim": 512, "kv_cache_dtype": self.dtype, "kv_cache_torch_dtype": dtype,
            "compress_ratio": ratio, "is_kv_source": True, "kv_page_alignment": alignment,
            "compressed_bytes_per_token": compressed,
        }  # fmt: skip
        latents = module.DeepseekV4Attention.get_kv_cache_spec(SimpleNamespace(**fields), config)
        name = "FLASHMLA_SPARSE_DSV41" if newer else "FLASHMLA_SPARSE_DSV4"
        name = name if packed else name.replace("FLASHMLA", "FLASHINFER_MLA")
        name = "FLASHMLA_MEGA_ATTN_DSV41" if self.dtype == "nvfp4_ds_mla" else name
        yield "attn", Cache(layer, name, latents, ratio, ratio)
        if newer or ratio == 4:
            fields |= {
                "head_dim": 68 if self.fp4_keys else 132, "dtype": torch.uint8,
                "cache_config": cache, "sparse_logits": self.fp4_keys, "rocm_mxfp4": False,
            }  # fmt: skip
            spec = module.DeepseekV4IndexerCache.get_kv_cache_spec(
                SimpleNamespace(**fields), config
            )
            name = "DEEPSEEK_V41_INDEXER" if newer else "DEEPSEEK_V4_INDEXER"
            yield "attn.indexer.k_cache", Cache(layer, name, spec, ratio, ratio)
        if newer and ratio == 2:
            yield "attn.compressor.state_cache", self._keys(layer, 1024, self.ring, None, config)
        if not newer:
            overlap = 1 + (ratio == 4)
            size, window = (4, 8) if ratio == 4 else (8, ratio)
            for name, dim in (("attn", 512), ("attn.indexer", 128))[: 1 + (ratio == 4)]:
                keys = self._keys(layer, 2 * overlap * dim, size, window, config)
                yield f"{name}.compressor.state_cache", keys

    def _keys(self, layer: int, dim: int, block: int, window: int | None, config: Any) -> Cache:
        """Of tokens that are not yet compressed."""
        module = v4_compressor if window else v41_compressor
        fields = SimpleNamespace(
            block_size=block, state_dim=dim, dtype=torch.float32, sliding_window=window
        )
        spec = module.CompressorStateCache.get_kv_cache_spec(fields, config)
        return Cache(layer, "CompressorBackend", spec, 0, self.ratios[layer])


class Rank:
    """A rank that has `layers` of a model: vLLM's tensors, and a request's blocks in each group of
    the whole model, the same on ranks of one seed.
    """

    def __init__(
        self, model: Model, layers: Sequence[int], seed: int = 0, *, tp: int = 1, rank: int = 0
    ) -> None:
        self.window = model.window
        with patch.object(v41, "_use_v41_mxfp8_kv_record", lambda: model.record == 528):
            caches = {
                f"model.layers.{layer}.{name}": cache
                for layer in range(len(model.ratios))
                for name, cache in model.caches(layer)
            }
        self.caches = {name: cache for name, cache in caches.items() if cache.layer in layers}
        modules = {name: engines.module(cache.backend) for name, cache in self.caches.items()}
        self.config = config = engines.config(
            modules, layers=len(model.ratios) - model.drafts, tp=tp, rank=rank
        )
        config.cache_config = SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: ORDER,
            num_gpu_blocks_override=BLOCKS,
            prefix_cache_retention_interval=None,
        )
        config.attention_config = SimpleNamespace(hisparse_config=None)
        config.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
        specs = {name: cache.spec for name, cache in caches.items()}
        groups = planner.get_kv_cache_groups(config, specs)
        self.first_specs = [specs[group.layer_names[0]] for group in groups]
        groups = planner._project_kv_cache_groups_to_worker(groups, self.caches)
        self.group_of = {name: at for at, group in enumerate(groups) for name in group.layer_names}
        self.planned = planner.get_kv_cache_config_from_groups(config, groups, 1 << 40)
        tensors = self.planned.kv_cache_tensors
        self.raw, self.views = torch.full((tensors[0].size,), FILL, dtype=torch.uint8), {}
        for tensor in tensors:
            views = create_kv_cache_views(
                self.raw.view(torch.int8), specs[tensor.layers[0]], BLOCKS, ORDER, tensor, None
            )
            self.views |= zip(tensor.layers, views)
        self.seen = engine_layout(config, self.planned, self.views)
        self.free = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS)).tolist()

    def blocks(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        """By group, as its manager gives them: of a window those before it are the null block, and
        a ring is one.
        """
        lists = []
        for spec in self.first_specs:
            first = 0
            if isinstance(spec, SlidingWindowMLASpec):
                first = max(0, tokens - spec.sliding_window + 1) // spec.block_size
            count = 1 if isinstance(spec, CircularBufferSpec) else -(-tokens // spec.block_size)
            ids = [self.free.pop() for _ in range(count - first)]
            lists.append((0,) * first + tuple(ids))
        return tuple(lists)

    def address(self, blocks: tuple[tuple[int, ...], ...], tokens: int) -> Any:
        return block_table(self.seen.groups, blocks, tokens)

    def rows(
        self, blocks: tuple[tuple[int, ...], ...], tokens: int, start: int = 0
    ) -> Iterator[tuple[int, str, int, int, int]]:
        """Where live rows and scales are that positions from `start` on write, and those of what no
        prefix keeps: layer, cache, number, and bytes `[...]` of the tensors.
        """
        for name, (layer, _, spec, per, ratio) in self.caches.items():
            view, ids = self.views[name], blocks[self.group_of[name]]
            stride, states = view.stride(0) * view.element_size(), view.shape[2]
            ring, packed = isinstance(spec, CircularBufferSpec), view.dtype == torch.uint8
            width = view.shape[3] * view.element_size()
            size, scale, step = RECORDS[width] if packed else (width, 0, 0)
            first, stop = 0, tokens // per if per else tokens
            if isinstance(spec, SlidingWindowMLASpec) and per:
                first = max(0, tokens - self.window + 1)
            elif not per:
                first = max(0, tokens // ratio * ratio - (ratio if ratio == 4 else 0))
            if not ring and not getattr(spec, "bounded_replay", False):
                first = max(first, start // (per or 1))
            for number in range(first, stop):
                block, slot = divmod(number % states if ring else number, states)
                assert ids[block]
                page = view.data_ptr() - self.raw.data_ptr() + ids[block] * stride
                cache = name.partition(".attn")[2]
                yield layer, cache, number, page + slot * size, size
                if scale:
                    at = page + states * size + slot * step
                    yield layer, f"{cache} scale", number, at, scale

    def write(self, blocks: tuple[tuple[int, ...], ...], tokens: int, start: int = 0) -> Any:
        """Writes what each row must be; returns which bytes were written."""
        written = torch.zeros_like(self.raw, dtype=torch.bool)
        for layer, cache, number, first, size in self.rows(blocks, tokens, start):
            self.raw[first : first + size] = value(layer, cache, number, size)
            assert not written[first : first + size].any()
            written[first : first + size] = True
        return written


def value(layer: int, cache: str, number: int, size: int) -> torch.Tensor:
    """The bytes of a row."""
    seed = crc32(f"{layer} {cache} {number}".encode())
    cells = np.random.default_rng(seed).integers(0, FILL, size, dtype=np.uint8)
    return torch.from_numpy(cells)


def ranks(model: Model, tp: int = 1, stages: Sequence[Sequence[int]] = ()) -> list[Rank]:
    """An engine's. Every rank of tensor parallelism has all of the state of its stage's layers."""
    stages = stages or [range(len(model.ratios))]
    places = [(layers, rank) for layers in stages for rank in range(tp)]
    return [Rank(model, layers, tp=tp, rank=rank) for layers, rank in places]


def hand_over(there: Sequence[Rank], here: Sequence[Rank], tokens: int, start: int = 0) -> None:
    """Every rank of an engine reads a request from those of another, where it lacks positions from
    `start` on; every live byte is compared, and that no other block has changed.
    """
    offered = []
    for source in there:
        blocks = source.blocks(tokens)
        source.write(blocks, tokens)
        offered.append(source.address(blocks, tokens))
    for dest in here:
        dest.free.reverse()  # other blocks than prefill's
        blocks = dest.blocks(tokens)
        wanted = dest.address(blocks, tokens)
        transfer = plan([source.seen.layout for source in there], dest.seen.layout)
        for number, address in enumerate(offered):
            oracle.copy(transfer.bind(number, address, wanted, tokens=range(start, tokens)))
        got = dest.raw.clone()
        live = dest.write(blocks, tokens, start)
        assert live.any()
        assert torch.equal(got[live], dest.raw[live])
        others = sorted({*range(BLOCKS)} - {block for ids in blocks for block in ids if block})
        assert (got.view(BLOCKS, -1)[others] == FILL).all()
