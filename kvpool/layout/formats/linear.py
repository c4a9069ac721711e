"""Slots of linear attention: a conv state and a temporal state.

The conv state's channels are sections with heads of their own: q, k and v of delta nets, x, B and C
of Mamba-2. Ranks of tensor parallelism share each section's heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from math import prod
from typing import Literal, NamedTuple, get_args

from kvpool.layout.dtypes import ITEMSIZE, dtype_name
from kvpool.layout.formats.kind import At, BufferSpec, Heads, PerRequest, Shard
from kvpool.layout.template import Cell, Repeat, Seq, Skip, Template

ConvLayout = Literal["channels_first", "taps_first"]


class ConvSection(NamedTuple):
    """Channels of a convolution: `dim` of each of `heads`. Its role is `conv.` and `name`."""

    name: str
    heads: Heads
    dim: int

    @property
    def channels(self) -> int:
        return self.heads.size * self.dim

    @property
    def role(self) -> str:
        return f"conv.{self.name}"

    def of(self, inside: Template) -> Template:
        return self.heads.of(Repeat("dim", self.dim, inside))


def conv_state(
    sections: Sequence[ConvSection], taps: int, dtype: str, *, taps_first: bool, spare: int = 0
) -> Template:
    """The last `taps` inputs of a convolution: `[channel, tap]`, or `[tap, channel]` if
    `taps_first`. `spare` more taps behind them are not used.
    """
    size = ITEMSIZE[dtype_name(dtype)]
    parts = []
    for section in sections:
        cell: Template = Cell(section.role, 1, dtype)
        if not taps_first:
            cell = Repeat("tap", taps, cell)
            cell = Seq(cell, Skip(spare * size)) if spare else cell
        parts.append(section.of(cell))
    channels = Seq(*parts)
    if not taps_first:
        return channels
    inputs = Repeat("tap", taps, channels)
    count = sum(section.channels for section in sections)
    return Seq(inputs, Skip(spare * count * size)) if spare else inputs


def temporal_state(heads: Heads, shape: Sequence[int], dtype: str, axis: str = "") -> Template:
    """A state of `shape` a head. `axis`: names its first dim, where an engine transposes states."""
    if axis:
        first, *inner = shape
        return heads.of(Repeat(axis, first, Cell("temporal", prod(inner), dtype)))
    return heads.of(Cell("temporal", prod(shape), dtype))


@dataclass(frozen=True, slots=True)
class LinearState(PerRequest):
    """The state of a linear-attention layer, per request: the last `taps` inputs of its
    convolution, and the temporal state of every head; without `taps` or `heads` only the other.

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
    _: KW_ONLY
    conv_layout: ConvLayout = "channels_first"
    temporal_dtype: str = "f32"
    state_axis: str = ""
    conv_inputs: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        if self.conv_layout not in (layouts := get_args(ConvLayout)):
            raise ValueError(f"conv_layout: one of {layouts}, got {self.conv_layout!r}.")
        if bool(self.sections) != bool(self.taps) or not (self.taps or self.heads):
            raise ValueError(
                f"LinearState: {len(self.sections)} sections, {self.taps} taps, {self.heads} "
                "heads. Give sections and taps, or heads, or all."
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        conv = [f"conv.{name}" for name, _, _ in self.sections]
        return *conv, *["temporal"] * bool(self.heads)

    def buffers(self, at: At) -> Iterator[BufferSpec]:
        at.takes(self)
        if self.taps:
            sections, taps_first = self.conv_sections(at.shard), self.conv_layout == "taps_first"
            conv = conv_state(sections, self.taps, at.packing, taps_first=taps_first)
            yield at.buffer("conv", conv)
        if self.heads:
            dtype, heads = self.temporal_dtype or at.packing, at.shard.heads(self.heads)
            state = temporal_state(heads, self.state_shape, dtype, self.state_axis)
            yield at.buffer("temporal", state)

    def conv_sections(self, shard: Shard) -> list[ConvSection]:
        """The sections, with the heads that a shard holds."""
        return [ConvSection(name, shard.heads(total), dim) for name, total, dim in self.sections]

    def channels(self, shard: Shard) -> int:
        """Channels of the convolution on a shard."""
        return sum(section.channels for section in self.conv_sections(shard))


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
    return LinearState(
        sections, kernel - 1, v_heads, (k_dim, v_dim), conv_layout=conv_layout, state_axis="key"
    )


def kda(heads: int, dim: int, kernel: int, conv_layout: ConvLayout = "taps_first") -> LinearState:
    """Kimi Delta Attention (Kimi-Linear): q, k, v over the same heads, states as of Qwen3-Next."""
    return gated_delta_net(heads, heads, dim, dim, kernel, conv_layout=conv_layout)


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
    return LinearState(sections, kernel - 1, heads, (head_dim, state_size), conv_layout=conv_layout)


def mamba1(
    channels: int, state_size: int, kernel: int, conv_layout: ConvLayout = "channels_first"
) -> LinearState:
    """Mamba-1: every channel of x has a state of its own."""
    return LinearState(
        (("x", channels, 1),), kernel - 1, channels, (state_size,), conv_layout=conv_layout
    )


def short_conv(
    channels: int, kernel: int, conv_layout: ConvLayout = "channels_first"
) -> LinearState:
    """A convolution alone (LFM2)."""
    return LinearState((("x", channels, 1),), kernel - 1, 0, (), conv_layout=conv_layout)


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
