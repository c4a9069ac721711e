"""Valid layouts of extreme sizes, which edits of single numbers seldom reach."""

from __future__ import annotations

from typing import Any

import msgspec

from kvpool.layout import PoolLayout
from tests.fuzz.build import Choices, packed, pick

SIZES = (1, 2, 3, 5, 64, 1 << 12, 1 << 17, 1 << 18, 1 << 19, 1 << 22, 1 << 34, 1 << 40, 1 << 62)
TOP = (1 << 63) - 1


def stretched(layout: PoolLayout, choices: Choices) -> bytes:
    """The layout with other numbers of entries, steps, items or stretches, and enough bytes for
    them.
    """
    raw: dict[str, Any] = msgspec.msgpack.decode(layout.to_msgpack())
    for _ in range(choices.number(1, 3)):
        changes = _entries, _entries, _axis, _items, _apart, _far, _padding, _packing
        pick(choices, (*changes, _pool, _shared))(raw, choices)
    reach = 64
    for buffer in raw["buffers"]:
        inside = [region for region in raw["regions"] if region["buffer"] == buffer["name"]]
        buffer["item_bytes"] = max(map(_end, inside), default=1) + pick(choices, (0, 0, 0, 1, 64))
        if choices.number(0, 3):
            buffer["item_stride"] = buffer["item_bytes"]
            buffer["base"] = reach
        reach = buffer["base"] + buffer["items"] * buffer["item_stride"] + pick(choices, (0, 64))
        if reach > TOP and choices.number(0, 3):
            buffer["base"], buffer["memory"] = 0, f"cuda:{len(inside)}"
    return packed(_clipped(raw))


def _entries(raw: dict[str, Any], choices: Choices) -> None:
    space, size = pick(choices, raw["spaces"]), pick(choices, SIZES)
    space["entries_per_item"] = size
    buffers = {buffer["name"] for buffer in raw["buffers"] if buffer["space"] == space["name"]}
    for region in raw["regions"]:
        for axis in region["axes"]:
            if region["buffer"] in buffers and axis["name"] == "entry":
                axis["size"] = axis["total"] = size


def _axis(raw: dict[str, Any], choices: Choices) -> None:
    axes = [axis for region in raw["regions"] for axis in region["axes"]]
    axis = pick(choices, axes)
    axis["size"], axis["start"] = pick(choices, SIZES), pick(choices, (0, 0, axis["start"]))
    axis["total"] = max(axis["total"], axis["start"] + axis["size"])
    axis["stride"] = pick(choices, (axis["stride"], axis["stride"], 0, *SIZES))


def _items(raw: dict[str, Any], choices: Choices) -> None:
    items = pick(choices, SIZES)
    for buffer in raw["buffers"]:
        buffer["items"] = items


def _apart(raw: dict[str, Any], choices: Choices) -> None:
    pick(choices, raw["regions"])["offset"] = pick(choices, (0, *SIZES))


def _padding(raw: dict[str, Any], choices: Choices) -> None:
    pick(choices, raw["buffers"])["padding"] = bool(choices.number(0, 1))


def _packing(raw: dict[str, Any], choices: Choices) -> None:
    pick(choices, raw["regions"])["packing"] = pick(choices, ("", "amx"))


def _pool(raw: dict[str, Any], choices: Choices) -> None:
    space = pick(choices, raw["spaces"])
    space["block_pool"] = pick(choices, (None, "blocks"))
    space["items_per_block"] = pick(choices, (1, 1, 1, *SIZES[:6])) if space["block_pool"] else 1


def _shared(raw: dict[str, Any], choices: Choices) -> None:
    part = {"size": pick(choices, SIZES), "ranks": pick(choices, (1, 2, 3, 1024))}
    pick(choices, raw["spaces"])["interleave"] = part | {"rank": part["ranks"] - 1}


def _far(raw: dict[str, Any], choices: Choices) -> None:
    pick(choices, raw["buffers"])["base"] = TOP - pick(choices, SIZES)


def _end(region: dict[str, Any]) -> int:
    steps = sum((axis["size"] - 1) * axis["stride"] for axis in region["axes"])
    return int(region["offset"] + steps + region["width"])


def _clipped(value: Any) -> Any:
    """The same with every integer within msgpack's range."""
    if isinstance(value, dict):
        return {key: _clipped(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_clipped(each) for each in value]
    return min(value, TOP) if isinstance(value, int) else value
