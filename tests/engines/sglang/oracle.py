"""What SGLang's pools must hold after a hand-over, by SGLang's own indexing.

Rows of its tensors are found as its attention and its kernels find them: a request's token
locations, the locations that its window pages have, its slot, its ring. A layout is never asked.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

Index = Callable[[Any], tuple[Any, ...]]


@dataclass
class Request:
    """A request of `tokens` tokens in one rank's pools: its pages, the pages of its window from
    number `first` on, its row of the request pool, and its slot.
    """

    tokens: int
    page: int
    pages: np.ndarray
    window_pages: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    first: int = 0
    row: int = 1
    slot: int = 1

    def at(self, positions: Any) -> Any:
        """Token locations."""
        return self.pages[positions // self.page] * self.page + positions % self.page

    def window_at(self, positions: Any) -> Any:
        """Token locations in the window's pool."""
        found = self.window_pages[positions // self.page - self.first]
        return found * self.page + positions % self.page


class Rows(NamedTuple):
    """Live rows of a tensor `[row dims..., head, ...]`: their numbers (positions, compressed
    entries, or 0 for a slot), how they are found, and the heads held. `open`: numbers behind or
    before the live ones that may be overwritten, since they are dead and of the same item.
    """

    tensor: torch.Tensor
    numbers: np.ndarray
    index: Index
    first_head: int = 0
    open: np.ndarray = np.zeros(0, dtype=np.int64)


Key = tuple[str, int, str]
Locate = Callable[[Any], Any]


def located(at: Locate) -> Index:
    """Rows by token location."""
    return lambda p: (at(p),)


def paged(at: Locate, page: int) -> Index:
    """Rows by page, and place in it."""
    return lambda p: (at(p) // page, at(p) % page)


class Side(NamedTuple):
    """One rank: its pools, its place, and its request. `modules`: pools of the draft's MTP modules
    behind the first.
    """

    target: Any
    request: Request
    draft: Any = None
    modules: tuple[Any, ...] = ()
    rank: int = 0
    ranks: int = 1
    window: int | None = None

    @property
    def drafts(self) -> tuple[Any, ...]:
        """Pools of all modules."""
        return () if self.draft is None else (self.draft, *self.modules)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes."""
    if tensor.stride(-1) != 1 or tensor.dim() == 0:
        return tensor
    return tensor.view(torch.uint8)


def rows_of(side: Side) -> dict[Key, Rows]:
    """All rows of a request, by owner, layer and what they are."""
    found = dict(read(side, side.target, "target", None))
    before = 0
    for pool in side.drafts:
        seen = dict(read(side, pool, "draft", None))
        layers = sorted({layer for _, layer, _ in seen})
        for (owner, layer, what), rows in seen.items():
            found[owner, before + layers.index(layer), what] = rows
        before += len(layers)
    return found


def read(side: Side, pool: Any, owner: str, layers: Sequence[int] | None) -> Iterator[Any]:
    kind = type(pool).__name__
    ask, page, tokens = side.request, pool.page_size, side.request.tokens
    every = np.arange(tokens)
    rest = np.arange(tokens, -(-tokens // page) * page)

    if kind == "SWAKVPool":
        for layer, (nth, slides) in pool.layers_mapping.items():
            inside = pool.swa_kv_pool if slides else pool.full_kv_pool
            alive, at = every, ask.at
            if slides and not pool.swa_uses_full_indices:
                alive, at = np.arange(max(0, tokens - side.window), tokens), ask.window_at
            for key, rows in mha(side, inside, owner, [(layer, nth)], alive, rest, at):
                yield (*key[:2], "window " * slides + key[2]), rows
        return
    if kind == "HybridLinearKVPool":
        inside = pool.full_kv_pool
        yield from read(side, inside, owner, list(pool.full_attention_layer_id_mapping))
        if owner == "target":  # a draft names the same slots, and none of its layers has any
            yield from mamba(side, pool.mamba_pool, owner)
        return
    if kind == "DeepSeekV4TokenToKVPool":
        yield from dsv4(side, pool, owner)
        return
    start = pool.start_layer
    numbers = [*enumerate(layers if layers is not None else range(start, start + pool.layer_num))]
    if "MHA" in kind:
        named = [(layer, start + n) for n, layer in numbers]
        yield from mha(side, pool, owner, named, every, rest, ask.at)
    elif kind == "NPUMLATokenToKVPool":
        for n, layer in numbers:
            parts = {"latent": pool.k_buffer[n], "rope": pool.v_buffer[n]}
            if start + n in pool.indexer_layer_id_to_slot:
                parts["index"] = pool.get_index_k_buffer(start + n)
            for what, tensor in parts.items():
                yield (owner, layer, what), Rows(raw(tensor), every, paged(ask.at, page), 0, rest)
    else:
        for n, layer in numbers:
            tensor = pool.get_key_buffer(start + n)
            yield (owner, layer, "row"), Rows(raw(tensor), every, located(ask.at), 0, rest)
        if kind == "DSATokenToKVPool":
            for n, layer in numbers:
                pages = pool.get_index_k_with_scale_buffer(start + n)
                for what, tensor in index_keys(pages, page) if len(pages) else ():
                    yield (owner, layer, what), Rows(tensor, every, paged(ask.at, page), 0, rest)


def index_keys(pages: torch.Tensor, page: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Keys of 128 bytes and their scales, of pages that have first all keys."""
    yield "index", pages[:, : page * 128].view(len(pages), page, 1, 128)
    yield "index scale", pages[:, page * 128 :].view(len(pages), page, 1, 4)


def mha(side, pool, owner, layers, every, rest, at):
    """`layers`: pairs of a number and the layer as `pool` is asked for it."""
    held, page = pool.head_num, pool.page_size
    total = max(held * side.ranks, held)
    first = side.rank * held
    if held == 1 and side.ranks > 1:  # fewer heads than ranks: some hold the same
        total = min(side.ranks, getattr(pool, "total_heads", side.ranks))
        first = side.rank * total // side.ranks
    for layer, asked in layers:
        for what, tensor in zip("kv", pool.get_kv_buffer(asked)):
            index, may = located(at), rest
            if pool.kv_cache_layout == "hnd":
                tensor, index = tensor.permute(0, 2, 1, 3), paged(at, page)
            elif pool.kv_cache_layout == "vectorized_5d" and what == "k":
                tensor, index = tensor.permute(0, 3, 1, 2, 4), paged(at, page)
            elif pool.kv_cache_layout == "vectorized_5d":  # [page, head, token / x, dim, x]
                tensor, x = tensor.permute(0, 2, 4, 1, 3), tensor.shape[-1]
                index = lambda p, x=x: (at(p) // page, at(p) % page // x, at(p) % x)  # noqa: E731
            elif tensor.dim() == 4:  # the NPU's [page, token, head, dim]
                index = paged(at, page)
            yield (owner, layer, what), Rows(raw(tensor), every, index, first, may)
        if type(pool).__name__ == "MHATokenToKVPoolMXFP8":
            for what, tensor in zip("kv", pool.get_kv_scale_buffer(asked)):
                index, may = located(at), rest
                if pool.mxfp8_sf_interleaved:
                    tensor = tensor.permute(0, 2, 3, 1, 4)
                    index = lambda p: (at(p) // page, at(p) % 32, at(p) % page // 32)  # noqa: E731
                    may = np.concatenate([np.arange(every[0] // page * page, every[0]), rest])
                yield (owner, layer, f"{what} scale"), Rows(raw(tensor), every, index, first, may)


def mamba(side, pool, owner):
    """A slot: each section of the conv state's channels, and heads of the temporal state."""
    slot, one = side.request.slot, np.zeros(1, dtype=np.int64)
    index = lambda p: (np.full(len(p), slot),)  # noqa: E731
    groups = pool.conv_shard_groups
    for n, layer in enumerate(pool.mamba_layer_ids):
        cache = pool.mamba2_layer_cache(n)
        conv = cache.conv[0]
        if getattr(pool, "conv_slice_axis", 0) == 1:
            conv = conv.transpose(1, 2)
        counts = [size // side.ranks for size in groups] if groups else [conv.shape[1]]
        for number, part in enumerate(torch.split(conv, counts, dim=1)):
            first = side.rank * counts[number]
            yield (owner, layer, f"conv {number}"), Rows(raw(part), one, index, first)
        first = side.rank * cache.temporal.shape[1]
        yield (owner, layer, "temporal"), Rows(raw(cache.temporal), one, index, first)


def dsv4(side, pool, owner):
    """Pages by KVLayout's row addressing; rings by CompressStatePool's translations."""
    ask, tokens = side.request, side.request.tokens
    seen = [(layer, it) for layer, it in enumerate(pool.layer_mapping) if it is not None]

    def latents(buffer, page, layout):
        data, base, step = layout.row_addressing(page)
        strides = buffer.stride(0), data, 1, 1
        rows = torch.as_strided(buffer, (len(buffer), page, 1, layout.data_bytes), strides)
        scale = torch.as_strided(
            buffer,
            (len(buffer), page, 1, layout.scale_bytes - 1),
            (buffer.stride(0), step, 1, 1),
            buffer.storage_offset() + base,
        )
        return ("rows", rows), ("scales", scale)

    window = np.arange(max(0, tokens - pool.sliding_window + 1), tokens)
    page = pool.swa_kv_pool.page_size
    rest = np.arange(tokens, -(-tokens // page) * page)
    for n, (layer, item) in enumerate(seen):
        index = paged(ask.window_at, page)
        for what, tensor in latents(pool.swa_kv_pool.kv_buffer[n], page, pool.kv_layout):
            yield (owner, layer, f"window {what}"), Rows(raw(tensor), window, index, 0, rest)
        ratio = item.compress_ratio
        if not ratio:
            continue
        per = pool.page_size // ratio
        entries = np.arange(tokens // ratio)
        dead = np.arange(tokens // ratio, -(-tokens // pool.page_size) * per)
        # the kernel's location of a compressed entry is that of its tokens, divided
        index = paged(lambda e, r=ratio: ask.at(e * r) // r, per)
        inside = item.compress_kv_pool
        for what, tensor in latents(
            inside.kv_buffer[item.compress_layer_id], per, inside.kv_layout
        ):
            yield (owner, layer, f"c{ratio} {what}"), Rows(raw(tensor), entries, index, 0, dead)
        if ratio == 4:
            for what, tensor in index_keys(pool.get_index_k_with_scale_buffer(layer), per):
                yield (owner, layer, what), Rows(tensor, entries, index, 0, dead)
        for what, ring in (
            ("state", pool.compress_state_pools[layer]),
            ("index state", pool.indexer_compress_state_pools[layer]),
        ):
            if ring is None:
                continue
            rows = ring.kv_score_buffer.kv_score[:, None]
            if ratio == 4:  # the open window and the one before it
                live = np.arange(max(0, tokens - tokens % 4 - 4), tokens)
                index = lambda p, ring=ring: (  # noqa: E731
                    ring.translate_from_swa_loc_to_state_loc(torch.tensor(ask.window_at(p))),
                )
                dead = np.arange(tokens, -(-tokens // 4) * 4)
            else:
                live, dead = np.arange(tokens - tokens % 128, tokens), np.zeros(0, dtype=np.int64)
                index = lambda p, ring=ring: (  # noqa: E731
                    ring.translate_from_req_position_to_state_loc(
                        torch.full((len(p),), ask.row), torch.tensor(p)
                    ),
                )
            yield (owner, layer, f"c{ratio} {what}"), Rows(raw(rows), live, index, 0, dead)


def tensors(pool: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """All memory of a pool that is state, and not an index."""
    seen = set() if seen is None else seen
    if id(pool) in seen:
        return
    seen.add(id(pool))
    if isinstance(pool, torch.Tensor):
        if pool.dtype not in (torch.uint64, torch.int64, torch.int32):
            yield pool
        return
    if type(pool).__module__.startswith("sglang") and hasattr(pool, "__dict__"):
        pool = vars(pool)
    parts = pool.values() if isinstance(pool, dict) else pool
    for part in parts if isinstance(pool, (dict, list, tuple)) else ():
        yield from tensors(part, seen)


def memory(side: Side) -> list[torch.Tensor]:
    """The storages of a rank's pools, as bytes."""
    found = {}
    for pool in (side.target, *side.drafts):
        for tensor in tensors(pool):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
    return [*found.values()]


def fill(side: Side, seed: int) -> None:
    """Random bytes everywhere."""
    for number, held in enumerate(memory(side)):
        noise = np.random.default_rng((seed, number)).integers(0, 256, len(held), dtype=np.uint8)
        held.copy_(torch.from_numpy(noise))


def agree(sides: Sequence[Side]) -> None:
    """Gives rows that several ranks hold the values of the first that does, as a model would."""
    first: dict[tuple[Key, int], torch.Tensor] = {}
    for side in sides:
        for key, rows in rows_of(side).items():
            if not len(rows.numbers):
                continue
            spots = rows.index(rows.numbers)
            values = rows.tensor[spots].clone()
            for head in range(values.shape[1]):
                known = first.setdefault((key, rows.first_head + head), values[:, head].clone())
                values[:, head] = known
            rows.tensor[spots] = values


def assert_handed_over(
    sources: Sequence[Side],
    dest: Side,
    before: Sequence[torch.Tensor],
    missing: Container[str] = (),
) -> int:
    """Every byte of `dest` is what it was in `before`, but the request's rows, which are those of
    `sources`. Rows of owners `missing` need not have come. Returns how many bytes the rows have.
    """
    arrived = [held.clone() for held in memory(dest)]
    offered: dict[Key, list[Rows]] = {}
    for source in sources:
        for key, rows in rows_of(source).items():
            offered.setdefault(key, []).append(rows)
    wanted, count = [], 0
    for key, here in rows_of(dest).items():
        spots = here.index(here.numbers) if len(here.numbers) else None
        may = here.tensor[here.index(here.open)].clone() if len(here.open) else None
        wanted.append((key, here, spots, may))
    # from here on `dest` is what it should have become
    for held, old in zip(memory(dest), before):
        held.copy_(old)
    for key, here, spots, may in wanted:
        if may is not None:
            here.tensor[here.index(here.open)] = may
        if spots is None or (key not in offered and key[0] in missing):
            continue  # such rows stay as they were
        held = here.tensor.shape[len(spots)]
        covered = np.zeros(held, dtype=bool)
        assert key in offered, f"{key}: no source has it"
        for there in offered[key]:
            assert set(here.numbers) <= set(there.numbers), key
            theirs = there.tensor[there.index(here.numbers)]
            low = max(here.first_head, there.first_head)
            high = min(here.first_head + held, there.first_head + theirs.shape[1])
            if low >= high:
                continue
            part = theirs[:, low - there.first_head : high - there.first_head]
            values = here.tensor[spots].clone()
            values[:, low - here.first_head : high - here.first_head] = part
            here.tensor[spots] = values
            covered[low - here.first_head : high - here.first_head] = True
        assert covered.all(), f"{key}: heads {np.flatnonzero(~covered)} come from nowhere"
        count += here.tensor[spots].numel() * here.tensor.element_size()
    for number, (expected, got) in enumerate(zip(memory(dest), arrived)):
        wrong = np.flatnonzero((expected != got).numpy())
        assert not wrong.size, f"tensor {number}: {wrong.size} bytes differ, from {wrong[:8]}"
    return count
