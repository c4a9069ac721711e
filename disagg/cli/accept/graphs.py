"""Graphs that capture writes, reads and copies, replayed with other ids and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from disagg.cli.accept.report import NOT_HERE, Row
from disagg.cli.accept.scope import Scope, Wrong
from kvpool.device import Device
from kvpool.testing.pools import POOLS

REPLAYS = 3
Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Runs work once, captures it again, and returns what replays it."""


def graph_rows(scope: Scope) -> list[Row]:
    """Writes and reads of some packings, and copies of items."""
    if scope.device.memory_kind != "cuda":
        return [Row("graphs", NOT_HERE, "not for this device: kvpool captures CUDA graphs only.")]
    device = scope.device
    with torch.cuda.device(device.allocate(1).device):  # captures are of the current device
        rows = [
            scope.tried(f"writes and reads, {pool}", partial(rows_replay, device, pool, captured))
            for pool in ("mha bf16", "mha hnd fp8", "mla fp8", "mha mxfp8")
        ]
        copies = partial(copies_replay, device, captured)
        return [*rows, scope.tried("copies of items, nsa bf16", copies)]


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """Captures work in a CUDA graph, after a run on another stream that compiles it."""
    cuda: Any = torch.cuda
    aside = cuda.Stream()
    aside.wait_stream(cuda.current_stream())
    with cuda.stream(aside):
        work()
    cuda.current_stream().wait_stream(aside)
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        work()
    replay: Callable[[], object] = graph.replay
    return replay


def rows_replay(device: Device, name: str, capture: Capture) -> str:
    """A captured write and the read after it, against a pool on the host."""
    pool, reference = (POOLS[name](device=each) for each in (device.name, "cpu"))
    roles = ("latent", "rope") if name.startswith("mla") else ("k", "v")
    memory = pool.view(roles[0], 1).device
    where = torch.zeros(6, dtype=torch.int64, device=memory)
    values = {
        role: torch.zeros(6, *pool.view(role, 1).shape[2:], dtype=torch.bfloat16, device=memory)
        for role in roles
    }
    found: list[torch.Tensor] = []

    def work() -> None:
        pool.write(1, where, values)
        found[:] = [pool.read(role, 1, where) for role in roles]

    replay = capture(work)
    random = torch.Generator().manual_seed(0)
    for number in range(REPLAYS):
        where.copy_(torch.randperm(30, generator=random)[:6])
        for each in values.values():
            each.copy_(torch.randn(each.shape, generator=random))
        given = {role: each.cpu() for role, each in values.items()}
        reference.write(1, where.cpu(), given)
        replay()
        for role, read in zip(roles, found):
            if not torch.equal(read.cpu(), reference.read(role, 1, where.cpu())):
                raise Wrong(f"replay {number + 1} of {REPLAYS}: {role} is not what was written.")
    return f"{REPLAYS} of {REPLAYS} replays wrote and read what a pool on the host holds"


def copies_replay(device: Device, capture: Capture) -> str:
    """A captured copy of two items, all bytes of the pool against the bytes before it."""
    pool = POOLS["nsa bf16"](device=device.name)
    views = [pool.item_bytes_view(buffer) for buffer in pool.layout.buffers]
    src, dst = (torch.tensor(ids, device=views[0].device) for ids in ([1, 2], [2, 3]))
    replay = capture(lambda: pool.copy_items("kv", src, dst))
    random = torch.Generator().manual_seed(0)
    for ids in ([4, 5], [5, 4], [1, 6]):
        for view in views:
            view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=random))
        expected = [view.cpu().clone() for view in views]
        src.copy_(torch.tensor(ids))
        dst.copy_(torch.tensor(ids[::-1]))
        replay()
        for was, view in zip(expected, views):
            was[ids[::-1]] = was[ids]
            if not torch.equal(view.cpu(), was):
                raise Wrong(f"a replay that copies items {ids} to {ids[::-1]}: other bytes.")
    return "3 of 3 replays swapped other items than were captured, and nothing else"
