"""Rows of multi-head latent attention, the same on every rank: a latent and a rope key."""

from __future__ import annotations

from kvpool.layout.formats.scales import scaled
from kvpool.layout.template import Cell, Pad, Repeat, Seq, Skip


def latent_row(latent: int, rope: int, dtype: str) -> Seq:
    """`[latent | rope]` of one token; without dims for it there is no rope key."""
    return Seq(Cell("latent", latent, dtype), *_rope_key(rope, dtype))


def fp8_latent_row(latent: int = 512, rope: int = 64) -> Seq:
    """A row of FlashMLA's sparse kernels (DeepSeek-V3.2): e4m3 latents, a float32 scale for each
    128 of them, and the rope key in bf16. 512 and 64 elements make 656 bytes.
    """
    return Seq(*scaled("latent", latent, 128), *_rope_key(rope, "bf16"))


def v4_latent_page(entries: int, latent: int = 448, rope: int = 64) -> Pad:
    """A page of DeepSeek-V4's latents: all rows of e4m3 latents and bf16 rope, then for each row a
    ue8m0 scale for each 64 latents, and a byte that is not used.

    448 and 64 elements make 584 bytes an entry; the page is rounded up to a multiple of the 576
    bytes of a row.
    """
    values, scales = scaled("latent", latent, 64, "ue8m0")
    rows = Repeat("entry", entries, Seq(values, Cell("rope", rope, "bf16")))
    return Pad(latent + 2 * rope, Seq(rows, Repeat("entry", entries, Seq(scales, Skip(1)))))


def _rope_key(rope: int, dtype: str) -> list[Cell]:
    return [Cell("rope", rope, dtype)] if rope else []
