"""Pages of keys and values, rows of multi-head latent attention (the same on every rank: a latent
and a rope key), keys of sparse-attention indexers, and rings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

from kvpool.layout.dtypes import PACKINGS
from kvpool.layout.formats.kind import At, Attention, BufferSpec, Heads, scaled
from kvpool.layout.template import Cell, Pad, Repeat, Seq, Skip, Template

Order = Literal["nhd", "hnd"]
FP4 = "float4_e2m1fn_x2"
"""Two elements a byte."""


def head_page(cell: Cell, heads: Heads, entries: int, order: Order) -> Template:
    """`cell` for each token and head: `[entry, head]` (nhd) or `[head, entry]` (hnd)."""
    if order == "nhd":
        return Repeat("entry", entries, heads.of(cell))
    return heads.of(Repeat("entry", entries, cell))


@dataclass(frozen=True, slots=True)
class MHA(Attention):
    """Multi-head and grouped-query attention: all K, then all V, each `[entry, head, dim]` (nhd) or
    `[head, entry, dim]` (hnd).

    Packings: `fp8`, a float32 scale per token and head; `mxfp8`, a ue8m0 scale per 32 elements (OCP
    Microscaling). Scales have buffers of their own.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    order: Order = "nhd"
    inputs = ("k", "v")

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ValueError(f"order: one of {get_args(Order)}, got {self.order!r}.")

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        v_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        dims = {"k": self.head_dim, "v": v_dim}
        if not at.takes(self, *PACKINGS):
            cells = [Cell(role, dim, at.packing) for role, dim in dims.items()]
        else:
            block, scale = (32, "ue8m0") if at.packing == "mxfp8" else (0, "f32")
            pairs = [scaled(role, dim, block, scale) for role, dim in dims.items()]
            cells = [cell for column in zip(*pairs) for cell in column]
        heads = at.shard.heads(self.num_kv_heads)
        for cell in cells:
            yield at.buffer(cell.role, head_page(cell, heads, at.entries, self.order))


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

    448 and 64 elements make 584 bytes an entry; a page is a multiple of the 576 bytes of a row.
    """
    values, scales = scaled("latent", latent, 64, "ue8m0")
    rows = Repeat("entry", entries, Seq(values, Cell("rope", rope, "bf16")))
    return Pad(latent + 2 * rope, Seq(rows, Repeat("entry", entries, Seq(scales, Skip(1)))))


def _rope_key(rope: int, dtype: str) -> list[Cell]:
    return [Cell("rope", rope, dtype)] if rope else []


@dataclass(frozen=True, slots=True)
class MLA(Attention):
    """Multi-head latent attention: one row a token, the latent and then the rope key. Without
    dims for it there is no rope key (layers without rotation). Packing `fp8`: `fp8_latent_row`.

    `rope_pairs`: the two elements of the rope key that are rotated together are neighbours, as
    engines' kernels write them (`is_neox_style=False` of vLLM). A model that keeps them a half
    apart reorders them. False: the key is as the model gives it (Kimi-Linear does not rotate it).
    """

    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    rope_pairs: bool = field(default=True, repr=False)

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("latent", "rope") if self.qk_rope_head_dim else ("latent",)

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        if at.takes(self, "fp8"):
            row = fp8_latent_row(self.kv_lora_rank, self.qk_rope_head_dim)
        else:
            row = latent_row(self.kv_lora_rank, self.qk_rope_head_dim, at.packing)
        yield at.buffer("kv", Repeat("entry", at.entries, row))


@dataclass(frozen=True, slots=True)
class V4Latent(Attention):
    """DeepSeek-V4's shared key and value: a row of latent and rope per token, or per compressed
    token. Packing `fp8`: `v4_latent_page`.
    """

    latent_dim: int = 448
    qk_rope_head_dim: int = 64
    inputs = ("latent", "rope")
    shared_kv = True

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        if at.takes(self, "fp8"):
            page: Template = v4_latent_page(at.entries, self.latent_dim, self.qk_rope_head_dim)
        else:
            row = latent_row(self.latent_dim, self.qk_rope_head_dim, at.packing)
            page = Repeat("entry", at.entries, row)
        yield at.buffer("latent", page)


def scaled_page(
    role: str, entries: int, count: int, *, block: int, scale: str, dtype: str = "e4m3"
) -> Seq:
    """All values of a page, `count` an entry, then all their scales, one for each `block`."""
    cells = scaled(role, count, block=block, scale=scale, dtype=dtype)
    return Seq(*(Repeat("entry", entries, cell) for cell in cells))


def _v4_page(entries: int) -> Template:
    return v4_latent_page(entries).of


def _v41_page(entries: int) -> Template:
    """512 elements in e4m3, the rope key among them, and a ue8m0 scale for each 32."""
    return scaled_page("latent", entries, 512, block=32, scale="ue8m0")


def _v41_fp4_page(entries: int) -> Template:
    """The same in e2m1, two elements a byte, and an e4m3 scale for each 16."""
    return scaled_page("latent", entries, 256, block=8, scale="e4m3", dtype=FP4)


def _v4_rows(dtype: str, entries: int) -> Template:
    return Repeat("entry", entries, latent_row(448, 64, dtype))


V4_PAGES: Mapping[tuple[int, str], Callable[[int], Template]] = {
    (584, "uint8"): _v4_page,
    (528, "uint8"): _v41_page,
    (288, "uint8"): _v41_fp4_page,
    **{(512, dtype): partial(_v4_rows, dtype) for dtype in ("bfloat16", "float8_e4m3fn")},
}
"""Pages of the latents of DeepSeek-V4 and V4.1 in vLLM, without padding, by the elements of an
entry and their dtype. Rows in fp8 have no scale (FlashInfer's is 1).
"""


def index_key_page(entries: int, dim: int, *, dtype: str = "e4m3", scale: str = "f32") -> Seq:
    """All keys of a page, then all their scales (the index cache of DeepSeek-V3.2): 4 bytes for
    each 128 elements, a float32 or a ue8m0 four times. 128 elements make 132 bytes an entry; in
    e2m1, which has two in a byte and a ue8m0 for each 32, 68 (DeepSeek-V4).
    """
    if dtype == FP4:
        dim, block, scale = dim // 2, 16, "ue8m0"
    else:
        block = 128 if scale in ("f32", "float32") else 32
    return scaled_page("index_key", entries, dim, block=block, scale=scale, dtype=dtype)


@dataclass(frozen=True, slots=True)
class IndexKey:
    """Keys of a sparse-attention indexer. Packing `fp8`: `index_key_page`.

    `pooled`: the indexer pools the keys of several tokens when it reads them (GLM-5-Next). A row is
    a token's key, as many weights, and whether the token counts; it is not quantised.
    """

    head_dim: int = 128
    pooled: bool = field(default=False, repr=False)
    inputs = ("index_key",)

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        if at.takes(self, *["fp8"] * (not self.pooled)):
            page: Template = index_key_page(at.entries, self.head_dim)
        else:
            count = 2 * self.head_dim + 1 if self.pooled else self.head_dim
            page = Repeat("entry", at.entries, Cell("index_key", count, at.packing))
        yield at.buffer("index_key", page)


@dataclass(frozen=True, slots=True)
class Ring:
    """`count` float32 values for each of the last tokens of a request, under one role."""

    role: str
    count: int

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.role,)

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        yield at.buffer(self.role, Repeat("entry", at.entries, Cell(self.role, self.count, "f32")))
