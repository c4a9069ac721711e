"""Host work that is independent of the device: allocation, plans and binding, against plain Python.
Each case is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from disagg.cli.bench.case import BenchCase, Work, WrongBytes
from disagg.cli.bench.memory import LAYERS, PAGE
from disagg.cli.bench.peer import BenchContext
from disagg.plan import TransferPlan, plan
from disagg.plan.bind import CopyBatch
from disagg.plan.cache import PlanCache
from kvpool import Allocator, DSv4Pool, MHAPool, MLAPool, RequestAddress, Span
from kvpool.layout import PoolLayout
from kvpool.layout.formats import Shard
from kvpool.models import declare, declare_draft
from tests.bench.plain import Lists, Run, regions, tuples

V4_PAGE = 256
RATIOS = [128, 128, *[4, 128] * 29, 4]
REQUESTS, BEFORE = 256, 131  # requests, and tokens that they have
SPACES = {"swa": 128, "c4": 64, "c128": 2, "c4.ring": 8, "c128.ring": 128}
PLAIN, NEW = "plain Python", "a new plan"
PLANNED_PAGES = 2048
Sides = Callable[[], tuple[list[PoolLayout], PoolLayout]]


def host_cases(quick: bool) -> Iterator[BenchCase]:
    """Every case; `quick` ones are small."""
    yield from allocator_cases()
    yield from plan_cases(ranks=64 if quick else 512)
    yield from bind_cases(pages=64 if quick else 2048)


def allocator_cases() -> Iterator[BenchCase]:
    """One more token for every request of a decode batch; bytes are those of the locations."""
    yield BenchCase(
        group="allocator",
        name=f"{REQUESTS} requests, DSv4",
        nbytes=8 * REQUESTS * len(SPACES),
        open=open_extend,
        bound=PLAIN,
        calls=50,
    )


def open_extend(context: BenchContext) -> Work:
    """A request has room for 8192 tokens, more than are timed."""
    pages = REQUESTS * 32
    allocator, lists = Allocator(dsv4(num_pages=pages + 1)), Lists(REQUESTS, pages)
    requests = [allocator.new_request() for _ in range(REQUESTS)]
    for _ in range(BEFORE):
        allocator.extend_batch(requests, 1)
        lists.extend()
    found: dict[str, Any] = {}

    def ours() -> None:
        found.update(allocator.extend_batch(requests, 1))

    def check() -> None:
        # the same entries, in differently numbered items, distinct between requests
        sizes = np.array([*SPACES.values()])
        located = np.stack([found[name][:, 0] for name in SPACES], axis=1)
        alike = (located % sizes == lists.extend() % sizes).all()
        if not alike or any(len(set(column)) < REQUESTS for column in located.T.tolist()):
            raise WrongBytes(f"locations of token {BEFORE} are not those expected.")

    return Work(ours, lists.extend, check)


def plan_cases(ranks: int) -> Iterator[BenchCase]:
    """New plans, and plans known from a peer of the same shape. Those of many ranks, a multiple of
    64, are for one of four ranks of decode.
    """
    few, many = (partial(deepseek_sides, count) for count in (8, ranks))
    draft = "DeepSeek-V3.2 and draft"
    alike = partial(head_sides, ranks)
    for name, opened, bound in (
        ("MLA", open_plan, "one request of plain Python"),
        (f"{draft}, 8 ranks", partial(open_new, few), PLAIN),
        (f"{draft}, {ranks} ranks", partial(open_new, many), PLAIN),
        (f"K and V, {ranks} ranks, no two alike", partial(open_new, alike), PLAIN),
        ("DSv4, known shape", partial(open_known, v4_sides), NEW),
        ("MLA from TP8 x PP2, known shape", partial(open_known, sharded_sides), NEW),
        (f"{draft}, 8 ranks, known shape", partial(open_known, few), NEW),
        (f"{draft}, {ranks} ranks, known shape", partial(open_known, many), NEW),
    ):
        yield BenchCase(group="plan", name=name, nbytes=0, open=opened, bound=bound)


def open_plan(context: BenchContext) -> Work:
    """A plan between two pools of 61 layers; the reference binds one request in plain Python."""
    pages = PLANNED_PAGES
    source, dest = mla_sides()
    ids = [{"kv": each.tolist()} for each in _ids(pages)]
    found: list[TransferPlan] = []

    def ours() -> None:
        found[:] = [plan([source], dest)]

    def check() -> None:
        explained = found[0].explain(pages * PAGE)
        expected = pages * PAGE * LAYERS * (512 + 64) * 2
        if explained.nbytes != expected:
            raise WrongBytes(f"the plan moves {explained.nbytes} bytes, not {expected}.")

    return Work(ours, partial(tuples, source, dest, ids), check)


def open_new(sides: Sides, context: BenchContext) -> Work:
    """A plan of layouts that have just been read; the reference finds the regions of all ranks in
    plain Python.
    """
    layouts = sides()
    tokens = 4 * PAGE
    found: list[TransferPlan] = []

    def ours() -> None:
        found[:] = [plan(*_as_read(*layouts))]

    def check() -> None:
        moved, needed = found[0].explain(tokens).nbytes, layouts[1].live_bytes(tokens)
        if moved != needed:
            raise WrongBytes(f"the plan moves {moved} bytes, not {needed}.")

    return Work(ours, partial(regions, *layouts), check)


def open_known(sides: Sides, context: BenchContext) -> Work:
    """A plan for layouts whose shapes are known, at other pointers."""
    sources, dest = sides()
    cache = PlanCache()
    cache.plan(sources, dest)
    others = [_read(replace(layout, generation="another life")) for layout in sources], _read(dest)
    found: list[TransferPlan] = []

    def ours() -> None:
        found[:] = [cache.plan(*others)]

    def check() -> None:
        anew = plan(*others)
        if not cache.hits or found[0].explain().rows != anew.explain().rows:
            raise WrongBytes("the known plan differs from a new one.")

    return Work(ours, lambda: plan(*_as_read(*others)), check)


def bind_cases(pages: int) -> Iterator[BenchCase]:
    """Binding of one request in shuffled pages; bytes are those of pointers and lengths."""
    tokens = pages * PAGE
    for name, runs, opened, calls in (
        (f"MLA, {LAYERS} x 1 page", LAYERS, partial(open_bind, 1), 0),
        (f"MLA, {LAYERS} x {pages} pages", LAYERS * pages, partial(open_bind, pages), 0),
        (f"MLA, {LAYERS} x {pages} pages, cold", LAYERS * pages, partial(open_bind, pages), 1),
        (f"DSv4, {tokens:,} tokens", v4_runs(tokens), partial(open_v4_bind, tokens), 0),
    ):
        yield BenchCase(
            group="bind", name=name, nbytes=24 * runs, open=opened, bound=PLAIN, calls=calls
        )


def open_bind(pages: int, context: BenchContext) -> Work:
    """61 layers of MLA."""
    layouts, ids = mla_sides(), _ids(pages)
    addresses = [RequestAddress(pages * PAGE, {"kv": Span(each)}) for each in ids]
    return _binding(layouts, addresses, LAYERS * pages)


def open_v4_bind(tokens: int, context: BenchContext) -> Work:
    """DeepSeek-V4: compressed latents and index keys, window latents, rings."""
    layouts = [dsv4().layout for _ in range(2)]
    addresses = []
    for pages, window, ring in zip(_ids(tokens // V4_PAGE), ([7, 3], [2, 9]), (2, 5)):
        spans = {"kv": Span(pages), "ring": Span(np.array([ring]))}
        spans["swa"] = Span(np.array(window), tokens // 128 - 2)
        addresses.append(RequestAddress(tokens, spans))
    return _binding(layouts, addresses, v4_runs(tokens))


def v4_runs(tokens: int) -> int:
    """Runs of a request whose last page of 256 tokens is full: window pages, pages of compressed
    entries, and the rings of overlapping windows.
    """
    overlaps, others = RATIOS.count(4), RATIOS.count(128)
    return LAYERS + (2 * overlaps + others) * (tokens // V4_PAGE) + 2 * overlaps


def _binding(layouts: Sequence[PoolLayout], addresses: Sequence[RequestAddress], runs: int) -> Work:
    source, dest = layouts
    transfer = plan([source], dest)
    ids = [{name: span.ids.tolist() for name, span in a.spans.items()} for a in addresses]
    found: list[CopyBatch] = []

    def ours() -> None:
        found[:] = [transfer.bind(0, *addresses)]

    def check() -> None:
        (batch,) = found
        needed = transfer.explain(addresses[0].num_tokens).nbytes
        if (batch.runs, batch.total) != (runs, needed):
            raise WrongBytes(
                f"{batch.total} bytes in {batch.runs} runs are bound, not {needed} in {runs}."
            )
        _need_within(batch, tuples(source, dest, ids))

    return Work(ours, partial(tuples, source, dest, ids), check)


def _need_within(batch: CopyBatch, items: Sequence[Run]) -> None:
    """Raises WrongBytes for a run that does not lie in one pair of items."""
    src, dst, nbytes = np.array(sorted(items), dtype=np.int64).T
    at = np.searchsorted(src, batch.src, side="right") - 1
    inside = batch.src + batch.nbytes <= src[at] + nbytes[at]
    wrong = ~inside | (batch.dst - batch.src != dst[at] - src[at])
    if wrong.any():
        raise WrongBytes(f"{int(wrong.sum())} of {batch.runs} runs lie in no pair of items.")


def mla_sides() -> list[PoolLayout]:
    """DeepSeek-V3's pool on both sides, without memory."""
    return [_mla(range(LAYERS)) for _ in range(2)]


def deepseek_sides(ranks: int) -> tuple[list[PoolLayout], PoolLayout]:
    """DeepSeek-V3.2 with its draft: ranks of prefill that are replicas, and one of decode."""
    declared = declare("deepseek_v32"), declare_draft("deepseek_v32")
    pools = (each.build(num_pages=8192, packing="fp8", device="meta") for each in declared if each)
    read = _read(PoolLayout.merge(*(pool.layout for pool in pools)))
    return [copy(read) for _ in range(ranks)], copy(read)


def head_sides(ranks: int) -> tuple[list[PoolLayout], PoolLayout]:
    """Stages of ten layers, of 64 ranks with a head each, and one of four ranks of decode."""
    layers = range(ranks // 64 * 10)
    stages = [layers[first : first + 10] for first in layers[::10]]
    sources = [_mha(stage, len(layers), Shard(rank, 64)) for stage in stages for rank in range(64)]
    return [_read(each) for each in sources], _read(_mha(layers, len(layers), Shard(0, 4)))


def v4_sides() -> tuple[list[PoolLayout], PoolLayout]:
    """DeepSeek-V4 on both sides."""
    return [dsv4().layout], dsv4().layout


def sharded_sides() -> tuple[list[PoolLayout], PoolLayout]:
    """Sixteen ranks of prefill in two stages, and one of decode."""
    stages = range(31), range(31, LAYERS)
    ranks = [_mla(layers, Shard(rank, 8)) for layers in stages for rank in range(8)]
    return ranks, _mla(range(LAYERS))


def dsv4(num_pages: int = 2049) -> DSv4Pool:
    """DeepSeek-V4 of 61 layers, without memory."""
    return DSv4Pool(
        compress_ratios=RATIOS,
        layers=range(LAYERS),
        page_size=V4_PAGE,
        packing="fp8",
        num_pages=num_pages,
        num_window_pages=4 * REQUESTS,
        num_slots=REQUESTS + 1,
        device="meta",
    )


def _mla(layers: range, shard: Shard = Shard()) -> PoolLayout:
    return MLAPool(
        layers=layers,
        total_kv_layers=LAYERS,
        num_pages=8192,
        page_size=PAGE,
        packing="bf16",
        device="meta",
        shard=shard,
    ).layout


def _mha(layers: range, total: int, shard: Shard) -> PoolLayout:
    return MHAPool(
        layers=layers,
        total_kv_layers=total,
        num_kv_heads=64,
        head_dim=128,
        num_pages=8192,
        page_size=PAGE,
        dtype="bf16",
        device="meta",
        shard=shard,
    ).layout


def _read(layout: PoolLayout) -> PoolLayout:
    """A layout as a peer reads it."""
    return PoolLayout.from_msgpack(layout.to_msgpack())


def _as_read(
    sources: Sequence[PoolLayout], dest: PoolLayout
) -> tuple[list[PoolLayout], PoolLayout]:
    """Layouts in which nothing has been looked up since they were read."""
    return list(map(copy, sources)), copy(dest)


def _ids(pages: int) -> list[Any]:
    """Pages in any order, on both sides."""
    random = np.random.default_rng(0)
    return [1 + random.permutation(2048)[:pages] for _ in range(2)]
