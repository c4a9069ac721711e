"""Labels of an engine, short enough for a router's picker: engines whose label `contract` is equal
can work together, at any TP, stages and page sizes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence

from disagg.contract.contract import Contract
from disagg.protocol.messages import Convention
from kvpool.layout import VERSION, Axis, Key, PoolLayout, Region

DIGEST_BYTES = 8
MAX_VALUE = 63
"""Characters of a value, as Kubernetes takes them."""

Stretches = tuple[tuple[int, int], ...]
"""Where a rank's shard starts and stops, of each inner axis in order of their names."""


def labels(contract: Contract) -> dict[str, str]:
    """Short texts of letters, digits, `-`, `_` and `.`, by name. `contract`, 16 hexadecimal digits,
    exists if no rank is missing, all ranks agree on what they share, and together they hold all
    of each region once: two such engines of one label fit, whichever is prefill.

    Layers and drafts are part of it, unlike of a store's namespace, where they may differ.
    """
    model = next((rank.conventions.get("model") for rank in contract.ranks), None)
    values = {
        "contract": _digest(contract),
        "model": None if model is None else str(model),
        "engine": contract.engine,
        "protocol": str(contract.protocol),
        "serves": "-".join(contract.serves),
        **contract.versions,
    }
    return {_short(name): _short(value) for name, value in values.items() if value}


def _short(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", value)[:MAX_VALUE].strip("-._")


def _digest(contract: Contract) -> str | None:
    """None where equal digests would not mean that two engines fit."""
    conventions, state = _conventions(contract), _state(contract)
    if contract.missing or conventions is None or not state:
        return None
    text = json.dumps(
        {
            "version": VERSION,
            "protocol": contract.protocol,
            "engine": contract.engine,
            "conventions": sorted(conventions.items()),
            "state": sorted(state.items()),
        },
        separators=(",", ":"),
    )
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _conventions(contract: Contract) -> dict[str, Convention] | None:
    """What all ranks say together; None if two of them differ."""
    together: dict[str, Convention] = {}
    for rank in contract.ranks:
        for name, value in rank.conventions.items():
            if together.setdefault(name, value) != value:
                return None
    return together


def _state(contract: Contract) -> dict[Key, str] | None:
    """What each region is, whole; None where ranks differ in it, or do not hold it once."""
    forms: dict[Key, str] = {}
    families: dict[Key, dict[tuple[int, int], dict[int, set[Stretches]]]] = {}
    totals: dict[Key, list[int]] = {}
    for layout in {rank.layout.fingerprint(): rank.layout for rank in contract.ranks}.values():
        for region in layout.regions:
            if forms.setdefault(region.key, form := _form(layout, region)) != form:
                return None
            interleave, axes = layout.space_of(region).held, _axes(region)
            totals[region.key] = [axis.total for axis in axes]
            by_rank = families.setdefault(region.key, {}).setdefault(
                (interleave.ranks, interleave.size), {}
            )
            stretches = tuple((axis.start, axis.stop) for axis in axes)
            by_rank.setdefault(interleave.rank, set()).add(stretches)
    whole = all(_whole(families[key], totals[key]) for key in forms)
    return forms if whole else None


def _axes(region: Region) -> list[Axis]:
    return sorted(region.inner_axes, key=lambda axis: axis.name)


def _form(layout: PoolLayout, region: Region) -> str:
    """What must be equal on both sides, for any shard: see `plan.match.mismatches`."""
    space = layout.space_of(region)
    by_entry = space.has_entries and not region.packing
    return repr(
        (
            region.dtype,
            region.width,
            [(axis.name, axis.total) for axis in _axes(region)],
            region.packing,
            "entries" if by_entry else space.kind,
            space.tokens_per_entry,
            space.partial,
            space.entries_per_item if region.packing else None,
            space.window,
        )
    )


def _whole(
    families: dict[tuple[int, int], dict[int, set[Stretches]]], totals: Sequence[int]
) -> bool:
    """Whether ranks that take positions in turn are all there, in one way of doing so, and the
    shards of each tile the region: then any part of it is covered exactly once.
    """
    if len(families) > 1:
        return False
    (((ranks, _), by_rank),) = families.items()
    return len(by_rank) == ranks and all(_tile(shards, totals) for shards in by_rank.values())


def _tile(shards: set[Stretches], totals: Sequence[int]) -> bool:
    """Whether shards are the cells of a grid: each axis is cut into stretches, one behind the
    other, and every combination of them is one shard.
    """
    cells = 1
    for axis, total in enumerate(totals):
        stretches = sorted({shard[axis] for shard in shards})
        edges = [0, *(stop for _, stop in stretches)]
        if [start for start, _ in stretches] != edges[:-1] or edges[-1] != total:
            return False
        cells *= len(stretches)
    return len(shards) == cells
