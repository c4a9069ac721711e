# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Copies of whole items in all buffers at once, and of many runs between pointers.

Items are cut into pieces. A table on the device has each piece's pointer in item 0, the item stride
and the length, so that one launch copies every piece of every item. Long runs are cut into pieces,
so that a program's tile is rows of equal size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvpool.device.torch_ops import Views
from kvpool.layout.grid import Ints, ragged
from kvpool_cuda.launch import WIDEST, checked, on, power_of_two, upload, words_at

PIECE = 16 << 10
"""Bytes that a program of eight warps moves: four accesses of 16 bytes a lane."""
STAGE_BYTES = 64 << 20
"""How many bytes are staged at once where an item may be both source and destination; more if one
piece of every item is more.
"""

TILE_BYTES = 8 << 10
"""Bytes that a program of four warps moves: four accesses of 16 bytes a lane."""
MIN_SPAN = 16
ALIGNMENTS = 16, 4, 1
MAX_IDLE = 4
"""How many times the programs that runs need are launched at most, most of them for nothing."""

Geometry = tuple[tuple[int, int, int], ...]
"""Base, item stride and item bytes of each buffer."""


class Table(NamedTuple):
    """`rows` int64 `[piece, 4]` on the device: pointer in item 0, item stride, length, and offset
    in a staged item. `offsets` `[piece + 1]` on the host: those offsets and their end.
    """

    rows: torch.Tensor
    offsets: list[int]


# never freed: any stream or CUDA graph may still read a table
_tables: dict[Geometry, Table] = {}


def copy_items(views: Views, src: torch.Tensor, dst: torch.Tensor, disjoint: bool = False) -> None:
    """See Device.copy_items."""
    count = src.numel()
    if not views or not count:
        return
    device = src.device
    checked("ids to copy from", views[0], src, (count,), torch.int64)
    checked("ids to copy to", views[0], dst, (count,), torch.int64)
    for view in views:
        bytes_of_items = view.dim() == 2 and view.element_size() == 1 and view.stride(1) == 1
        if not bytes_of_items or view.device != device:
            raise ValueError(
                f"items of {list(view.shape)} {view.dtype} on {view.device}: expected bytes "
                f"[item, byte] on {device}."
            )
    geometry = tuple((view.data_ptr(), view.stride(0), view.shape[1]) for view in views)
    src, dst = src.contiguous(), dst.contiguous()
    with on(device):
        table = _tables.get(geometry)
        if table is None:
            table = _tables[geometry] = _table(geometry, device)
        if disjoint:
            _launch(table, slice(0, len(table.offsets) - 1), src, dst, None)
            return
        groups = list(_groups(table.offsets, count))
        room = max(table.offsets[g.stop] - table.offsets[g.start] for g in groups)
        stage = torch.empty(count * room, dtype=torch.uint8, device=device)
        for group in groups:
            _launch(table, group, src, None, stage)
            _launch(table, group, None, dst, stage)


def _table(geometry: Geometry, device: torch.device) -> Table:
    base, stride, length = np.array(geometry, dtype=np.int64).T
    buffer, piece = ragged(-(-length // PIECE))
    start = piece * PIECE
    nbytes = np.minimum(PIECE, length[buffer] - start)
    # staged pieces start at multiples of 16 bytes
    offsets = np.concatenate([[0], np.cumsum(-(-nbytes // WIDEST) * WIDEST)])
    rows = [base[buffer] + start, stride[buffer], nbytes, offsets[:-1]]
    uploaded = upload(rows, device, axis=1)
    if device.type == "cuda":  # any stream may read it from now on
        torch.cuda.current_stream(device).synchronize()
    return Table(uploaded, offsets.tolist())


def _groups(offsets: list[int], count: int) -> Iterator[slice]:
    """Groups of adjacent pieces whose `count` items fit into the stage."""
    first = 0
    while first < len(offsets) - 1:
        last = bisect_right(offsets, offsets[first] + STAGE_BYTES // count) - 1
        last = max(last, first + 1)
        yield slice(first, last)
        first = last


def _launch(
    table: Table,
    pieces: slice,
    src: torch.Tensor | None,
    dst: torch.Tensor | None,
    stage: torch.Tensor | None,
) -> None:
    """Copies pieces of items `src` to items `dst`; the stage replaces the one that is None."""
    ids = src if src is not None else dst
    count = 0 if ids is None else ids.numel()
    number = pieces.stop - pieces.start
    _move[(number * count,)](
        table.rows[pieces].data_ptr(),
        number,
        0 if src is None else src.data_ptr(),
        0 if dst is None else dst.data_ptr(),
        0 if stage is None else stage.data_ptr() - table.offsets[pieces.start],
        table.offsets[pieces.stop] - table.offsets[pieces.start],
        FROM_STAGE=src is None,
        TO_STAGE=dst is None,
        WORDS=PIECE // 8,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["pieces", "src", "dst", "stage", "room"])
def _move(
    table,
    pieces,
    src,
    dst,
    stage,
    room,
    FROM_STAGE: tl.constexpr,
    TO_STAGE: tl.constexpr,
    WORDS: tl.constexpr,
):
    program = tl.program_id(0)
    number = (program // pieces).to(tl.int64)
    row = words_at(table, 8, 8) + (program % pieces) * 4
    base = tl.load(row)
    stride = tl.load(row + 1)
    nbytes = tl.load(row + 2)
    staged = stage + number * room + tl.load(row + 3)
    if FROM_STAGE:
        from_ = staged
    else:
        from_ = base + tl.load(words_at(src, 8, 8) + number) * stride
    if TO_STAGE:
        to = staged
    else:
        to = base + tl.load(words_at(dst, 8, 8) + number) * stride
    _copy_bytes(from_, to, nbytes, WORDS)


@triton.jit
def _copy_units(src, dst, nbytes, UNIT: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr):
    """Copies `nbytes` bytes, `WORDS` words at a time; pointers and length are whole units."""
    first = nbytes * 0
    while first < nbytes // WORD:
        word = first + tl.arange(0, WORDS)
        inside = word // (UNIT // WORD) < nbytes // UNIT
        values = tl.load(words_at(src, WORD, UNIT) + word, mask=inside)
        tl.store(words_at(dst, WORD, UNIT) + word, values, mask=inside)
        first += WORDS


@triton.jit
def _copy_bytes(src, dst, nbytes, WORDS: tl.constexpr):
    """Copies `nbytes` bytes with the widest accesses that pointers and length allow."""
    low = src | dst | nbytes
    if low % 16 == 0:
        _copy_units(src, dst, nbytes, 16, 8, WORDS)
    elif low % 4 == 0:
        _copy_units(src, dst, nbytes, 4, 4, WORDS)
    else:
        _copy_units(src, dst, nbytes, 1, 1, WORDS)


def copy_runs(device: torch.device, src: Ints, dst: Ints, nbytes: Ints) -> None:
    """See Device.copy_runs. One launch for runs whose pointers and lengths are multiples of 16
    bytes, one for multiples of 4, one for all others.
    """
    bits = int(np.bitwise_or.reduce([np.bitwise_or.reduce(part) for part in (src, dst, nbytes)]))
    if bits % ALIGNMENTS[0] == 0 and nbytes.any():
        _copy(device, ALIGNMENTS[0], src, dst, nbytes)
        return
    low = np.where(nbytes > 0, (src | dst | nbytes) & (ALIGNMENTS[0] - 1), -1)
    for unit in ALIGNMENTS:
        these = (low >= 0) & (low % unit == 0)
        low[these] = -1
        if these.any():
            _copy(device, unit, src[these], dst[these], nbytes[these])


def _copy(device: torch.device, unit: int, src: Ints, dst: Ints, nbytes: Ints) -> None:
    # pieces as long as the average run: tiles hold at most three times the bytes that move
    span = min(TILE_BYTES, max(MIN_SPAN, power_of_two(int(nbytes.mean()))))
    pieces = -(-int(nbytes.max()) // span)
    if pieces * src.size > MAX_IDLE * -(-int(nbytes.sum()) // span):
        # a few runs are much longer than the others: every run would have programs for the longest
        run, piece = ragged(-(-nbytes // span))
        start = piece * span
        src, dst, nbytes = src[run] + start, dst[run] + start, np.minimum(span, nbytes[run] - start)
        pieces = 1
    rows = TILE_BYTES // span
    with on(device):
        columns = upload([src, dst, nbytes], device)
        _runs[(-(-src.size // rows) * pieces,)](
            columns.data_ptr(), src.size, pieces, UNIT=unit, WORD=min(unit, 8), ROWS=rows, SPAN=span
        )


@triton.jit(do_not_specialize=["columns", "count", "pieces"])
def _runs(
    columns,
    count,
    pieces,
    UNIT: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
):
    program = tl.program_id(0)
    index = (program // pieces).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = (program % pieces).to(tl.int64) * SPAN
    valid = index < count
    column = words_at(columns, 8, 8) + index
    src = tl.load(column, mask=valid, other=0) + start
    dst = tl.load(column + count, mask=valid, other=0) + start
    nbytes = tl.load(column + 2 * count, mask=valid, other=0) - start
    word = tl.arange(0, SPAN // WORD)[None, :]
    inside = word // (UNIT // WORD) < (nbytes // UNIT)[:, None]
    values = tl.load(words_at(src, WORD, UNIT)[:, None] + word, mask=inside)
    tl.store(words_at(dst, WORD, UNIT)[:, None] + word, values, mask=inside)
