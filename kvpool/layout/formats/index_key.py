"""Pages of keys of a sparse-attention indexer."""

from __future__ import annotations

from kvpool.layout.formats.scales import scaled
from kvpool.layout.template import Repeat, Seq


def index_key_page(entries: int, dim: int, *, dtype: str = "e4m3", scale: str = "f32") -> Seq:
    """All keys of a page, then all their scales (the index cache of DeepSeek-V3.2): 4 bytes for
    each 128 elements, a float32 or a ue8m0 four times. 128 elements make 132 bytes an entry.
    """
    block = 128 if scale in ("f32", "float32") else 32
    cells = scaled("index_key", dim, block=block, scale=scale, dtype=dtype)
    return Seq(*(Repeat("entry", entries, cell) for cell in cells))
