"""One layer of a PoolCache: the interface that `transformers` models call, over a pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar
from weakref import proxy

import torch
from transformers.cache_utils import CacheLayerMixin

from kvpool.integrations.batch import Batch
from kvpool.integrations.linear import LinearStates
from kvpool.layout.dtypes import PACKINGS
from kvpool.layout.formats import MHA, MLA, At, Attention, IndexKey, LinearState, Ring
from kvpool.layout.request_address import MAX_TOKENS

StateT = TypeVar("StateT")
# what transformers calls the compressor that a ring belongs to
NAMES = {"state": "compressor", "index_state": "indexer"}


def unsupported(name: str, instead: str) -> Callable[..., NoReturn]:
    """A method that raises NotImplementedError."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"PoolCache: {name} is not supported. {instead}")

    return refuse


def pairs_of_halves(rope: torch.Tensor) -> torch.Tensor:
    """`[.., x0 x1 .. y0 y1 ..]`, as transformers gives rotated keys, as `[.., x0 y0 x1 y1 ..]`."""
    return rope.reshape(*rope.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)


def halves_of_pairs(rope: torch.Tensor) -> torch.Tensor:
    """The inverse of `pairs_of_halves`."""
    return rope.reshape(*rope.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


class PoolLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """`states` are the layer's states; each must get every token: `attention`, `indexer`,
    `linear` (`linear1`, ..), `compressor`.
    """

    def __init__(self, batch: Batch, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # weak: without a cycle, a dropped cache lets go of its allocator at once
        self.batch: Batch = proxy(batch)
        self.layer, self.batch_size = layer, len(batch.requests)
        self.is_initialized = True
        pool = batch.pool
        kept = pool.kinds_of(layer)
        self.attention = next((kind for kind, _ in kept if isinstance(kind, Attention)), None)
        self.roles = pool.roles(layer, Attention) if self.attention else ()
        self.index = next((site for kind, site in kept if isinstance(kind, IndexKey)), None)
        exact = pool.packing not in PACKINGS
        if exact and self.index and self.index.packing != pool.packing:
            raise ValueError(
                f"{pool.owner} layer {layer} index_key: stored as {self.index.packing}, other "
                f"roles as {pool.packing}; nothing may be rounded. Build the pool with "
                f"index_packing={pool.packing!r}, or with packing={self.index.packing!r}."
            )
        linear = [(kind, site) for kind, site in kept if isinstance(kind, LinearState)]
        self.linear = [
            LinearStates(self.batch, layer, f"linear{n or ''}", kind, site)
            for n, (kind, site) in enumerate(linear)
        ]
        self.compressors = {
            NAMES[kind.role]: Compressor(self.batch, layer, site, kind)
            for kind, site in kept
            if isinstance(kind, Ring)
        }
        if "indexer" in self.compressors:
            self.index = None  # the compressor writes it
        self.states = [
            *["attention"] * bool(self.attention),
            *["indexer"] * bool(self.index),
            *(linear.name for linear in self.linear),
            *self.compressors,
        ]
        self.window = pool.space_of(self.roles[0], layer).window if self.roles else None
        self.is_sliding = self.window is not None
        self.is_linear = bool(self.linear) and self.attention is None
        # over grouped heads an indexer selects blocks of columns, over latents single ones
        if self.index and isinstance(self.attention, MHA) and any(batch.padding.before):
            raise ValueError(
                f"{pool.owner} layer {layer} index_key: padding {list(batch.padding.before)}, but "
                "the model selects blocks of columns. Make a batch of each length."
            )

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool has its memory."""

    def update(
        self, key_states: Any, value_states: Any, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = self._need(self.attention, "keys and values")
        pool = self.batch.pool
        inputs = self._checked(kind, key_states, value_states)
        paired = isinstance(kind, MLA) and kind.rope_pairs and kind.qk_rope_head_dim > 0
        if paired:
            inputs[1] = pairs_of_halves(inputs[1])
        rows, _, tokens, _ = key_states.shape
        start = self.batch.advance(self.layer, "attention", tokens)
        locations = self.batch.locations(self.layer, self.roles[0])
        # of a latent without a rope key the second is [N, 0]
        cells = [*(pool.view(role, self.layer).shape[2:] for role in self.roles), (0,)]
        flat = [x.transpose(1, 2).reshape(rows * tokens, *cell) for x, cell in zip(inputs, cells)]
        pool.set_kv_buffer(self.layer, *self.batch.tokens_only(locations[:, start:], *flat))
        first = 0 if self.window is None else max(0, start - self.window)
        alive = locations[:, first:]
        loaded = self.batch.read(alive.flatten(), partial(pool.get_kv_buffer, self.layer))
        shapes = [(*alive.shape, x.shape[1:-1].numel(), x.shape[-1]) for x in loaded]
        outputs = [x.reshape(n).transpose(1, 2).contiguous() for x, n in zip(loaded, shapes)]
        if paired:
            outputs[1] = halves_of_pairs(outputs[1])
        if kind.shared_kv:
            outputs = [torch.cat(outputs, dim=-1)] * 2
        # models ask for the shape; the memory is the pool's
        self.keys, self.values = (x.to("meta") for x in outputs)
        return outputs[0], outputs[1]

    def update_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        self._need(self.index, "index keys")
        rows, tokens, dim = keys.shape
        pool = self.batch.pool
        (role,) = pool.roles(self.layer, IndexKey)
        width = pool.view(role, self.layer).shape[-1]
        self.batch.check(self.layer, "index_key", keys, (tokens, width), pool.dtype)
        start = self.batch.advance(self.layer, "indexer", tokens)
        locations = self.batch.locations(self.layer, role)
        flat = self.batch.tokens_only(locations[:, start:], keys.flatten(0, 1))
        pool.set_index_key(self.layer, *flat)
        (rows_read,) = self.batch.read(
            locations.flatten(), lambda ids: [pool.get_index_key(self.layer, ids)]
        )
        return rows_read.reshape(rows, -1, dim)  # type: ignore[no-any-return]

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """As update_indexer, `[B, 1, T, D]` (MiniMax-M3)."""
        return self.update_indexer(keys.squeeze(1)).unsqueeze(1)

    def linear_states(self, index: int) -> LinearStates:
        """The layer's linear-attention state number `index`; ValueError if there is none."""
        state = self.linear[index] if index < len(self.linear) else None
        return self._need(state, f"linear-attention state {index}")

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        compressor = self._compressor(name)
        for part in (kv, gate):
            taken = kv.shape[1], compressor.width
            self.batch.check(self.layer, compressor.ring, part, taken, "f32", widen=True)
        return compressor.store(name, kv, gate)

    def update_overlap_state(
        self, name: str, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return self._compressor(name).overlap(chunk_kv, chunk_gate, head_dim)

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        return self._compressor(name).append(compressed)

    def get_seq_length(self) -> int:
        """Columns cached for this layer; of one that the pool does not hold, for all others."""
        for linear in self.linear:
            linear.check_returned()
        written = self.batch.written
        return written[self.layer, self.states[0]] if self.states else min(written.values())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens that the next forward attends to, tokens dropped before them)."""
        length = self.get_seq_length()
        dropped = 0 if self.window is None else max(0, length - self.window)
        return length - dropped + query_length, dropped

    def get_max_length(self) -> int:
        """-1, no maximum: the limit is the free pages, which all requests share."""
        return -1

    def _checked(self, kind: Any, keys: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
        """States as the pool's inputs; raises ValueError where they do not fit it."""
        pool, states = self.batch.pool, [keys, values]
        regions = [pool.layout.region_by_key[pool.owner, self.layer, role] for role in self.roles]
        views = [pool.view(role, self.layer) for role in self.roles]
        if kind.shared_kv:
            if keys is not values:
                raise ValueError(
                    f"{regions[0]}: keys and values differ, the pool stores one for both."
                )
            sizes, total = [view.shape[-1] for view in views], keys.shape[-1]
            states = list(torch.split(keys, sizes if sum(sizes) == total else total, dim=-1))
        if len(self.roles) == 1 and values.numel():
            raise ValueError(
                f"{regions[0]}: the model gives a rope key {list(values.shape)}, the pool has "
                "none. Build the pool for this model."
            )
        for region, view, state in zip(regions, views, states):
            heads, dim = (1, *view.shape[2:])[-2:]
            axis, shape = region.axis("head"), (heads, keys.shape[2], dim)
            part = f" (heads {axis.start}-{axis.stop - 1} of {axis.total})" if axis else ""
            self.batch.check(self.layer, region.role, state, shape, pool.dtype, part=part)
        return states

    def _compressor(self, name: str) -> Compressor:
        return self._need(self.compressors.get(name), f"{name} states")

    def _need(self, state: StateT | None, what: str) -> StateT:
        if state is None:
            raise ValueError(
                f"{self.batch.pool.owner} layer {self.layer}: the model has {what}, the pool "
                f"holds {self.states or 'nothing'} there. Build the pool for this model."
            )
        return state

    reset = unsupported("reset", "Free the requests and build a new PoolCache.")
    crop = unsupported("crop of a layer", "Crop the whole cache.")
    activate_past_recording = unsupported("past recording", "Decode without an assistant model.")
    reorder_cache = unsupported("reorder_cache", "Decode without beams, or with a DynamicCache.")
    batch_repeat_interleave = unsupported("repeating rows", "Prefill a request for every row.")
    batch_select_indices = unsupported("selecting rows", "Build one of the requests to keep.")
    offload = unsupported("offload", "Use pool.save and pool.load for each request.")


class Compressor:
    """DeepSeek-V4's, of the attention or of its indexer: open windows are in rings, compressed
    entries in pages.

    A ring's row holds a token's keys and gates. When its window has closed, only the series that
    the next window overlaps is read again, with the position bias added to the gate: the row is
    rewritten so.
    """

    def __init__(self, batch: Batch, layer: int, at: At, ring: Ring) -> None:
        self.batch, self.layer = batch, layer
        self.ring, self.width = at.prefix + ring.role, ring.count // 2
        names = ("index_key",) if ring.role == "index_state" else ("latent", "rope")
        self.roles = [at.prefix + name for name in names]
        space = batch.pool.space_of(self.ring, layer)
        self.ratio, self.overlaps = space.window_step, bool(space.window)
        self._page_ends = range(0, MAX_TOKENS, space.entries_per_item) if space.ring else range(0)
        self._start = 0
        self._prior: tuple[torch.Tensor, torch.Tensor] | None = None

    def store(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Takes keys and gates `[B, T, D]` of new tokens; returns those of all windows now closed,
        and the position of the first.
        """
        start = self._start = self.batch.advance(self.layer, name, kv.shape[1])
        opened, end = start // self.ratio * self.ratio, start + kv.shape[1]
        self._prior = self._rows(opened - self.ratio, opened) if self.overlaps and opened else None
        kv, gate = (
            torch.cat([rows.to(new.dtype), new], dim=1)
            for rows, new in zip(self._rows(opened, start), (kv, gate))
        )
        closed = (end - opened) // self.ratio * self.ratio
        # entries that are alive at the end; earlier ones are in the ring already or are dead
        first = max(start, opened + closed - (self.ratio if self.overlaps else 0))
        rows = torch.cat([kv, gate], dim=-1)[:, first - opened :]
        self._write([*range(first, end)], rows)
        return kv[:, :closed], gate[:, :closed], opened

    def overlap(
        self, chunk_kv: torch.Tensor, chunk_gate: torch.Tensor, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Stores the last of the windows `[B, W, ratio, D]`, which the next one overlaps, and the
        last of each page that has a ring, with which a prefix may end; returns the one before the
        first, `[B, ratio, head_dim]`, if any.
        """
        opened, count = self._start // self.ratio, chunk_kv.shape[1]
        ends = [(opened + n + 1) * self.ratio for n in range(count)]
        kept = [n for n in range(count) if n == count - 1 or ends[n] in self._page_ends]
        rows = torch.cat([chunk_kv[:, kept], chunk_gate[:, kept]], dim=-1)
        positions = [p for n in kept for p in range(ends[n] - self.ratio, ends[n])]
        self._write(positions, rows.flatten(1, 2))
        if self._prior is None:
            return None, None
        kv, gate = (rows[..., :head_dim] for rows in self._prior)
        return kv.to(chunk_kv.dtype), gate.to(chunk_gate.dtype)

    def append(self, compressed: torch.Tensor) -> torch.Tensor:
        """Writes compressed entries `[B, W, D]`; returns all entries, `[B, E, D]`."""
        pool, locations = self.batch.pool, self.batch.locations(self.layer, self.roles[0])
        first = self._start // self.ratio
        count = first + compressed.shape[1]
        # a window's entry is at the location of its first token
        located = locations[:, : count * self.ratio : self.ratio]
        sizes = [pool.view(role, self.layer).shape[-1] for role in self.roles]
        parts = torch.split(compressed.flatten(0, 1), sizes, dim=-1)
        new = located[:, first:].flatten()
        pool.write(self.layer, new, dict(zip(self.roles, parts)))
        parts_read = pool.read_roles(self.roles, self.layer, located.flatten())
        rows = [part.to(compressed.dtype) for part in parts_read]
        return torch.cat(rows, dim=-1).reshape(len(compressed), count, compressed.shape[-1])

    def _rows(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and gates `[B, T, D]` of positions, float32."""
        locations = self.batch.locations(self.layer, self.ring)[:, first:end]
        values = self.batch.pool.read(self.ring, self.layer, locations.flatten())
        kv, gate = values.reshape(*locations.shape, values.shape[-1]).chunk(2, dim=-1)
        return kv, gate

    def _write(self, positions: list[int], rows: torch.Tensor) -> None:
        locations = self.batch.locations(self.layer, self.ring)[:, positions].flatten()
        kept = locations >= 0
        values = rows.flatten(0, 1)[kept]
        self.batch.pool.write(self.layer, locations[kept], {self.ring: values})
