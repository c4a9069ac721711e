"""Pools made of kinds of state: all pools of kvpool."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

import torch

from kvpool.layout.dtypes import dtype_name
from kvpool.pools.access import ArrayLike, DTypeLike
from kvpool.pools.base import KVPool
from kvpool.pools.buf_infos import StateType
from kvpool.pools.kinds import MHA, MLA, At, IndexKey, Kind, LinearState, V4Latent
from kvpool.pools.placement import BufferSpec

ATTENTION = (MHA, MLA, V4Latent)


class UnionPool(KVPool):
    """A pool whose buffers are those of its `parts()`."""

    def parts(self) -> Iterator[tuple[Kind, At]]:
        """Kinds of state and where each lies; parts without layers are left out."""
        raise TypeError(f"{type(self).__name__} needs a parts() method.")

    def declare(self) -> Iterator[BufferSpec]:
        """The buffers of every part."""
        for kind, at in self.kinds:
            if at.layers:
                yield from kind.buffers(at)

    @cached_property
    def kinds(self) -> tuple[tuple[Kind, At], ...]:
        """The parts, evaluated once."""
        return tuple(self.parts())

    def at(
        self,
        layers: Iterable[int] | None = None,
        space: str = "kv",
        entries: int = 0,
        *,
        packing: DTypeLike | None = None,
        prefix: str = "",
        state: StateType | None = None,
    ) -> At:
        """An `At` of this pool: by default all layers in pages of the `kv` space. Layers that this
        pool does not hold are left out.
        """
        named = set(self.layers if layers is None else layers)
        wrong = [n for n in named if not isinstance(n, int) or n < 0]
        if wrong:
            raise ValueError(f"{self.owner} layers of {space}: numbers from 0, got {wrong[0]!r}.")
        held = tuple(layer for layer in self.layers if layer in named)
        packing = self.packing if packing is None else packing
        stored = packing if isinstance(packing, str) else dtype_name(packing)
        return At(held, space, entries or self.page_size, self.shard, stored, prefix, state)

    def part(self, layer: int, *kinds: type, part: str = "") -> tuple[Any, At]:
        """A layer's first part that is one of `kinds`; `part` is the prefix where a layer has
        several (`c4`). Raises KeyError naming the parts that it has.
        """
        here = [(kind, at) for kind, at in self.kinds if layer in at.layers]
        for kind, at in here:
            if isinstance(kind, kinds) and part in ("", at.prefix[:-1]):
                return kind, at
        names = ", ".join(at.prefix + type(kind).__name__ for kind, at in here) or "nothing"
        wanted = " or ".join(f"{part}{'.' * bool(part)}{kind.__name__}" for kind in kinds)
        raise KeyError(f"{self.owner} layer {layer}: no {wanted} (the layer has {names}).")

    def roles(self, layer: int, *kinds: type, part: str = "") -> tuple[str, ...]:
        """Input roles, with prefix, of the part that `part` finds."""
        kind, at = self.part(layer, *kinds, part=part)
        return tuple(at.prefix + role for role in kind.inputs)

    def set_kv_buffer(
        self,
        layer: int,
        locations: ArrayLike,
        first: torch.Tensor,
        second: torch.Tensor,
        *,
        part: str = "",
    ) -> None:
        """Writes K and V `[N, head, dim]`, or latent and rope `[N, dim]`, of a layer's attention to
        flat locations `[N]` of its space. `part="c4"` or `"c128"`: compressed entries. Of a latent
        without a rope key `second` is `[N, 0]`.
        """
        roles = self.roles(layer, *ATTENTION, part=part)
        if len(roles) == 1 and second.numel():
            raise ValueError(
                f"{self.owner} layer {layer} {roles[0]}: it has no rope key, got one of "
                f"{list(second.shape)}. Give [N, 0], or build the pool with qk_rope_head_dim."
            )
        self.write(layer, locations, dict(zip(roles, (first, second))))

    def get_kv_buffer(
        self, layer: int, locations: ArrayLike, *, part: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads K and V, or latent and rope (without a rope key `[N, 0]`), in the pool's dtype."""
        roles, dtype = self.roles(layer, *ATTENTION, part=part), getattr(torch, self.dtype)
        first, *others = self.read_roles(roles, layer, locations)
        second = others[0] if others else first[:, :0]
        return first.to(dtype), second.to(dtype)

    def set_index_key(self, layer: int, locations: ArrayLike, keys: torch.Tensor) -> None:
        """Writes a sparse indexer's keys `[N, dim]` to flat locations `[N]`."""
        self.write(layer, locations, dict(zip(self.roles(layer, IndexKey), (keys,))))

    def get_index_key(self, layer: int, locations: ArrayLike) -> torch.Tensor:
        """Reads a sparse indexer's keys `[N, dim]`, in the pool's dtype."""
        (role,) = self.roles(layer, IndexKey)
        return self.read(role, layer, locations).to(getattr(torch, self.dtype))

    def set_linear_state(
        self,
        layer: int,
        slots: ArrayLike,
        conv: torch.Tensor | None = None,
        temporal: torch.Tensor | None = None,
        *,
        part: str = "",
    ) -> None:
        """Writes conv `[N, channel, tap]` (sections one after the other) and temporal
        `[N, head, *state_shape]`, or one of them, to slots `[N]`.
        """
        kind, at = self.part(layer, LinearState, part=part)
        values = {} if conv is None else kind.split(conv, at.shard)
        if temporal is not None:
            values["temporal"] = kind.rows(temporal)
        self.write(layer, slots, {at.prefix + role: rows for role, rows in values.items()})

    def get_linear_state(
        self, layer: int, slots: ArrayLike, *, part: str = ""
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Reads conv `[N, channel, tap]` and temporal `[N, head, *state_shape]`; None where the
        state has no such part.
        """
        kind, at = self.part(layer, LinearState, part=part)
        roles = [at.prefix + role for role in kind.inputs]
        held = dict(zip(kind.inputs, self.read_roles(roles, layer, slots)))
        conv = [held[role] for role in kind.conv_roles]
        temporal = held.get("temporal")
        if temporal is not None:
            temporal = temporal.reshape(*temporal.shape[:2], *kind.state_shape)
        return kind.join(conv) if conv else None, temporal
