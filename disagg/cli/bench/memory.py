"""Cases of a device's memory: entries of every packing that has its own kernel, items, and runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from disagg.cli.bench.case import BenchCase, Measurement, Sizes, Work, need_equal, noise, plain_copy
from disagg.cli.bench.peer import BenchContext
from kvpool import DSv4Pool, KVPool, MHAPool, MLAPool, NSAPool
from kvpool.device.quant import dequantise, quantise
from kvpool.device.torch_ops import bits
from kvpool.layout.formats import scale_role
from kvpool.pools.placement import Placement

LAYERS, PAGE = 61, 64  # of DeepSeek-V3, and tokens per page
WINDOW_PAGE = 128
MLA_PAGE_BYTES = PAGE * (512 + 64) * 2
RUN_WIDTHS = {"512 B": 512, "4 KiB": 4 << 10, "36 KiB": 36 << 10}
STORE_TARGETS = {"bf16": 0.85, "fp8": 0.7}
MOVE_TARGET, RUNS_TARGET = 0.85, 0.8


class EntryFormat(NamedTuple):
    """Entries of one layer: pool, shape of their bf16 values by role, stored bytes per entry."""

    kind: type[KVPool]
    arguments: Mapping[str, Any]
    roles: Mapping[str, tuple[int, ...]]
    stored: int


HEADS = {"num_kv_heads": 8, "head_dim": 128, "packing": "bf16"}
K_AND_V = {"k": (8, 128), "v": (8, 128)}
MLA = {"latent": (512,), "rope": (64,)}
DSV4 = {"packing": "fp8", "compress_ratios": [0]}
DSV4_ROWS = {"swa.latent": (448,), "swa.rope": (64,)}
ENTRY_FORMATS = {
    "K and V 8 x 128, NHD": EntryFormat(MHAPool, HEADS, K_AND_V, 4096),
    "K and V 8 x 128, HND": EntryFormat(MHAPool, {**HEADS, "order": "hnd"}, K_AND_V, 4096),
    "MLA bf16, 1152 B": EntryFormat(MLAPool, {"packing": "bf16"}, MLA, 1152),
    "MLA fp8, 656 B": EntryFormat(MLAPool, {"packing": "fp8"}, MLA, 656),
    "index keys fp8, 132 B": EntryFormat(NSAPool, {"packing": "fp8"}, {"index_key": (128,)}, 132),
    # 584 bytes; one is spare
    "DSv4 fp8, 584 B": EntryFormat(DSv4Pool, DSV4, DSV4_ROWS, 583),
}


def memory_cases(sizes: Sizes) -> Iterator[BenchCase]:
    """All of them."""
    for group in ("store", "load"):
        yield from entry_cases(group, sizes.entry_bytes)
    for placement in ("layer", "page"):
        for ids in ("device", "host"):
            nbytes, name = sizes.pages * LAYERS * MLA_PAGE_BYTES, f"MLA by {placement}, {ids} ids"
            row = Measurement(group="move", case=name, bytes=nbytes, target=MOVE_TARGET)
            yield BenchCase(row=row, open=partial(open_move, sizes.pages, placement, ids))
    for group in ("gather", "scatter"):
        for name, width in RUN_WIDTHS.items():
            count = sizes.run_bytes // width
            row = Measurement(group=group, case=name, bytes=count * width, target=RUNS_TARGET)
            yield BenchCase(row=row, open=partial(open_runs, group, count, width))


def entry_cases(group: str, copied: int) -> Iterator[BenchCase]:
    """Writes of bf16 values, quantised where the pool does; or reads of the same."""
    for name, rows in ENTRY_FORMATS.items():
        values = 2 * sum(int(np.prod(shape)) for shape in rows.roles.values())
        moved = values + rows.stored  # of an entry, twice what a copy counts
        tokens = max(1, 2 * copied // moved // WINDOW_PAGE) * WINDOW_PAGE
        nbytes = tokens * moved // 2
        target = STORE_TARGETS[rows.arguments["packing"]] if group == "store" else None
        row = Measurement(group=group, case=name, bytes=nbytes, target=target)
        yield BenchCase(row=row, open=partial(open_entries, group, rows, tokens, nbytes))


def open_entries(
    group: str, rows: EntryFormat, tokens: int, nbytes: int, context: BenchContext
) -> Work:
    """Entries of layer 0 as in a prefill: pages in random order, entries within them in order."""
    pool = rows.kind(
        layers=[0],
        num_pages=tokens // PAGE + 1,
        num_window_pages=tokens // WINDOW_PAGE + 1,
        device=context.device.name,
        page_size=PAGE,
        **rows.arguments,
    )
    view = pool.view(next(iter(rows.roles)), 0)
    entries, seed = view.shape[1], torch.Generator().manual_seed(0)
    pages = 1 + torch.randperm(tokens // entries, generator=seed)
    locations = (pages[:, None] * entries + torch.arange(entries)).flatten().to(view.device)
    values = {
        role: torch.randn(tokens, *shape, generator=seed).bfloat16().to(view.device)
        for role, shape in rows.roles.items()
    }
    stored, read = _stored(pool, values), dict[str, torch.Tensor]()

    def store() -> None:
        pool.write(0, locations, values)

    def check_stored() -> None:
        rows = locations.cpu()
        for role, expected in stored.items():
            memory = bits(pool.view(role, 0)).cpu()
            need_equal(f"entries of {role}", memory[rows // entries, rows % entries], expected)

    def load() -> None:
        read.update(zip(rows.roles, pool.read_roles(rows.roles, 0, locations)))

    def check_loaded() -> None:
        for role in rows.roles:
            scales, expected = stored.get(scale_role(role)), stored[role]
            if scales is not None:
                expected = dequantise(expected, scales, torch.bfloat16)
            need_equal(f"entries of {role}", read[role], expected)

    reference = plain_copy(context.device, nbytes)
    if group == "store":
        return Work(store, reference, check_stored)
    store()
    return Work(load, reference, check_loaded)


def _stored(pool: KVPool, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The entries that the pool must hold, computed on the host."""
    entries = {}
    for role, floats in values.items():
        entries[role], scales = floats.cpu(), scale_role(role)
        if (pool.owner, 0, scales) in pool.layout.region_by_key:
            kind, view = pool.view(role, 0).dtype, pool.view(scales, 0)
            entries |= zip((role, scales), quantise(floats.cpu(), view.shape[-1], view.dtype, kind))
    return entries


def open_move(pages: int, placement: Placement, ids: str, context: BenchContext) -> Work:
    """Pages of an MLA pool moved in all layers. The pool checks and copies ids on the host."""
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


def open_runs(group: str, count: int, width: int, context: BenchContext) -> Work:
    """Runs in random order, gathered into one contiguous buffer or scattered from it."""
    apart, whole = (context.device.allocate(n * width) for n in (2 * count, count))
    slots = np.random.default_rng(0).permutation(2 * count)[:count]
    runs, places = noise(count, width), torch.from_numpy(slots).to(apart.device)
    addresses = apart.data_ptr() + slots * width, whole.data_ptr() + np.arange(count) * width
    if group == "gather":
        apart.view(-1, width)[places] = runs.to(apart.device)
        src, dst = addresses
    else:
        whole.view(-1, width).copy_(runs)
        dst, src = addresses

    def check() -> None:
        copied = whole.view(-1, width) if group == "gather" else apart.view(-1, width)[places]
        need_equal("runs", copied, runs)

    ours = partial(context.device.copy_runs, src, dst, np.full(count, width, dtype=np.int64))
    return Work(ours, plain_copy(context.device, count * width), check)
