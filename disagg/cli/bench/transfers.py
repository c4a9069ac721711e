"""Reads from another process's memory, by engine and run length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch

from disagg.cli.bench.case import BenchCase, BenchContext, Sizes
from disagg.cli.bench.peer import pattern
from disagg.cli.bench.work import Work, need_equal, plain_copy
from disagg.plan.bind import CopyBatch

READ_WIDTHS = {"1 KiB": 1 << 10, "4 KiB": 4 << 10, "36 KiB": 36 << 10, "1 MiB": 1 << 20}


def transfer_cases(sizes: Sizes, engines: Sequence[str]) -> Iterator[BenchCase]:
    """Runs in random order, and one run of all bytes."""
    for engine in engines:
        for name, width in {**READ_WIDTHS, "one run": sizes.transfer_bytes}.items():
            count = sizes.transfer_bytes // width
            yield BenchCase(
                group="transfer",
                name=f"{engine}, {name}",
                nbytes=count * width,
                open=partial(open_transfer, engine, count, width),
                engine=engine,
            )


def memory_bytes(sizes: Sizes) -> int:
    """Memory that each side needs: twice the bytes that are read."""
    return 2 * sizes.transfer_bytes


def open_transfer(engine: str, count: int, width: int, context: BenchContext) -> Work:
    """See transfer_cases."""
    reader = context.readers(engine)
    memory = reader.memory
    random = np.random.default_rng(0)
    src, dst = (random.permutation(2 * count)[:count] * width for _ in range(2))
    nbytes = np.full(count, width, dtype=np.int64)
    batch = CopyBatch(reader.base + src, memory.data_ptr() + dst, nbytes)
    memory.zero_()
    context.device.record().synchronize()

    def check() -> None:
        slots = 2 * count * width
        runs = pattern(memory.numel())[:slots].view(-1, width)
        expected = torch.zeros_like(runs)
        expected[torch.from_numpy(dst // width)] = runs[torch.from_numpy(src // width)]
        need_equal("runs of memory", memory[:slots].view(-1, width), expected)

    return Work(partial(reader.read, batch), plain_copy(context.device, count * width), check)
