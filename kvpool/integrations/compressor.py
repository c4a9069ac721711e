"""DeepSeek-V4's compressors over a pool: open windows in rings, compressed entries in pages.

A ring's row holds a token's keys and gates. When its window has closed, only the series that the
next window overlaps is read again, with the position bias added to the gate: the row is rewritten
so.
"""

from __future__ import annotations

import torch

from kvpool.integrations.batch import Batch
from kvpool.layout.formats import At, Ring
from kvpool.layout.request_address import MAX_TOKENS


class Compressor:
    """One compressor of a layer: the attention's own, or its indexer's."""

    def __init__(self, batch: Batch, layer: int, at: At, ring: Ring) -> None:
        self.batch, self.layer = batch, layer
        self.ring, self.width = at.prefix + ring.role, ring.count // 2
        names = ("index_key",) if ring.role == "index_state" else ("latent", "rope")
        self.roles = [at.prefix + name for name in names]
        space = batch.pool.space_of(self.ring, layer)
        self.ring_space = space.name
        self.entry_space = batch.pool.space_of(self.roles[0], layer).name
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
        self._prior = None
        if self.overlaps and opened:
            self._prior = self._rows(opened - self.ratio, opened)
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
        pool, locations = self.batch.pool, self.batch.where[self.entry_space]
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
        locations = self.batch.where[self.ring_space][:, first:end]
        values = self.batch.pool.read(self.ring, self.layer, locations.flatten())
        kv, gate = values.reshape(*locations.shape, values.shape[-1]).chunk(2, dim=-1)
        return kv, gate

    def _write(self, positions: list[int], rows: torch.Tensor) -> None:
        locations = self.batch.where[self.ring_space][:, positions]
        kept = locations.flatten() >= 0
        values = rows.flatten(0, 1)[kept]
        self.batch.pool.write(self.layer, locations.flatten()[kept], {self.ring: values})
