"""Rows of multi-head latent attention, the same on every rank: a latent and a rope key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvpool.layout.formats.kind import At, Attention, BufferSpec
from kvpool.layout.formats.scales import scaled
from kvpool.layout.template import Cell, Pad, Repeat, Seq, Skip, Template


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


@dataclass(frozen=True, slots=True)
class MLA(Attention):
    """Multi-head latent attention: one row a token, the latent and then the rope key. Without
    dims for it there is no rope key (layers without rotation).

    Packing `fp8`: `fp8_latent_row`.

    `rope_pairs`: the two elements of the rope key that are rotated together are neighbours, as
    engines' kernels write them (`is_neox_style=False` of vLLM). A model that keeps them a half
    apart reorders them. False: the key is as the model gives it (Kimi-Linear does not rotate it).
    """

    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    rope_pairs: bool = field(default=True, repr=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Latent and rope key, or the latent alone."""
        return ("latent", "rope") if self.qk_rope_head_dim else ("latent",)

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """One row a token."""
        if at.takes(self, "fp8"):
            row = fp8_latent_row(self.kv_lora_rank, self.qk_rope_head_dim)
        else:
            row = latent_row(self.kv_lora_rank, self.qk_rope_head_dim, at.packing)
        yield at.buffer("kv", Repeat("entry", at.entries, row))


@dataclass(frozen=True, slots=True)
class V4Latent(Attention):
    """DeepSeek-V4's shared key and value: a row of latent and rope per token, or per compressed
    token.

    Packing `fp8`: `v4_latent_page`.
    """

    latent_dim: int = 448
    qk_rope_head_dim: int = 64
    inputs = ("latent", "rope")
    shared_kv = True

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """One page of rows."""
        if at.takes(self, "fp8"):
            page: Template = v4_latent_page(at.entries, self.latent_dim, self.qk_rope_head_dim)
        else:
            row = latent_row(self.latent_dim, self.qk_rope_head_dim, at.packing)
            page = Repeat("entry", at.entries, row)
        yield at.buffer("latent", page)
