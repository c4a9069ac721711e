# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
"""Copies of many runs of device memory, and of runs to and from one contiguous buffer.

Long runs are cut, so that a tile of a program is so many rows of so many bytes. What is regular
(one length for all, addresses one behind the other) reaches the device as two numbers, not as an
array.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvpool.layout.grid import Ints, ragged
from kvpool_cuda.geometry import power_of_two
from kvpool_cuda.launch import on, upload
from kvpool_cuda.words import words_at

TILE = 8 << 10
"""Bytes that a program of four warps moves: four accesses of 16 bytes a lane."""
SHORTEST = 16
UNITS = 16, 4, 1


def copy_runs(device: torch.device, src: Ints, dst: Ints, nbytes: Ints) -> None:
    """See Device.copy_runs. Runs go by what their addresses and lengths are multiples of: one
    launch for those of 16 bytes, one for those of 4, one for all others.
    """
    low = np.where(nbytes > 0, (src | dst | nbytes) & (UNITS[0] - 1), -1)
    for unit in UNITS:
        these = (low >= 0) & (low % unit == 0)
        low[these] = -1
        if these.any():
            _copy(device, unit, src[these], dst[these], nbytes[these])


def gather(addresses: Ints, nbytes: Ints, out: torch.Tensor) -> None:
    """Copies runs `[N]` of the device of `out` into it, one behind the other."""
    copy_runs(out.device, addresses, _packed(out, nbytes), nbytes)


def scatter(buffer: torch.Tensor, addresses: Ints, nbytes: Ints) -> None:
    """Copies what `gather` made to runs `[N]` of the device of `buffer`."""
    copy_runs(buffer.device, _packed(buffer, nbytes), addresses, nbytes)


def _packed(buffer: torch.Tensor, nbytes: Ints) -> Ints:
    ends = np.cumsum(nbytes)
    total, held = int(ends[-1]) if ends.size else 0, buffer.numel() * buffer.element_size()
    if not buffer.is_contiguous() or held < total:
        raise ValueError(
            f"runs of {total:,} bytes together, a buffer of {held:,} bytes with strides "
            f"{list(buffer.stride())}. Give a contiguous one of at least as many."
        )
    return buffer.data_ptr() + ends - nbytes


class _Column(NamedTuple):
    """A number of each piece: listed on the device, or regular."""

    listed: torch.Tensor | None
    start: int
    step: int

    @property
    def address(self) -> int:
        """Of the list; 0 where there is none."""
        return 0 if self.listed is None else self.listed.data_ptr()


def _column(numbers: Ints, device: torch.device) -> _Column:
    start, step = int(numbers[0]), int(numbers[1] - numbers[0]) if numbers.size > 1 else 0
    if (np.diff(numbers) == step).all():
        return _Column(None, start, step)
    return _Column(upload(numbers, device), 0, 0)


def _copy(device: torch.device, unit: int, src: Ints, dst: Ints, nbytes: Ints) -> None:
    # pieces as long as runs are on average: what tiles hold is at most three times what moves
    span = min(TILE, max(SHORTEST, power_of_two(int(nbytes.mean()))))
    if nbytes.max() > span:
        src, dst, nbytes = _cut(src, dst, nbytes, span)
    rows = TILE // span
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
def _numbers(listed, start, step, index, there, LISTED: tl.constexpr):
    if LISTED:
        numbers = tl.load(words_at(listed, 8, 8) + index, mask=there, other=0)
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
    there = index < count
    from_ = _numbers(src, src_start, src_step, index, there, SRC)
    to = _numbers(dst, dst_start, dst_step, index, there, DST)
    length = tl.where(there, _numbers(nbytes, nbytes_start, nbytes_step, index, there, NBYTES), 0)
    word = tl.arange(0, SPAN // WORD)[None, :]
    inside = word // (UNIT // WORD) < (length // UNIT)[:, None]
    values = tl.load(words_at(from_, WORD, UNIT)[:, None] + word, mask=inside)
    tl.store(words_at(to, WORD, UNIT)[:, None] + word, values, mask=inside)
