"""Prefill converts before it offers."""

from __future__ import annotations

import pytest

from disagg import DecodeEndpoint, KVPoll, create_engine
from disagg.plan import plan
from disagg.portable.converted_offers import ConvertedOffers
from disagg.portable.stored_as import stored_as
from disagg.runtime.converting_prefill import ConvertingPrefill
from kvpool import OutOfPages, RequestAddress, Span
from kvpool.device.host_copy import copy_runs
from tests import oracle
from tests.cast.test_endpoints import Prefill, is_right, pools
from tests.cast.test_pools import built, hand_over, pairs
from tests.pools import mha

TOKENS = 45


@pytest.mark.parametrize("chunks", [(), (3, 8)], ids=["whole", "chunks"])
@pytest.mark.parametrize(("build", "source", "dest"), [*pairs()])
def test_any_pair_of_packings(build, source, dest, chunks):
    """What decode then has is what it would have converted itself, but for bytes of a request's own
    pages that nothing was written to.
    """
    first, wire, *others = (built(build, packing) for packing in (source, dest, dest, dest))

    def by_prefill(planned, sources, tables, dest, table, edges, most):
        if planned.cast is None:
            pytest.skip("nothing is converted")
        offers = ConvertedOffers(sources[0].layout, wire.layout)
        free = offers.num_free
        plain = plan([wire.layout], dest.layout)
        for positions in edges:
            there = offers.convert("r", tables[0], positions)
            copy_runs(*plain.bind(0, there, table, tokens=positions))
        offers.free("r")
        assert offers.num_free == free

    hand_over([first], *others, 12, edges=chunks, by=by_prefill, everywhere=False)


@pytest.mark.parametrize("by_layer", [False, True])
def test_a_room_in_chunks_whose_pages_come_one_by_one(by_layer):
    (pool,), (wire, dest, want) = pools("bf16"), pools("fp8", 3)
    source = Prefill(pool)
    for each in (dest, want):
        oracle.blank(each)
    table, ids = oracle.place(dest, TOKENS, 5), source.table.spans["kv"].ids
    with (
        ConvertingPrefill(pool.layout, wire.layout, create_engine("local")) as prefill,
        DecodeEndpoint(dest.layout, create_engine("local"), verify="checksum") as decode,
    ):
        decode.connect([prefill.address], timeout=30)
        decode.receive("r", table)
        for stop in (20, 33, TOKENS):
            part = RequestAddress(stop, {"kv": Span(ids[: -(-stop // 4)])})
            if not by_layer:
                prefill.send("r", part, last=stop == TOKENS)
                continue
            for layer in (1, 0, 2):
                last = stop == TOKENS and layer == 2
                prefill.send("r", part, layers=range(layer, layer + 1), last=last)
        for side in (decode, prefill):
            assert side.wait("r", 60) is KVPoll.Success, side.failure("r")
        is_right([source], dest, want, table)
        free = prefill.num_free["kv"]
        prefill.forget("r")
        assert prefill.num_free["kv"] == free + 12


def test_a_pool_without_room_refuses_and_keeps_nothing():
    (pool,), wire = pools("bf16"), built(mha, "fp8", layers=range(3), num_pages=14, page_size=4)
    source, offers = Prefill(pool), ConvertedOffers(pool.layout, wire.layout)
    free = offers.num_free
    there = offers.convert("a", source.table)
    assert (
        offers.convert("a", source.table).spans["kv"].ids.tolist() == there.spans["kv"].ids.tolist()
    )
    with pytest.raises(OutOfPages, match="space kv of the pool that is offered: 12 more items"):
        offers.convert("b", source.table)
    offers.free("b")
    offers.free("a")
    assert offers.num_free == free


def test_pages_of_other_sizes_are_refused():
    (pool,), wire = pools("bf16"), built(mha, "fp8", layers=range(3), num_pages=14, page_size=8)
    with pytest.raises(ValueError, match="space kv: 4 tokens an item, and 8 in the pool"):
        ConvertedOffers(pool.layout, wire.layout)


@pytest.mark.parametrize("wanted", ["float32", "float8_e4m3fn"])
def test_a_pool_of_the_same_pages_in_another_type(wanted):
    pool = built(mha, "bf16", layers=range(3), num_pages=40, page_size=4)
    dest, want = (built(mha, wanted, layers=range(3), num_pages=40, page_size=4) for _ in range(2))
    source = Prefill(pool)
    offered, memory = stored_as(pool.layout, wanted, 1 << 20)
    assert sum(buffer.items * buffer.item_bytes for buffer in offered.buffers) <= memory.numel()
    for each in (dest, want):
        oracle.blank(each)
    table = oracle.place(dest, TOKENS, 5)
    with (
        ConvertingPrefill(pool.layout, offered, create_engine("local")) as prefill,
        DecodeEndpoint(dest.layout, create_engine("local")) as decode,
    ):
        decode.connect([prefill.address], timeout=30)
        decode.receive("r", table)
        prefill.send("r", source.table)
        assert decode.wait("r", 60) is KVPoll.Success, decode.failure("r")
    is_right([source], dest, want, table)


@pytest.mark.parametrize(
    ("dtype", "nbytes", "words"),
    [
        ("int8", 1 << 20, "'int8': one of bfloat16, float16, float32, float8_e4m3fn"),
        ("bf16", 1 << 20, "'bf16': there is nothing that is of another type"),
        ("e4m3", 1000, "1,000 bytes: not one item of space kv has room"),
    ],
)
def test_a_pool_that_cannot_be_is_refused(dtype, nbytes, words):
    with pytest.raises(ValueError, match=words):
        stored_as(built(mha, "bf16").layout, dtype, nbytes)
