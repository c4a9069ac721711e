"""From vLLM's configuration and registered tensors to the layout of one rank, and from its block
ids to block tables.

vLLM's objects are read by name; only what its platform decides is imported, where it is needed.
vLLM's groups take their ids from one pool of blocks and lie over one another: a block is one
group's at a time. Block 0 is the null block: what its positions held is dead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from disagg.connectors.blocks import BlockGroup
from disagg.connectors.tensors import PlacedTensor, UnknownFormat, fold_blocks, layout_of
from disagg.connectors.vllm.layers import read_layer
from disagg.connectors.vllm.registered import (
    OPEN_WINDOWS,
    V4,
    Platform,
    RegisteredLayer,
    platform_of_process,
    stem,
)
from kvpool.layout import Interleave, PoolLayout, Space

HERE = "add it to disagg/connectors/vllm/layout.py"
SPECS = {
    "FullAttentionSpec": "kv",
    "MLAAttentionSpec": "kv",
    "SlidingWindowSpec": "swa",
    "SlidingWindowMLASpec": "swa",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "state",
    "CircularBufferSpec": "ring",
}
"""Specs that are known, and what the spaces of their groups are called."""


@dataclass(frozen=True)
class VllmLayout:
    """What a rank's tensors mean, and how vLLM's block ids address them. `groups` are the
    transferable cache groups, in the order of `transfer_group_ids`. `layers`: owner and number of
    each layer that has state, by vLLM's name; two may have one number.
    """

    layout: PoolLayout
    groups: tuple[BlockGroup, ...]
    layers: Mapping[str, tuple[str, int]]


def engine_layout(
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
    platform: Platform | None = None,
) -> VllmLayout:
    """The layout of what vLLM gave `register_kv_caches`, on `platform` (None: this process's).

    Raises UnknownFormat, which names the layer, its backend or spec, and what is known, and
    LayoutError where the tensors cannot be described.
    """
    platform = platform or platform_of_process()
    groups: list[BlockGroup] = []
    placed: list[PlacedTensor] = []
    lists: list[Space] = []
    names: dict[str, tuple[str, int]] = {}
    for number in kv_cache_config.transfer_group_ids:
        group = kv_cache_config.kv_cache_groups[number]
        layers = registered_layers(group, vllm_config, kv_caches, platform)
        if not layers:
            groups.append(BlockGroup("", 1, 1))
            continue
        pairs = [(layer, tensor) for layer in layers for tensor in read_layer(layer)]
        names |= {layer.name: (t.owner, t.number) for layer, t in pairs}
        tensors, blocks = fold_blocks([t for _, t in pairs], kv_cache_config.num_blocks)
        spec, space = layers[0].spec, space_of(number, layers[0], blocks)
        state: Literal["first", "position"] | None = None
        if space.per_request:
            state = "first" if getattr(spec, "mamba_cache_mode", "none") == "none" else "position"
        tokens = spec.block_size * space.held.ranks
        groups.append(BlockGroup(space.name, blocks, tokens, state))
        lists.append(space)
        spaces = (compressed(space_of(number, layer, blocks), layer) for layer, _ in pairs)
        placed += zip(spaces, tensors)
    model = vllm_config.model_config
    layout = layout_of(placed, model.get_total_num_hidden_layers(), model.model, *lists)
    return VllmLayout(layout, tuple(groups), names)


def registered_layers(
    group: Any, config: Any, views: Mapping[str, torch.Tensor], platform: Platform
) -> list[RegisteredLayer]:
    """A group's layers that have state of their own."""
    modules = config.compilation_config.static_forward_context
    # vLLM loads the target first
    target = next(stem(name) for name in modules if name in views)
    registered = partial(RegisteredLayer, config=config, target=target, platform=platform)
    own_specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    layers = []
    for name in group.layer_names:
        module, spec = modules[name], own_specs.get(name, group.kv_cache_spec)
        if getattr(module, "kv_sharing_target_layer_name", None) is not None:
            continue
        kind = type(spec).__name__
        if kind not in SPECS:
            raise UnknownFormat(
                f"{name}: a {kind} is not known (known: {', '.join(SPECS)}). Use another model, or "
                f"{HERE}."
            )
        layer = registered(name=name, module=module, spec=spec, view=views[name])
        version = getattr(spec, "model_version", None)
        if (layer.ratio != 1 or version) and layer.backend not in V4:
            raise UnknownFormat(
                f"{name}: a {kind} of {version or 'this model'}, {layer.ratio} tokens a state, is "
                f"known of {', '.join(V4)} only. Use another --attention-backend, or {HERE}."
            )
        layers.append(layer)
    return layers


def shared_positions(parallel: Any, spec: Any) -> Interleave | None:
    """Which positions this rank holds of a group, if ranks share them (decode context parallelism,
    DCP). Without prefill context parallelism (PCP) they are TP ranks that follow one another, which
    then have the same heads; with it, PCP ranks, then TP ranks (`initialize_model_parallel`).
    """
    tp, ranks = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    pcp, size = parallel.prefill_context_parallel_size, parallel.cp_kv_cache_interleave_size
    if pcp > 1 and ranks == 1:
        raise UnknownFormat(
            f"prefill_context_parallel_size {pcp} with decode_context_parallel_size 1: each rank "
            "holds all of the state, but vLLM passes on the address of one of them only. Set "
            f"--decode-context-parallel-size {pcp}, or no prefill context parallelism."
        )
    if ranks == 1 or not spec.dcp_sharded:
        return None
    if spec.block_size % size:
        raise UnknownFormat(
            f"cp_kv_cache_interleave_size {size}: blocks of {spec.block_size} tokens would cut "
            "stretches. Use a size that divides them."
        )
    place = parallel.rank % tp * pcp + parallel.rank // tp % pcp
    return Interleave(size, place % ranks, ranks)


def space_of(group: int, layer: RegisteredLayer, blocks: int) -> Space:
    """The space of a layer's blocks, of `blocks` items each; layers of a group have one space.

    Decode computes the last prompt token again: n - 1 tokens are handed over, and the one behind
    them sees the last W - 1 of them, or those of its chunk.
    """
    spec, window, step = layer.spec, None, 1
    kind = SPECS[type(spec).__name__]
    if kind == "swa":
        window = spec.sliding_window - 1 + spec.extra_retained_tokens
        if window < 1:
            raise UnknownFormat(
                f"{layer.name}: a window of 1 token is not known, only larger ones."
            )
    if kind == "chunk":
        window, step = 0, spec.attention_chunk_size
    if kind == "ring":
        window, step = 0, layer.ratio
    return Space(
        f"{kind}{group}",
        "slot" if kind == "state" else "ring" if kind == "ring" else "paged",
        1 if kind == "state" else spec.block_size // blocks,
        window=window,
        window_step=step,
        reserved=blocks,
        block_pool="blocks",
        interleave=shared_positions(layer.config.parallel_config, spec),
        items_per_block=blocks,
        # vLLM loads the window of a replayed group from us where a prefix is its own
        whole=getattr(spec, "bounded_replay", False),
    )


def compressed(space: Space, layer: RegisteredLayer) -> Space:
    """The space of a layer that keeps one state for several tokens, or their keys until then, whose
    blocks `space` has; of any other layer that space. Of keys those of the open window are alive,
    and of windows that overlap those of the one before.
    """
    ratio = layer.ratio
    if ratio == 1 or space.per_request:
        return space
    if space.items_per_block > 1 or space.interleave is not None:
        raise UnknownFormat(
            f"{layer.name}: compressed states are known in whole blocks of one rank only. Use "
            "--decode-context-parallel-size 1, and blocks of the kernel's size."
        )
    own = replace(space, name=f"{space.name}.c{ratio}", ids=space.name, block_pool=None)
    if layer.backend == OPEN_WINDOWS:
        return replace(own, window=ratio if ratio == 4 else 0, window_step=ratio)
    entries, rest = divmod(space.entries_per_item, ratio)
    if rest:
        raise UnknownFormat(
            f"{layer.name}: blocks of {space.entries_per_item} tokens cut states of {ratio}. Use a "
            f"--block-size that is a multiple of {ratio}."
        )
    return replace(own, entries_per_item=entries, tokens_per_entry=ratio)
