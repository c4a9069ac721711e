"""Pages of keys of a sparse-attention indexer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.layout.formats.kind import At, BufferSpec
from kvpool.layout.formats.scales import scaled
from kvpool.layout.template import Cell, Repeat, Seq, Template


def index_key_page(entries: int, dim: int, *, dtype: str = "e4m3", scale: str = "f32") -> Seq:
    """All keys of a page, then all their scales (the index cache of DeepSeek-V3.2): 4 bytes for
    each 128 elements, a float32 or a ue8m0 four times. 128 elements make 132 bytes an entry.
    """
    block = 128 if scale in ("f32", "float32") else 32
    cells = scaled("index_key", dim, block=block, scale=scale, dtype=dtype)
    return Seq(*(Repeat("entry", entries, cell) for cell in cells))


@dataclass(frozen=True, slots=True)
class IndexKey:
    """Keys of a sparse-attention indexer.

    Packing `fp8`: `index_key_page`.

    `pooled`: the indexer pools the keys of several tokens when it reads them (GLM-5-Next). A row is
    a token's key, as many weights, and whether the token counts; it is not quantised.
    """

    head_dim: int = 128
    pooled: bool = field(default=False, repr=False)
    inputs = ("index_key",)

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """One page of keys."""
        if at.takes(self, *["fp8"] * (not self.pooled)):
            page: Template = index_key_page(at.entries, self.head_dim)
        else:
            count = 2 * self.head_dim + 1 if self.pooled else self.head_dim
            page = Repeat("entry", at.entries, Cell("index_key", count, at.packing))
        yield at.buffer("index_key", page)
