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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    def value_bytes(self) -> int:
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


_K_AND_V = {"k": (8, 128), "v": (8, 128)}
_MLA = {"latent": (512,), "rope": (64,)}
_DSV4 = {"swa.latent": (448,), "swa.rope": (64,)}


def _format(
    name: str, kind: type[KVPool], roles: Mapping[str, Any], stored: int, **arguments: Any
) -> EntryFormat:
    return EntryFormat(name=name, kind=kind, roles=roles, stored=stored, arguments=arguments)


ENTRY_FORMATS = (
    _format("K and V 8 x 128, NHD", MHAPool, _K_AND_V, 4096, **HEADS),
    _format("K and V 8 x 128, HND", MHAPool, _K_AND_V, 4096, **HEADS, order="hnd"),
    _format("MLA bf16, 1152 B", MLAPool, _MLA, 1152, packing="bf16"),
    _format("MLA fp8, 656 B", MLAPool, _MLA, 656, packing="fp8"),
    _format("index keys fp8, 132 B", NSAPool, {"index_key": (128,)}, 132, packing="fp8"),
    # 584 bytes, of which one is spare
    _format("DSv4 fp8, 584 B", DSv4Pool, _DSV4, 583, packing="fp8", compress_ratios=[0]),
)


def store_cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Writes of bf16 values, quantised where the pool does."""
    return _cases("store", open_store, sizes)


def load_cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Reads of the same as bf16 values."""
    return _cases("load", open_load, sizes)


def _cases(group: str, opens: Callable[..., Work], sizes: Sizes) -> Iterator[BenchCase]:
    for rows in ENTRY_FORMATS:
        moved = rows.value_bytes + rows.stored  # of an entry, twice what a copy counts
        tokens = max(1, 2 * sizes.entry_bytes // moved // WINDOW_PAGE) * WINDOW_PAGE
        nbytes = tokens * moved // 2
        opened = partial(opens, rows, tokens, nbytes)
        yield BenchCase(group=group, name=rows.name, nbytes=nbytes, open=opened)


def open_store(rows: EntryFormat, tokens: int, nbytes: int, context: BenchContext) -> Work:
    """See store_cases."""
    pool, locations, values = _filled(rows, tokens, context)

    def check() -> None:
        for role, expected in _stored(pool, values).items():
            written = _entries(pool, role, locations)
            need_equal(f"entries of {role}", written, expected.contiguous().view(torch.uint8))

    return Work(lambda: pool.write(0, locations, values), plain_copy(context.device, nbytes), check)


def open_load(rows: EntryFormat, tokens: int, nbytes: int, context: BenchContext) -> Work:
    """See load_cases."""
    pool, locations, values = _filled(rows, tokens, context)
    pool.write(0, locations, values)
    stored = _stored(pool, values)
    read: dict[str, torch.Tensor] = {}

    def ours() -> None:
        read.update(zip(rows.roles, pool.read_roles(rows.roles, 0, locations)))

    def check() -> None:
        for role in rows.roles:
            scales, expected = stored.get(scale_role(role)), stored[role]
            if scales is not None:
                expected = dequantise(expected, scales, torch.bfloat16)
            need_equal(
                f"entries of {role}", read[role].view(torch.uint8), expected.view(torch.uint8)
            )

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
    locations = (pages[:, None] * entries + torch.arange(entries)).flatten()
    device = pool.view(first, 0).device
    values = {
        role: torch.randn(tokens, *shape, generator=seed).bfloat16().to(device)
        for role, shape in rows.roles.items()
    }
    return pool, locations.to(device), values


def _stored(pool: KVPool, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entries that the pool must hold, computed on the host."""
    entries = {}
    for role, floats in values.items():
        entries[role], scales = floats.cpu(), scale_role(role)
        if (pool.owner, 0, scales) in pool.layout.region_by_key:
            kind, view = pool.view(role, 0).dtype, pool.view(scales, 0)
            entries[role], entries[scales] = quantise(
                floats.cpu(), view.shape[-1], view.dtype, kind
            )
    return entries


def _entries(pool: KVPool, role: str, locations: torch.Tensor) -> torch.Tensor:
    """Bytes of the pool's memory at locations, `[N, ..., byte]`, on the host."""
    view, rows = bits(pool.view(role, 0)).cpu(), locations.cpu()
    return view[rows // view.shape[1], rows % view.shape[1]].view(torch.uint8)
