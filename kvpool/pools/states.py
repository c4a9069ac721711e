"""The pool of states: all pools of kvpool.

A pool says in `states()` which kinds of state (kvpool.layout.formats) it has, and where each lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from kvpool.extras import Lazy
from kvpool.layout import Space
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import (
    MHA,
    At,
    Attention,
    BufferSpec,
    ConvLayout,
    IndexKey,
    Kind,
    LinearState,
    Order,
    PerRequest,
    Shard,
    StateType,
)
from kvpool.pools.access import ArrayLike, DTypeLike
from kvpool.pools.base import Common, KVPool

if TYPE_CHECKING:
    import torch
else:
    torch = Lazy("torch", "kvpool.pools")


@dataclass(frozen=True, slots=True)
class State:
    """A kind of state that a layer keeps: of every token, or with `window` of that many tokens
    before the current one. A `PerRequest` state, such as a linear one, is kept once a request, its
    convolution in `dtype` (empty: the pool's). Where a layer has several, roles of the later begin
    with their number: `linear1.conv.x`.
    """

    kind: Kind
    window: int | None = None
    dtype: str = ""

    def __post_init__(self) -> None:
        if self.window is not None and (isinstance(self.kind, PerRequest) or self.window < 1):
            name = type(self.kind).__name__
            raise ValueError(
                f"{name}: a window of {self.window}. Give 1 or more, and none for a state that a "
                "request has once."
            )


class UnionPool(KVPool):
    """A pool of the states that its `states()` gives."""

    window_page_size = 0
    index_packing: DTypeLike | None = "fp8"
    conv_dtype: DTypeLike | None = None
    windows: Mapping[int, str] = {}
    """The space of each window."""

    def states(self) -> Iterator[tuple[Kind, At]]:
        """Kinds of state and where each lies; those without layers are left out."""
        raise TypeError(f"{type(self).__name__} needs a states() method.")

    def declare(self) -> Iterator[BufferSpec]:
        for kind, site in self.kinds:
            if site.layers:
                yield from kind.buffers(site)

    @cached_property
    def kinds(self) -> tuple[tuple[Kind, At], ...]:
        """The states, evaluated once."""
        return tuple(self.states())

    def kinds_of(self, layer: int) -> list[tuple[Kind, At]]:
        """The states that a layer keeps."""
        return [(kind, site) for kind, site in self.kinds if layer in site.layers]

    def spaces(self) -> Iterator[Space]:
        """Pages of tokens, pages of each window, and a slot per request."""
        yield from super().spaces()
        for window, name in self.windows.items():
            yield Space(name, "paged", self.window_page_size, window=window)
        yield Space("state", "slot")

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
        packing = self.packing if packing is None else packing
        return At(
            layers=tuple(layer for layer in self.layers if layer in named),
            space=space,
            entries=entries or self.page_size,
            shard=self.shard,
            packing=packing if isinstance(packing, str) else dtype_name(packing),
            prefix=prefix,
            state=state,
        )

    def place(
        self,
        kind: Kind,
        layers: Iterable[int] | None = None,
        *,
        window: int | None = None,
        dtype: str = "",
        number: int = 0,
    ) -> tuple[Kind, At]:
        """A kind of state where these pools have it: those of a request in slots, `number` counting
        those of a layer, windows in spaces of their own, all others in pages of tokens.
        """
        packing, component = None, None
        if isinstance(kind, PerRequest):
            packing, component = dtype or self.conv_dtype or self.dtype, StateType.MAMBA
            prefix = f"linear{number}." if number else ""
            site = self.at(layers, "state", 1, packing=packing, prefix=prefix, state=component)
            return kind, site
        if isinstance(kind, IndexKey):
            packing, component = self.dtype if kind.pooled else self.index_packing, StateType.DSA
        if window is None:
            return kind, self.at(layers, packing=packing, state=component)
        space, entries, component = self.windows[window], self.window_page_size, StateType.SWA
        site = self.at(layers, space, entries, packing=packing, prefix="swa.", state=component)
        return kind, site

    def part(self, layer: int, wanted: type, part: str = "") -> tuple[Any, At]:
        """A layer's first state of class `wanted`; `part` is the prefix where a layer has
        several (`c4`). Raises KeyError naming the states that it has.
        """
        kept = self.kinds_of(layer)
        for kind, site in kept:
            if isinstance(kind, wanted) and part in ("", site.prefix[:-1]):
                return kind, site
        names = ", ".join(site.prefix + type(kind).__name__ for kind, site in kept) or "nothing"
        name = f"{part}.{wanted.__name__}" if part else wanted.__name__
        raise KeyError(f"{self.owner} layer {layer}: no {name} (the layer has {names}).")

    def roles(self, layer: int, wanted: type, part: str = "") -> tuple[str, ...]:
        """Input roles, with prefix, of the state that `part` finds."""
        kind, site = self.part(layer, wanted, part)
        return tuple(site.prefix + role for role in kind.inputs)

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
        roles = self.roles(layer, Attention, part=part)
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
        roles, dtype = self.roles(layer, Attention, part=part), getattr(torch, self.dtype)
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
        kind, site = self.part(layer, LinearState, part=part)
        values = {} if conv is None else _sections_of(kind, conv, site.shard)
        if temporal is not None:
            if temporal.shape[2:] != kind.state_shape or not kind.heads:
                shape = ", ".join(map(str, ("N", "head", *kind.state_shape)))
                taken = f"a state is [{shape}]" if kind.heads else "this state has none"
                raise ValueError(f"temporal: {list(temporal.shape)}, {taken}.")
            if not kind.state_axis:
                temporal = temporal.reshape(*temporal.shape[:2], -1)
            values["temporal"] = temporal
        self.write(layer, slots, {site.prefix + role: rows for role, rows in values.items()})

    def get_linear_state(
        self, layer: int, slots: ArrayLike, *, part: str = ""
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Reads conv `[N, channel, tap]` and temporal `[N, head, *state_shape]`; None where the
        state has no such part.
        """
        kind, _ = self.part(layer, LinearState, part=part)
        stored = self.read_roles(self.roles(layer, LinearState, part=part), layer, slots)
        rows = dict(zip(kind.inputs, stored))
        temporal = rows.pop("temporal", None)
        if temporal is not None:
            temporal = temporal.reshape(*temporal.shape[:2], *kind.state_shape)
        sections = [section.squeeze(-1).flatten(1, 2) for section in rows.values()]
        return torch.cat(sections, dim=1) if sections else None, temporal


class LayeredPool(UnionPool):
    """`states`: what each layer of the model keeps, by layer. A layer without states, such as one
    that reads another's or has no attention, is left out or has none.

    Layers of equal windows share a space: `swa`, or `swa127` and so on where windows differ. Roles
    are those of the other pools (`k`, `swa.k`, `latent`, `index_key`, ..), so that their layouts
    pair. A layer's second linear state has the prefix `linear1.`, and so on. `conv_dtype` (default:
    that of the pool) and `temporal_dtype` (default: that of each state) are those of linear states,
    `order` and `conv_layout` (default: those of each) are those of K and V and of convolutions.
    """

    def __init__(
        self,
        *,
        states: Mapping[int, tuple[State, ...]],
        order: Order | None = None,
        conv_layout: ConvLayout | None = None,
        index_packing: DTypeLike | None = "fp8",
        window_page_size: int = 0,
        conv_dtype: DTypeLike | None = None,
        temporal_dtype: DTypeLike | None = None,
        **common: Unpack[Common],
    ) -> None:
        linear = any(isinstance(s.kind, LinearState) for kept in states.values() for s in kept)
        for name, dtype in (("conv_dtype", conv_dtype), ("temporal_dtype", temporal_dtype)):
            if dtype is not None and not linear:
                raise ValueError(f"{name}: no layer has a linear state. Leave it out.")

        def stored(state: State) -> State:
            kind = state.kind
            if isinstance(kind, MHA):
                kind = replace(kind, order=order or kind.order)
            if isinstance(kind, LinearState):
                kind = replace(kind, conv_layout=conv_layout or kind.conv_layout)
                if kind.heads and temporal_dtype is not None:
                    kind = replace(kind, temporal_dtype=dtype_name(temporal_dtype))
            return replace(state, kind=kind)

        self.by_layer = {layer: tuple(map(stored, states[layer])) for layer in sorted(states)}
        self.index_packing, self.conv_dtype = index_packing, conv_dtype
        self.window_page_size = window_page_size or common.get("page_size", 0)
        states_kept = (state for kept in self.by_layer.values() for state in kept)
        windows = sorted({s.window for s in states_kept if s.window is not None})
        # named by the whole model, so that all pipeline stages have the same names
        self.windows = {w: "swa" if len(windows) == 1 else f"swa{w}" for w in windows}
        super().__init__(**common)

    def states(self) -> Iterator[tuple[Kind, At]]:
        layers: dict[tuple[int, State], list[int]] = {}
        for layer, kept in self.by_layer.items():
            number = 0
            for state in kept:
                in_slot = isinstance(state.kind, PerRequest)
                layers.setdefault((number * in_slot, state), []).append(layer)
                number += in_slot
        for number, state in sorted(layers, key=itemgetter(0)):
            kind, window, dtype = state.kind, state.window, state.dtype
            yield self.place(kind, layers[number, state], window=window, dtype=dtype, number=number)


def _sections_of(kind: LinearState, conv: torch.Tensor, shard: Shard) -> dict[str, torch.Tensor]:
    """Channels `[N, channel, tap]` by role as pools store them, `[N, head, dim, tap, 1]`."""
    sections = kind.conv_sections(shard)
    sizes = [section.channels for section in sections]
    if conv.shape[1:] != (sum(sizes), kind.taps):
        names = ", ".join(section.name for section in sections) or "no section"
        raise ValueError(
            f"conv: {list(conv.shape)}, this shard takes [N, {sum(sizes)}, {kind.taps}]: the "
            f"channels of {names} one after the other, and taps."
        )
    return {
        section.role: part.reshape(len(part), section.heads.size, section.dim, kind.taps, 1)
        for section, part in zip(sections, torch.split(conv, sizes, dim=1))
    }
