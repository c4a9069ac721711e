"""What linear attention keeps in a slot, as item templates: a conv state and a temporal state.

The conv state's channels are sections with heads of their own: q, k and v of delta nets, x, B and C
of Mamba-2. Ranks of tensor parallelism share each section's heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Literal, NamedTuple

import torch

from disagg.connectors.tensors import Format, Part, UnknownFormat
from kvpool.item import Cell, Repeat, Seq, Skip, Template
from kvpool.layout.dtypes import ITEMSIZE, dtype_name

LinearKind = Literal["mamba1", "mamba2", "delta_net"]


class Section(NamedTuple):
    """Heads `first` to `first + heads` of `total`, `dim` channels each."""

    role: str
    heads: int
    dim: int
    first: int
    total: int

    def of(self, inside: Template) -> Template:
        """`inside` for each channel."""
        return Repeat("head", self.heads, Repeat("dim", self.dim, inside), self.first, self.total)


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
    size, kept = ITEMSIZE[dtypes[0]], taps - spare
    cells = [(part, Cell(f"conv.{part.role}", 1, dtypes[0])) for part in parts]
    if dim_first:
        unused = [Skip(spare * size)] if spare else []
        found = [part.of(Seq(Repeat("tap", kept, cell), *unused)) for part, cell in cells]
    else:
        unused = [Skip(spare * channels * size)] if spare else []
        found = [Repeat("tap", kept, Seq(*(part.of(cell) for part, cell in cells))), *unused]
    heads, *inner = temporal
    state: Template = Cell("temporal", prod(inner), dtypes[1])
    if kind == "delta_net":  # an axis says which of the two states it is
        value, key = inner
        outer, cell = ("key", value) if key_first else ("value", key)
        state = Repeat(outer, prod(inner) // cell, Cell("temporal", cell, dtypes[1]))
    return Seq(*found), Repeat("head", heads, state, rank * heads, ranks * heads)


def sections(
    kind: LinearKind, channels: int, temporal: Sequence[int], rank: int, ranks: int, groups: int
) -> list[Section]:
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

    def section(role: str, held: int, size: int) -> Section:
        return Section(role, held, size, rank * held, ranks * held)

    if kind == "mamba1":
        return [section("x", heads, 1)]
    if kind == "delta_net":
        return [section("q", others, inner), section("k", others, inner), section("v", heads, dim)]
    both = section("b", others, inner), section("c", others, inner)
    if others == groups == 1:  # one group is in every rank
        both = both[0]._replace(first=0, total=1), both[1]._replace(first=0, total=1)
    elif ranks > 1 and ranks * others != groups:
        raise UnknownFormat(
            f"{others} of {groups} groups on each of {ranks} ranks: use a TP size that divides the "
            "groups."
        )
    return [section("x", heads, dim), *both]
