"""What engines keep in a slot of linear attention, derived from the shapes of their states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch

from disagg.connectors.tensors import Format, Part, UnknownFormat
from kvpool.item import Template
from kvpool.layout.dtypes import dtype_name
from kvpool.layout.formats import ConvSection, Heads, conv_state, temporal_state

LinearKind = Literal["mamba1", "mamba2", "delta_net"]


def slots(view: torch.Tensor, *, item: Template) -> list[Part]:
    """A slot, or a state of one, in each item."""
    return [Part(view.flatten(1), ("item",), item)]


def tensor_states(
    kind: LinearKind,
    conv: torch.Tensor,
    temporal: torch.Tensor,
    *,
    rank: int,
    ranks: int,
    groups: int,
    key_first: bool,
) -> list[tuple[torch.Tensor, Format]]:
    """The states in tensors of their own, `[layer, slot, channel, tap]` in either order of the last
    two and `[layer, slot, *temporal]`: tensors in the order of their bytes, and what a layer has.
    The other arguments are those of `states`.
    """
    dim_first = conv.stride(2) >= conv.stride(3)
    held = conv if dim_first else conv.transpose(2, 3), temporal
    items = states(
        kind,
        (held[0].shape[2], held[0].shape[3]),
        temporal.shape[2:],
        (dtype_name(conv.dtype), dtype_name(temporal.dtype)),
        rank=rank,
        ranks=ranks,
        groups=groups,
        dim_first=dim_first,
        key_first=key_first,
    )
    return [(tensor, partial(slots, item=item)) for tensor, item in zip(held, items)]


def states(
    kind: LinearKind,
    conv: tuple[int, int],
    temporal: Sequence[int],
    dtypes: tuple[str, str],
    *,
    rank: int = 0,
    ranks: int = 1,
    groups: int = 0,
    spare: int = 0,
    dim_first: bool = False,
    key_first: bool = False,
) -> tuple[Template, Template]:
    """The conv state and the temporal state of a slot of `rank` of `ranks`. `conv`: `(dim, tap)` if
    `dim_first`, else `(tap, dim)`.

    `temporal`: `(head, dim, state)` of Mamba, `(head, value, key)` of delta nets, whose bytes are
    `(head, key, value)` if `key_first`, as on a CPU. `groups`: Mamba-2's B and C in the model.
    `spare`: taps beyond those of the kernel, which speculation uses: prefill writes the first taps.

    Raises UnknownFormat where the channels are not those of the heads.
    """
    channels, taps = conv if dim_first else conv[::-1]
    parts = sections(kind, channels, temporal, rank, ranks, groups)
    conv_item = conv_state(parts, taps - spare, dtypes[0], taps_first=not dim_first, spare=spare)
    held, *shape = temporal
    heads = Heads(rank * held, held, ranks * held)
    if kind != "delta_net":
        return conv_item, temporal_state(heads, shape, dtypes[1])
    value, key = shape
    if key_first:
        return conv_item, temporal_state(heads, (key, value), dtypes[1], "key")
    return conv_item, temporal_state(heads, (value, key), dtypes[1], "value")


def sections(
    kind: LinearKind, channels: int, temporal: Sequence[int], rank: int, ranks: int, groups: int
) -> list[ConvSection]:
    """The sections of a conv state of `channels` channels, derived as vLLM's
    ssm_conv_transfer_utils.py does.
    """
    heads, dim, *rest = temporal
    if kind == "mamba1":
        dim, rest = 1, []
    inner = rest[0] if rest else 1
    others = (channels - heads * dim) // (2 * inner)  # heads of each of the other two
    if heads * dim + 2 * inner * others != channels or (others < 1) == bool(rest):
        raise UnknownFormat(
            f"{channels} channels are not those of {heads} heads of {dim} and two sections of "
            f"heads of {inner}."
        )

    def section(name: str, held: int, size: int) -> ConvSection:
        return ConvSection(name, Heads(rank * held, held, ranks * held), size)

    if kind == "mamba1":
        return [section("x", heads, 1)]
    if kind == "delta_net":
        return [section("q", others, inner), section("k", others, inner), section("v", heads, dim)]
    both = section("b", others, inner), section("c", others, inner)
    if others == groups == 1:  # one group is in every rank
        both = both[0]._replace(heads=Heads(0, 1, 1)), both[1]._replace(heads=Heads(0, 1, 1))
    elif ranks > 1 and ranks * others != groups:
        raise UnknownFormat(
            f"{others} of {groups} groups on each of {ranks} ranks: use a TP size that divides the "
            "groups."
        )
    return [section("x", heads, dim), *both]
