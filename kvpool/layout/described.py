"""Descriptions of existing tensors, and how several become the parts of one layout. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex

from kvpool.layout.sentences import ranges
from kvpool.layout.types import Buffer, Key, LayoutError, Region


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
    for number, seen in enumerate(described):
        if not isinstance(seen, Described):
            raise TypeError(
                f"argument {number}: what describe(...) returned, got {type(seen).__name__}."
            )
        for region in seen.regions:
            known = regions.setdefault(region.key, region)
            if known is not region:
                raise LayoutError(
                    f"{region}: described twice, in buffers {known.buffer} and {region.buffer}. "
                    "Give each state its layer, role and owner (owner='draft' for a draft model)."
                )
        for buffer in seen.buffers:
            other = buffers.setdefault(buffer.name, buffer)
            if other != buffer:
                raise LayoutError(
                    f"buffer {buffer.name}: two of this name, at {other.base:#x} in space "
                    f"{other.space} and at {buffer.base:#x} in space {buffer.space}. Give "
                    "describe_buffer another name for each."
                )
    return Described(tuple(buffers.values()), tuple(regions.values()))


def total_layers(given: int | None, held: Sequence[int], owner: str) -> int:
    """Layers of the target model, of which `owner` holds `held`, in order. Raises LayoutError where
    they are not given and `held` does not say it, or where `held` has more.
    """
    if given is None:
        if owner == "target" and list(held) == list(range(len(held))):
            return len(held)
        raise LayoutError(
            f"{owner} total_kv_layers: not given, and layers {ranges(held)} alone do not say how "
            "many the target model has. Give total_kv_layers."
        )
    if isinstance(given, bool) or not isinstance(given, SupportsIndex):
        raise LayoutError(
            f"{owner} total_kv_layers: how many layers the target model has, one whole number, got "
            f"{given!r}."
        )
    given = index(given)
    if owner == "target" and held and given <= held[-1]:
        raise LayoutError(f"{owner} total_kv_layers: {given}, but layer {held[-1]} is there.")
    return given
