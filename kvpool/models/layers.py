"""What a model's layers keep, and the pool that holds it.

A model is a list of layers, each a tuple of states: one of attention, two where a layer also has
index keys or a linear state, none where a layer has no attention or reads another's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool.pools.base import KVPool
from kvpool.pools.hybrid_linear import HybridLinearPool
from kvpool.pools.kinds import MHA, MLA, IndexKey, LinearState
from kvpool.pools.layered import LayeredPool, State
from kvpool.pools.mha import MHAPool
from kvpool.pools.mla import MLAPool, NSAPool
from kvpool.pools.swa import SWAPool

Layer = tuple[State, ...]
Need = tuple[type[KVPool], dict[str, Any]]  # a pool class and its own arguments


def need(layers: Sequence[Layer]) -> Need:
    """The pool of these layers: the class made for such layers, or LayeredPool."""
    kinds = {type(state.kind) for layer in layers for state in layer}
    windows = {state.window for layer in layers for state in layer}
    single = all(len(layer) == 1 for layer in layers)
    found: Need | None = None
    if single and kinds == {MHA}:
        found = _grouped(layers, windows)
    elif kinds <= {MLA, IndexKey} and windows == {None}:
        found = _latent(layers)
    elif windows == {None} and LinearState in kinds and IndexKey not in kinds:
        found = _linear(layers)
    states = {n: layer for n, layer in enumerate(layers) if layer}
    return found or (LayeredPool, {"states": states})


def _grouped(layers: Sequence[Layer], windows: set[int | None]) -> Need | None:
    """One kind of full layers and one of window layers, of one window."""
    full = {state.kind for (state,) in layers if state.window is None}
    swa = {state.kind for (state,) in layers if state.window is not None}
    if len(full) > 1 or len(swa) > 1 or len(windows - {None}) > 1:
        return None
    if not swa:
        (heads,) = full
        if not isinstance(heads, MHA):
            return None
        dims = {"num_kv_heads": heads.num_kv_heads, "head_dim": heads.head_dim}
        v_dim = {} if heads.v_head_dim is None else {"v_head_dim": heads.v_head_dim}
        return MHAPool, {**dims, **v_dim}
    (window,), (windowed,) = windows - {None}, swa
    held = tuple(n for n, (state,) in enumerate(layers) if state.window is not None)
    (first,) = full or swa
    arguments = {"full": first, "window_layers": held, "window": window}
    return SWAPool, arguments if first == windowed else {**arguments, "swa": windowed}


def _latent(layers: Sequence[Layer]) -> Need | None:
    """Latents of one size on all layers, index keys of one size on some."""
    latents = {layer[0].kind for layer in layers if layer}
    index = {state.kind for layer in layers for state in layer[1:]}
    kind = next(iter(latents))
    if not all(layers) or len(latents) > 1 or len(index) > 1:
        return None
    if not isinstance(kind, MLA) or not kind.rope_pairs:
        return None
    dims = {"kv_lora_rank": kind.kv_lora_rank, "qk_rope_head_dim": kind.qk_rope_head_dim}
    if not index:
        return MLAPool, dims
    key = next(iter(index))
    if not isinstance(key, IndexKey) or key.pooled:
        return None
    held = tuple(n for n, layer in enumerate(layers) if len(layer) > 1)
    return NSAPool, {**dims, "index_head_dim": key.head_dim, "index_layers": held}


def _linear(layers: Sequence[Layer]) -> Need | None:
    """One linear state, and one kind of attention or none."""
    if any(state.dtype for layer in layers for state in layer):
        return None
    states = [{type(state.kind) is LinearState: state.kind for state in layer} for layer in layers]
    linear = {held[True] for held in states if True in held}
    full = {held[False] for held in states if False in held}
    if len(full) > 1 or len(linear) != 1 or any(len(a) != len(b) for a, b in zip(layers, states)):
        return None
    (state,), held = linear, tuple(n for n, kinds in enumerate(states) if True in kinds)
    arguments: dict[str, Any] = {"linear": state, "linear_layers": held}
    if full:
        arguments = {"full": next(iter(full)), **arguments}
    if full and any(len(held) != 1 for held in states):
        arguments["full_layers"] = tuple(n for n, held in enumerate(states) if False in held)
    return HybridLinearPool, arguments
