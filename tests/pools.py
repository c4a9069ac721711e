"""Small pools of every class. Each has numbers of its own, so that no two sizes are alike."""

from __future__ import annotations

from functools import partial

from kvpool import (
    MHA,
    MLA,
    DSv4Pool,
    HybridLinearPool,
    IndexKey,
    MHAPool,
    MLAPool,
    NSAPool,
    SWAPool,
)
from kvpool.states import gated_delta_net, kda, mamba2

COMMON = {
    "layers": range(4),
    "num_pages": 9,
    "num_window_pages": 11,
    "num_slots": 5,
    "page_size": 4,
    "packing": "bf16",
}
ROW, INDEX = MLA(16, 8), IndexKey(16)
GDN = gated_delta_net(k_heads=2, v_heads=4, k_dim=3, v_dim=5, kernel=4)
KDA = kda(heads=4, dim=3, kernel=4)
MAMBA2 = mamba2(heads=4, head_dim=3, groups=2, state_size=5, kernel=4)


def mha(**more):
    return MHAPool(**{**COMMON, "num_kv_heads": 4, "head_dim": 8, "v_head_dim": 16, **more})


def mla(**more):
    return MLAPool(**{**COMMON, "kv_lora_rank": 16, "qk_rope_head_dim": 8, **more})


def nsa(**more):
    """Index keys on layers 1 and 3."""
    given = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "index_head_dim": 16}
    return NSAPool(**{**COMMON, **given, "index_layers": (1, 3), **more})


def swa(**more):
    """MHA on layers 1 and 3, MLA of a window of 6 in pages of 2 on layers 0 and 2."""
    given = {"full": MHA(4, 8, 16), "swa": ROW, "window_layers": (0, 2)}
    return SWAPool(**{**COMMON, **given, "window": 6, "window_page_size": 2, **more})


def hybrid(**more):
    """Gated DeltaNet on layers 0 to 2, MHA on layer 3."""
    given = {"full": MHA(4, 8, 16), "linear": GDN, "linear_layers": (0, 1, 2)}
    return HybridLinearPool(**{**COMMON, **given, **more})


def hybrid_mla(**more):
    """KDA on layers 0 to 2, MLA on layer 3."""
    return hybrid(**{"full": ROW, "linear": KDA, **more})


def hybrid_nsa(**more):
    """Mamba-2 on layers 0 and 2, MLA on layers 1 and 3, index keys on layer 3."""
    given = {"full": ROW, "linear": MAMBA2, "index": INDEX, "index_layers": [3]}
    return hybrid(**{**given, "linear_layers": (0, 2), **more})


def dsv4(**more):
    """A window of 6 in pages of 4; ratio 2 (overlapping) on layers 1 and 3, ratio 8 on layer 2."""
    given = {"compress_ratios": (0, 2, 8, 2), "overlap_ratio": 2, "page_size": 8}
    dims = {"latent_dim": 8, "qk_rope_head_dim": 4, "index_head_dim": 8}
    return DSv4Pool(**{**COMMON, **given, **dims, "window": 6, "window_page_size": 4, **more})


CLASSES = {
    "mha": mha,
    "mha hnd": partial(mha, order="hnd"),
    "mla": mla,
    "nsa": nsa,
    "swa": swa,
    "hybrid": hybrid,
    "hybrid mla": hybrid_mla,
    "hybrid nsa": hybrid_nsa,
    "dsv4": dsv4,
    "dsv4 speculating": partial(dsv4, speculation=True),
}
# all classes in all packings that they have
PACKED = {
    f"{name} {packing}": partial(build, packing=packing)
    for name, build in CLASSES.items()
    for packing in ("bf16", "f32", "fp8")
}
for name in ("mha", "mha hnd"):
    PACKED[f"{name} mxfp8"] = partial(CLASSES[name], packing="mxfp8", head_dim=64, v_head_dim=32)
PACKED["hybrid mxfp8"] = partial(hybrid, packing="mxfp8", full=MHA(4, 64, 32))
PACKED["swa mxfp8"] = partial(swa, packing="mxfp8", full=MHA(4, 64, 32), swa=MHA(2, 32))
