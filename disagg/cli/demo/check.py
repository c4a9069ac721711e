"""Compares the live bytes of two pools, and a pool with transformers' own cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from kvpool.layout import RequestAddress, Space
from kvpool.layout.formats import LinearState


class ByteCount(NamedTuple):
    """Differing and compared bytes."""

    wrong: int = 0
    checked: int = 0

    def plus(self, actual: torch.Tensor, expected: torch.Tensor) -> ByteCount:
        """Adds those of two tensors of equal shape and dtype."""
        ours, truth = (x.contiguous().view(torch.uint8) for x in (actual, expected))
        if (ours.shape, actual.dtype) != (truth.shape, expected.dtype):
            raise ValueError(f"{actual.shape} {actual.dtype} is no {truth.shape} {expected.dtype}.")
        return ByteCount(self.wrong + int((ours != truth).sum()), self.checked + ours.numel())


def locations(space: Space, address: RequestAddress, entries: range) -> np.ndarray:
    """Flat locations of a request's entries in a pool."""
    span = address.spans[space.id_list]
    items, steps = space.place(np.arange(entries.start, entries.stop, dtype=np.int64))
    return np.asarray(span.ids[items - span.first_item] * space.steps + steps)


def same_as_pool(
    pool: Any, address: RequestAddress, single: Any, single_address: RequestAddress, start: int = 0
) -> ByteCount:
    """Compares the live bytes of a request's positions from `start` on in two pools of equal
    layout; slots and rings are compared whole.
    """
    count = ByteCount()
    for region in pool.layout.regions:
        space = pool.layout.space_of(region)
        alive = space.alive(address.num_tokens)
        first = 0 if space.per_request else start // space.tokens_per_entry
        entries = range(max(first, alive.start), alive.stop)
        values, truth = (
            owner.gather(region.role, region.layer, locations(space, table, entries))
            for owner, table in ((pool, address), (single, single_address))
        )
        count = count.plus(values, truth)
    return count


def same_as_transformers(pool: Any, address: RequestAddress, own: Any) -> ByteCount:
    """Compares the pool with all bytes that transformers' cache holds of the same tokens."""
    count = ByteCount()
    for layer in pool.layers:
        for roles, entries, expected in _held(pool, layer, own.layers[layer], address.num_tokens):
            parts = []
            for role in roles:
                region = pool.layout.region_by_key[pool.owner, layer, role]
                rows = locations(pool.layout.space_of(region), address, entries)
                parts.append(pool.gather(role, layer, rows).flatten(1))
            count = count.plus(torch.cat(parts, dim=1)[:, : expected.shape[1]], expected)
    return count


def _held(
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
            yield from _compressor(own, "indexer" if indexer else "compressor", entry, role, ratio)


def _compressor(
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
