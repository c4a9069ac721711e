"""What engines keep in a slot of linear attention, derived from the shapes of their states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from disagg.connectors.tensors import UnknownFormat
from kvpool.item import Template
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import ConvSection, Heads, conv_state, temporal_state

LinearKind = Literal["mamba1", "mamba2", "delta_net", "short_conv"]


@dataclass(frozen=True, kw_only=True)
class LinearShard:
    """Which part of linear attention a rank holds, and in which order.

    `groups`: Mamba-2's B and C in the model. `spare`: taps beyond those of the kernel, which
    speculation uses: prefill writes the first taps. A conv state is `(dim, tap)` if `dim_first`,
    else `(tap, dim)`; the bytes of a delta net's state are `(head, key, value)` if `key_first`, as
    on a CPU, else `(head, value, key)`.
    """

    rank: int = 0
    ranks: int = 1
    groups: int = 0
    spare: int = 0
    dim_first: bool = False
    key_first: bool = False

    def heads(self, count: int) -> Heads:
        """The `count` heads of this rank."""
        return Heads(self.rank * count, count, self.ranks * count)


def states(
    kind: LinearKind,
    conv: tuple[int, int],
    temporal: Sequence[int],
    dtypes: Sequence[object],
    shard: LinearShard = LinearShard(),
) -> tuple[Template, ...]:
    """The conv state and, but for a short convolution, the temporal state of a slot, each of its
    own of `dtypes`. `conv`: in the order that `shard` says. `temporal`: `(head, dim, state)` of
    Mamba, `(head, value, key)` of delta nets, `()` of a short convolution.

    Raises UnknownFormat where the channels are not those of the heads.
    """
    conv_dtype, temporal_dtype = dtype_name(dtypes[0]), dtype_name(dtypes[-1])
    channels, taps = conv if shard.dim_first else conv[::-1]
    parts = sections(kind, channels, temporal, shard)
    conv_item = conv_state(
        parts, taps - shard.spare, conv_dtype, taps_first=not shard.dim_first, spare=shard.spare
    )
    if kind == "short_conv":
        return (conv_item,)
    shape, axis = temporal[1:], ""
    if kind == "delta_net":
        shape, axis = (shape[::-1], "key") if shard.key_first else (shape, "value")
    return conv_item, temporal_state(shard.heads(temporal[0]), shape, temporal_dtype, axis)


def sections(
    kind: LinearKind, channels: int, temporal: Sequence[int], shard: LinearShard
) -> list[ConvSection]:
    """The sections of a conv state, derived as vLLM's ssm_conv_transfer_utils.py does."""
    if kind == "short_conv":
        return [ConvSection("x", shard.heads(channels), 1)]
    heads, dim, *rest = (temporal[0], 1) if kind == "mamba1" else temporal
    inner = rest[0] if rest else 1
    others = (channels - heads * dim) // (2 * inner)  # heads of each of the other two
    if heads * dim + 2 * inner * others != channels or (others < 1) == bool(rest):
        raise UnknownFormat(
            f"{channels} channels are not those of {heads} heads of {dim} and two sections of "
            f"heads of {inner}."
        )
    if kind == "mamba1":
        return [ConvSection("x", shard.heads(heads), 1)]
    pair, own = shard.heads(others), shard.heads(heads)
    if kind == "delta_net":
        keys = [ConvSection(name, pair, inner) for name in ("q", "k")]
        return [*keys, ConvSection("v", own, dim)]
    if others == shard.groups == 1:  # one group is in every rank
        pair = Heads(0, 1, 1)
    elif shard.ranks > 1 and shard.ranks * others != shard.groups:
        raise UnknownFormat(
            f"{others} of {shard.groups} groups on each of {shard.ranks} ranks: use a TP size that "
            "divides the groups."
        )
    return [ConvSection("x", own, dim), *(ConvSection(name, pair, inner) for name in ("b", "c"))]
