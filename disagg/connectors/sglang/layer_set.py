"""Which layers a pool of SGLang's holds, on which rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from disagg.connectors import formats
from disagg.connectors.tensors import Format, LayerTensor, PlacedTensor
from kvpool.layout import Space
from kvpool.layout.formats import Heads


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What the pools of a rank do not say.

    `tp_rank`, `tp_size`: its place in attention's tensor parallelism. `total_kv_heads`: those of
    the model. `window`: the tokens before a position that its sliding window sees (the scheduler's
    `sliding_window_size`). `groups`: Mamba-2's B and C in the model. `sliding`: layers that see
    that window, whether or not their pool holds more.
    """

    tp_rank: int = 0
    tp_size: int = 1
    total_kv_heads: int = 1
    window: int | None = None
    groups: int = 0
    sliding: Collection[int | None] = ()

    def heads(self, count: int) -> Heads:
        """The `count` heads of this rank."""
        return formats.head_shard(count, self.total_kv_heads, self.tp_rank, self.tp_size)


@dataclass(frozen=True, kw_only=True)
class LayerSet:
    """Layers of one pool: whose, their numbers, the space of their pages, what precedes their
    roles, and the name of the pool.
    """

    ranks: Ranks
    owner: str
    numbers: Sequence[int]
    space: Space
    prefix: str = ""
    pool: str

    def tensors(self, views: Iterable[torch.Tensor], form: Format) -> Iterator[PlacedTensor]:
        """A tensor of each of the layers, in their order, which holds `form`."""
        for number, view in zip(self.numbers, views, strict=True):
            slides = self.owner == "target" and number in self.ranks.sliding
            layer = LayerTensor(
                name=f"{self.pool} layer {number}",
                number=number,
                view=view,
                format=form,
                owner=self.owner,
                prefix=self.prefix or ("swa." if slides else ""),
            )
            yield self.space, layer


PoolReader = Callable[[Any, LayerSet], Iterator[PlacedTensor]]
"""Yields the tensors of a pool, which holds these layers."""
