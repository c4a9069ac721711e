"""What vLLM's kernels write, in plain torch indexing: nothing here calls the table.

A rank holds a layer's view `[block, head slot, state, content]` in one of vLLM's physical orders
(v1/kv_cache_layout.py of vLLM 0.32). `write` puts the oracle's values where the backend's kernel
puts a token's, `read` finds them again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from tests import oracle

FP8 = torch.float8_e4m3fn
ORDERS = {"LBHNC": "lbhnc", "LBNHC": "lbnhc", "BLHNC": "blhnc", "BLNHC": "blnhc", "BHLNC": "bhlnc"}
"""KVCacheLayout's stride orders, largest stride first."""


def views(order: str, layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype):
    """One allocation and the layers' logical `[block, head, state, content]` views of it."""
    sizes = dict(zip("lbhnc", (layers, *shape)))
    physical = torch.zeros([sizes[axis] for axis in ORDERS[order]], dtype=dtype)
    logical = physical.permute([ORDERS[order].index(axis) for axis in "lbhnc"])
    return physical, list(logical)


@dataclass
class Rank:
    """One layer of a rank and where its tokens are: token t in block `ids[t // tokens]`.

    `share`: of decode context parallelism, (interleave size, rank, ranks). A block id then stands
    for a block on every rank; this one has slots for its stretches of their tokens
    (`ComputeSlotMappingKernel` of v1/worker/block_table.py).
    """

    view: torch.Tensor
    layer: int
    ids: list[int]
    heads: range = range(1)
    owner: str = "target"
    prefix: str = ""
    share: tuple[int, int, int] = field(default=(1, 0, 1), kw_only=True)

    @property
    def block_tokens(self) -> int:
        return self.view.shape[2]

    def cells(self, block: int, offset: int):
        """(role, steps of the inner axes, the tensor that holds it) of the token that is there."""
        raise NotImplementedError

    def at(self, token: int) -> tuple[int, int]:
        size, _, ranks = self.share
        block, offset = divmod(token, self.block_tokens * ranks)
        return self.ids[block], offset // (ranks * size) * size + offset % size

    def holds(self, token: int) -> bool:
        size, rank, ranks = self.share
        return token % (self.block_tokens * ranks) // size % ranks == rank

    def write(self, tokens: range) -> None:
        for token in filter(self.holds, tokens):
            for role, inner, cell in self.cells(*self.at(token)):
                cell.copy_(self.value(role, token, inner, cell))

    def assert_holds(self, tokens: range) -> None:
        for token in filter(self.holds, tokens):
            for role, inner, cell in self.cells(*self.at(token)):
                held = cell.contiguous().view(torch.uint8)
                expected = self.value(role, token, inner, cell).view(torch.uint8)
                assert held.equal(expected), (self.layer, role, token, inner)

    def value(self, role, token, inner, cell):
        """The oracle's value of a cell."""
        key = self.owner, self.layer, self.prefix + role
        at = [np.array([step]) for step in (token, *inner)]
        raw = oracle.values(key, [*at, np.arange(cell.numel() * cell.element_size())])
        return torch.from_numpy(raw.reshape(-1)).view(cell.dtype)


@dataclass
class KeysAndValues(Rank):
    """`reshape_and_cache_flash` of FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATTENTION, HPC_ATTN:
    `key_cache, value_cache = kv_cache.transpose(1, 2).split(head_size, dim=-1)`, then
    `key_cache[block, offset] = key` (v1/attention/backends/flash_attn.py, do_kv_cache_update).
    """

    key: int = 0

    def cells(self, block, offset):
        entry = self.view.transpose(1, 2)[block, offset]
        for number, head in enumerate(self.heads):
            yield "k", (head,), entry[number, : self.key]
            yield "v", (head,), entry[number, self.key :]


@dataclass
class TokenHeadScales(Rank):
    """TRITON_ATTN with `*_per_token_head`: the halves of the content are K and V, the last four
    bytes of a half one float32 scale (v1/attention/backends/triton_attn.py, _ensure_scale_caches).
    """

    def cells(self, block, offset):
        halves = self.view.transpose(1, 2)[block, offset].chunk(2, dim=-1)
        for number, head in enumerate(self.heads):
            for role, half in zip("kv", halves):
                yield role, (head,), half[number, :-4]
                yield f"{role}.scale", (head,), half[number, -4:].view(torch.float32)


@dataclass
class TransposedKeys(Rank):
    """CPU_ATTN, isa vec and vec16: the page of a head is `[2 * tokens, dim]`, its first half K, its
    second V; K's element (token, i) is at `token + i * block_size` (csrc/cpu/cpu_attn_vec.hpp).
    """

    def cells(self, block, offset):
        for number, head in enumerate(self.heads):
            k, v = self.view[block, number].view(-1).chunk(2)
            tokens, dim = self.block_tokens, k.numel() // self.block_tokens
            for i in range(dim):
                yield "k", (head, i), k[offset + i * tokens].view(1)
            yield "v", (head,), v[offset * dim : (offset + 1) * dim]


@dataclass
class PlanesOfHeads(Rank):
    """B12X: `kv_cache.unbind(1)`, each plane `unflatten(-1, (heads, dim))` (_kv_cache_views)."""

    def cells(self, block, offset):
        for role, plane in zip("kv", self.view.unbind(1)):
            token_heads = plane[block, offset].unflatten(-1, (len(self.heads), -1))
            for number, head in enumerate(self.heads):
                yield role, (head,), token_heads[number]


@dataclass
class LatentRows(Rank):
    """`flat[slots, :kv_lora_rank] = kv_c; flat[slots, kv_lora_rank:] = k_pe` (mla/cpu_mla.py,
    do_kv_cache_update; concat_and_cache_mla of the GPU writes the same rows).
    """

    latent: int = 0

    def cells(self, block, offset):
        row = self.view.squeeze(1)[block, offset]
        yield "latent", (), row[: self.latent]
        yield "rope", (), row[self.latent :]


@dataclass
class SparseRows(Rank):
    """Rows of 656 bytes, fp8_ds_mla (mla/flashmla_sparse.py: first 512 bytes e4m3, next 16 four
    float32, last 128 bfloat16).
    """

    def cells(self, block, offset):
        row = self.view.squeeze(1)[block, offset]
        yield "latent", (), row[:512].view(FP8)
        yield "latent.scale", (), row[512:528].view(torch.float32)
        yield "rope", (), row[528:].view(torch.bfloat16)


@dataclass
class IndexKeys(Rank):
    """`indexer_k_quant_and_cache_kernel`: byte i of the key at `block * stride + offset * 128 + i`,
    its scale at `block * stride + block_size * 128 + offset * 4` (csrc/cache_kernels.cu).
    """

    def cells(self, block, offset):
        page = self.view[block].view(-1)
        yield "index_key", (), page[offset * 128 : offset * 128 + 128].view(FP8)
        start = self.block_tokens * 128 + offset * 4
        yield "index_key.scale", (), page[start : start + 4].view(torch.float32)


@dataclass
class Slots(Rank):
    """Linear attention: `MambaBase.bind_kv_cache` cuts a page into conv `(tap, dim)` (SD) or
    `(dim, tap)` (DS) and the temporal state; the conv's channels are `sections` of (role, heads,
    dim) one after the other, each of which a rank holds from head `first` on.
    """

    conv: tuple[int, int] = (0, 0)
    conv_dtype: torch.dtype = torch.bfloat16
    temporal: tuple[int, ...] = ()
    dim_first: bool = False
    sections: tuple[tuple[str, int, int, int], ...] = ()
    cell_dims: int = 2
    taps: int = 3

    def cells(self, block, offset):
        page = self.view[block].view(-1)
        size = math.prod(self.conv) * self.conv_dtype.itemsize
        conv = page[:size].view(self.conv_dtype).view(self.conv)
        conv = conv if self.dim_first else conv.T
        state = page[size : size + math.prod(self.temporal) * 4].view(torch.float32)
        at = 0
        for role, heads, first, dim in self.sections:
            for head, i, tap in np.ndindex(heads, dim, self.taps):
                yield role, (first + head, i, tap), conv[at + head * dim + i, tap].view(1)
            at += heads * dim
        state = state.view(self.temporal)
        cells = state.flatten(-self.cell_dims)
        for steps in np.ndindex(*cells.shape[:-1]):
            yield "temporal", (self.heads[steps[0]], *steps[1:]), cells[steps]
