"""A batch of requests whose states lie in a pool, column by column.

Row b of a batch is one request. Columns are what a model counts its positions by; the token of row
b in column c is its position c - padding[b], and no column before is in the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from kvpool.allocation.allocator import Allocator, Request
from kvpool.layout import Space
from kvpool.layout.dtypes import dtype_name
from kvpool.pools.states import UnionPool

PADDING = -2
"""The location of a column that is no token. -1 is a token whose state is gone, as everywhere."""


@dataclass(frozen=True, slots=True)
class Padding:
    """`before`, `[B]`: columns before each row's first token; `columns`: those up to the last."""

    before: tuple[int, ...]
    columns: int

    @classmethod
    def of(cls, padding: npt.ArrayLike, lengths: Sequence[int], spaces: Sequence[Space]) -> Padding:
        """Padding of rows that have `lengths` `[B]` tokens. Raises ValueError unless these end in
        one column, and rows without any begin after it.
        """
        numbers = np.asarray(padding)
        if numbers.dtype.kind not in "iu" or numbers.shape not in ((), (len(lengths),)):
            raise ValueError(
                f"padding: a whole number, or one for each of {len(lengths)} rows, got {padding!r}."
            )
        before = np.broadcast_to(numbers, len(lengths)).tolist()
        if min(before) < 0:
            raise ValueError(f"padding: 0 or more, got {before}.")
        ends = {n + p for n, p in zip(lengths, before) if n}
        columns = max(ends, default=0)
        if len(ends) > 1 or any(p < columns for n, p in zip(lengths, before) if not n):
            fits = [max(lengths) - n for n in lengths]
            raise ValueError(
                f"requests: {list(lengths)} tokens with padding {before} do not end in one column. "
                f"Give padding={fits}, and the model what inputs() returns."
            )
        compressed = [space for space in spaces if space.tokens_per_entry > 1]
        if any(before) and compressed:
            raise ValueError(
                f"space {compressed[0].name}: padding {before}, but the model compresses windows "
                f"of {compressed[0].tokens_per_entry} columns. Make a batch of each length."
            )
        return cls(tuple(before), columns)

    def tokens(self, columns: int) -> list[int]:
        """How many of the first columns are tokens, of each row."""
        return [max(columns - before, 0) for before in self.before]


@dataclass
class Progress:
    """What the caches of each owner (target, draft) have written of one request.

    `written`: tokens, where fewer than the request has; `unfinished`: owners of whose last forward
    some layers were not written.
    """

    written: dict[str, int] = field(default_factory=dict)
    unfinished: set[str] = field(default_factory=set)

    def truncate(self, pool: UnionPool, tokens: int) -> None:
        """Forgets what was written after `tokens` tokens. Raises ValueError if they end inside a
        window that a compressor of `pool` has closed: it keeps the window's gates no more.
        """
        for space in pool.layout.spaces if self.written.get(pool.owner, 0) > tokens else ():
            step, end = space.window_step, self.written[pool.owner]
            if space.window and step > 1 and tokens % step and tokens // step < end // step:
                raise ValueError(
                    f"space {space.name}: {tokens} tokens end inside a window of {step} that was "
                    f"compressed. Keep {tokens // step * step} tokens."
                )
        self.written = {owner: min(count, tokens) for owner, count in self.written.items()}


PROGRESS: WeakKeyDictionary[Request, Progress] = WeakKeyDictionary()


class Batch:
    """`where`: flat locations `[B, columns]` by space, PADDING where there is no token. `written`:
    columns, by the layers and states that each forward writes. `query_length`: of the forward whose
    mask was made last. `failed`: why a state changed in place was not written.

    Raises ValueError where cached tokens do not end in one column.
    """

    def __init__(
        self,
        pool: UnionPool,
        allocator: Allocator,
        requests: Sequence[Request],
        padding: npt.ArrayLike = 0,
    ) -> None:
        self.pool, self.allocator, self.requests = pool, allocator, tuple(requests)
        if len({id(request) for request in requests}) != len(requests) or not requests:
            raise ValueError(f"requests: one or more, each once, got {len(requests)}.")
        if not isinstance(pool, UnionPool):
            name = type(pool).__name__
            raise ValueError(f"{name}: PoolCache needs a UnionPool, which has kinds of state.")
        if pool not in allocator.pools:
            raise ValueError("allocator: it allocates another pool's items. Use Allocator(pool).")
        self.device = pool.item_bytes_view(pool.layout.buffers[0]).device
        located = [allocator.locations(request) for request in requests]
        self.progress = [PROGRESS.setdefault(request, Progress()) for request in requests]
        for request, progress in zip(requests, self.progress):
            progress.truncate(pool, request.num_tokens)
        if _copy_progress not in allocator.on_fork:
            allocator.on_fork.append(_copy_progress)
        if any(pool.owner in progress.unfinished for progress in self.progress):
            raise ValueError("the last forward over a request did not finish. Free it.")
        lengths = [
            max(progress.written.get(pool.owner, request.num_tokens), request.received_tokens)
            for request, progress in zip(requests, self.progress)
        ]
        self.padding = Padding.of(padding, lengths, pool.layout.spaces)
        self.columns = self.padding.columns
        self.where = {
            name: self._stack([row[name][:n] for row, n in zip(located, lengths)], self.columns)
            for name in located[0]
        }
        self.written: dict[tuple[int, str], int] = {}
        self._behind = 0  # states that lack the tokens of this forward
        self.query_length = 0
        self.failed: Exception | None = None

    def locations(self, layer: int, role: str) -> torch.Tensor:
        """Flat locations `[B, columns]` of all tokens in the space of a layer's role."""
        return self.where[self.pool.space_of(role, layer).name]

    def advance(self, layer: int, state: str, tokens: int) -> int:
        """Counts `tokens` new columns of a layer's state; returns the first.

        The first state of a forward allocates for all. If too few items are free, raises
        OutOfPages, and RequestPinned where a room needs a state that would be overwritten; both
        change nothing.
        """
        start = self.written[layer, state]
        if start == self.columns:
            self._extend(tokens)
        elif start + tokens != self.columns:
            raise ValueError(
                f"layer {layer} {state}: {tokens} new tokens, other states {self.columns - start}."
            )
        self.written[layer, state] = start + tokens
        self._behind -= 1
        if self._behind == 0:
            for progress, tokens_of_row in zip(self.progress, self.padding.tokens(self.columns)):
                progress.written[self.pool.owner] = tokens_of_row
                progress.unfinished.discard(self.pool.owner)
        return start

    def crop(self, tokens_to_remove: int) -> None:
        length = self.columns + tokens_to_remove
        if not 0 <= length <= self.columns:
            raise ValueError(
                f"crop: {-self.columns} to 0, minus the tokens to remove, got {tokens_to_remove}."
            )
        if length == self.columns:
            return
        if any(count != self.columns for count in self.written.values()):
            raise ValueError("the last forward over a request did not finish. Free it.")
        tokens_kept = self.padding.tokens(length)
        left = [min(n, request.num_tokens) for n, request in zip(tokens_kept, self.requests)]
        for progress, n in zip(self.progress, tokens_kept):
            replace(progress).truncate(self.pool, n)  # raises before anything is changed
        self.allocator.truncate_batch(self.requests, left)
        for progress, n in zip(self.progress, tokens_kept):
            progress.truncate(self.pool, n)
        self.where = {name: locations[:, :length] for name, locations in self.where.items()}
        self.written = dict.fromkeys(self.written, length)
        self.columns = length

    def tokens_only(self, locations: torch.Tensor, *states: torch.Tensor) -> list[torch.Tensor]:
        """Flat, of new columns `[B, T]` that are tokens: locations and states `[B * T, ...]`."""
        flat = [locations.flatten(), *states]
        if self.columns - locations.shape[1] >= max(self.padding.before):
            return flat
        kept = flat[0] != PADDING
        return [values[kept] for values in flat]

    def read(self, locations: torch.Tensor, load: Callable[[torch.Tensor], Any]) -> Any:
        """What `load` reads at locations `[N]`, `[N, ...]` or None each; zeros for no token."""
        if not any(self.padding.before):
            return load(locations)
        empty = locations == PADDING
        return [
            x if x is None else x.masked_fill(empty.view(-1, *[1] * (x.dim() - 1)), 0)
            for x in load(locations.masked_fill(empty, 0))  # the reserved item
        ]

    def fail(self, error: Exception) -> None:
        """Keeps why a state changed in place was not written, for the next call to raise."""
        self.failed = error
        if len(self.written) == 1:  # no other state of this forward is there to raise it
            for progress in self.progress:
                progress.unfinished.add(self.pool.owner)

    def raise_failure(self) -> None:
        if self.failed is not None:
            failed = self.failed
            if len(self.written) > 1:
                self.failed = None
            raise failed

    def check(
        self,
        layer: int,
        role: str,
        state: torch.Tensor,
        shape: tuple[int, ...],
        dtype: str,
        *,
        widen: bool = False,
        part: str = "",
    ) -> None:
        """Raises ValueError unless a state has all rows, `shape` and `dtype` (with `widen`, or a
        narrower dtype). `part`: which part of the shape the pool holds, for the error.
        """
        wanted = getattr(torch, dtype_name(dtype))
        memory = self.pool.layout.buffers[0].memory
        wide = torch.promote_types(state.dtype, wanted) if widen else state.dtype
        seen = tuple(state.shape), wide, str(state.device)
        if seen != ((len(self.requests), *shape), wanted, memory):
            taken = [len(self.requests), *shape]
            raise ValueError(
                f"{self.pool.owner} layer {layer} {role}: the model gives {list(state.shape)} "
                f"{state.dtype} on {state.device}, the pool and its requests take {taken} {wanted} "
                f"on {memory}{part}. Build the pool unsharded, with the model's dims, dtype and "
                "device (nothing is rounded), and the cache with a request for every row."
            )
        if state.requires_grad:
            raise ValueError(
                f"{self.pool.owner} layer {layer} {role}: gradients are not supported. Run the "
                "model in torch.no_grad()."
            )

    def _extend(self, columns: int) -> None:
        for (layer, state), count in self.written.items():
            if count != self.columns:
                raise RuntimeError(
                    f"layer {layer} {state}: {count} tokens, others {self.columns}. Either a "
                    "forward did not finish (free the requests), or it changed the state in place "
                    "and something still holds the tensor (let go of it), or the model has no such "
                    "state (build the pool for this model)."
                )
        before = self.padding.tokens(self.columns)
        after = self.padding.tokens(self.columns + columns)
        more = [b - a for a, b in zip(before, after)]
        room = [request.num_tokens - n for request, n in zip(self.requests, before)]
        others = {region.owner for region in self.allocator.layout.regions} - {self.pool.owner}
        if not any(room):
            fresh_rows = self.allocator.extend_batch(self.requests, more)
            fresh = {name: [row[:n] for row, n in zip(x, more)] for name, x in fresh_rows.items()}
            for progress, n in zip(self.progress, before):
                for owner in others:
                    progress.written.setdefault(owner, n)
        elif others and room == more:  # a draft's forward after its target's
            rows = [self.allocator.locations(request) for request in self.requests]
            fresh = {name: [row[name][n:] for row, n in zip(rows, before)] for name in rows[0]}
            for space in self.allocator.spaces:
                if not space.per_request and any((row < 0).any() for row in fresh[space.name]):
                    raise ValueError(
                        f"space {space.name}: tokens left the window before {self.pool.owner} "
                        "wrote them. Run its forward after each of the target's."
                    )
        else:
            row = next(row for row, n in enumerate(room) if n)
            raise ValueError(
                f"row {row}: the request has {self.requests[row].num_tokens} tokens, this cache "
                f"wrote {before[row]}. Give it the same tokens, or requests of its own."
            )
        for progress in self.progress:
            progress.unfinished.add(self.pool.owner)
        for name, located in fresh.items():
            self.where[name] = torch.cat([self.where[name], self._stack(located, columns)], dim=1)
        self.columns += columns
        self._behind = len(self.written)
        self.query_length = 0

    def _stack(self, rows: Sequence[npt.NDArray[np.int64]], columns: int) -> torch.Tensor:
        """Locations of rows of different lengths as `[B, columns]`, after PADDING."""
        aligned = np.full((len(rows), columns), PADDING, dtype=np.int64)
        for row, located in enumerate(rows):
            aligned[row, columns - len(located) :] = located
        return torch.from_numpy(aligned).to(self.device)


def _copy_progress(request: Request, child: Request, tokens: int) -> None:
    """Called when a request is forked."""
    if progress := PROGRESS.get(request):
        if progress.unfinished:
            raise ValueError("the last forward over this request did not finish. Free it.")
        written = {owner: min(count, tokens) for owner, count in progress.written.items()}
        PROGRESS[child] = Progress(written)
