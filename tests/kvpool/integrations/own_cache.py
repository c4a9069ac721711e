"""Compares a pool with transformers' own cache, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from disagg.cli.live_bytes import ByteCount, locations
from kvpool.layout import RequestAddress
from kvpool.layout.formats import LinearState


def same_as_transformers(pool: Any, address: RequestAddress, own: Any) -> ByteCount:
    """Compares the pool with all bytes that transformers' cache holds of the same tokens."""
    wrong = checked = 0
    for layer in pool.layers:
        for roles, entries, expected in tensors_of(
            pool, layer, own.layers[layer], address.num_tokens
        ):
            parts = []
            for role in roles:
                region = pool.layout.region_by_key[pool.owner, layer, role]
                rows = locations(pool.layout.space_of(region), address, entries)
                parts.append(pool.gather(role, layer, rows).flatten(1))
            ours = torch.cat(parts, dim=1)[:, : expected.shape[1]]
            assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
            ours, truth = (x.contiguous().view(torch.uint8) for x in (ours, expected))
            wrong, checked = wrong + int((ours != truth).sum()), checked + ours.numel()
    return ByteCount(wrong, checked)


def tensors_of(
    pool: Any, layer: int, own: Any, tokens: int
) -> Iterator[tuple[list[str], range, torch.Tensor]]:
    """Roles whose cells are concatenated in a tensor of transformers, entries, and the tensor."""
    roles = [r.role for r in pool.layout.regions if (r.owner, r.layer) == (pool.owner, layer)]
    main = [role for role in roles if role.removeprefix("swa.") in ("k", "v", "latent", "rope")]
    if main:
        keys, values = (x[0].transpose(0, 1).flatten(1) for x in (own.keys, own.values))
        last = range(tokens - len(keys), tokens)
        if "swa.latent" in main:  # one tensor holds keys and values
            yield main, last, keys
        else:
            yield [main[0]], last, keys
            kind = next(kind for kind, placed in pool.kinds if layer in placed.layers)
            if getattr(kind, "rope_pairs", False):  # transformers has the halves of each pair apart
                values = values.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
            yield [main[1]], last, values
    if "index_key" in roles:
        yield ["index_key"], range(tokens), own.indexer_keys[0]
    linear = [pair for pair in pool.kinds_of(layer) if isinstance(pair[0], LinearState)]
    for number, (kind, site) in enumerate(linear):
        conv = [site.prefix + role for role in kind.inputs if role.startswith("conv.")]
        if kind.taps:
            yield conv, range(1), own.conv_states[number][..., -kind.taps :].flatten(1)
        if kind.heads:
            state = own.recurrent_states[number]
            yield [f"{site.prefix}temporal"], range(1), state.flatten(1)
    for role in roles:
        name, _, kind = role.partition(".")
        if kind in ("state", "index_state"):
            ratio = int(name.removeprefix("c"))
            indexer = kind == "index_state"
            entry = [f"{name}.index_key"] if indexer else [f"{name}.latent", f"{name}.rope"]
            yield from compressor(own, "indexer" if indexer else "compressor", entry, role, ratio)


def compressor(
    own: Any, name: str, entry: list[str], ring: str, ratio: int
) -> Iterator[tuple[list[str], range, torch.Tensor]]:
    """Compressed entries, the open window, and the overlap with the window before."""
    compressed, count = own.compressed_kv[name], own.entry_count[name]
    if compressed is not None:
        yield entry, range(count), compressed[0]
    kv, gate = own.buffer_kv[name], own.buffer_gate[name]
    if kv is not None:
        rows = torch.cat([kv[0], gate[0]], dim=-1).float()
        yield [ring], range(count * ratio, count * ratio + len(rows)), rows
    overlap = getattr(own, "overlap_kv", {}).get(name)
    if overlap is not None:
        yield [ring], range((count - 1) * ratio, count * ratio), overlap[0].float()
