"""Work that cannot be captured in a CUDA graph. What can is in `kvpool.testing.checks.hardware`."""

from __future__ import annotations

import pytest
import torch

from tests.pools import PACKED

GPU = torch.device("cuda:0")


def test_a_first_copy_inside_a_capture_is_refused():
    pool = PACKED["mla bf16"](device="cuda:0", num_pages=17)
    ids = torch.tensor([1, 2], device=GPU)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="once before the capture"), torch.cuda.graph(graph):
        pool.copy_items("kv", ids, ids)
