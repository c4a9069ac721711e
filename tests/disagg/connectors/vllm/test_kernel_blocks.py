"""Hybrid models on a GPU: a block of vLLM's is several blocks of an attention kernel, or one state.

Tensors lie as vLLM's, on a CPU. Kernels write, two workers hand over, kernels read.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pytest
import torch

from disagg.connectors.blocks import BlockGroup, block_table
from disagg.connectors.source import Source
from disagg.connectors.vllm.layout import engine_layout
from disagg.connectors.vllm.registered import Platform
from tests.disagg.connectors.vllm import engines, kernels

BLOCKS, TOKENS, D, HEADS, WINDOW = 12, 140, 8, 2, 20
FULL, SHORT, STATES = (0, 1), (2, 3), (4, 5)
HAD, HAS = 254, 255  # what lies in the memory of prefill and of decode; values are 0 to 253


@dataclass(frozen=True)
class Cut:
    """Blocks of `tokens` tokens, `ratio` kernel blocks each, of heads one by one (HND) or not."""

    ratio: int
    tokens: int = 66
    heads_first: bool = True


class Memory:
    """Tensor n, `[block, byte]`, holds layer n of every group. `blocks`: a request's, by group."""

    def __init__(self, cut: Cut, blocks: tuple[list[int], ...], byte: int) -> None:
        page = cut.tokens * HEADS * 2 * D * 2
        self.raw = torch.full((2, BLOCKS, page), byte, dtype=torch.uint8)
        self.views, self.cut = {}, cut
        inner = (HEADS, cut.tokens // cut.ratio) if cut.heads_first else (-1, HEADS)
        for n, tensor in enumerate(self.raw):
            view = tensor.view(torch.bfloat16).view(BLOCKS * cut.ratio, *inner, 2 * D)
            view = view if cut.heads_first else view.transpose(1, 2)
            self.views |= dict.fromkeys((engines.name(FULL[n]), engines.name(SHORT[n])), view)
            slots = tensor.view(torch.int8)[:, None, None, : engines.GDN_BYTES]
            self.views[engines.name(STATES[n])] = slots
        full, short, state = blocks
        split = [
            [b * cut.ratio + j for b in ids for j in range(cut.ratio)] for ids in (full, short)
        ]
        self.kernels = []
        for ids, layers, prefix, first in zip(
            split, (FULL, SHORT), ("", "swa."), (0, TOKENS - WINDOW + 1)
        ):
            for layer in layers:
                view = self.views[engines.name(layer)]
                made = kernels.KeysAndValues(view, layer, ids, range(HEADS), prefix=prefix, key=D)
                self.kernels.append((made, range(first, TOKENS)))
        for layer in STATES:
            made = engines.delta_net(self.views[engines.name(layer)], layer, *state)
            self.kernels.append((made, range(1)))

    def write(self) -> None:
        for kernel, tokens in self.kernels:
            kernel.write(tokens)

    def dead(self, entries: int) -> torch.Tensor:
        """Which bytes are of positions behind the request's, in its last item of `entries`."""
        before = self.raw.clone()
        self.raw.zero_()
        for kernel, _ in self.kernels[:4]:
            for token in range(TOKENS, -(-TOKENS // entries) * entries):
                for _, _, cell in kernel.cells(*kernel.at(token)):
                    cell.view(torch.uint8).fill_(1)
        marks = self.raw.bool()
        self.raw.copy_(before)
        return marks


class Side(engines.WorkerSide):
    """A worker over such memory."""

    def __init__(self, memory: Memory, *, produces: bool) -> None:
        cut = memory.cut
        heads = {"num_kv_heads": HEADS, "head_size": D}
        short = engines.spec("SlidingWindowSpec", cut.tokens, sliding_window=WINDOW, **heads)
        specs = [
            ([*map(engines.name, FULL)], engines.spec("FullAttentionSpec", cut.tokens, **heads)),
            ([*map(engines.name, SHORT)], short),
            ([*map(engines.name, STATES)], engines.spec("MambaSpec", cut.tokens, **engines.GDN)),
        ]
        modules = {engines.name(n): engines.module("FLASHINFER") for n in (*FULL, *SHORT)}
        modules |= {engines.name(n): None for n in STATES}
        self.described = engine_layout(
            engines.config(modules), engines.caches(BLOCKS, specs), memory.views, Platform()
        )
        seen = self.described.layout, self.described.groups, self.described.layers
        super().__init__(*seen, produces=produces, verify="checksum")


@pytest.fixture
def opened():
    """Makes sides, which are closed when the test has ended."""
    with ExitStack() as stack:
        yield lambda memory, produces: stack.enter_context(Side(memory, produces=produces))


EARLY = [7, 2], [5, 4], [3]  # of the first 70 tokens
THERE = [7, 2, 9], [0, 4, 11], [3]  # block 5 has left the window
HERE = [1, 8, 5], [0, 10, 2], [6]
SMALL = [1, 8, 5, 3, 9], [0, 0, 0, 10, 2], [6]


@pytest.mark.parametrize(
    ("one", "other", "here"),
    [
        (Cut(33), Cut(33), HERE),
        (Cut(33), Cut(33, heads_first=False), HERE),
        (Cut(1, heads_first=False), Cut(33), HERE),
        (Cut(11), Cut(4, tokens=32), SMALL),
    ],
    ids=str,
)
def test_kernel_blocks_beside_states_arrive_in_blocks_cut_otherwise(one, other, here, opened):
    source, dest = Memory(one, THERE, HAD), Memory(other, here, HAS)
    expected = Memory(other, here, HAS)
    source.write()
    expected.write()
    prefill, decode = opened(source, produces=True), opened(dest, produces=False)
    before = source.raw.clone()
    prefill.step(sends=[engines.send(EARLY, 0, 70, last=False)])
    source_of = Source("room", (prefill.rank.prefill.address,))
    decode.step(receives=[engines.receive(source_of, here, 0, TOKENS)])
    prefill.step(sends=[engines.send(THERE, 70, TOKENS, last=True)])
    engines.until(lambda: decode.received, prefill, decode)
    assert decode.received == {"d"} and not decode.failed
    for kernel, tokens in dest.kernels:
        kernel.assert_holds(tokens)
    entries = decode.described.layout.spaces[0].entries_per_item
    may_differ = dest.dead(entries) & (dest.raw == HAD)
    assert torch.equal(dest.raw[~may_differ], expected.raw[~may_differ])
    assert torch.equal(source.raw, before)


def test_each_group_says_how_many_items_its_blocks_are(opened):
    side = opened(Memory(Cut(33), THERE, HAD), produces=True)
    assert side.described.groups == (
        BlockGroup("kv0", 33, 66), BlockGroup("swa1", 33, 66), BlockGroup("state2", 1, 66, "first"),
    )  # fmt: skip
    said = {s.name: (s.items_per_block, s.reserved) for s in side.described.layout.spaces}
    assert said == {"kv0": (33, 33), "swa1": (33, 33), "state2": (1, 1)}
    assert side.described.layout.block_pools == {"blocks": ("kv0", "swa1", "state2")}
    spans = block_table(side.described.groups, THERE, TOKENS).spans
    assert spans["kv0"].ids[:3].tolist() == [231, 232, 233] and spans["kv0"].ids.size == 99
    assert spans["swa1"].first_item == 33 and spans["swa1"].ids[[0, -1]].tolist() == [132, 395]
    assert spans["state2"].ids.tolist() == [3]


@pytest.mark.parametrize("cut", [Cut(1), Cut(33, heads_first=False)], ids=str)
def test_blocks_that_can_be_read_as_one_item_are(cut, opened):
    side = opened(Memory(cut, THERE, HAD), produces=True)
    assert [group.blocks for group in side.described.groups] == [1, 1, 1]
