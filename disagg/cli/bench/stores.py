"""Writes and reads of entries, for every packing that has its own kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from disagg.cli.bench.case import BenchCase, BenchContext, Sizes
from disagg.cli.bench.work import PAGE, Work, need_equal, plain_copy
from kvpool import DSv4Pool, KVPool, MHAPool, MLAPool, NSAPool
from kvpool.device.quant import dequantise, quantise
from kvpool.device.torch_ops import bits
from kvpool.layout.formats import scale_role

WINDOW_PAGE = 128
HEADS = {"num_kv_heads": 8, "head_dim": 128, "packing": "bf16"}
MLA_ROLES = {"latent": (512,), "rope": (64,)}


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """Entries of one layer: their pool, the shape of their bf16 values by role, and the stored
    bytes per entry.
    """

    name: str
    kind: type[KVPool]
    arguments: Mapping[str, Any]
    roles: Mapping[str, tuple[int, ...]]
    stored: int

    @property
    def given(self) -> int:
        """Bytes of an entry's values."""
        return 2 * sum(int(np.prod(shape)) for shape in self.roles.values())

    def pool(self, device: str, tokens: int) -> KVPool:
        """A pool with room for `tokens` entries of layer 0 beside the reserved page."""
        return self.kind(
            layers=[0],
            num_pages=tokens // PAGE + 1,
            num_window_pages=tokens // WINDOW_PAGE + 1,
            device=device,
            page_size=PAGE,
            **self.arguments,
        )


ENTRY_FORMATS = (
    EntryFormat("K and V 8 x 128, NHD", MHAPool, HEADS, {"k": (8, 128), "v": (8, 128)}, 4096),
    EntryFormat(
        "K and V 8 x 128, HND",
        MHAPool,
        {**HEADS, "order": "hnd"},
        {"k": (8, 128), "v": (8, 128)},
        4096,
    ),
    EntryFormat("MLA bf16, 1152 B", MLAPool, {"packing": "bf16"}, MLA_ROLES, 1152),
    EntryFormat("MLA fp8, 656 B", MLAPool, {"packing": "fp8"}, MLA_ROLES, 656),
    EntryFormat("index keys fp8, 132 B", NSAPool, {"packing": "fp8"}, {"index_key": (128,)}, 132),
    EntryFormat(
        "DSv4 fp8, 584 B",  # of which one byte is spare
        DSv4Pool,
        {"packing": "fp8", "compress_ratios": [0]},
        {"swa.latent": (448,), "swa.rope": (64,)},
        583,
    ),
)


def store_cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Writes of bf16 values, quantised where the pool does."""
    return _cases("store", open_store, sizes)


def load_cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Reads of the same as bf16 values."""
    return _cases("load", open_load, sizes)


def _cases(group: str, opens: Callable[..., Work], sizes: Sizes) -> Iterator[BenchCase]:
    for rows in ENTRY_FORMATS:
        both = rows.given + rows.stored
        tokens = max(1, 2 * sizes.entry_bytes // both // WINDOW_PAGE) * WINDOW_PAGE
        nbytes = tokens * both // 2
        yield BenchCase(group, rows.name, nbytes, partial(opens, rows, tokens, nbytes))


def open_store(rows: EntryFormat, tokens: int, nbytes: int, context: BenchContext) -> Work:
    """See store_cases."""
    pool, where, values = _filled(rows, tokens, context)

    def check() -> None:
        for role, expected in _stored(pool, values).items():
            found = _entries(pool, role, where)
            need_equal(f"entries of {role}", found, expected.contiguous().view(torch.uint8))

    return Work(lambda: pool.write(0, where, values), plain_copy(context.device, nbytes), check)


def open_load(rows: EntryFormat, tokens: int, nbytes: int, context: BenchContext) -> Work:
    """See load_cases."""
    pool, where, values = _filled(rows, tokens, context)
    pool.write(0, where, values)
    stored = _stored(pool, values)
    read: dict[str, torch.Tensor] = {}

    def ours() -> None:
        read.update(zip(rows.roles, pool.read_roles(rows.roles, 0, where)))

    def check() -> None:
        for role in rows.roles:
            scales = stored.get(scale_role(role))
            held = stored[role]
            expected = held if scales is None else dequantise(held, scales, torch.bfloat16)
            need_equal(f"entries of {role}", *(t.view(torch.uint8) for t in (read[role], expected)))

    return Work(ours, plain_copy(context.device, nbytes), check)


def _filled(
    rows: EntryFormat, tokens: int, context: BenchContext
) -> tuple[KVPool, torch.Tensor, dict[str, Any]]:
    """A pool, locations as in a prefill (pages in random order, entries within them in order), and
    values.
    """
    pool = rows.pool(context.device.name, tokens)
    first = next(iter(rows.roles))
    entries = pool.view(first, 0).shape[1]
    seed = torch.Generator().manual_seed(0)
    pages = 1 + torch.randperm(tokens // entries, generator=seed)
    where = (pages[:, None] * entries + torch.arange(entries)).flatten()
    there = pool.view(first, 0).device
    values = {
        role: torch.randn(tokens, *shape, generator=seed).bfloat16().to(there)
        for role, shape in rows.roles.items()
    }
    return pool, where.to(there), values


def _stored(pool: KVPool, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entries that the pool must hold, computed on the host."""
    found = {}
    for role, given in values.items():
        scales = scale_role(role)
        if (pool.owner, 0, scales) in pool.layout.region_by_key:
            kind, view = pool.view(role, 0).dtype, pool.view(scales, 0)
            found[role], found[scales] = quantise(given.cpu(), view.shape[-1], view.dtype, kind)
        else:
            found[role] = given.cpu()
    return found


def _entries(pool: KVPool, role: str, where: torch.Tensor) -> torch.Tensor:
    """Bytes of the pool's memory at locations, `[N, ..., byte]`, on the host."""
    view, at = bits(pool.view(role, 0)).cpu(), where.cpu()
    return view[at // view.shape[1], at % view.shape[1]].view(torch.uint8)
