"""Checks of CUDA graphs: captured writes, reads and copies, replayed with other ids and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvpool.device import Device
from kvpool.testing.case import fail
from kvpool.testing.pools import POOLS

REPLAYS = 3
GRAPH_POOLS = ("mha bf16", "mha hnd fp8", "mla fp8", "mha mxfp8")
Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""Runs work once, captures it again, and returns what replays it."""


def no_graphs(device: Device) -> str | None:
    """Why these checks are not for a device, or None."""
    if device.memory_kind != "cuda":
        return "not for this device: kvpool captures CUDA graphs only."
    return None


def captured_writes_and_reads_replay(device: Device) -> None:
    """3 of 3 replays write and read what a pool on the host holds."""
    with torch.cuda.device(device.allocate(1).device):  # captures are of the current device
        for pool in GRAPH_POOLS:
            rows_replay(device, pool, captured)


def captured_copies_replay(device: Device) -> None:
    """3 of 3 replays swap other items than were captured, and nothing else."""
    with torch.cuda.device(device.allocate(1).device):
        copies_replay(device, captured)


GRAPH_CHECKS = captured_writes_and_reads_replay, captured_copies_replay


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


def rows_replay(device: Device, name: str, capture: Capture) -> None:
    """A captured write and the read after it, against a pool on the host."""
    pool, reference = POOLS[name](device=device.name), POOLS[name](device="cpu")
    roles = ("latent", "rope") if name.startswith("mla") else ("k", "v")
    memory = pool.view(roles[0], 1).device
    locations = torch.zeros(6, dtype=torch.int64, device=memory)
    values = {
        role: torch.zeros(6, *pool.view(role, 1).shape[2:], dtype=torch.bfloat16, device=memory)
        for role in roles
    }
    reads: list[torch.Tensor] = []

    def work() -> None:
        pool.write(1, locations, values)
        reads[:] = [pool.read(role, 1, locations) for role in roles]

    replay = capture(work)
    random = torch.Generator().manual_seed(0)
    for number in range(REPLAYS):
        locations.copy_(torch.randperm(30, generator=random)[:6])
        for tensor in values.values():
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        on_host = {role: tensor.cpu() for role, tensor in values.items()}
        reference.write(1, locations.cpu(), on_host)
        replay()
        for role, read in zip(roles, reads):
            if not torch.equal(read.cpu(), reference.read(role, 1, locations.cpu())):
                fail(
                    f"pool {name}, replay {number + 1} of {REPLAYS}: {role} is not what was "
                    "written."
                )


def copies_replay(device: Device, capture: Capture) -> None:
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
        for before, view in zip(expected, views):
            before[ids[::-1]] = before[ids]
            if not torch.equal(view.cpu(), before):
                fail(f"a replay that copies items {ids} to {ids[::-1]}: other bytes.")
