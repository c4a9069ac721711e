"""A hand-off layer by layer: bytes exact over every engine, layers ready one by one, refusals."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from disagg import DecodeEndpoint, KVPoll, RoomError
from disagg.engines.base import create_engine
from kvpool import Shard
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.disagg.runtime.sides import request, turn, turned
from tests.pools import CLASSES, mla

TOKENS = 21
CHUNKS = (range(9), range(9, TOKENS))
MANY = {"num_pages": 12, "num_window_pages": 16}
SHAPES = {
    "equal": lambda build: [(build,)],
    "by page": lambda build: [(build.but(placement="page"),)],
    "TP": lambda build: [(build.but(shard=Shard(rank, 2)),) for rank in range(2)],
    "PP": lambda build: [
        (build.but(layers=part, total_kv_layers=4),) for part in (range(1, 4), range(1))
    ],
}


@pytest.mark.parametrize(
    ("pool", "shape"),
    [("mla", "equal"), ("mha", "by page"), ("swa", "TP"), ("hybrid", "PP"), ("dsv4", "equal")],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_layers_are_read_as_they_are_computed(farm, engine, pool, shape):
    build, verify = CLASSES[pool].but(**MANY), "checksum" if shape == "TP" else None
    with farm.case(engine, SHAPES[shape](build), TOKENS) as (addresses, prefill), ExitStack() as st:
        dest = build.but(placement="page" if shape == "by page" else "layer")()
        oracle.blank(dest)
        decode = DecodeEndpoint(dest.layout, create_engine(engine), verify=verify)
        st.enter_context(decode).connect(addresses)
        decode.receive("r", address := oracle.place(dest, TOKENS, 90))
        assert not decode.layer_ready("r", 0)
        for chunk in CHUNKS:
            for layer in range(4):
                prefill("send", "r", chunk, None, range(layer, layer + 1))
                if chunk is CHUNKS[-1]:
                    assert decode.wait_layer("r", layer, 30) is not KVPoll.Failed
                    assert oracle.holds(oracle.of_layers(dest, range(layer + 1)), address)
                    ready = [decode.layer_ready("r", each) for each in range(4)]
                    assert ready == [each <= layer for each in range(4)]
        assert decode.wait("r", 30) is KVPoll.Success, decode.failure("r")
        oracle.assert_holds(dest, address)
        assert prefill("wait", "r") == [(KVPoll.Success, None)] * len(addresses)


@contextmanager
def stepped(source, dest):
    """Both endpoints, turned by hand: prefill, its table, decode, and its own."""
    given, address = request(source, dest, TOKENS)
    with turned([source], [dest]) as ([prefill], [decode]):
        yield prefill, given, decode, address


@pytest.fixture
def pair():
    source, dest = (mla.but(**MANY)() for _ in range(2))
    with stepped(source, dest) as ends:
        yield *ends, dest


def test_a_layer_is_ready_once_it_is_read_and_a_wait_says_what_is_awaited(pair):
    prefill, given, decode, address, dest = pair
    decode.receive("r", address)
    turn(prefill, decode)
    prefill.send("r", given, layers=range(1), last=False)
    assert not decode.layer_ready("r", 0)
    turn(prefill, decode)
    assert [decode.layer_ready("r", layer) for layer in range(4)] == [True, False, False, False]
    assert decode.wait_layer("r", 0, 0.01) is KVPoll.Transferring
    awaited = f"target layers 1-3 of chunk 0 to {TOKENS}"
    with pytest.raises(TimeoutError, match=f"waits for {awaited} of rank 0 of prefill"):
        decode.wait_layer("r", 3, 0.01)
    with pytest.raises(TimeoutError, match=f"waits for {awaited} .`send`."):
        prefill.wait("r", 0.01)
    prefill.send("r", given, layers=range(1, 9), last=True, aux={"first": 7})
    turn(prefill)
    assert decode.wait_layer("r", 3, 10) is not KVPoll.Failed  # turns its own loop
    turn(prefill, decode)
    assert decode.poll("r") is prefill.poll("r") is KVPoll.Success
    assert decode.aux("r") == {"first": 7}
    assert decode.metrics("r").chunks == 2
    assert decode.layer_ready("r", 3)
    oracle.assert_holds(dest, address)


def test_a_wait_for_a_layer_ends_with_a_room_that_fails(pair):
    prefill, given, decode, address, _ = pair
    decode.receive("r", address)
    turn(prefill, decode)
    prefill.send("r", given, layers=range(1), last=False)
    turn(prefill, decode)
    prefill.abort("r", "out of memory")
    turn(prefill, decode)
    assert decode.wait_layer("r", 3, 10) is KVPoll.Failed
    assert not decode.layer_ready("r", 0)  # what was read is void


def test_layers_that_are_not_there_are_the_callers_error(pair):
    prefill, given, decode, address, _ = pair
    decode.receive("r", address)
    with pytest.raises(RoomError, match="target layer 4 is not here, but target layers 0-3"):
        decode.wait_layer("r", 4)
    with pytest.raises(RoomError, match="draft layer 0 is not here"):
        decode.layer_ready("r", 0, owner="draft")
    with pytest.raises(RoomError, match="target layers 4 to 7 are not here, but target layers 0-3"):
        prefill.send("r", given, layers=range(4, 8), last=False)
    for wrong in (range(0), range(0, 4, 2), [0, 1], 3, range(-1, 2)):
        with pytest.raises(ValueError, match="layers="):
            prefill.send("r", given, layers=wrong)
    turn(prefill, decode)
    assert decode.poll("r") is KVPoll.WaitingForInput


REFUSALS = {
    "the same layer": ((range(9), range(1), False), "target layer 0 of chunk 0 to 9 were sent"),
    "a layer of a range": (
        (range(9), range(4), False),
        "target layers 0-1 of chunk 0 to 9 were sent already",
    ),
    "all layers": ((range(9), None, False), "target layers 0-1 of chunk 0 to 9 were sent already"),
    "another chunk": (
        (range(9, 21), range(1), False),
        "target layers 2-3 of chunk 0 to 9 were not sent yet, got chunk 9 to 21",
    ),
    "a longer chunk": ((range(12), range(2, 3), False), "not sent yet, got chunk 0 to 12"),
    "the end with a hole": (
        (range(9), range(2, 3), True),
        "target layer 3 of chunk 0 to 9 were not sent. Say",
    ),
}


@pytest.mark.parametrize(("sent", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_what_overlaps_or_leaves_a_hole_is_refused_by_name(pair, sent, reason):
    prefill, given, *_ = pair
    for layer in range(2):
        prefill.send("r", given, tokens=range(9), layers=range(layer, layer + 1), last=False)
    tokens, layers, last = sent
    with pytest.raises(RoomError, match=reason):
        prefill.send("r", given, tokens=tokens, layers=layers, last=last)
    prefill.send("r", given, tokens=range(9), layers=range(2, 4), last=False)  # nothing has changed
    prefill.send("r", given)


def test_layers_of_roles_that_decode_lacks_are_passed_over():
    target, draft = mla.but(**MANY), mla.but(owner="draft", layers=range(2), **MANY)
    source, dest = oracle.merged(target(), draft()), target()
    parts = [("draft", 0, 1), ("target", 0, 2), ("target", 2, 4), ("draft", 1, 2)]
    with stepped(source, dest) as (prefill, given, decode, address):
        decode.receive("r", address)
        for tokens in CHUNKS:
            for owner, start, stop in parts:
                last = tokens is CHUNKS[-1] and (owner, start) == ("draft", 1)
                meant = {"layers": range(start, stop), "owner": owner}
                prefill.send("r", given, tokens=tokens, last=last, **meant)
                turn(prefill, decode)
        assert decode.poll("r") is KVPoll.Success, decode.failure("r")
        oracle.assert_holds(dest, address)


@pytest.mark.parametrize("pool", ["hybrid", "dsv4"])
def test_states_come_by_layer_where_decode_holds_all_pages(pool):
    source, dest = (CLASSES[pool].but(**MANY)() for _ in range(2))
    with stepped(source, dest) as (prefill, given, decode, address):
        oracle.write(dest, address, range(TOKENS), salt=1)
        decode.receive("r", address, start=TOKENS)
        for tokens in CHUNKS:
            for layer in range(4):
                last = tokens is CHUNKS[-1] and layer == 3
                some = range(layer, layer + 1)
                prefill.send("r", given, tokens=tokens, layers=some, last=last)
        turn(prefill, decode)
        assert decode.poll("r") is KVPoll.Success, decode.failure("r")
        held = oracle.state(dest)
        for region in dest.layout.regions:
            salt = 0 if dest.layout.space_of(region).per_request else 1
            one = replace(held, layout=replace(held.layout, regions=(region,)))
            assert oracle.holds(one, address, salt), str(region)
