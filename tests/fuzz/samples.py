"""Layouts of one's own, and of peers that fit them, from which hostile layouts are made.

Base pointers are numbers, behind which there is no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpool.item import Cell, Pad, Repeat, Seq, Skip, Template, item_bytes, item_regions
from kvpool.layout import Buffer, Interleave, PoolLayout, RequestAddress, Space, Span
from tests import oracle

TOKENS = 21
Part = tuple[int, str, int, Template]


@dataclass(frozen=True)
class Case:
    """A layout of one's own, and lists of peers' layouts that can fill it."""

    own: PoolLayout
    peers: Sequence[Sequence[PoolLayout]]


def moved(layout: PoolLayout, by: int) -> PoolLayout:
    buffers = tuple(replace(buffer, base=buffer.base + by) for buffer in layout.buffers)
    return replace(layout, buffers=buffers)


def at(base: int, state: oracle.State) -> PoolLayout:
    """The layout as if its memory began at `base`."""
    layout = replace(state.layout, model="model", generation="g1")
    return moved(layout, base - min(buffer.base for buffer in layout.buffers))


def rows(page: int, base: int, side_by_side: bool = False) -> PoolLayout:
    """Latent and rope in one row, three layers."""
    row = Repeat("entry", page, Seq(Cell("latent", 8, "bf16"), Cell("rope", 4, "bf16")))
    spaces = [Space("kv", "paged", page)]
    if side_by_side:
        return at(
            base, oracle.overlaid({"kv": [(n, row) for n in range(3)]}, spaces, 12, padding=True)
        )
    return at(base, oracle.built([(layer, "kv", 12, row) for layer in range(3)], spaces))


def heads(page: int, base: int, start: int, size: int, order: str = "nhd") -> PoolLayout:
    """Keys and values of a shard of 8 heads: in one row, or in separate buffers."""
    cells = [Cell("k", 4, "bf16"), Cell("v", 4, "bf16")]
    rows_of = [Repeat("head", size, cell, start, 8) for cell in cells]
    spaces = [Space("kv", "paged", page)]
    if order == "one row":
        row = Repeat("entry", page, Seq(*rows_of))
        return at(base, oracle.built([(0, "kv", 12, row)], spaces))
    if order == "nhd":
        items = [Repeat("entry", page, heads_row) for heads_row in rows_of]
    else:
        items = [Repeat("head", size, Repeat("entry", page, cell), start, 8) for cell in cells]
    return at(base, oracle.built([(0, "kv", 12, item) for item in items], spaces))


def states(page: int, ring: int, window: int, base: int) -> PoolLayout:
    """A window, with rings in its pages, compressed entries that share the pages' ids, a ring of
    the request, and a slot.
    """
    spaces = [
        Space("kv", "paged", page),
        Space("c4", "paged", page // 4, 4, ids="kv"),
        Space("swa", "paged", page // 2, window=window),
        Space("row", "paged", page // 2, window=1, window_step=2, ids="swa", ring=page // 4),
        Space("ring", "ring", ring, window=4, reserved=0),
        Space("state", "slot"),
    ]
    conv = Repeat("tap", 3, Seq(Repeat("dim", 2, Cell("conv.q", 2, "f32")), Skip(8)))
    parts: list[Part] = [
        (0, "kv", 12, Repeat("entry", page, Cell("latent", 4, "bf16"))),
        (0, "c4", 12, Repeat("entry", page // 4, Cell("c4.latent", 4, "bf16"))),
        (1, "swa", 16, Repeat("entry", page // 2, Cell("swa.latent", 4, "bf16"))),
        (1, "row", 16, Repeat("entry", page // 4, Cell("c4.row", 2, "f32"))),
        (0, "ring", 3, Repeat("entry", ring, Cell("c4.state", 2, "f32"))),
        (1, "state", 3, conv),
    ]
    return at(base, oracle.built(parts, spaces))


def hybrid(
    page: int, base: int, pool: str | None, padding: bool = False, cut: int = 1
) -> PoolLayout:
    """Pages, a window's pages and a state: each in memory of its own, or (`pool`) all over one
    another in blocks of one allocation, `cut` pages a block.
    """
    spaces = [
        Space("kv", "paged", page, reserved=cut, block_pool=pool, items_per_block=cut),
        Space("swa", "paged", 4, window=8, block_pool=pool),
        Space("state", "slot", block_pool=pool),
    ]
    row = Repeat("entry", page, Seq(Cell("k", 4, "bf16"), Cell("v", 4, "bf16"), Skip(4)))
    state = Repeat("tap", 3, Cell("conv.q", 5, "f32"))
    swa = Repeat("entry", 4, Cell("swa.latent", 12, "bf16"))
    groups = {"kv": [(0, row), (2, row)], "swa": [(1, swa)], "state": [(3, state)]}
    if pool is not None:
        return at(base, oracle.overlaid(groups, spaces, 30))
    parts = [(layer, name, 30, item) for name, items in groups.items() for layer, item in items]
    return at(base, oracle.built(parts, spaces, padding=padding))


def padded(page: int, base: int, multiple: int = 64, padding: bool = True) -> PoolLayout:
    """Rows followed by scales, pages padded; or what would be padding is somebody else's."""
    row = Repeat("entry", page, Seq(Cell("latent", 7, "e4m3"), Cell("rope", 2, "bf16"), Skip(1)))
    scales = Repeat("entry", page, Seq(Cell("latent.scale", 3, "ue8m0"), Skip(1)))
    item = Pad(multiple, Seq(row, scales))
    groups = {"kv": [(layer, item) for layer in range(2)]}
    spaces = [Space("kv", "paged", page)]
    return at(base, oracle.overlaid(groups, spaces, 12, padding=padding))


def packed(page: int, base: int, start: int, size: int, packing: str = "amx") -> PoolLayout:
    """Keys of a shard of 4 heads whose pages are packed, each followed by its values."""
    keys = Cell("k", 24, "uint8")
    values = Repeat("entry", page, Cell("v", 4, "bf16"))
    item = Repeat("head", size, Seq(keys, values), start, 4)
    buffers, regions, step = [], [], item_bytes(item)
    for layer in range(2):
        name = f"b{layer}"
        buffers.append(Buffer(name, "kv", base + 12 * step * layer, step, step, 12))
        for region in item_regions(item, owner="target", layer=layer, buffer=name):
            regions.append(replace(region, packing=packing if region.role == "k" else ""))
    spaces = (Space("kv", "paged", page),)
    return PoolLayout(tuple(buffers), tuple(regions), spaces, 4, "model", "g1")


def shared_out(page: int, base: int, size: int, rank: int, ranks: int) -> PoolLayout:
    """Rows and compressed entries of a rank's stretches of positions, and index keys of all."""
    part = Interleave(size, rank, ranks)
    spaces = [
        Space("kv", "paged", page, interleave=part),
        Space("c2", "paged", page // 2, 2, ids="kv", interleave=part),
        Space("index", "paged", page * ranks, ids="kv"),
    ]
    parts: list[Part] = [
        (0, "kv", 12, Repeat("entry", page, Cell("latent", 4, "bf16"))),
        (0, "c2", 12, Repeat("entry", page // 2, Cell("c2.latent", 3, "bf16"))),
        (0, "index", 12, Repeat("entry", page * ranks, Cell("index_key", 2, "bf16"))),
    ]
    return at(base, oracle.built(parts, spaces))


HERE, THERE, FAR = 1 << 30, 1 << 40, 1 << 46
CASES = (
    Case(rows(4, HERE), [[rows(4, THERE)], [rows(8, THERE)], [rows(2, FAR, True), rows(2, THERE)]]),
    Case(rows(4, HERE, True), [[rows(4, THERE, True)], [rows(8, FAR)]]),
    Case(
        heads(4, HERE, 2, 4, "one row"),
        [
            [heads(4, THERE, 0, 8)],
            [heads(4, THERE, 0, 4, "one row"), heads(4, FAR, 4, 4, "one row")],
            [heads(8, THERE, 0, 8, "hnd")],
        ],
    ),
    Case(heads(8, HERE, 4, 4), [[heads(8, THERE, 4, 4)], [heads(2, THERE, 0, 8, "hnd")]]),
    Case(states(8, 8, 6, HERE), [[states(8, 8, 6, THERE)], [states(16, 16, 8, FAR)]]),
    Case(
        padded(4, HERE),
        [[padded(4, THERE)], [padded(8, FAR, 128)], [padded(4, THERE, padding=False)]],
    ),
    Case(
        packed(4, HERE, 0, 4),
        [[packed(4, THERE, 0, 4)], [packed(4, THERE, 0, 2), packed(4, FAR, 2, 2)]],
    ),
    Case(padded(4, HERE, padding=False), [[padded(4, THERE, padding=False)], [padded(4, FAR)]]),
    Case(
        hybrid(4, HERE, "blocks"),
        [[hybrid(4, THERE, "blocks")], [hybrid(8, FAR, "others", True)], [hybrid(4, FAR, None)]],
    ),
    Case(
        hybrid(4, HERE, "blocks", cut=3),
        [[hybrid(12, THERE, "blocks")], [hybrid(2, FAR, "blocks", cut=6)]],
    ),
    Case(hybrid(8, HERE, None), [[hybrid(4, THERE, "blocks")], [hybrid(8, THERE, "blocks")]]),
    Case(
        shared_out(4, HERE, 2, 1, 2),
        [
            [shared_out(8, THERE, 2, 0, 1)],
            [shared_out(4, THERE, 2, 1, 2)],
            [shared_out(4, base, 4, rank, 3) for rank, base in enumerate((THERE, FAR, 1 << 47))],
        ],
    ),
)
LAYOUTS = [layout for case in CASES for peers in ([case.own], *case.peers) for layout in peers]


def address(layout: PoolLayout, tokens: int = TOKENS) -> RequestAddress:
    """A block table of `tokens` tokens: every other item, from the last one down, those of one
    block pool after one another.
    """
    spans = {}
    taken: dict[str, int] = {}
    for space in layout.spaces:
        if space.ids is None:
            items = min(
                buffer.items
                for buffer in layout.buffers
                if layout.space_by_name[buffer.space].id_list == space.name
            )
            count = -(-tokens // space.item_span) if space.kind == "paged" else 1
            cut = space.items_per_block
            low, high = space.reserved // cut, items // cut
            usable = [*range(high - 1, low - 1, -2), *range(high - 2, 0, -2)]
            first = taken.get(space.block_pool or "", 0)
            stop = first - (-count // cut)
            if space.block_pool is not None:
                taken[space.block_pool] = stop
            ids = [block * cut + item for block in usable[first:stop] for item in range(cut)]
            spans[space.name] = Span(ids[:count])  # type: ignore[arg-type]
    return RequestAddress(tokens, spans)
