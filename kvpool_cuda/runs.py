# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Copies of many runs of device memory.

Long runs are cut into pieces, so that a program's tile is rows of equal size. A regular column (one
length for all, evenly spaced pointers) is passed as two numbers, not as an array.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvpool.layout.grid import Ints, ragged
from kvpool_cuda.geometry import power_of_two
from kvpool_cuda.launch import on, upload, words_at

TILE_BYTES = 8 << 10
"""Bytes that a program of four warps moves: four accesses of 16 bytes a lane."""
MIN_SPAN = 16
ALIGNMENTS = 16, 4, 1


def copy_runs(device: torch.device, src: Ints, dst: Ints, nbytes: Ints) -> None:
    """See Device.copy_runs. One launch for runs whose pointers and lengths are multiples of 16
    bytes, one for multiples of 4, one for all others.
    """
    low = np.where(nbytes > 0, (src | dst | nbytes) & (ALIGNMENTS[0] - 1), -1)
    for unit in ALIGNMENTS:
        these = (low >= 0) & (low % unit == 0)
        low[these] = -1
        if these.any():
            _copy(device, unit, src[these], dst[these], nbytes[these])


class _Column(NamedTuple):
    """A number of each piece: a list on the device, or start and step."""

    listed: torch.Tensor | None
    start: int
    step: int

    @property
    def address(self) -> int:
        """Pointer to the list; 0 if valid is none."""
        return 0 if self.listed is None else self.listed.data_ptr()


def _column(numbers: Ints, device: torch.device) -> _Column:
    start, step = int(numbers[0]), int(numbers[1] - numbers[0]) if numbers.size > 1 else 0
    if (np.diff(numbers) == step).all():
        return _Column(None, start, step)
    return _Column(upload(numbers, device), 0, 0)


def _copy(device: torch.device, unit: int, src: Ints, dst: Ints, nbytes: Ints) -> None:
    # pieces as long as the average run: tiles hold at most three times the bytes that move
    span = min(TILE_BYTES, max(MIN_SPAN, power_of_two(int(nbytes.mean()))))
    if nbytes.max() > span:
        src, dst, nbytes = _cut(src, dst, nbytes, span)
    rows = TILE_BYTES // span
    with on(device):
        columns = [_column(numbers, device) for numbers in (src, dst, nbytes)]
        _runs[(-(-src.size // rows),)](
            *(number for c in columns for number in (c.address, c.start, c.step)),
            src.size,
            *(c.listed is not None for c in columns),
            unit,
            min(unit, 8),
            rows,
            span,
        )


def _cut(src: Ints, dst: Ints, nbytes: Ints, span: int) -> tuple[Ints, Ints, Ints]:
    pieces = -(-nbytes // span)
    run, piece = ragged(pieces)
    start = piece * span
    return src[run] + start, dst[run] + start, np.minimum(span, nbytes[run] - start)


@triton.jit
def _numbers(listed, start, step, index, valid, LISTED: tl.constexpr):
    if LISTED:
        numbers = tl.load(words_at(listed, 8, 8) + index, mask=valid, other=0)
    else:
        numbers = start + index * step
    return numbers


@triton.jit(
    do_not_specialize=[
        *("src", "src_start", "src_step", "dst", "dst_start", "dst_step"),
        *("nbytes", "nbytes_start", "nbytes_step", "count"),
    ]
)
def _runs(
    src,
    src_start,
    src_step,
    dst,
    dst_start,
    dst_step,
    nbytes,
    nbytes_start,
    nbytes_step,
    count,
    SRC: tl.constexpr,
    DST: tl.constexpr,
    NBYTES: tl.constexpr,
    UNIT: tl.constexpr,
    WORD: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = index < count
    from_ = _numbers(src, src_start, src_step, index, valid, SRC)
    to = _numbers(dst, dst_start, dst_step, index, valid, DST)
    length = tl.where(valid, _numbers(nbytes, nbytes_start, nbytes_step, index, valid, NBYTES), 0)
    word = tl.arange(0, SPAN // WORD)[None, :]
    inside = word // (UNIT // WORD) < (length // UNIT)[:, None]
    values = tl.load(words_at(from_, WORD, UNIT)[:, None] + word, mask=inside)
    tl.store(words_at(to, WORD, UNIT)[:, None] + word, values, mask=inside)
