"""Pages of which only vLLM's kernel knows the inside: whole between equals, or refused by name."""

from __future__ import annotations

import pytest
import torch

from disagg.connectors.formats import whole_items
from disagg.connectors.tensors import UnknownFormat
from disagg.connectors.vllm.layers import Platform
from disagg.connectors.vllm.layout import engine_layout
from disagg.plan import IncompatibleLayouts, plan
from kvpool.layout import LayoutError, RequestAddress, Span
from kvpool.layout.formats import Heads
from tests import oracle
from tests.disagg.connectors.vllm import engines, kernels

D, BLOCKS, BF16 = 16, 7, torch.bfloat16
HERE = Platform(version="0.32.0")
NAME = engines.name(0)


class Side:
    """A rank of an engine with one layer: its layout and its memory."""

    def __init__(
        self, backend, content, *, order="LBHNC", block=16, dtype=BF16, mode="NONE", heads=2, tp=1,
        rank=0, here=HERE, dcp=1, **said
    ):  # fmt: skip
        shape = BLOCKS, heads // tp, block, content
        self.memory, (view,) = kernels.views(order, 1, shape, dtype)
        spec = engines.spec(
            "FullAttentionSpec", block, num_kv_heads=heads // tp, head_size=D,
            kv_quant_mode=type("Mode", (), {"name": mode}),
        )  # fmt: skip
        config = engines.config(
            {NAME: engines.module(backend, **said)}, tp=tp, rank=rank, kv_heads=heads,
            decode_context_parallel_size=dcp,
        )  # fmt: skip
        caches = engines.caches(BLOCKS, [((NAME,), spec)])
        self.layout = engine_layout(config, caches, {NAME: view}, here).layout
        self.bytes = self.memory.view(-1).view(torch.uint8)
        self.view = view


def cpu(isa="amx", **more):
    return Side("CPU_ATTN", 2 * D, **{"isa": isa, **more})


def int4(**more):
    held = {"dtype": torch.uint8, "mode": "INT4_PER_TOKEN_HEAD", **more}
    return Side("TRITON_ATTN", D + 8, kv_cache_dtype="int4_per_token_head", **held)


def hand_over(sources, dest, theirs=(3, 1, 4), ours=(2, 5, 6), tokens=40):
    """Moves a request by the plan, between memories full of noise."""
    for seed, side in enumerate((*sources, dest)):
        side.bytes.random_(0, 255, generator=torch.Generator().manual_seed(seed))
    held = [oracle.over(each.layout, each.bytes.numpy()) for each in (*sources, dest)]
    there = RequestAddress(tokens, {"kv0": Span(list(theirs))})
    here = RequestAddress(tokens, {"kv0": Span(list(ours))})
    before = dest.view.clone()
    for batch in plan([each.layout for each in sources], dest.layout).bind_all(
        [there] * len(sources), here
    ):
        oracle.apply(batch, held[:-1], held[-1])
    expected = before
    heads = torch.cat([source.view for source in sources], dim=1)
    first = dest.layout.regions[0].axis("head")
    start = first.start if first else 0
    expected[list(ours)] = heads[list(theirs), start : start + dest.view.shape[1]]
    assert dest.view.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "LBNHC"])
def test_blocks_move_whole_between_equal_engines(order):
    hand_over([int4(order=order)], int4(order=order))


@pytest.mark.parametrize("isa", ["amx", "vxe", "of tomorrow"])
def test_heads_of_cpu_attention_move_between_ranks_of_one_isa(isa):
    hand_over([cpu(isa)], cpu(isa))
    hand_over([cpu(isa, tp=2, rank=rank) for rank in range(2)], cpu(isa))
    hand_over([cpu(isa)], cpu(isa, tp=2, rank=1))


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (cpu(), cpu("vec"), ["layer 0 k: ", "vllm 0.32.0 CPU_ATTN amx bfloat16 16+16"]),
        (cpu(), cpu("vxe"), ["CPU_ATTN amx", "CPU_ATTN vxe"]),
        (cpu(), cpu(here=Platform(version="0.33.0")), ["vllm 0.32.0", "vllm 0.33.0"]),
        (cpu(), cpu(dtype=torch.float16), ["amx bfloat16", "amx float16"]),
        (cpu(), cpu(block=32), ["layer 0 k", "16", "32"]),
        (int4(), int4(order="LBNHC"), ["2 heads x 16 tokens", "16 tokens x 2 heads"]),
        (int4(), int4(block=32), ["x 16 tokens x", "x 32 tokens x"]),
        (int4(tp=2), int4(), ["1 heads x", "2 heads x"]),
        (int4(), Side("TRITON_ATTN", 2 * D), ["layer 0 k"]),
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
        (lambda: Side("TURBOQUANT", D, mode="TURBOQUANT_K8V4"), ["TURBOQUANT", "TRITON_ATTN"]),
        (lambda: Side("FLASHINFER", D, mode="NVFP4"), ["pages of NVFP4", "INT4_PER_TOKEN_HEAD"]),
        (lambda: Side("FLASH_ATTN", D, mode="INT8_PER_TOKEN_HEAD"), ["INT8_PER", "of TRITON_ATTN"]),
    ],
)
def test_what_is_decided_elsewhere_is_refused_at_start(make, words):
    with pytest.raises(UnknownFormat) as refused:
        make()
    assert all(word in str(refused.value) for word in [NAME, *words]), refused.value


def test_blocks_that_lie_among_other_layers_are_refused():
    _, (view, _) = kernels.views("BHLNC", 2, (BLOCKS, 2, 16, D + 8), torch.uint8)
    with pytest.raises(UnknownFormat, match="they lie among others"):
        whole_items(view, "int4", Heads(0, 2, 2))


def test_such_pages_are_refused_where_ranks_share_positions():
    with pytest.raises(LayoutError, match="layer 0 k: packing"):
        cpu(heads=2, tp=2, dcp=2)
