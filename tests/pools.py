"""Small pools of every class. Each has numbers of its own, so that hardly two sizes are alike."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvpool import (
    MHA,
    MLA,
    DSv4Pool,
    HybridLinearPool,
    IndexKey,
    KVPool,
    MHAPool,
    MLAPool,
    NSAPool,
    SWAPool,
)
from kvpool.states import gated_delta_net, kda, mamba2

ITEMS = {"num_pages": 9, "num_window_pages": 11, "num_slots": 5}
COMMON = {"layers": range(4), "page_size": 4, "packing": "bf16"}
ROW, INDEX = MLA(16, 8), IndexKey(16)
GDN = gated_delta_net(k_heads=2, v_heads=4, k_dim=3, v_dim=5, kernel=4)
KDA = kda(heads=4, dim=3, kernel=4)
MAMBA2 = mamba2(heads=4, head_dim=3, groups=2, state_size=5, kernel=4)


@dataclass(frozen=True)
class Small:
    """A class and arguments, any of which may be changed."""

    kind: type[KVPool]
    arguments: dict[str, Any]

    def __call__(self, **more) -> KVPool:
        return self.kind(**{**ITEMS, **self.arguments, **more})

    def but(self, **more) -> Small:
        return replace(self, arguments={**self.arguments, **more})

    def from_budget(self, nbytes: int, **more) -> KVPool:
        return self.kind.from_budget(nbytes, **{**self.arguments, **more})


def small(kind: type[KVPool], **arguments) -> Small:
    return Small(kind, {**COMMON, **arguments})


mha = small(MHAPool, num_kv_heads=4, head_dim=8, v_head_dim=16)
mla = small(MLAPool, kv_lora_rank=16, qk_rope_head_dim=8)
# index keys on layers 1 and 3
nsa = small(NSAPool, kv_lora_rank=16, qk_rope_head_dim=8, index_head_dim=16, index_layers=(1, 3))
# MHA on layers 1 and 3, MLA of a window of 6 in pages of 2 on layers 0 and 2
swa = small(
    SWAPool, full=MHA(4, 8, 16), swa=ROW, window_layers=(0, 2), window=6, window_page_size=2
)
# Gated DeltaNet on layers 0 to 2, MHA on layer 3
hybrid = small(HybridLinearPool, full=MHA(4, 8, 16), linear=GDN, linear_layers=(0, 1, 2))
# KDA on layers 0 to 2, MLA on layer 3
hybrid_mla = hybrid.but(full=ROW, linear=KDA)
# Mamba-2 on layers 0 and 2, MLA on layers 1 and 3, index keys on layer 3
hybrid_nsa = hybrid.but(
    full=ROW, linear=MAMBA2, linear_layers=(0, 2), index=INDEX, index_layers=[3]
)
# a window of 6 in pages of 4; ratio 2 (overlapping) on layers 1 and 3, ratio 8 on layer 2
dsv4 = small(
    DSv4Pool,
    compress_ratios=(0, 2, 8, 2),
    overlap_ratio=2,
    page_size=8,
    window=6,
    window_page_size=4,
    latent_dim=8,
    qk_rope_head_dim=4,
    index_head_dim=8,
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
    "dsv4": dsv4,
    "dsv4 speculating": dsv4.but(speculation=True),
}
WIDE = MHA(4, 64, 32)
# all classes in all packings that they have
PACKED = {
    **{
        f"{name} {packing}": build.but(packing=packing)
        for name, build in CLASSES.items()
        for packing in ("bf16", "f32", "fp8")
    },
    "mha mxfp8": mha.but(packing="mxfp8", head_dim=64, v_head_dim=32),
    "mha hnd mxfp8": mha.but(packing="mxfp8", head_dim=64, v_head_dim=32, order="hnd"),
    "swa mxfp8": swa.but(packing="mxfp8", full=WIDE, swa=MHA(2, 32)),
    "hybrid mxfp8": hybrid.but(packing="mxfp8", full=WIDE),
}
