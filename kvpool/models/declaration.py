"""What a model's layers keep, and the pool that holds it.

A model is a list of layers, each a tuple of states: one of attention, two where a layer also has
index keys or a linear state, none where a layer has no attention or reads another's keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.layout.sentences import steps
from kvpool.pools.base import KVPool
from kvpool.pools.states import LayeredPool, State

Layer = tuple[State, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A pool class and its arguments, without sizes, dtype, device, shard and pipeline stage.

    `layers` are global ids: all layers of a target; a draft's follow them. `page_size` is the
    default of `build`, `kinds` are the classes of the states that it has, `speculation` the
    arguments of a pool that serves speculative decoding. Rules of model types leave out whose
    layers these are: `layers`, `total_kv_layers`, `owner` and `model`.
    """

    pool: type[KVPool]
    arguments: Mapping[str, Any]
    kinds: frozenset[type]
    page_size: int = 64
    speculation: Mapping[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    total_kv_layers: int = 0
    owner: str = "target"
    model: str = ""

    def __str__(self) -> str:
        """The model and its pool, then a line for all layers that keep the same."""
        others = dict(self.arguments)
        layers: dict[Layer, list[int]] = {}
        for layer, states in others.pop("states", {}).items():
            layers.setdefault(states, []).append(layer)
        rows = [f"{self.model} ({self.owner}): {self.pool.__name__}, {len(self.layers)} layers"]
        for states, numbers in layers.items():
            kept = (f"{s.kind}{f', a window of {s.window}' * bool(s.window)}" for s in states)
            rows.append(f"layers {steps(numbers)}: {'; '.join(kept)}")
        return "\n".join((*rows, *(f"{name}: {value}" for name, value in others.items())))

    def build(self, **common: Any) -> KVPool:
        """The pool. Give a dtype or a packing, and num_pages, num_window_pages and num_slots where
        the pool has such spaces. What is given here overrides the declaration.
        """
        return self.pool(**self._arguments(common))

    def from_budget(self, nbytes: int, **common: Any) -> KVPool:
        """As `build`, with as many pages as fit into `nbytes`; see KVPool.from_budget."""
        return self.pool.from_budget(nbytes, **self._arguments(common))

    def _arguments(self, common: Mapping[str, Any]) -> dict[str, Any]:
        names = ("layers", "total_kv_layers", "owner", "model", "page_size")
        return {**{name: getattr(self, name) for name in names}, **self.arguments, **common}


def layered(layers: Sequence[Layer], first: int = 0) -> Declaration:
    """The pool of these layers, numbered from `first`."""
    states = {n: layer for n, layer in enumerate(layers, first) if layer}
    kinds = frozenset(type(state.kind) for layer in layers for state in layer)
    return Declaration(pool=LayeredPool, arguments={"states": states}, kinds=kinds)
