"""From vLLM's configuration and registered tensors to the layout of one rank.

vLLM's objects are read by name; only what its platform decides is imported, where it is needed.
vLLM's groups take their ids from one pool of blocks and lie over one another: a block is one
group's at a time. Block 0 is the null block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from disagg.connectors.vllm.layers import (
    ROWS,
    Attention,
    Layer,
    Linear,
    UnknownFormat,
    describe_layer,
    join_nested,
)
from kvpool.layout import PoolLayout, Region, Space
from kvpool.layout.types import Buffer

HERE = "add it to disagg/connectors/vllm/layout.py"
SPECS = {
    "FullAttentionSpec": "kv",
    "MLAAttentionSpec": "kv",
    "SlidingWindowSpec": "swa",
    "SlidingWindowMLASpec": "swa",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "state",
}
"""Specs that are known, and what the spaces of their groups are called."""
QUANTISED = ("NONE", "FP8_PER_TENSOR", "INT8_PER_TOKEN_HEAD", "FP8_PER_TOKEN_HEAD")
"""Quantisation modes (`KVQuantMode`) that are known."""


@dataclass(frozen=True)
class Group:
    """A transferable KV cache group of vLLM, in the order of `transfer_group_ids`.

    `space`: the space whose ids are this group's; empty if none of its layers is on this rank (a
    pipeline stage). `blocks`: kernel blocks a manager block, so that block b is ids `b * blocks`
    to `(b + 1) * blocks - 1`. `tokens`: positions a manager block holds. `state`: which of a slot
    group's blocks is the live state of n tokens: the request's first, or that of position n - 1,
    block number `(n - 1) // tokens`.
    """

    space: str
    kind: Literal["paged", "slot"]
    blocks: int
    tokens: int
    state: Literal["first", "position"] | None = None


@dataclass(frozen=True)
class EngineLayout:
    """What a rank's tensors mean, and how vLLM's block ids address them."""

    layout: PoolLayout
    groups: tuple[Group, ...]


def engine_layout(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> EngineLayout:
    """The layout of what `register_kv_caches` was given.

    Raises UnknownFormat, which names the layer, its backend or spec, and what is known, and
    LayoutError where the tensors cannot be described.
    """
    refuse_context_parallel(vllm_config.parallel_config)
    ids = kv_cache_config.transfer_group_ids
    modules = vllm_config.compilation_config.static_forward_context
    spaces: list[Space] = []
    groups: list[Group] = []
    buffers: list[Buffer] = []
    regions: list[Region] = []
    for number in ids:
        specs = layer_specs(kv_cache_config.kv_cache_groups[number], modules)
        if not specs:
            groups.append(Group("", "paged", 1, 1))
            continue
        first = next(iter(specs.values()))
        name = f"{SPECS[type(first).__name__]}{number}"
        layers, blocks = fold_blocks(
            [
                read_layer(vllm_config, layer, modules[layer], spec, kv_caches[layer], name)
                for layer, spec in specs.items()
            ],
            kv_cache_config.num_blocks,
        )
        pool = "blocks" if len(ids) > 1 else None
        found = {space_of(layer, spec, name, blocks, pool) for layer, spec in specs.items()}
        if len(found) > 1:
            raise UnknownFormat(
                f"KV cache group {number}: layers of several spaces are not known: "
                f"{'; '.join(sorted(map(str, found)))}. Use a model whose groups have one block "
                f"size and window each, or {HERE}."
            )
        spaces += found
        state: Literal["first", "position"] | None = None
        if isinstance(layers[0], Linear):
            state = "first" if first.mamba_cache_mode == "none" else "position"
        kind: Literal["paged", "slot"] = "slot" if state else "paged"
        groups.append(Group(name, kind, blocks, first.block_size, state))
        seen = join_nested(map(describe_layer, layers))
        buffers += seen.buffers
        regions += seen.regions
    here = [group for group in groups if group.space]
    if len({group.blocks for group in here}) > 1:
        ratios = ", ".join(f"{group.space} {group.blocks}" for group in here)
        raise UnknownFormat(
            f"KV cache groups of one pool of blocks, with kernel blocks a block of {ratios}: not "
            "known, only equal ones. Set VLLM_KV_CACHE_LAYOUT=LBNHC, or a block size that all "
            "backends take."
        )
    model = vllm_config.model_config
    total, called = model.get_total_num_hidden_layers(), str(model.model).rstrip("/")
    called = called.rpartition("/")[2]
    layout = PoolLayout(tuple(buffers), tuple(regions), tuple(spaces), total, model=called)
    return EngineLayout(layout, tuple(groups))


def refuse_context_parallel(parallel: Any) -> None:
    """With context parallelism a rank holds only its stretches of the positions."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        ranks = getattr(parallel, name, 1)
        if ranks > 1:
            raise UnknownFormat(
                f"{name} {ranks}: which positions a rank holds is not known. Use 1."
            )


def layer_specs(group: Any, modules: Mapping[str, Any]) -> dict[str, Any]:
    """The specs of a group's layers that have state of their own."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    found = {
        name: each.get(name, group.kv_cache_spec)
        for name in group.layer_names
        if getattr(modules[name], "kv_sharing_target_layer_name", None) is None
    }
    for name, spec in found.items():
        kind, version = type(spec).__name__, getattr(spec, "model_version", None)
        what = ""
        if kind not in SPECS:
            what = f"a {kind} is not known (known: {', '.join(SPECS)})"
        elif version:
            what = f"the {kind} of {version} is not known"
        elif kind != "MambaSpec" and spec.tokens_per_state != 1:
            what = f"a {kind} of {spec.tokens_per_state} tokens a state is not known, only of 1"
        if what:
            raise UnknownFormat(f"{name}: {what}. Use another model, or {HERE}.")
    return found


def space_of(layer: str, spec: Any, name: str, blocks: int, pool: str | None) -> Space:
    """The space of a layer's blocks, of `blocks` items each.

    Decode computes the last prompt token again: n - 1 tokens are handed over, and the one behind
    them sees the last W - 1 of them, or those of its chunk.
    """
    kind, window, step = SPECS[type(spec).__name__], None, 1
    if kind == "state":
        return Space(name, "slot", reserved=blocks, block_pool=pool)
    if kind == "swa":
        window = spec.sliding_window - 1 + spec.extra_retained_tokens
        if window < 1:
            raise UnknownFormat(f"{layer}: a window of 1 token is not known, only larger ones.")
    if kind == "chunk":
        window, step = 0, spec.attention_chunk_size
    tokens = spec.block_size // blocks
    return Space(
        name,
        "paged",
        tokens,
        window=window,
        window_step=step,
        reserved=blocks,
        block_pool=pool,
    )


def fold_blocks(layers: Sequence[Layer], blocks: int) -> tuple[list[Layer], int]:
    """The layers and their items a manager block: 1, but for kernel blocks that cannot be read as
    one. They can where all their tokens are one stride apart.
    """
    counts = {layer.view.shape[0] for layer in layers}
    (count, *others) = sorted(counts)
    if others or count % blocks:
        views = {layer.name: tuple(layer.view.shape) for layer in layers}
        raise UnknownFormat(
            f"views {views} of {blocks} blocks: not known, only as many kernel blocks a block in "
            "all layers of a group. Use a block size that all backends take."
        )
    ratio = count // blocks
    folded: list[Layer] = []
    for layer in layers:
        _, heads, tokens, content = layer.view.shape
        block, head, token, _ = layer.view.stride()
        if ratio > 1 and (layer.backend not in ROWS or block != tokens * token):
            return list(layers), ratio
        shape, strides = (blocks, heads, ratio * tokens, content), (ratio * block, head, token, 1)
        view = layer.view.as_strided(shape, strides) if ratio > 1 else layer.view
        folded.append(replace(layer, view=view))
    return folded, 1


def read_layer(
    vllm_config: Any, name: str, module: Any, spec: Any, view: torch.Tensor, space: str
) -> Layer:
    """A layer as the table takes it, from vLLM's module and spec."""
    number, owner, model = owner_of(vllm_config, name, module, spec)
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    rank = parallel.rank % ranks
    if type(spec).__name__ == "MambaSpec":
        kind = spec.mamba_type.name
        if getattr(spec, "tp_replicated", False):
            rank, ranks = 0, 1
        groups = getattr(getattr(module, "norm", None), "n_groups", 0)
        spare = 0 if kind == "MAMBA1" else vllm_config.num_speculative_tokens
        said = spec.shapes, spec.dtypes, rank, ranks, groups, spare, conv_dim_first()
        return Linear(name, number, owner, space, view, kind, *said)
    layer = Attention(
        name,
        number,
        owner,
        space,
        view,
        module.get_attn_backend().get_name(),
        spec.head_size,
        spec.head_size_v,
        getattr(module, "kv_cache_dtype", "auto"),
        fp8=platform_fp8(),
        isa=getattr(module, "isa", ""),
        prefix="swa." if getattr(spec, "sliding_window", None) else "",
    )
    mode = spec.kv_quant_mode.name
    if mode not in QUANTISED:
        layer.refuse(
            f"pages of {mode} are not known (known: {', '.join(QUANTISED)}).",
            "Use --kv-cache-dtype auto",
        )
    if layer.backend == "DEEPSEEK_V32_INDEXER":
        if getattr(module, "uses_shuffled_layout", False):
            layer.refuse("shuffled index keys are not known.", "Use a platform without them")
        key = model.hf_text_config.index_head_dim
        return replace(layer, key=key, value=0, scale=index_scale())
    refuse_scales(layer, module, mode)
    if "MLA" in type(spec).__name__:
        config = model.hf_text_config
        return replace(layer, key=config.kv_lora_rank, value=config.qk_rope_head_dim)
    return replace(layer, heads=head_shard(layer, model, spec.num_kv_heads, rank, ranks))


def refuse_scales(layer: Attention, module: Any, mode: str) -> None:
    """A scale of the whole tensor is in no page: a peer with another would read wrong values."""
    scales = [getattr(module, f"_{which}_scale_float", 1.0) for which in "kv"]
    if mode == "FP8_PER_TENSOR" and layer.dtype != "fp8_ds_mla" and scales != [1.0, 1.0]:
        layer.refuse(
            f"its values are scaled by k {scales[0]} and v {scales[1]} of the checkpoint, which is "
            "not in its pages; only 1.0 is known.",
            "Use a checkpoint without KV scales, or --kv-cache-dtype auto",
        )


def head_shard(layer: Attention, model: Any, held: int, rank: int, ranks: int) -> tuple[int, int]:
    """(first head, heads of the model). Of fewer heads than ranks, several ranks hold the same."""
    total = held * ranks
    if held == 1 and ranks > 1:
        total = model.get_total_num_kv_heads()
        if total > ranks:
            layer.refuse(
                f"1 KV head on each of {ranks} ranks of a model of {total}: how many the layer has "
                "is not known.",
                "Use a smaller TP size",
            )
    return rank * total // ranks, total


def owner_of(vllm_config: Any, name: str, module: Any, spec: Any) -> tuple[int, str, Any]:
    """Number, owner and model config of a layer. A draft's layers are marked by vLLM, named so, or
    numbered after the target's; a group of EAGLE's may hold the target's layers too.
    """
    target = vllm_config.model_config
    numbers = [int(part) for part in name.split(".") if re.fullmatch(r"\d+", part)]
    if len(numbers) != 1:
        raise UnknownFormat(
            f"{name}: a name with {len(numbers)} numbers is not known, only with the layer's. Use "
            f"another model, or {HERE}."
        )
    draft = getattr(module, "is_draft_layer", False) or getattr(spec, "is_draft", False)
    named = name.startswith("draft_model.")
    if not draft and not named and numbers[0] < target.get_total_num_hidden_layers():
        return numbers[0], "target", target
    speculative = vllm_config.speculative_config
    return numbers[0], "draft", getattr(speculative, "draft_model_config", None) or target


def conv_dim_first() -> bool:
    """Whether vLLM keeps conv states as `(dim, tap)` (VLLM_SSM_CONV_STATE_LAYOUT)."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def platform_fp8() -> str:
    """What `fp8` means on vLLM's platform: e4m3fn or e4m3fnuz."""
    from vllm.platforms import current_platform

    return str(current_platform.fp8_dtype()).removeprefix("torch.")


def index_scale() -> str:
    """The dtype of index keys' scales: vLLM 0.33 writes ue8m0 on some GPUs."""
    from vllm.utils import deep_gemm

    exponents = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)
    return "float8_e8m0fnu" if exponents is not None and exponents() else "float32"
