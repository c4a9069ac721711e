"""Pages of which only vLLM's kernel knows the inside: whole between equals, or refused by name."""

from __future__ import annotations

import pytest
import torch

from disagg.connectors.tensors import UnknownFormat
from disagg.connectors.vllm.registered import Platform
from disagg.plan import IncompatibleLayouts, plan
from kvpool.layout import LayoutError, RequestAddress, Span
from tests import oracle
from tests.disagg.connectors.vllm.engines import D, Layers, name


def cpu(isa="amx", **more):
    return Layers("CPU_ATTN", 2 * D, **{"isa": isa, **more})


def int4(**more):
    said = {"mode": "INT4_PER_TOKEN_HEAD", "kv_cache_dtype": "int4_per_token_head"}
    return Layers("TRITON_ATTN", D + 8, **{"dtype": torch.uint8, **said, **more})


def hand_over(sources, dest, theirs=(3, 1, 4), ours=(2, 5, 6), tokens=40):
    """Moves a request by the plan, between memories full of noise."""
    for seed, side in enumerate((*sources, dest)):
        memory = side.physical.view(-1).view(torch.uint8)
        memory.random_(0, 255, generator=torch.Generator().manual_seed(seed))
    (view,) = dest.views
    expected = view.clone()
    tables = [RequestAddress(tokens, {"kv0": Span(list(ids))}) for ids in (theirs, ours)]
    copies = plan([source.layout for source in sources], dest.layout)
    for batch in copies.bind_all([tables[0]] * len(sources), tables[1]):
        oracle.apply(batch, [source.state for source in sources], dest.state)
    heads = torch.cat([source.views[0] for source in sources], dim=1)
    axis = dest.layout.regions[0].axis("head")
    start = axis.start if axis else 0
    expected[list(ours)] = heads[list(theirs), start : start + view.shape[1]]
    assert view.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "LBNHC"])
def test_blocks_move_whole_between_equal_engines(order):
    hand_over([int4(order=order)], int4(order=order))


@pytest.mark.parametrize("isa", ["amx", "of tomorrow"])
def test_heads_of_cpu_attention_move_between_ranks_of_one_isa(isa):
    hand_over([cpu(isa, tp=2, rank=rank) for rank in range(2)], cpu(isa))
    hand_over([cpu(isa)], cpu(isa, tp=2, rank=1))


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (cpu(), cpu("vec"), ["layer 0 k: ", "vllm 0.32.0 CPU_ATTN amx bfloat16 16+16"]),
        (cpu(), cpu("vxe"), ["CPU_ATTN amx", "CPU_ATTN vxe"]),
        (cpu(), cpu(platform=Platform(version="0.33.0")), ["vllm 0.32.0", "vllm 0.33.0"]),
        (cpu(), cpu(dtype=torch.float16), ["amx bfloat16", "amx float16"]),
        (cpu(), cpu(block=32), ["layer 0 k", "16", "32"]),
        (int4(), int4(order="LBNHC"), ["2 heads x 16 tokens", "16 tokens x 2 heads"]),
        (int4(), int4(block=32), ["x 16 tokens x", "x 32 tokens x"]),
        (int4(tp=2), int4(), ["1 heads x", "2 heads x"]),
        (int4(), Layers("TRITON_ATTN", 2 * D), ["layer 0 k"]),
    ],
)
def test_unequal_engines_are_refused_by_both_names(one, other, words):
    with pytest.raises(IncompatibleLayouts) as refused:
        plan([one.layout], other.layout)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: cpu(""), ["isa unknown packs bfloat16"]),
        (lambda: cpu("rvv"), ["isa rvv packs bfloat16"]),
        (lambda: cpu("neon"), ["isa neon packs bfloat16", "float32"]),
        (lambda: cpu(order="LBNHC"), ["are not contiguous"]),
        (lambda: int4(order="BHLNC", layers=2), ["items that lie among others"]),
        (lambda: Layers("TURBOQUANT", D, mode="TURBOQUANT_K8V4"), ["TURBOQUANT", "TRITON_ATTN"]),
        (lambda: Layers("FLASH_ATTN", D, mode="NVFP4"), ["pages of NVFP4", "NVFP4 of FLASHINFER"]),
        (
            lambda: Layers("FLASH_ATTN", D, mode="INT8_PER_TOKEN_HEAD"),
            ["INT8_PER", "of TRITON_ATTN"],
        ),
    ],
)
def test_what_is_decided_elsewhere_is_refused_at_start(make, words):
    with pytest.raises(UnknownFormat) as refused:
        make()
    assert all(word in str(refused.value) for word in [name(0), *words]), refused.value


def test_such_pages_are_refused_where_ranks_share_positions():
    with pytest.raises(LayoutError, match="layer 0 k: packing"):
        cpu(heads=2, tp=2, dcp=2)
