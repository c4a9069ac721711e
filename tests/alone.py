"""Moves bytes with what `pip install kvpool` alone installs: `python - < tests/alone.py`. As a file
it would find the tests' folders of kvpool's names.
"""

import sys

import numpy as np

from disagg import DecodeEndpoint, PrefillEndpoint, create_engine
from disagg.plan import plan
from kvpool.describe import describe_pointers
from kvpool.layout import PoolLayout, RequestAddress, Space, Span


def layout(rows):
    seen = describe_pointers(
        rows.ctypes.data, rows.shape, None, "f32", ("item", "entry", "dim"), role="latent", layer=0
    )
    return PoolLayout(seen.buffers, seen.regions, (Space("kv", entries_per_item=4),), 1)


theirs = np.random.default_rng(0).standard_normal((9, 4, 8), dtype=np.float32)
ours = np.zeros_like(theirs)
assert plan([layout(theirs)], layout(ours)).explain(tokens=6).nbytes == 6 * 32
with (
    PrefillEndpoint(layout(theirs), create_engine("local")) as prefill,
    DecodeEndpoint(layout(ours), create_engine("local"), verify="checksum") as decode,
):
    decode.connect([prefill.address], timeout=10)
    decode.receive("r1", RequestAddress(6, {"kv": Span([2, 5])}))
    prefill.send("r1", RequestAddress(6, {"kv": Span([7, 3])}))
    assert decode.wait("r1", timeout=10).name == "Success"
expected = np.zeros_like(theirs)
expected[2], expected[5, :2] = theirs[7], theirs[3, :2]
assert ours.tobytes() == expected.tobytes()
assert "torch" not in sys.modules
