"""The conformance kit's small pools by name, and all of them in all packings that they have."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.pools.base import KVPool
from kvpool.testing.pools import (
    CLASSES,
    COMMON as COMMON,
    POOLS,
    dsv4 as dsv4,
    hybrid as hybrid,
    hybrid_mla as hybrid_mla,
    hybrid_nsa as hybrid_nsa,
    mha as mha,
    mla as mla,
    nsa as nsa,
    small as small,
    swa as swa,
)

ROW, INDEX = swa.arguments["swa"], hybrid_nsa.arguments["index"]
GDN, KDA, MAMBA2 = (each.arguments["linear"] for each in (hybrid, hybrid_mla, hybrid_nsa))
PACKED = {
    **{
        f"{name} {packing}": build.but(packing=packing)
        for name, build in CLASSES.items()
        for packing in ("bf16", "f32", "fp8")
    },
    **{name: build for name, build in POOLS.items() if name.endswith("mxfp8")},
}
every_class, every_packing = (
    pytest.mark.parametrize("build", held.values(), ids=held) for held in (CLASSES, PACKED)
)

QUICK = {
    *("mha bf16", "mha hnd mxfp8", "mha fp8, one head", "mla fp8 stacked", "nsa bf16", "swa fp8"),
    *("hybrid bf16", "hybrid nsa fp8 by page", "swa bf16 in blocks", "dsv4 speculating bf16"),
    "dsv4 fp8, rows of 584",
}
"""Pools that together have every class, kind of packing and placement."""
CONFORMING = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in POOLS
]
"""The kit's pools, to check on a device: all but `QUICK` only with --long."""


def memory_of(pool: KVPool) -> np.ndarray:
    """A copy of all its bytes."""
    return pool._slab.numpy().copy()
