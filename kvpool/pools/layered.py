"""Layers that need not be alike: for each, the kinds of state that it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter

from typing_extensions import Unpack

from kvpool.layout import Space
from kvpool.layout.dtypes import dtype_name
from kvpool.pools.access import DTypeLike
from kvpool.pools.base import Common
from kvpool.pools.buf_infos import StateType
from kvpool.pools.composite import UnionPool
from kvpool.pools.kinds import At, IndexKey, Kind, LinearState


@dataclass(frozen=True, slots=True)
class State:
    """A kind of state that a layer keeps: of every token, or with `window` of that many tokens
    before the current one. A linear state is kept once a request, its convolution in `dtype`
    (empty: the pool's). Where a layer has several, roles of the later begin with their
    number: `linear1.conv.x`.
    """

    kind: Kind
    window: int | None = None
    dtype: str = ""

    def __post_init__(self) -> None:
        if self.window is not None and (isinstance(self.kind, LinearState) or self.window < 1):
            name = type(self.kind).__name__
            raise ValueError(
                f"{name}: a window of {self.window}. Give 1 or more, and none for a linear state."
            )


class LayeredPool(UnionPool):
    """`states`: what each layer of the model keeps, by layer. A layer without states, such as one
    that reads another's or has no attention, is left out or has none.

    Layers of equal windows share a space: `swa`, or `swa127` and so on where windows differ. Roles
    are those of the other pools (`k`, `swa.k`, `latent`, `index_key`, ..), so that their layouts
    pair. A layer's second linear state has the prefix `linear1.`, and so on. `conv_dtype` (default:
    that of the pool) and `temporal_dtype` (default: that of each state) are those of linear states.
    """

    has_index_packing = True
    has_linear_states = True

    def __init__(
        self,
        *,
        states: Mapping[int, tuple[State, ...]],
        index_packing: str = "fp8",
        window_page_size: int = 0,
        conv_dtype: DTypeLike | None = None,
        temporal_dtype: DTypeLike | None = None,
        **common: Unpack[Common],
    ) -> None:
        linear = [s for held in states.values() for s in held if isinstance(s.kind, LinearState)]
        for name, given in (("conv_dtype", conv_dtype), ("temporal_dtype", temporal_dtype)):
            if given is not None and not linear:
                raise ValueError(f"{name}: no layer has a linear state. Leave it out.")
        self.states, self.index_packing, self.conv_dtype = dict(states), index_packing, conv_dtype
        if temporal_dtype is not None:
            self.states = {layer: _stored(held, temporal_dtype) for layer, held in states.items()}
        self.window_page_size = window_page_size or common.get("page_size", 0)
        kept = [state.window for held in self.states.values() for state in held]
        windows = {window for window in kept if window is not None}
        # named by the whole model, so that all pipeline stages have the same names
        self.window_spaces = {w: "swa" if len(windows) == 1 else f"swa{w}" for w in sorted(windows)}
        super().__init__(**common)

    def parts(self) -> Iterator[tuple[Kind, At]]:
        """Each state, with the layers that keep it; linear states by their number in a layer."""
        layers: dict[tuple[int, State], list[int]] = {}
        for layer in sorted(self.states):
            linear = 0
            for state in self.states[layer]:
                is_linear = isinstance(state.kind, LinearState)
                layers.setdefault((linear * is_linear, state), []).append(layer)
                linear += is_linear
        for number, state in sorted(layers, key=itemgetter(0)):
            yield state.kind, self._at(state, layers[number, state], number)

    def spaces(self) -> Iterator[Space]:
        """Pages of tokens, pages of each window, and a slot per request."""
        yield from super().spaces()
        for window, name in self.window_spaces.items():
            yield Space(name, "paged", self.window_page_size, window=window)
        yield Space("state", "slot")

    def _at(self, state: State, layers: list[int], number: int) -> At:
        if isinstance(state.kind, LinearState):
            conv = state.dtype or self.conv_dtype or self.dtype
            prefix = f"linear{number}." if number else ""
            mamba = StateType.MAMBA
            return self.at(layers, "state", 1, packing=conv, prefix=prefix, state=mamba)
        indexed, packing = isinstance(state.kind, IndexKey), None
        if isinstance(state.kind, IndexKey):
            packing = self.dtype if state.kind.pooled else self.index_packing
        if state.window is not None:
            name, entries = self.window_spaces[state.window], self.window_page_size
            return self.at(
                layers, name, entries, packing=packing, prefix="swa.", state=StateType.SWA
            )
        return self.at(layers, packing=packing, state=StateType.DSA if indexed else None)


def _stored(states: tuple[State, ...], temporal_dtype: DTypeLike) -> tuple[State, ...]:
    """The states of a layer, with temporal states of that dtype."""
    name = dtype_name(temporal_dtype)
    return tuple(
        replace(state, kind=replace(state.kind, temporal_dtype=name))
        if isinstance(state.kind, LinearState) and state.kind.state_shape
        else state
        for state in states
    )
