"""Layers of one of SGLang's pools, and the rank whose pools they are."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from disagg.connectors.tensors import LayerTensor, PlacedTensor, TensorPart
from kvpool.layout import Space


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

    def tensors(self, views: Iterable[torch.Tensor], part: TensorPart) -> Iterator[PlacedTensor]:
        """A tensor of each of the layers, in their order, which is all of one part."""
        for number, view in zip(self.numbers, views, strict=True):
            slides = self.owner == "target" and number in self.ranks.sliding
            layer = LayerTensor(
                name=f"{self.pool} layer {number}",
                number=number,
                view=view,
                parts=[part],
                owner=self.owner,
                prefix=self.prefix or ("swa." if slides else ""),
            )
            yield self.space, layer


def paged(tensor: torch.Tensor, page: int, heads: int = 1) -> torch.Tensor:
    """A view of rows `[token, head, content]`, in any number of dims, in pages of `page` tokens."""
    tokens = tensor.view(-1, heads, tensor.shape[-1])
    pages = len(tokens) // page
    return tokens[: pages * page].view(pages, page, heads, -1).transpose(1, 2)
