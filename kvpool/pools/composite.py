"""Pools that are unions of kinds of state at places."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from kvpool.pools.base import KVPool
from kvpool.pools.kinds import MHA, MLA, At, IndexKey, Kind, V4Latent
from kvpool.pools.placement import BufferSpec

ATTENTION = (MHA, MLA, V4Latent)


class UnionPool(KVPool):
    """Declares its parts, each a kind of state at a place, and nothing else."""

    def parts(self) -> Iterator[tuple[Kind, At]]:
        """Kinds of state, and where each lies; parts without layers are left out."""
        raise TypeError(f"{type(self).__name__} has no parts: define parts().")

    def declare(self) -> Iterator[BufferSpec]:
        """The buffers of every part."""
        for kind, at in self.kinds:
            if at.layers:
                yield from kind.declare(at)

    @cached_property
    def kinds(self) -> tuple[tuple[Kind, At], ...]:
        """The parts, as they were when the pool was built."""
        return tuple(self.parts())

    def at(self, layers: Any = None, space: str = "kv", entries: int = 0, **more: Any) -> At:
        """A place of this pool: by default all layers in pages of the `kv` space. Layers that are
        not held here are left out.
        """
        named = set(self.layers if layers is None else layers)
        wrong = [n for n in named if not isinstance(n, int) or n < 0]
        if wrong:
            raise ValueError(f"{self.owner} layers of {space}: numbers from 0, got {wrong[0]!r}.")
        held = tuple(layer for layer in self.layers if layer in named)
        more.setdefault("packing", self.packing)
        return At(held, space, entries or self.page_size, self.shard, **more)

    def roles(self, layer: int, *kinds: type, part: str = "") -> tuple[str, ...]:
        """Input roles of the first part of one of `kinds` that a layer has, with its prefix; `part`
        names a prefix where a layer has several (`c4`).

        Raises KeyError naming what the layer has instead.
        """
        here = [(kind, at) for kind, at in self.kinds if layer in at.layers]
        for kind, at in here:
            if isinstance(kind, kinds) and part in ("", at.prefix[:-1]):
                return tuple(at.prefix + role for role in kind.inputs)
        names = ", ".join(at.prefix + type(kind).__name__ for kind, at in here) or "nothing"
        wanted = " or ".join(f"{part}{'.' * bool(part)}{kind.__name__}" for kind in kinds)
        raise KeyError(f"{self.owner} layer {layer}: no {wanted} here (it has {names}).")

    def set_kv_buffer(
        self,
        layer: int,
        locations: Any,
        first: torch.Tensor,
        second: torch.Tensor,
        *,
        part: str = "",
    ) -> None:
        """Writes K and V `[N, head, dim]`, or latent and rope `[N, dim]`, of a layer's attention to
        flat locations `[N]` of its space. `part="c4"` or `"c128"`: compressed entries.
        """
        roles = self.roles(layer, *ATTENTION, part=part)
        self.write(layer, locations, dict(zip(roles, (first, second))))

    def get_kv_buffer(
        self, layer: int, locations: Any, *, part: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads what `set_kv_buffer` wrote, in the pool's dtype."""
        roles, dtype = self.roles(layer, *ATTENTION, part=part), getattr(torch, self.dtype)
        first, second = self.read_roles(roles, layer, locations)
        return first.to(dtype), second.to(dtype)

    def set_index_key(self, layer: int, locations: Any, keys: torch.Tensor) -> None:
        """Writes a sparse indexer's keys `[N, dim]` to flat locations `[N]`."""
        self.write(layer, locations, dict(zip(self.roles(layer, IndexKey), (keys,))))

    def get_index_key(self, layer: int, locations: Any) -> torch.Tensor:
        """Reads a sparse indexer's keys `[N, dim]`, in the pool's dtype."""
        (role,) = self.roles(layer, IndexKey)
        return self.read(role, layer, locations).to(getattr(torch, self.dtype))
