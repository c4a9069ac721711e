"""Scales of a whole layer's keys or values, as a checkpoint brings them: in no page, so both
sides say theirs as conventions, `k_scale of layer 3`, and those of a draft as `draft.k_scale of
layer 0`. Two sides whose scales differ refuse each other before any request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from disagg.connectors.tensors import UnknownFormat
from disagg.plan.cast.scales import SCALED, scale_name
from disagg.protocol.messages import Convention
from kvpool.layout import PoolLayout, Region
from kvpool.layout.formats import FP4, scale_role


@dataclass(frozen=True, kw_only=True)
class LayerScale:
    """What an engine's module says of layer `layer` of `owner`: by how much its keys or values
    (`role` k or v) are scaled; a number, a tensor, or None for not at all.
    """

    owner: str
    layer: int
    role: str
    value: Any


def scale_conventions(layout: PoolLayout, scales: Iterable[LayerScale]) -> dict[str, Convention]:
    """What the values of a rank are scaled by, layer by layer: of fp8 without scales in the pages,
    and of NVFP4, whose scales are scaled. A layer without such a module has 1.

    Raises UnknownFormat for scales that are no one number a layer.
    """
    by_layer: dict[tuple[str, int, str], list[LayerScale]] = {}
    for scale in scales:
        by_layer.setdefault((scale.owner, scale.layer, scale.role), []).append(scale)
    conventions: dict[str, Convention] = {}
    for region in _scaled(layout):
        role = SCALED[_name(region)]
        # of several modules over one cache, one has the scale (MLA: the absorbed one)
        modules = by_layer.get((region.owner, region.layer, role), [])
        values = {_number(scale) for scale in modules if scale.value is not None} - {1.0}
        if len(values) > 1:
            raise UnknownFormat(
                f"{region.owner} layer {region.layer}: modules with {role} scales of "
                f"{' and '.join(map(str, sorted(values)))} over one cache are not known. Use "
                "--kv-cache-dtype auto."
            )
        name = scale_name(region.owner, region.layer, region.role)
        if name is not None:
            conventions[name] = next(iter(values), 1.0)
    return conventions


def _name(region: Region) -> str:
    return region.role.rpartition(".")[2]


def _scaled(layout: PoolLayout) -> Iterator[Region]:
    """Regions of values whose scale is not in the pages, or not all of it."""
    for region in layout.regions:
        name = _name(region)
        scales = layout.region_by_key.get((region.owner, region.layer, scale_role(region.role)))
        plain = name in SCALED and region.dtype.startswith("float8") and scales is None
        exponents = scales is not None and scales.dtype == "float8_e8m0fnu"
        if plain or (name in ("k", "v") and region.dtype == FP4 and not exponents):
            yield region


def _number(scale: LayerScale) -> float:
    """As float32, which engines keep: the same number of a checkpoint and of a file of numbers."""
    values = np.unique(np.asarray(getattr(scale.value, "tolist", lambda: scale.value)()))
    name = f"{scale.owner} layer {scale.layer}: {scale.role} scales"
    if values.size != 1:
        raise UnknownFormat(
            f"{name} of {values.size} heads are not known, only one a layer. Use "
            "--kv-cache-dtype auto."
        )
    number = float(np.float32(values[0]))
    if not (math.isfinite(number) and number > 0):
        raise UnknownFormat(f"{name} of {number}: not a positive number. Use another checkpoint.")
    return number
