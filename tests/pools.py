"""The conformance kit's small pools by name, and all of them in all packings that they have."""

from __future__ import annotations

from kvpool.testing.pools import CLASSES, POOLS
from kvpool.testing.pools import COMMON as COMMON
from kvpool.testing.pools import dsv4 as dsv4
from kvpool.testing.pools import hybrid as hybrid
from kvpool.testing.pools import hybrid_mla as hybrid_mla
from kvpool.testing.pools import hybrid_nsa as hybrid_nsa
from kvpool.testing.pools import mha as mha
from kvpool.testing.pools import mla as mla
from kvpool.testing.pools import nsa as nsa
from kvpool.testing.pools import small as small
from kvpool.testing.pools import swa as swa

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
