"""Scales of a whole layer, which no page has. Engines say them as conventions (`k_scale of layer
3`), and rows are converted as if each were 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from disagg.plan.cast.arrival import Arrival, Rows

SCALED = {"k": "k", "v": "v", "latent": "k"}
"""Which of a layer's two scales the values of a role have: a latent is a key, and what scales it
scales the rope key beside it.
"""


def scale_name(owner: str, layer: int, role: str) -> str | None:
    """The convention that says by what a role's values are scaled; None if none does."""
    which = SCALED.get(role.rpartition(".")[2])
    prefix = "" if owner == "target" else f"{owner}."
    return which and f"{prefix}{which}_scale of layer {layer}"


def scale_problems(
    arrival: Arrival, sources: Iterable[Mapping[str, object]], dest: Mapping[str, object]
) -> list[str]:
    """Why rows would be converted to other values: scales that are not 1, as both sides say."""
    names: dict[str, None] = {}
    for (owner, layer, role), rows in arrival.conversions.items():
        name = scale_name(owner, layer, role)
        if name is not None and (_plain(rows.arrival) or _plain(rows.dest)):
            names[name] = None
    sides = [*(("prefill", conventions) for conventions in sources), ("decode", dest)]
    return list(
        dict.fromkeys(
            f"{name}: {conventions[name]!r} on {side}, and rows are converted as if it were 1. "
            "Give both sides one format, or use a checkpoint without scales of whole layers."
            for name in names
            for side, conventions in sides
            if conventions.get(name, 1.0) != 1.0
        )
    )


def _plain(rows: Rows) -> bool:
    return rows.format.dtype.startswith("float8") and not rows.format.scales
