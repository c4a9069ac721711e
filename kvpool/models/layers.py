"""What a model's layers keep, and the pool that holds it.

A model is a list of layers, each a tuple of states: one of attention, two where a layer also has
index keys or a linear state, none where a layer has no attention or reads another's keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpool.pools.base import KVPool
from kvpool.pools.states import LayeredPool, State

Layer = tuple[State, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A pool class and its own arguments, the classes of its kinds of state, the default page size
    and the arguments of a pool that serves speculative decoding.
    """

    pool: type[KVPool]
    arguments: Mapping[str, Any]
    kinds: frozenset[type]
    page_size: int = 64
    speculation: Mapping[str, Any] = field(default_factory=dict)


def layered(layers: Sequence[Layer], first: int = 0) -> Need:
    """The pool of these layers, numbered from `first`."""
    states = {n: layer for n, layer in enumerate(layers, first) if layer}
    kinds = frozenset(type(state.kind) for layer in layers for state in layer)
    return Need(pool=LayeredPool, arguments={"states": states}, kinds=kinds)
