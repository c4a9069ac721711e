"""Keys, values and latents in FP4: two e2m1 values a byte, and a scale for each 16 values in planes
of their own (NVFP4 with e4m3 scales, block-16 MX with ue8m0).
"""

from __future__ import annotations

from kvpool.layout.formats.attention import FP4, Order, head_page
from kvpool.layout.formats.kind import Heads, scale_role
from kvpool.layout.template import Cell, Repeat, Seq, Template

BLOCK = 16
"""Values that have one scale."""
TILE = 4
"""Tokens whose scales are mixed where V's scales are in tiles."""
TILES = "v.scale.tiles"


def fp4_cells(role: str, dim: int, scale: str = "e4m3") -> tuple[Cell, Cell]:
    """The codes of `dim` values and their scales of dtype `scale`. Raises ValueError if `dim` is
    not a multiple of 16.
    """
    if dim % BLOCK:
        raise ValueError(f"{role}: {dim} elements are not a multiple of the block size {BLOCK}.")
    return Cell(role, dim // 2, FP4), Cell(scale_role(role), dim // BLOCK, scale)


def nvfp4_pages(heads: Heads, entries: int, dim: int, order: Order) -> tuple[Template, ...]:
    """Pages of K, of K's scales, of V and of V's scales."""
    cells = [*fp4_cells("k", dim), *fp4_cells("v", dim)]
    return tuple(head_page(cell, heads, entries, order) for cell in cells)


def v_scale_tiles(heads: Heads, entries: int, dim: int, order: Order) -> Template:
    """V's scales as the kernels of SM100 (TRT-LLM's) read them. Those of 4 tokens and a head are a
    tile: of S scales a token, scale s of token t is in row `s // (S / 4)`, at `s % (S / 4) * 4 +
    t % 4`. So an entry is 4 tokens, which are written one after the other (`Space.partial`).
    """
    row = Cell(TILES, dim // BLOCK, "e4m3")
    if order == "nhd":
        return Repeat("entry", entries // TILE, Repeat("row", TILE, heads.of(row)))
    return heads.of(Repeat("entry", entries // TILE, Repeat("row", TILE, row)))


def nvfp4_latent_row(latent: int = 512, rope: int = 64) -> Seq:
    """A row of FlashMLA's sparse kernels on SM100 (vLLM's `nvfp4_ds_mla`): latents in FP4, the rope
    key in e4m3 without a scale, then the latents' scales, 8 rows of 4 of them transposed. 512 and
    64 elements make 352 bytes.
    """
    codes, scales = fp4_cells("latent", latent)
    transposed = Cell(f"{scales.role}.transposed", scales.count, scales.dtype)
    return Seq(codes, Cell("rope", rope, "e4m3"), transposed)
