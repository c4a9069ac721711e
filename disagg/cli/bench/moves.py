"""Moves of items in all layers; gathers and scatters of runs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from disagg.cli.bench.case import BenchCase, BenchContext, Sizes
from disagg.cli.bench.work import LAYERS, PAGE, Work, need_equal, noise, plain_copy
from kvpool import MLAPool
from kvpool.pools.placement import Placement

MLA_PAGE_BYTES = PAGE * (512 + 64) * 2
RUN_WIDTHS = {"512 B": 512, "4 KiB": 4 << 10, "36 KiB": 36 << 10}


def move_cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Pages of a 61-layer MLA pool copied to other pages, in all layers at once."""
    nbytes = sizes.pages * LAYERS * MLA_PAGE_BYTES
    for placement in ("layer", "page"):
        for ids in ("device", "host"):
            yield BenchCase(
                group="move",
                name=f"MLA by {placement}, {ids} ids",
                nbytes=nbytes,
                open=partial(open_move, sizes.pages, placement, ids),
            )


def open_move(pages: int, placement: Placement, ids: str, context: BenchContext) -> Work:
    """See move_cases. Ids on the host go through the pool, which checks and copies them."""
    pool = MLAPool(
        layers=range(LAYERS),
        num_pages=2 * pages + 1,
        page_size=PAGE,
        packing="bf16",
        placement=placement,
        device=context.device.name,
    )
    views = [pool.item_bytes_view(buffer) for buffer in pool.layout.buffers]
    shuffled = 1 + np.random.default_rng(0).permutation(2 * pages)
    src, dst = shuffled[:pages], shuffled[pages:]
    sources, dests = (torch.from_numpy(ids).to(views[0].device) for ids in (src, dst))
    expected = [noise(pages, MLA_PAGE_BYTES, seed=layer) for layer in range(LAYERS)]
    for view, rows in zip(views, expected):
        view[sources] = rows.to(view.device)

    def check() -> None:
        for layer, (view, rows) in enumerate(zip(views, expected)):
            need_equal(f"pages of layer {layer}", view[dests], rows)

    if ids == "host":
        ours = partial(pool.copy_items, "kv", src, dst)
    else:
        ours = partial(context.device.copy_items, views, sources, dests, disjoint=True)
    return Work(ours, plain_copy(context.device, pages * LAYERS * MLA_PAGE_BYTES), check)


def run_cases(sizes: Sizes) -> Iterator[BenchCase]:
    """Runs in random order, to and from one contiguous buffer."""
    for group in ("gather", "scatter"):
        for name, width in RUN_WIDTHS.items():
            count = sizes.run_bytes // width
            opened = partial(open_runs, group, count, width)
            yield BenchCase(group=group, name=name, nbytes=count * width, open=opened)


def open_runs(group: str, count: int, width: int, context: BenchContext) -> Work:
    """See run_cases."""
    apart = context.device.allocate(2 * count * width)
    whole = context.device.allocate(count * width)
    slots = np.random.default_rng(0).permutation(2 * count)[:count]
    runs = noise(count, width)
    places = torch.from_numpy(slots).to(apart.device)
    addresses = apart.data_ptr() + slots * width, whole.data_ptr() + np.arange(count) * width
    if group == "gather":
        apart.view(-1, width)[places] = runs.to(apart.device)
        src, dst = addresses
    else:
        whole.view(-1, width).copy_(runs)
        dst, src = addresses
    nbytes = np.full(count, width, dtype=np.int64)

    def check() -> None:
        copied = whole.view(-1, width) if group == "gather" else apart.view(-1, width)[places]
        need_equal("runs", copied, runs)

    return Work(
        partial(context.device.copy_runs, src, dst, nbytes),
        plain_copy(context.device, count * width),
        check,
    )
