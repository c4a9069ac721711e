"""Kinds of state that a layer can have, each with its item templates.

A kind is a frozen dataclass of the model's numbers. `buffers(at)` gives its buffers for the layers,
space, shard and packing in `at`. A pool is a list of kinds, each with its `At`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import torch

from kvpool.layout.dtypes import PACKINGS, dtype_name
from kvpool.layout.formats import (
    ConvSection,
    conv_state,
    fp8_latent_row,
    head_page,
    index_key_page,
    latent_row,
    scaled,
    temporal_state,
    v4_latent_page,
)
from kvpool.layout.formats.attention import ORDERS, Order
from kvpool.layout.template import Cell, Repeat, Template, prefixed
from kvpool.pools.buf_infos import StateType
from kvpool.pools.placement import BufferSpec, Shard

ConvLayout = Literal["channels_first", "taps_first"]


@dataclass(frozen=True, slots=True)
class At:
    """Where a pool puts a kind of state: in which layers and space, and how it is stored.

    `entries`: entries an item. `packing`: a float dtype, or a quantised packing of the kind.
    `prefix`: prepended to roles and buffer names. `state`: the component under which connectors
    list the buffers (None: the main cache).
    """

    layers: tuple[int, ...]
    space: str
    entries: int
    shard: Shard
    packing: str
    prefix: str = ""
    state: StateType | None = None

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            object.__setattr__(self, "packing", dtype_name(self.packing))

    def buffer(self, name: str, item: Template) -> BufferSpec:
        """A buffer of each layer."""
        item = prefixed(item, self.prefix)
        return BufferSpec(self.prefix + name, self.layers, self.space, item, self.state)

    def takes(self, kind: object, *packings: str) -> bool:
        """Whether the packing is one of `packings`; raises ValueError for another quantised one."""
        if self.packing in PACKINGS and self.packing not in packings:
            known = ", ".join((*packings, "any float dtype"))
            raise ValueError(f"packing: {type(kind).__name__} takes {known}, got {self.packing!r}.")
        return self.packing in packings


class Kind(Protocol):
    """A kind of state. Kinds of attention also have `shared_kv`: whether the inputs are parts of
    one tensor that is both key and value.
    """

    @property
    def inputs(self) -> tuple[str, ...]:
        """Roles that a write takes, in order, without prefix and without scales."""

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """The buffers of this kind, one specification per role or row."""


@dataclass(frozen=True, slots=True)
class MHA:
    """Multi-head and grouped-query attention: all K, then all V, each `[entry, head, dim]` (nhd) or
    `[head, entry, dim]` (hnd).

    Packings: `fp8`, a float32 scale per token and head; `mxfp8`, a ue8m0 scale per 32 elements (OCP
    Microscaling). Scales have buffers of their own.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    order: Order = "nhd"
    inputs = ("k", "v")
    shared_kv = False

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"order: one of {ORDERS}, got {self.order!r}.")

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """K, V, then the scales of both if the packing has any."""
        v_dim = self.head_dim if self.v_head_dim is None else self.v_head_dim
        dims = ("k", self.head_dim), ("v", v_dim)
        if not at.takes(self, *PACKINGS):
            cells = [Cell(role, dim, at.packing) for role, dim in dims]
        else:
            block, scale = (32, "ue8m0") if at.packing == "mxfp8" else (0, "f32")
            pairs = [scaled(role, dim, block=block, scale=scale) for role, dim in dims]
            cells = [*(values for values, _ in pairs), *(scales for _, scales in pairs)]
        heads = at.shard.heads(self.num_kv_heads)
        for cell in cells:
            yield at.buffer(cell.role, head_page(cell, heads, at.entries, self.order))


@dataclass(frozen=True, slots=True)
class MLA:
    """Multi-head latent attention: one row a token, the latent and then the rope key. Without
    dims for it there is no rope key (layers without rotation).

    Packing `fp8`: `fp8_latent_row`.

    `rope_pairs`: the two elements of the rope key that are rotated together are neighbours, as
    engines' kernels write them (`is_neox_style=False` of vLLM). A model that keeps them a half
    apart reorders them. False: the key is as the model gives it (Kimi-Linear does not rotate it).
    """

    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    rope_pairs: bool = field(default=True, repr=False)
    shared_kv = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Latent and rope key, or the latent alone."""
        return ("latent", "rope") if self.qk_rope_head_dim else ("latent",)

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """One row a token."""
        sizes = self.kv_lora_rank, self.qk_rope_head_dim
        packed = at.takes(self, "fp8")
        row = fp8_latent_row(*sizes) if packed else latent_row(*sizes, at.packing)
        yield at.buffer("kv", Repeat("entry", at.entries, row))


@dataclass(frozen=True, slots=True)
class V4Latent:
    """DeepSeek-V4's shared key and value: a row of latent and rope per token, or per compressed
    token.

    Packing `fp8`: `v4_latent_page`.
    """

    latent_dim: int = 448
    qk_rope_head_dim: int = 64
    inputs = ("latent", "rope")
    shared_kv = True

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """One page of rows."""
        sizes = self.latent_dim, self.qk_rope_head_dim
        if at.takes(self, "fp8"):
            page: Template = v4_latent_page(at.entries, *sizes)
        else:
            page = Repeat("entry", at.entries, latent_row(*sizes, at.packing))
        yield at.buffer("latent", page)


@dataclass(frozen=True, slots=True)
class IndexKey:
    """Keys of a sparse-attention indexer.

    Packing `fp8`: `index_key_page`.

    `pooled`: the indexer pools the keys of several tokens when it reads them (GLM-5-Next). A row is
    a token's key, as many weights, and whether the token counts; it is not quantised.
    """

    head_dim: int = 128
    pooled: bool = field(default=False, repr=False)
    inputs = ("index_key",)

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """One page of keys."""
        if self.pooled:
            at.takes(self)
            row = Cell("index_key", 2 * self.head_dim + 1, at.packing)
            yield at.buffer("index_key", Repeat("entry", at.entries, row))
            return
        if at.takes(self, "fp8"):
            page: Template = index_key_page(at.entries, self.head_dim)
        else:
            page = Repeat("entry", at.entries, Cell("index_key", self.head_dim, at.packing))
        yield at.buffer("index_key", page)


@dataclass(frozen=True, slots=True)
class Ring:
    """`count` float32 values for each of the last tokens of a request, under one role."""

    role: str
    count: int

    @property
    def inputs(self) -> tuple[str, ...]:
        """The role."""
        return (self.role,)

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """One row a token."""
        yield at.buffer(self.role, Repeat("entry", at.entries, Cell(self.role, self.count, "f32")))


@dataclass(frozen=True, slots=True)
class LinearState:
    """The state of a linear-attention layer, per request: the last `taps` inputs of its
    convolution, and the temporal state of every head. Without `taps` or without `heads` there is
    only the other one.

    The convolution's channels are `sections` of (name, heads, dim), each sharded over its heads.
    `conv_layout`: `channels_first` stores `[head, dim, tap]`, `taps_first` `[tap, channels]`.
    `state_axis`: the first dim of a head's state as an axis, for states that an engine transposes.
    `temporal_dtype`: empty is that of the convolution, `At.packing`. `conv_inputs`: transformers'
    model gives the convolution's new inputs; False: its new state (Zaya).
    """

    sections: tuple[tuple[str, int, int], ...]
    taps: int
    heads: int
    state_shape: tuple[int, ...]
    conv_layout: ConvLayout = "channels_first"
    temporal_dtype: str = "f32"
    state_axis: str = ""
    conv_inputs: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        known = get_args(ConvLayout)
        if self.conv_layout not in known:
            raise ValueError(f"conv_layout: one of {known}, got {self.conv_layout!r}.")
        if bool(self.sections) != bool(self.taps) or not (self.taps or self.heads):
            raise ValueError(
                f"LinearState: {len(self.sections)} sections, {self.taps} taps, {self.heads} "
                "heads. Give sections and taps, or heads, or all."
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        """Sections of the convolution, then the temporal state."""
        return *self.conv_roles, *["temporal"] * bool(self.heads)

    @property
    def conv_roles(self) -> tuple[str, ...]:
        """Sections of the convolution."""
        return tuple(f"conv.{name}" for name, _, _ in self.sections)

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        """The conv state, then the temporal state."""
        at.takes(self)
        if self.taps:
            taps_first = self.conv_layout == "taps_first"
            sections = self.conv_sections(at.shard)
            yield at.buffer(
                "conv", conv_state(sections, self.taps, at.packing, taps_first=taps_first)
            )
        if self.heads:
            dtype, heads = self.temporal_dtype or at.packing, at.shard.heads(self.heads)
            state = temporal_state(heads, self.state_shape, dtype, self.state_axis)
            yield at.buffer("temporal", state)

    def conv_sections(self, shard: Shard) -> list[ConvSection]:
        """The sections of the convolution on one rank."""
        return [ConvSection(name, shard.heads(total), dim) for name, total, dim in self.sections]

    def channels(self, shard: Shard) -> int:
        """Channels of the convolution on one rank."""
        return sum(section.channels for section in self.conv_sections(shard))

    def split(self, conv: torch.Tensor, shard: Shard) -> dict[str, torch.Tensor]:
        """Channels `[N, channel, tap]` by role as pools store them, `[N, head, dim, tap, 1]`."""
        sections = self.conv_sections(shard)
        sizes = [section.channels for section in sections]
        if conv.shape[1:] != (sum(sizes), self.taps):
            names = ", ".join(name for name, _, _ in self.sections) or "no section"
            raise ValueError(
                f"conv: {list(conv.shape)}, this shard takes [N, {sum(sizes)}, {self.taps}]: the "
                f"channels of {names} one after the other, and taps."
            )
        return {
            section.role: part.reshape(len(part), section.heads.size, section.dim, self.taps, 1)
            for section, part in zip(sections, torch.split(conv, sizes, dim=1))
        }

    def join(self, held: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `split`: channels `[N, channel, tap]` of the stored sections."""
        return torch.cat([part.squeeze(-1).flatten(1, 2) for part in held], dim=1)

    def rows(self, temporal: torch.Tensor) -> torch.Tensor:
        """Temporal states `[N, head, *state_shape]` as pools store them."""
        if temporal.shape[2:] != self.state_shape or not self.heads:
            shape = ", ".join(map(str, ("N", "head", *self.state_shape)))
            taken = f"a state is [{shape}]" if self.heads else "this state has none"
            raise ValueError(f"temporal: {list(temporal.shape)}, {taken}.")
        return temporal if self.state_axis else temporal.reshape(*temporal.shape[:2], -1)


def gated_delta_net(
    k_heads: int,
    v_heads: int,
    k_dim: int,
    v_dim: int,
    kernel: int,
    conv_layout: ConvLayout = "channels_first",
) -> LinearState:
    """Gated DeltaNet (Qwen3-Next): q and k over k heads, v over v heads. vLLM has its states
    transposed, so they have the axis `key`.
    """
    sections = ("q", k_heads, k_dim), ("k", k_heads, k_dim), ("v", v_heads, v_dim)
    shape = k_dim, v_dim
    return LinearState(sections, kernel - 1, v_heads, shape, conv_layout, state_axis="key")


def kda(heads: int, dim: int, kernel: int, conv_layout: ConvLayout = "taps_first") -> LinearState:
    """Kimi Delta Attention (Kimi-Linear): q, k and v over the same heads, states as in Gated
    DeltaNet.
    """
    sections = ("q", heads, dim), ("k", heads, dim), ("v", heads, dim)
    return LinearState(sections, kernel - 1, heads, (dim, dim), conv_layout, state_axis="key")


def mamba2(
    heads: int,
    head_dim: int,
    groups: int,
    state_size: int,
    kernel: int,
    conv_layout: ConvLayout = "channels_first",
) -> LinearState:
    """Mamba-2: x over heads, B and C over groups."""
    sections = ("x", heads, head_dim), ("b", groups, state_size), ("c", groups, state_size)
    return LinearState(sections, kernel - 1, heads, (head_dim, state_size), conv_layout)


def mamba1(
    channels: int, state_size: int, kernel: int, conv_layout: ConvLayout = "channels_first"
) -> LinearState:
    """Mamba-1: every channel of x has a state of its own."""
    return LinearState((("x", channels, 1),), kernel - 1, channels, (state_size,), conv_layout)


def short_conv(
    channels: int, kernel: int, conv_layout: ConvLayout = "channels_first"
) -> LinearState:
    """A convolution alone (LFM2)."""
    return LinearState((("x", channels, 1),), kernel - 1, 0, (), conv_layout)


def lightning(heads: int, dim: int) -> LinearState:
    """Lightning attention (MiniMax-01): a state of every head, in the pool's dtype."""
    return LinearState((), 0, heads, (dim, dim), temporal_dtype="")


def cca(q_heads: int, kv_heads: int, dim: int, kernels: tuple[int, int]) -> LinearState:
    """Compressed convolutional attention (Zaya), beside keys and values in a layer: the last q and
    k before two convolutions, and the half of the last token's values that the next token takes.
    """
    sections, taps = (("q", q_heads, dim), ("k", kv_heads, dim)), sum(kernels) - 2
    return LinearState(
        sections, taps, kv_heads * dim // 2, (), temporal_dtype="", conv_inputs=False
    )
