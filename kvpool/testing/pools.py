"""The kit's pools: small ones of every class and packing, and some with rows of real sizes. Sizes
within a pool differ, so that a mix-up shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kvpool.layout import formats
from kvpool.layout.formats import MHA, MLA, IndexKey, Shard
from kvpool.pools.base import KVPool
from kvpool.pools.placement import ITEM_COUNTS
from kvpool.pools.states import LayeredPool, State
from kvpool.pools.typed import DSv4Pool, HybridLinearPool, MHAPool, MLAPool, NSAPool, SWAPool


@dataclass(frozen=True, slots=True)
class Example:
    """A class and its arguments; `resized`: those of a pool of other pages, for its state."""

    kind: type[KVPool]
    arguments: Mapping[str, Any]
    resized: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, **more: Any) -> KVPool:
        return self.kind(**{**self.arguments, **more})

    def but(self, **more: Any) -> Example:
        """The same example with other arguments."""
        return replace(self, arguments={**self.arguments, **more})

    def from_budget(self, nbytes: int, **more: Any) -> KVPool:
        """A pool of as many pages as fit into `nbytes` bytes."""
        sizes = {name: value for name, value in self.arguments.items() if name not in ITEM_COUNTS}
        return self.kind.from_budget(nbytes, **{**sizes, **more})

    @property
    def others(self) -> list[Mapping[str, Any]]:
        """Arguments of pools that must exchange state with this one."""
        pages = {"placement": "page", **self.resized}
        return [pages, {"placement": "stack", "shard": Shard(1, 2)}]


_COUNTS = {"num_pages": 9, "num_window_pages": 11, "num_slots": 5}
_LAYERS = {"layers": range(4), "total_kv_layers": 4}
COMMON: Mapping[str, Any] = {**_COUNTS, **_LAYERS, "page_size": 4, "packing": "bf16"}
_HALF_PAGES = {"page_size": 2, "num_pages": 17}
ROW, INDEX = MLA(16, 8), IndexKey(16)


def small(kind: type[KVPool], **arguments: Any) -> Example:
    """A pool of four layers; by default bf16, in pages of four tokens."""
    return Example(kind, {**COMMON, **arguments}, _HALF_PAGES)


mha = small(MHAPool, num_kv_heads=4, head_dim=8, v_head_dim=16)
mla = small(MLAPool, kv_lora_rank=16, qk_rope_head_dim=8)
nsa = small(NSAPool, kv_lora_rank=16, qk_rope_head_dim=8, index_head_dim=16, index_layers=(1, 3))
swa = replace(
    small(SWAPool, full=MHA(4, 8, 16), swa=ROW, window_layers=(0, 2), window=6, window_page_size=2),
    resized={**_HALF_PAGES, "window_page_size": 3},
)
_GDN = formats.gated_delta_net(k_heads=2, v_heads=4, k_dim=3, v_dim=5, kernel=4)
hybrid = small(HybridLinearPool, full=MHA(4, 8, 16), linear=_GDN, linear_layers=(0, 1, 2))
hybrid_mla = hybrid.but(full=ROW, linear=formats.kda(heads=4, dim=3, kernel=4))
_SSM = formats.mamba2(heads=4, head_dim=3, groups=2, state_size=5, kernel=4)
hybrid_nsa = hybrid.but(full=ROW, linear=_SSM, linear_layers=(0, 2), index=INDEX, index_layers=[3])
_CONVS = State(formats.short_conv(8, 3)), State(formats.short_conv(4, 2))
layered = small(
    LayeredPool,
    states={
        0: (State(MHA(4, 8, 16)),),
        1: (State(MHA(2, 16), window=6), *_CONVS),
        2: (State(ROW), State(INDEX)),
        3: (State(ROW, window=3),),
    },
)
_V4_DIMS = {"latent_dim": 8, "qk_rope_head_dim": 4, "index_head_dim": 8}
_V4_PAGES = {"page_size": 8, "window": 6, "window_page_size": 4}
dsv4 = Example(
    DSv4Pool,
    {**COMMON, **_V4_DIMS, **_V4_PAGES, "compress_ratios": (0, 2, 8, 2), "overlap_ratio": 2},
    {"page_size": 16, "num_pages": 5, "window_page_size": 2, "num_window_pages": 21},
)

CLASSES = {
    "mha": mha,
    "mha hnd": mha.but(order="hnd"),
    "mla": mla,
    "nsa": nsa,
    "swa": swa,
    "hybrid": hybrid,
    "hybrid mla": hybrid_mla,
    "hybrid nsa": hybrid_nsa,
    "layered": layered,
    "dsv4": dsv4,
    "dsv4 speculating": dsv4.but(speculation=True),
    "dsv4, rings of pages": replace(
        dsv4.but(page_rings=True),
        resized={"page_size": 16, "num_pages": 5, "window_page_size": 8, "page_rings": False},
    ),
}
WIDE = MHA(4, 64, 32)
# rows of released models: several blocks a row, and block counts that are not powers of two
_REAL = {"layers": (0, 1), "total_kv_layers": 3, "num_pages": 3, "page_size": 64, "packing": "fp8"}
_REAL_V4 = {**_REAL, "layers": (1, 2), "compress_ratios": (0, 4, 128), "page_size": 256}

POOLS: dict[str, Example] = {
    **{
        f"{name} {packing}": build.but(packing=packing)
        for name, build in CLASSES.items()
        for packing in ("bf16", "fp8")
    },
    "mha f32": mha.but(packing="f32"),
    "mla f32": mla.but(packing="f32"),
    "mla bf16 without rope": mla.but(qk_rope_head_dim=0),
    "mla fp8 without rope": mla.but(qk_rope_head_dim=0, packing="fp8"),
    "mha f16": mha.but(packing="f16"),
    "mha mxfp8": mha.but(packing="mxfp8", head_dim=64, v_head_dim=32),
    "mha hnd mxfp8": mha.but(packing="mxfp8", head_dim=64, v_head_dim=32, order="hnd"),
    "swa mxfp8": swa.but(packing="mxfp8", full=WIDE, swa=MHA(2, 32)),
    "hybrid mxfp8": hybrid.but(packing="mxfp8", full=WIDE),
    "mamba-1 and mha in a layer": hybrid.but(
        linear=formats.mamba1(12, 5, 4, "taps_first"), full_layers=(1, 3)
    ),
    "hybrid short conv": hybrid.but(linear=formats.short_conv(8, 3)),
    "lightning alone": small(
        HybridLinearPool, linear=formats.lightning(4, 6), linear_layers=range(4)
    ),
    "mha bf16 by page": mha.but(placement="page"),
    "mha bf16 stacked": mha.but(placement="stack"),
    "mla fp8 stacked": mla.but(packing="fp8", placement="stack"),
    "hybrid nsa fp8 by page": hybrid_nsa.but(packing="fp8", placement="page"),
    "dsv4 fp8 by page": dsv4.but(packing="fp8", placement="page"),
    "swa bf16 in blocks": swa.but(placement="block", num_pages=60),
    "hybrid nsa fp8 in blocks": hybrid_nsa.but(packing="fp8", placement="block", num_pages=40),
    "dsv4 fp8 in blocks": dsv4.but(packing="fp8", placement="block", num_pages=60),
    "mha fp8, one head": mha.but(packing="fp8", num_kv_heads=1),
    "mla fp8, rows of 656": Example(MLAPool, _REAL, {"page_size": 16, "num_pages": 9}),
    "nsa fp8, keys of 132": Example(
        NSAPool, {**_REAL, "packing": "bf16"}, {"page_size": 16, "num_pages": 9}
    ),
    "dsv4 fp8, rows of 584": Example(
        DSv4Pool,
        {**_REAL_V4, "num_window_pages": 6, "num_slots": 2},
        {"page_size": 128, "num_pages": 5, "window_page_size": 64, "num_window_pages": 12},
    ),
}
