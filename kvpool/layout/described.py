"""Descriptions of existing tensors, what their regions share, and how several descriptions become
the parts of one layout. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, SupportsIndex, TypedDict

from kvpool.layout.sentences import ranges
from kvpool.layout.types import Buffer, Key, LayoutError, Region

if TYPE_CHECKING:
    import torch

Shards = Mapping[str, tuple[int, int]]
"""(start, total) of sharded axes, by name."""


class DescribeOptions(TypedDict, total=False):
    """The options of RegionOptions that all `describe_*` take."""

    space: str
    owner: str
    shards: Shards
    buffer: Buffer | None
    padding: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOptions:
    """What the regions of one tensor have in common."""

    space: str = "kv"
    owner: str = "target"
    shards: Shards = field(default_factory=dict)
    buffer: Buffer | None = None
    """From `describe_buffer`: several slices of one tensor become regions of one buffer."""
    padding: bool = False
    """Bytes between the described ones are foreign: transfers neither read nor write them. Where
    the caller owns the whole tensor and nobody uses them, this lets them travel with their
    neighbours, which makes runs longer.
    """
    cell: str | None = "dim"
    dtype: str | torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Described:
    """Buffers and the regions that lie in them."""

    buffers: tuple[Buffer, ...]
    regions: tuple[Region, ...]


def join(described: Iterable[Described]) -> Described:
    """All buffers, each once, and all regions. A buffer of `describe_buffer` may come with each of
    its slices.

    Raises TypeError for what is no description, LayoutError where a state is described twice or two
    buffers have one name.
    """
    buffers: dict[str, Buffer] = {}
    regions: dict[Key, Region] = {}
    for number, part in enumerate(described):
        if not isinstance(part, Described):
            raise TypeError(
                f"argument {number}: what describe(...) returned, got {type(part).__name__}."
            )
        for region in part.regions:
            first = regions.setdefault(region.key, region)
            if first is not region:
                raise LayoutError(
                    f"{region}: described twice, in buffers {first.buffer} and {region.buffer}. "
                    "Give each state its layer, role and owner (owner='draft' for a draft model)."
                )
        for buffer in part.buffers:
            first_buffer = buffers.setdefault(buffer.name, buffer)
            if first_buffer != buffer:
                raise LayoutError(
                    f"buffer {buffer.name}: two of this name, at {first_buffer.base:#x} in space "
                    f"{first_buffer.space} and at {buffer.base:#x} in space {buffer.space}. Give "
                    "describe_buffer another name for each."
                )
    return Described(tuple(buffers.values()), tuple(regions.values()))


def total_layers(total: int | None, layers: Sequence[int], owner: str) -> int:
    """Layers of the target model, of which `owner` holds `layers`, in order. Raises LayoutError
    where their number is not given and does not follow, or where `layers` has more.
    """
    if total is None:
        if owner == "target" and list(layers) == list(range(len(layers))):
            return len(layers)
        raise LayoutError(
            f"{owner} total_kv_layers: not given, and layers {ranges(layers)} alone do not say how "
            "many the target model has. Give total_kv_layers."
        )
    if isinstance(total, bool) or not isinstance(total, SupportsIndex):
        raise LayoutError(
            f"{owner} total_kv_layers: how many layers the target model has, one whole number, got "
            f"{total!r}."
        )
    count = index(total)
    if owner == "target" and layers and count <= layers[-1]:
        raise LayoutError(f"{owner} total_kv_layers: {count}, but layer {layers[-1]} is there.")
    return count
