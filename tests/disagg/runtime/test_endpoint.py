"""The hand-off between real processes, over every engine, byte by byte."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from kvpool import MHAPool, MLAPool, Shard
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.disagg.runtime.sides import (
    MLA,
    TOKENS,
    decode_side,
    endpoints,
    moves,
    prefill_process,
    prefill_side,
    succeeds,
)
from tests.disagg.waiting import until
from tests.streams import Relay

MHA = {"num_kv_heads": 4, "head_dim": 8, "dtype": "bf16", "num_pages": 12, "page_size": 16}


def ready(pool, start=0, salt=1):
    """A blank destination that holds a prefix of its own."""
    address = oracle.place(pool, TOKENS, seed=99)
    oracle.blank(pool)
    oracle.write(pool, address, range(start), salt)
    return address


@pytest.mark.parametrize(
    ("engine", "start"),
    [*(("local", start) for start in (0, 16, TOKENS)), *((engine, 33) for engine in ENGINES)],
)
def test_a_prefix_that_decode_holds_is_neither_read_nor_touched(engine, start):
    dest = MLAPool(layers=range(3), **{**MLA, "page_size": 5, "num_pages": 30})
    address = ready(dest, start)
    with (
        prefill_process(engine=engine, build=partial(MLAPool, layers=range(3), **MLA)) as source,
        DecodeEndpoint(dest.layout, create_engine(engine)) as decode,
    ):
        source.ask(1)  # before anybody wants it
        decode.connect([source.address], timeout=60)
        decode.receive(1, address, start=start)
        succeeds(decode, 1)
        oracle.assert_holds(dest, address, range(start, TOKENS), kept=range(start))
        assert decode.metrics(1).bytes_moved == (TOKENS - start) * dest.bytes_per_token


def test_aux_values_on_which_ranks_disagree_fail_by_name():
    dest = MHAPool(layers=range(2), **MHA)
    ranks = [MHAPool(layers=range(2), **{**MHA, "shard": Shard(rank, 2)}) for rank in range(2)]
    with ExitStack() as stack:
        prefill = endpoints(stack, PrefillEndpoint, ranks)
        (decode,) = endpoints(stack, DecodeEndpoint, [dest])
        decode.connect([rank.address for rank in prefill], timeout=30)
        decode.receive("r", ready(dest))
        for number, (rank, pool) in enumerate(zip(prefill, ranks)):
            rank.send("r", oracle.place(pool, TOKENS), aux={"first_token": number})
        assert decode.wait("r", 10) is KVPoll.Failed
        assert "ranks send different values of aux first_token" in str(decode.failure("r"))


@pytest.mark.parametrize(
    ("received", "sent"),
    [
        ("before", "meanwhile"),
        ("before", "after"),
        ("meanwhile", "before"),
        ("meanwhile", "meanwhile"),
        ("meanwhile", "after"),
    ],
)
def test_a_room_that_decode_fails_as_its_link_is_lost_ends_on_prefill_too(received, sent):
    with (
        prefill_side("tcp://127.0.0.1:*", lease=None, insecure=True) as (prefill, given),
        decode_side(insecure=True) as (decode, dest, address),
        Relay(prefill.address) as relay,
    ):
        link = decode.connect([relay.address], timeout=20)

        def act(when):
            if when == received:
                decode.receive("r", address)
            if when == received == "before":
                until(prefill, lambda: "r" in prefill.machine.rooms.by_name)
            if when == sent:
                prefill.send("r", given)

        act("before")
        relay.cut()
        until(decode, lambda: link.lost is not None)
        act("meanwhile")
        assert decode.wait("r", 20) is KVPoll.Failed
        relay.mend()
        decode.handshake(link, 20)
        act("after")
        assert prefill.wait("r", 20) is KVPoll.Failed
        assert not any(prefill.leases().leased.values())
        for side in (prefill, decode):
            side.forget("r")
        moves(prefill, given, decode, dest, address)
