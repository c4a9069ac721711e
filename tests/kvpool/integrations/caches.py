"""Tiny models over a pool's cache and over transformers' own, and what both must have in common,
byte by byte.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from kvpool import Allocator
from kvpool.integrations.transformers import PoolCache, pool_for
from kvpool.layout import Pin, RequestAddress
from kvpool.layout.formats import LinearState
from kvpool.testing.memory import ByteCount, flat_locations
from tests.kvpool.models.tiny import own_cache, tiny

PROMPT, CHUNKS, STEPS = 29, (11, 17, 1), 8


@lru_cache(maxsize=8)
def model_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(tiny(family)).to(dtype)


def pool_of(model: Any, page_size: int = 5, num_pages: int = 40, **common: Any) -> Any:
    if model.config.model_type == "deepseek_v4":  # both ratios must divide a page
        page_size = 16 * page_size
    sizes = {"num_pages": num_pages, "num_window_pages": 60, "num_slots": 6}
    common = {"page_size": page_size, "dtype": model.dtype, **sizes, **common}
    return pool_for(model.config, **common)


def cache_of(model: Any, rows: int = 1, padding: Any = 0, **common: Any) -> PoolCache:
    pool = pool_of(model, **common)
    return PoolCache.new(pool, Allocator(pool), rows, padding)


def filled_with_nan(pool: Any) -> Any:
    """All but the reserved items: what is read of them is seen in the logits."""
    for buffer in pool.layout.buffers:
        pool.item_bytes_view(buffer)[1:] = 0xFF
    return pool


def offered(cache: PoolCache) -> set[str]:
    """A room that offers what the first request has now, until it is taken from the set."""
    request, rooms = cache.requests[0], {"r"}
    table, layout = request.address(), cache.pool.layout
    request.pin(Pin("r", "offered", table, layout, True, lambda: bool(rooms)))
    return rooms


def prompt(rows: int, tokens: int = PROMPT) -> torch.Tensor:
    """Tokens `[rows, tokens]`."""
    return torch.randint(0, 128, (rows, tokens), generator=torch.Generator().manual_seed(3))


def argument_of(model: Any) -> str:
    """What a model calls its cache."""
    names = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values"


@torch.no_grad()
def run(
    model: Any,
    cache: Any,
    ids: torch.Tensor,
    padding: tuple[int, ...] | None = None,
    chunks: tuple[int, ...] = CHUNKS,
    steps: int = STEPS,
) -> list[torch.Tensor]:
    """Logits `[B, T, vocabulary]` of each chunk and of each greedy step."""
    start = 0 if padding is None else cache.get_seq_length()
    mask = torch.ones(ids.shape[0], start + ids.shape[1] + steps, dtype=torch.long)
    for row, columns in enumerate(padding or ()):
        mask[row, :columns] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits: list[torch.Tensor] = []
    more = {argument_of(model): cache, "use_cache": True}
    for size in (*chunks, *[1] * steps):
        end = start + size
        if padding is not None:
            more |= {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        logits.append(model(ids[:, :size], **more).logits)
        ids = ids[:, size:] if size < ids.shape[1] else logits[-1][:, -1:].argmax(-1)
        start = end
    return logits


class Row:
    """One row of transformers' own cache, without the columns before its `tokens`."""

    def __init__(self, held: Any, row: int, tokens: int) -> None:
        self.held, self.row, self.tokens = held, row, tokens

    def __getattr__(self, name: str) -> Any:
        found = self.of(getattr(self.held, name))
        if name in ("keys", "values"):
            return found[:, :, -self.tokens :]
        return found[:, -self.tokens :] if name == "indexer_keys" else found

    def of(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value[self.row : self.row + 1]
        if isinstance(value, dict):
            return {key: self.of(each) for key, each in value.items()}
        if isinstance(value, list):
            return [Row(each, self.row, self.tokens) for each in value]
        return value


def with_lightning(cache: Any) -> Any:
    """A cache with the lightning states that MiniMax has apart in layers, as others have them."""
    states = getattr(cache, "linear_cache", None)
    if states is None:
        return cache
    layers = [
        SimpleNamespace(recurrent_states={0: state}) if len(state) else cache.layers[n]
        for n, state in enumerate(states)
    ]
    return SimpleNamespace(layers=layers)


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
                rows = flat_locations(pool.layout.space_of(region), address, entries)
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


def assert_same(model: Any, ours: Any, theirs: Any, logits: Any, expected: Any) -> None:
    columns = ours.get_seq_length() - sum(a.shape[1] for a in logits)
    for step, (a, b) in enumerate(zip(logits, expected, strict=True)):
        columns += a.shape[1]
        for row, padding in enumerate(ours.padding.before):
            since = min(max(padding - columns + a.shape[1], 0), a.shape[1])
            assert torch.equal(a[row, since:], b[row, since:]), f"step {step} row {row}"
    theirs = with_lightning(theirs)
    for row, (request, padding) in enumerate(zip(ours.requests, ours.padding.before)):
        tokens = request.num_tokens
        assert tokens == ours.get_seq_length() - padding
        found = same_as_transformers(ours.pool, request.address(), Row(theirs, row, tokens))
        assert found.checked and not found.wrong
    assert not any(ours.pool.item_bytes_view(b)[0].any() for b in ours.pool.layout.buffers), (
        "a padding item is written"
    )
    ours.allocator.check_integrity()


def assert_same_run(model: Any, ours: Any, ids: torch.Tensor, *padding: Any, **more: Any) -> None:
    """Of a cache in which nothing is yet."""
    theirs = own_cache(model)
    expected = run(model, theirs, ids, *padding, **more)
    assert_same(model, ours, theirs, run(model, ours, ids, *padding, **more), expected)
