"""Layouts of many parts, valid but for what a bound refuses, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Layout = dict[str, Any]
KV = {"name": "kv", "reserved": 0}


def whole(buffers: Sequence[Any], regions: Sequence[Any], spaces: Sequence[Any] = (KV,)) -> Layout:
    parts = {"buffers": [*buffers], "regions": [*regions], "spaces": [*spaces]}
    return {"version": 1, **parts, "total_kv_layers": 1}


def buffer(number: int, base: int, stride: int, size: int, items: int, **more: Any) -> Any:
    sizes = {"base": base, "item_stride": stride, "item_bytes": size, "items": items}
    return {"name": f"{number}", "space": "kv", "memory": "cpu", **sizes, **more}


def region(number: int, place: int = -1, offset: int = 0, width: int = 1, **more: Any) -> Any:
    """The region of a layer, in a buffer of its own or in another."""
    names = {"owner": "target", "layer": number, "role": "k"}
    where = {"buffer": f"{number if place < 0 else place}", "offset": offset, "width": width}
    return {**names, **where, "dtype": "uint8", "axes": [], **more}


def one_item(count: int) -> Layout:
    """All layers in one item."""
    size = 2 * count
    return whole([buffer(0, 0, size, size, 1)], [region(n, 0, 2 * n) for n in range(count)])


def forms(count: int) -> Layout:
    """The same, no two of one width."""
    regions = [region(n, 0, n << 12, 1 + n % 4000) for n in range(count)]
    return whole([buffer(0, 0, 1 << 40, 1 << 40, 1)], regions)


def roles(count: int) -> Layout:
    regions = [region(0, 0, n, role=f"r{n}") for n in range(count)]
    return whole([buffer(0, 0, count, count, 1)], regions)


def owners(count: int) -> Layout:
    regions = [region(0, 0, n, owner=f"r{n}") for n in range(count)]
    return whole([buffer(0, 0, count, count, 1)], regions)


def axes(count: int) -> Layout:
    steps = [{"name": name, "size": 2, "stride": 4 << 2 * n} for n, name in enumerate("abc")]
    regions = [region(n, 0, n << 10, axes=steps) for n in range(count)]
    return whole([buffer(0, 0, 1 << 40, 1 << 40, 1)], regions)


def apart(count: int) -> Layout:
    """A buffer for each layer."""
    return whole([buffer(n, 100 * n, 2, 2, 1) for n in range(count)], map(region, range(count)))


def shapes(count: int) -> Layout:
    """The same, no two of one size."""
    buffers = [buffer(n, n << 20, 10 + n, 10 + n, 1) for n in range(count)]
    return whole(buffers, [region(n, width=1 + n) for n in range(count)])


def side_by_side(count: int) -> Layout:
    """Buffers that interleave."""
    buffers = [buffer(n, 2 * n, 2 * count, 2, 2, padding=False) for n in range(count)]
    return whole(buffers, map(region, range(count)))


def ends(count: int) -> Layout:
    """The same, no two of as many items."""
    buffers = [buffer(n, 2 * n, 2 * count, 2, 1 + n, padding=False) for n in range(count)]
    return whole(buffers, map(region, range(count)))


def runs(count: int) -> Layout:
    """Buffers that interleave, each of many runs."""
    size, steps = 1 << 7, [{"name": "head", "size": 1 << 6, "stride": 2}]
    buffers = [
        buffer(n, size * n, size * count, size, 2, padding=bool(n % 2)) for n in range(count)
    ]
    return whole(buffers, [region(n, axes=steps) for n in range(count)])


def own_spaces(count: int) -> Layout:
    """A space for each layer."""
    buffers = [buffer(n, 100 * n, 2, 2, 1, space=f"s{n}") for n in range(count)]
    spaces = [{"name": f"s{n}", "reserved": 0} for n in range(count)]
    return whole(buffers, map(region, range(count)), spaces)


def shared_ids(count: int) -> Layout:
    """The same, all with the ids of the first."""
    layout = own_spaces(count)
    for space in layout["spaces"][1:]:
        space["ids"] = "s0"
    return layout


def block_pool(count: int) -> Layout:
    """The same, over one another in blocks of one pool."""
    buffers = [buffer(n, 0, 100, 2 + n % 90, 5, space=f"s{n}") for n in range(count)]
    spaces = [{"name": f"s{n}", "reserved": 0, "block_pool": "p"} for n in range(count)]
    return whole(buffers, map(region, range(count)), spaces)


LAYOUTS: dict[str, Callable[[int], Layout]] = {
    make.__name__: make
    for make in (
        *(one_item, forms, roles, owners, axes, apart, shapes, side_by_side, ends, runs),
        *(own_spaces, shared_ids, block_pool),
    )
}
