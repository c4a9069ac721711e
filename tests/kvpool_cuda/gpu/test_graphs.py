"""Writes, reads and copies inside CUDA graphs, with other ids at every replay."""

from __future__ import annotations

import pytest
import torch

from tests.pools import PACKED

GPU = torch.device("cuda:0")


def captured(work):
    """A graph of `work`, which first runs on another stream to compile everything."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = work()
    return graph, made


@pytest.mark.parametrize("name", ["mha bf16", "mha hnd fp8", "mla fp8", "mha mxfp8"])
def test_a_graph_replays_writes_and_reads_with_new_inputs(name):
    pool, reference = PACKED[name](device="cuda:0"), PACKED[name]()
    roles = ("latent", "rope") if name.startswith("mla") else ("k", "v")
    where = torch.zeros(6, dtype=torch.int64, device=GPU)
    values = {
        role: torch.zeros(6, *pool.view(role, 1).shape[2:], dtype=torch.bfloat16, device=GPU)
        for role in roles
    }

    def work():
        pool.write(1, where, values)
        return [pool.read(role, 1, where) for role in roles]

    graph, read = captured(work)
    for seed in range(3):
        torch.manual_seed(seed)
        where.copy_(torch.randperm(30)[:6])
        for each in values.values():
            each.copy_(torch.randn(each.shape))
        reference.write(1, where.cpu(), {role: each.cpu() for role, each in values.items()})
        graph.replay()
        for role, found in zip(roles, read):
            assert torch.equal(found.cpu(), reference.read(role, 1, where.cpu()))


def test_a_graph_replays_copies_with_new_ids():
    pool = PACKED["nsa bf16"](device="cuda:0")
    src, dst = (torch.tensor(ids, device=GPU) for ids in ([1, 2], [2, 3]))
    graph, _ = captured(lambda: pool.copy_items("kv", src, dst))
    for ids in ([4, 5], [5, 4]):
        random = torch.randint(0, 256, (pool.nbytes,), dtype=torch.uint8)
        pool._slab.copy_(random)
        before = [pool.item_bytes_view(buffer).cpu() for buffer in pool.layout.buffers]
        src.copy_(torch.tensor(ids))
        dst.copy_(torch.tensor(ids[::-1]))
        graph.replay()
        for buffer, was in zip(pool.layout.buffers, before):
            was[ids[::-1]] = was[ids]
            assert torch.equal(pool.item_bytes_view(buffer).cpu(), was)


def test_a_first_copy_inside_a_capture_is_refused():
    pool = PACKED["mla bf16"](device="cuda:0", num_pages=17)
    ids = torch.tensor([1, 2], device=GPU)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="once before the capture"), torch.cuda.graph(graph):
        pool.copy_items("kv", ids, ids)
