"""Memory of a check: laid out as any engine's, and read in the same runs."""

from __future__ import annotations

import pytest

from disagg import DecodeEndpoint, PrefillEndpoint, create_engine
from disagg.cli.check.memory import PREFILL_BYTES, CheckMemory, most_tokens
from disagg.plan import plan
from kvpool.testing.pools import POOLS
from tests import oracle
from tests.disagg.runtime.sides import moves

TOKENS = 70


def held(memory):
    (slab,) = memory.slabs.values()
    return oracle.over(memory.layout, slab.numpy())


@pytest.mark.parametrize("build", POOLS.values(), ids=POOLS)
def test_every_byte_of_every_layout_arrives(build):
    pools = build(), build()
    source, dest = (CheckMemory.of(pool.layout, TOKENS) for pool in pools)
    assert plan([source.layout], dest.layout).explain(TOKENS) == plan(
        [pools[0].layout], pools[1].layout
    ).explain(TOKENS)
    with (
        PrefillEndpoint(source.layout, create_engine("local")) as prefill,
        DecodeEndpoint(dest.layout, create_engine("local")) as decode,
    ):
        decode.connect([prefill.address], timeout=30)
        for number, tokens in enumerate((TOKENS, 37)):  # a shorter one has room too
            given, into = source.address(tokens), dest.address(tokens)
            oracle.fill(held(source), given)
            oracle.blank(held(dest))
            moves(prefill, given, decode, held(dest), into, room=number)


@pytest.mark.parametrize("name", ["mha bf16", "swa bf16", "hybrid bf16"])
def test_there_is_room_for_as_many_tokens_as_memory_allows(name):
    layouts = [POOLS[name]().layout] * 2
    most = most_tokens(layouts)
    sizes = [
        sum(slab.numel() for slab in CheckMemory.of(layout, most).slabs.values())
        for layout in layouts
    ]
    assert most >= 1 and sum(sizes) <= PREFILL_BYTES
