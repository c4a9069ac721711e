"""vLLM's ranks that share positions (`--decode-context-parallel-size`) hand over to ranks that
share them otherwise, or not at all. Kernels write, endpoints move, kernels read.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.connectors.blocks import block_table
from disagg.connectors.tensors import UnknownFormat
from disagg.connectors.vllm.layout import engine_layout
from disagg.connectors.vllm.registered import Platform
from kvpool.layout import Interleave, RequestAddress
from tests.disagg.connectors.vllm import engines, kernels

D, BLOCKS, TOKENS = 16, 40, 75
ATTN, MLA, GDN = engines.name(0), engines.name(1), engines.name(2)


@dataclass(frozen=True)
class Ranks:
    """An engine's ranks: TP, DCP, stretches, tokens of a rank's block, PCP, KV heads of the model.
    vLLM wants TP to be DCP times the KV heads, so that ranks that share positions have equal heads.
    """

    tp: int = 1
    dcp: int = 1
    size: int = 1
    block: int = 8
    pcp: int = 1
    heads: int = 1

    @property
    def count(self) -> int:
        return self.tp * self.pcp


class Rank:
    """One rank: a layer of KV heads, one of latents, and a state that is not shared."""

    def __init__(self, side: Ranks, rank: int, seed: int) -> None:
        tp_rank, pcp_rank = rank % side.tp, rank // side.tp
        held, first = max(1, side.heads // side.tp), tp_rank * side.heads // side.tp
        heads = range(first, first + held)
        shapes = {
            ATTN: (BLOCKS, held, side.block, 2 * D),
            MLA: (BLOCKS, 1, side.block, engines.LATENT + engines.ROPE),
        }
        self.views = {
            name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()
        }
        self.views[GDN] = torch.zeros(BLOCKS, 1, 1, engines.GDN_BYTES, dtype=torch.int8)
        block = side.block
        specs = [
            ([ATTN], engines.spec("FullAttentionSpec", block, num_kv_heads=held, head_size=D)),
            ([MLA], engines.spec("MLAAttentionSpec", block, num_kv_heads=1, head_size=40)),
            ([GDN], engines.spec("MambaSpec", block, tp_replicated=True, **engines.GDN)),
        ]
        modules = {ATTN: engines.module("FLASH_ATTN"), MLA: engines.module("TRITON_MLA"), GDN: None}
        made = engines.config(
            modules, kv_heads=side.heads, tp=side.tp, rank=rank,
            decode_context_parallel_size=side.dcp, prefill_context_parallel_size=side.pcp,
            cp_kv_cache_interleave_size=side.size,
        )  # fmt: skip
        self.described = engine_layout(made, engines.caches(BLOCKS, specs), self.views, Platform())
        order = np.random.default_rng(seed).permutation(np.arange(1, BLOCKS))
        count = -(-TOKENS // (side.block * side.dcp))
        ids = [order[:count].tolist(), order[count : 2 * count].tolist(), [int(order[-1])]]
        place = tp_rank * side.pcp + pcp_rank  # `initialize_model_parallel`: PCP first, then TP
        share = side.size, place % side.dcp, side.dcp
        self.ids = ids
        self.kernels = [
            kernels.KeysAndValues(self.views[ATTN], 0, ids[0], heads, share=share, key=D),
            kernels.LatentRows(self.views[MLA], 1, ids[1], share=share, latent=engines.LATENT),
        ]
        self.state = engines.delta_net(self.views[GDN], 2, *ids[2])

    def table(self) -> RequestAddress:
        return block_table(self.described.groups, self.ids, TOKENS)

    def write(self) -> None:
        for kernel in self.kernels:
            kernel.write(range(TOKENS))
        self.state.write(range(1))

    def assert_holds(self) -> None:
        for kernel in self.kernels:
            kernel.assert_holds(range(TOKENS))
        self.state.assert_holds(range(1))


SIDES = [
    (Ranks(tp=2, dcp=2), Ranks()),
    (Ranks(), Ranks(tp=2, dcp=2)),
    (Ranks(tp=4, dcp=2, size=4, heads=2), Ranks(block=16, heads=2)),
    (Ranks(tp=4, dcp=2, size=8), Ranks(tp=4, dcp=4, size=1, block=4)),  # two replicas to four ranks
    (Ranks(tp=4, dcp=2, size=2, heads=2), Ranks(tp=2, block=32, heads=2)),
    (Ranks(pcp=2, dcp=2, size=4), Ranks(tp=2, pcp=2, dcp=4)),
]


@pytest.mark.parametrize(("one", "other"), SIDES, ids=str)
def test_ranks_that_share_positions_hand_over_to_other_ranks(one, other):
    sources = [Rank(one, rank, 1) for rank in range(one.count)]
    dests = [Rank(other, rank, 2) for rank in range(other.count)]
    for source in sources:
        source.write()
    with ExitStack() as stack:

        def end(kind, rank, **options):
            made = kind(rank.described.layout, create_engine("local"), **options)
            return stack.enter_context(made)

        prefills = [end(PrefillEndpoint, source) for source in sources]
        decodes = [end(DecodeEndpoint, each, ranks=len(dests), verify="checksum") for each in dests]
        for decode, dest in zip(decodes, dests):
            decode.connect([prefill.address for prefill in prefills], timeout=30)
            decode.receive("r", dest.table())
        for prefill, source in zip(prefills, sources):
            prefill.send("r", source.table())
        for decode, dest in zip(decodes, dests):
            assert decode.wait("r", 30) is KVPoll.Success, decode.failure("r")
            dest.assert_holds()


def test_blocks_of_shared_groups_hold_positions_of_every_rank():
    described = Rank(Ranks(tp=4, dcp=2, size=4, heads=2), 3, 1).described
    assert [(group.space, group.tokens) for group in described.groups] == [
        ("kv0", 16), ("kv1", 16), ("state2", 8),
    ]  # fmt: skip
    assert described.layers == {ATTN: ("target", 0), MLA: ("target", 1), GDN: ("target", 2)}
    shares = {space.name: space.interleave for space in described.layout.spaces}
    assert shares == {"kv0": Interleave(4, 1, 2), "kv1": Interleave(4, 1, 2), "state2": None}
    assert described.layout.region_by_key["target", 0, "k"].axis("head").start == 1


@pytest.mark.parametrize(
    ("side", "words"),
    [
        (Ranks(tp=2, dcp=2, size=3), "cp_kv_cache_interleave_size 3: blocks of 8 tokens"),
        (Ranks(pcp=2), "prefill_context_parallel_size 2 with decode_context_parallel_size 1"),
    ],
)
def test_ranks_whose_positions_are_not_known_are_refused(side, words):
    with pytest.raises(UnknownFormat, match=words):
        Rank(side, 0, 1)
