"""Pipeline stages of SGLang hand a request over through its queues and our KV manager, sender and
receiver, with tensor parallelism and drafts; every byte is compared with SGLang's own indexing of
its pools. test_pairs.py runs llama's stages in engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from tests.engines.sglang import oracle, queues, sides
from tests.engines.sglang.pairings import WINDOW, side
from tests.engines.sglang.queues import DECODE_ROW, PREFILL_ROW, Engine, Model
from tests.engines.sglang.test_drafts import mtp

TOKENS, PAGES, LAYERS = 83, 24, 8

WHOLE, HALVES = ((0, 8),), ((0, 4), (4, 8))
UNEVEN = (0, 3), (3, 8)
"""Of a hybrid's layers, those of attention are 3 and 7: the first stage has none of them."""
SHAPES = {  # the stages' layers and the ranks of each, on prefill and on decode
    "pp 2 to 1": (HALVES, 1, WHOLE, 1),
    "pp 1 to 2": (WHOLE, 1, HALVES, 1),
    "pp 2 to 2": (HALVES, 1, HALVES, 1),
    "pp 2 to 2, cut elsewhere": (HALVES, 1, UNEVEN, 1),
    "pp 2 with no attention to 1": (UNEVEN, 1, WHOLE, 1),
    "pp 2, tp 2 to 1": (HALVES, 2, WHOLE, 1),
    "pp 2 to tp 2": (HALVES, 1, WHOLE, 2),
    "tp 2 to pp 2": (WHOLE, 2, HALVES, 1),
    "pp 2, tp 2 to pp 2": (UNEVEN, 2, HALVES, 1),
}
Make = Callable[[int, int, int], Any]
"""A pool of layers from the first on, of a rank among several."""


def llama(first: int, count: int, ranks: int) -> Any:
    return sides.mha(heads=4 // ranks, layers=count, start=first)


def one_head(target: Any, ranks: int) -> Any:
    """All ranks hold the only head."""
    pool = sides.mha(heads=1, layers=1)
    pool.total_heads = 1
    return pool


MODELS: dict[str, tuple[Make, Callable[[Any, int], Any], int]] = {  # target, draft, and its heads
    "llama": (llama, lambda target, ranks: sides.mha(heads=2 // ranks, layers=1), 2),
    "llama, a draft of one head": (llama, one_head, 1),
    "windows": (
        lambda first, count, ranks: sides.swa(heads=4 // ranks, first=first, layers=count),
        lambda target, ranks: sides.mha(heads=4 // ranks, layers=1),
        4,
    ),
    "gated delta net": (
        lambda first, count, ranks: sides.hybrid(
            heads=4 // ranks, first=first, layers=count, ranks=ranks
        ),
        lambda target, ranks: mtp(target, 16),
        4,
    ),
    "kimi": (
        lambda first, count, ranks: sides.hybrid(
            first=first, layers=count, ranks=ranks, kind="kda", full="mla"
        ),
        lambda target, ranks: mtp(target, 16),
        4,
    ),
}


@pytest.fixture(autouse=True)
def one_rank():
    with sides.alone():
        yield


def engine(name: str, seed: int, cuts: Any, ranks: int, drafts: bool) -> Engine:
    """What ranks hold twice is equal, as a model would have it."""
    make, draft, heads = MODELS[name]
    window = WINDOW if name == "windows" else None
    stages = []
    for first, stop in cuts:
        pools = [make(first, stop - first, ranks) for _ in range(ranks)]
        stages.append(
            [
                side(pool, seed + 7 * first + n, TOKENS, PAGES, rank=n, ranks=ranks, window=window)
                for n, pool in enumerate(pools)
            ]
        )
    if drafts:
        stages[-1] = [rank._replace(draft=draft(rank.target, ranks)) for rank in stages[-1]]
    everyone = [rank for stage in stages for rank in stage]
    for number, rank in enumerate(everyone):
        oracle.fill(rank, seed + number)
    oracle.agree(everyone)
    model = Model(heads=heads, hidden=64) if drafts else None
    return Engine(stages=stages, model=Model(layers=LAYERS), draft=model)


def move(source: Engine, dest: Engine) -> None:
    with queues.pair(source, dest) as pair:
        held = [[tensor.clone() for tensor in oracle.memory(rank)] for rank in dest.sides]
        assert queues.transfer(source, dest, pair, chunk=2) == []
        for rank, before in zip(dest.sides, held):
            assert oracle.assert_handed_over(source.sides, rank, before)
        # the last stage samples, and has the first hidden state
        sent = pair[0][-len(source.stages[-1])].metadata_buffers
        for queue in pair[1]:
            for buffer in ("output_ids", "output_hidden_states")[: 1 + bool(dest.draft)]:
                got, expected = (getattr(one, buffer) for one in (queue.metadata_buffers, sent))
                assert torch.equal(got[DECODE_ROW], expected[PREFILL_ROW])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", [name for name in MODELS if "draft" not in name])
def test_stages_of_any_cut_pair(name, shape, monkeypatch):
    monkeypatch.setenv("KVPOOL_SGLANG", json.dumps({"verify": "checksum"}))
    there, ranks, here, others = SHAPES[shape]
    move(engine(name, 1, there, ranks, False), engine(name, 50, here, others, False))


@pytest.mark.parametrize("shape", [name for name, shape in SHAPES.items() if shape[2] == WHOLE])
@pytest.mark.parametrize("name", MODELS)
def test_a_draft_of_the_last_stage_comes_with_it(name, shape, monkeypatch):
    """SGLang drafts in no pipeline but prefill's, of which the last stage has the draft (its issues
    33584, 39378).
    """
    monkeypatch.setenv("KVPOOL_SGLANG", json.dumps({"verify": "checksum"}))
    there, ranks, here, others = SHAPES[shape]
    move(engine(name, 1, there, ranks, True), engine(name, 50, here, others, True))
