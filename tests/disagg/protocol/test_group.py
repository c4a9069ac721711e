"""Decodes that know their group: whom they ask, what that takes, and how their rooms end.

Real endpoints over the network of the protocol model, which checks bytes, pages and leases.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from disagg import Group, KVPoll
from disagg.protocol.codec import decode
from disagg.protocol.events import Received
from disagg.protocol.messages import ChunkReady, ReadDone, ReadRequest, ReleaseAck
from kvpool.layout.formats import Shard
from tests.disagg.protocol.protocol_model import Decode, Prefill, World
from tests.disagg.protocol.protocol_promises import check, settle
from tests.pools import mha, mla

TIMEOUT, LEASE, OFFER = 5.0, 12.0, 9.0
SMALL = {"layers": [0, 1], "num_pages": 9, "page_size": 2}
ROWS = mla.but(kv_lora_rank=4, qk_rope_head_dim=2, **SMALL)
KINDS = (ReadRequest, ChunkReady, ReadDone, ReleaseAck)


def heads(total, **more):
    return mha.but(num_kv_heads=total, head_dim=2, v_head_dim=1, **SMALL | more)


def halves(build=ROWS):
    return [build.but(shard=Shard(rank, 2)) for rank in range(2)]


class Counting(World):
    """A world that notes what was sent, and what has arrived, by prefill rank and decode."""

    def __init__(self, *given) -> None:
        super().__init__(*given)
        self.sent: Counter = Counter()
        self.readers: dict[tuple[str, int], int] = {}
        self.done: set[tuple[str, int]] = set()

    def carry(self, connection, way, data):
        message, pair = decode(data), (connection.address, connection.decode.number)
        if isinstance(message, KINDS):
            self.sent[type(message), pair] += 1
        if isinstance(message, ReadRequest):
            self.readers[pair] = message.readers
        super().carry(connection, way, data)

    def deliver(self, connection, way, data):
        if isinstance(decode(data), ReadDone):
            self.done.add((connection.address, connection.decode.number))
        super().deliver(connection, way, data)


def world_of(sources, dests, table=None, verify=False, greeted=True) -> Counting:
    """Prefill ranks and a group of decodes, past the hello if `greeted`. `table` says of which
    ranks each decode is to wait; without, its word is taken.
    """
    world = Counting(LEASE, OFFER)
    for rank, build in enumerate(sources):
        Prefill(world, build, TIMEOUT, f"rank {rank}", 0)
    layouts = tuple(build().layout for build in dests)
    for number, build in enumerate(dests):
        asks = table and [table[number]]
        group = Group(layouts, number)
        node = Decode(world, build, TIMEOUT, number, readers=group, verify=verify, asks=asks)
        if asks is None:
            node.asked = lambda link, service: [link.addresses[n] for n in link.asks]
        world.decodes.append(node)
        node.connect(0)
    world.live(3 if greeted else 0)
    return world


def send(world, name="r") -> None:
    """Every rank has a room."""
    for node in world.ranks(0):
        node.send(name, 5, 5)


def begin(world, name="r") -> None:
    """Every rank has a room, and every decode asks for it."""
    send(world, name)
    for node in world.decodes:
        node.want(name, 0, 5, 0)


def states(nodes, name="r"):
    return [node.machine.poll(name) for node in nodes]


def pairs(world):
    """Who asked whom: decodes by number of the prefill rank."""
    ranks = [node.address for node in world.ranks(0)]
    return [{n for n, node in enumerate(world.decodes) if (r, n) in world.readers} for r in ranks]


@st.composite
def engines(draw, kind, total, tp=(1, 2, 3, 4, 6, 8)):
    """Ranks of one side: of one stage or two, with shares of the heads or replicas."""
    usual = [n for n in tp if kind == "mla" or total % n == 0 or n % total == 0]
    ranks, stages = draw(st.sampled_from(usual)), draw(st.sampled_from(([[0, 1]], [[0], [1]])))
    if ranks * len(stages) > 8:
        stages = [[0, 1]]
    build = ROWS if kind == "mla" else heads(total)
    return [
        build.but(layers=layers, shard=Shard(rank, ranks), page_size=page)
        for page in [draw(st.sampled_from((2, 3)))]
        for layers in stages
        for rank in range(ranks)
    ]


def share_of(build) -> set:
    """Layers and heads of a rank, from how its pool is made."""
    arguments, shard = build.arguments, build.arguments["shard"]
    total = arguments.get("num_kv_heads", 1)
    first, count = shard.rank * total // shard.size, max(1, total // shard.size)
    return {(layer, head) for layer in arguments["layers"] for head in range(first, first + count)}


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["mla", "mha"]), st.sampled_from([2, 4, 8]), st.booleans())
def test_of_any_two_engines_each_room_ends_with_those_that_ask_and_four_messages_a_pair(
    data, kind, total, verify
):
    sources, dests = (data.draw(engines(kind, total)) for _ in range(2))
    pick = random.Random(data.draw(st.integers(0, 1 << 16), label="order"))
    world = world_of(sources, dests, verify=verify)
    begin(world)
    everybody = world.everybody()
    for _ in range(5000):
        if all(rank.ended for rank in states(everybody)):
            break
        if ways := world.ways():
            world.arrive(*pick.choice(ways))
        else:
            for node in everybody:
                node.engine.go_on(pick.choice((1, 99)))
                node.turn()
        for node in world.ranks(0):
            asks = {pair for pair in world.readers if pair[0] == node.address}
            readers = {world.readers[pair] for pair in asks}
            over = asks and readers == {len(asks)} and asks <= world.done
            assert node.machine.poll("r").ended == bool(over)
    assert states(everybody) == [KVPoll.Success] * len(everybody)
    check(world)
    table = pairs(world)
    for node, askers in zip(world.ranks(0), table):
        assert {world.readers[node.address, n] for n in askers} == {len(askers)}
    assert set(world.sent.values()) == {1}
    assert len(world.sent) == 4 * len(world.readers)
    sharers = [{n for n, d in enumerate(dests) if share_of(s) & share_of(d)} for s in sources]
    assert len(world.readers) <= sum(map(len, sharers)) + len(sources)
    copies = Counter(what for rank in sources for what in share_of(rank))
    if max(copies.values()) == 1:
        count = len(dests)
        assert table == [rank or {rank % count} for rank, rank in enumerate(sharers)]
    if kind == "mla" and all(len(share_of(rank)) == 2 for rank in (*sources, *dests)):
        assert len(world.readers) == max(len(sources), len(dests))


def test_a_member_that_declines_is_done_with_the_ranks_that_it_asks():
    world = world_of([ROWS] * 3, [ROWS] * 2)
    send(world)
    world.decodes[0].want("r", 0, 5, 0)
    world.decodes[1].decline("r", 0)
    world.live(20)
    assert pairs(world) == [{0}, {1}, {1}]
    assert states(world.everybody()) == [KVPoll.Success] * 5


@pytest.mark.parametrize("greeted", [True, False], ids=["asked", "not asked"])
@pytest.mark.parametrize(
    ("sources", "build", "table"),
    [
        (halves(), ROWS, [[0], [1]]),
        (halves(heads(2)), heads(2), [[0], [1]]),
        ([heads(2)], heads(2), [[0], [0]]),
    ],
)
def test_a_room_that_one_member_aborts_ends_everywhere(sources, build, table, greeted):
    """Where it has not asked yet, all ranks are told that it will not."""
    world = world_of(sources, halves(build), table, greeted=greeted)
    first, second = world.decodes
    send(world)
    second.want("r", 0, 5, 0)
    second.abort("r")
    world.live(3)
    first.want("r", 0, 5, 0)
    world.live(20)
    alone = greeted and table == [[0], [1]]
    assert states(world.decodes) == [KVPoll.Success if alone else KVPoll.Failed, KVPoll.Failed]
    ended = states(world.ranks(0))
    assert ended == ([KVPoll.Success, KVPoll.Failed] if alone else [KVPoll.Failed] * len(ended))
    settle(world)


@pytest.mark.parametrize(("before", "noticed"), [(0, True), (2, False), (5, True)])
def test_a_member_that_dies_ends_its_rooms_within_the_bounds(before, noticed):
    world = world_of([ROWS] * 3, [ROWS] * 2, [[0], [1, 2]])
    first, second = world.decodes
    send(world)
    first.want("r", 0, 5, 0)
    if before:
        second.want("r", 0, 5, 0)
        second.engine.fate = "stick"
        world.live(before)
    world.kill(second, 0, noticed)
    world.live(20)
    world.pass_time(LEASE + 2, True)
    assert states([first]) == [KVPoll.Success]
    assert states(world.ranks(0)) == [KVPoll.Success, KVPoll.Failed, KVPoll.Failed]
    settle(world)


def test_a_rank_that_restarts_with_another_layout_is_planned_anew_by_all():
    """Of two replicas, one comes back with one of two layers."""
    world = world_of([ROWS] * 2, [ROWS] * 2)
    begin(world, "before")
    world.live(20)
    assert pairs(world) == [{0}, {1}]
    node = world.prefills["rank 1"]
    world.kill(node, 0, True)
    Prefill(world, ROWS.but(layers=[0]), TIMEOUT, node.address, 0)
    world.pass_time(2 * TIMEOUT, True)
    world.readers.clear()
    begin(world, "after")
    world.live(20)
    assert states(world.everybody(), "after") == [KVPoll.Success] * 4
    assert pairs(world) == [{0, 1}, {1}]
    assert world.readers["rank 0", 0] == world.readers["rank 0", 1] == 2


def test_a_link_is_refused_on_all_members_if_one_cannot_read():
    world = world_of([ROWS], [ROWS, ROWS.but(packing="f32")])
    refusals = [node.links[0].refusal for node in world.decodes]
    assert "on decode rank 1 of its group: bfloat16 on prefill, float32 on decode." in refusals[0]
    assert "on decode rank" not in refusals[1]
    begin(world)
    world.live(5)
    assert states(world.everybody()) == [KVPoll.Failed] * 3


def test_a_rank_that_was_not_asked_cannot_end_a_room():
    """It knows the attempt, as another rank may have told it."""
    world = world_of([ROWS] * 2, [ROWS] * 2)
    node = world.decodes[0]
    node.want("r", 0, 5, 0)
    rank = node.links[0].ranks[1]
    generation, attempt = rank.hello.generation, node.rooms["r"].attempt
    attempt = {"generation": generation, "room": "r", "attempt": attempt}
    chunk = {"start": 0, "stop": 5, "last": True, "num_tokens": 5, "spans": {}, "aux": b"\x80"}
    for message, answer in (
        (ReleaseAck(**attempt, leased=True), []),
        (ChunkReady(**attempt, **chunk), ["Abort"]),
        (ReleaseAck(**attempt, leased=False), []),
    ):
        effects = node.machine.handle(Received(rank.number, message), world.now)
        assert [type(decode(effect.data)).__name__ for effect in effects] == answer
    assert node.machine.poll("r") is KVPoll.WaitingForInput
    assert node.machine.rooms.known("r").waits_for.endswith("of rank 0 of prefill (rank 0)")


def test_a_value_that_a_rank_which_is_not_asked_has_sent_is_missed_by_name():
    world = world_of([ROWS] * 2, [ROWS] * 2, [[0], [0]])
    first, second = world.decodes
    begin(world)
    world.live(20)
    assert states([first, second]) == [KVPoll.Success, KVPoll.Failed]
    assert str(second.machine.failure("r").reason) == (
        "prefill sent no aux value rank 0 (it sent: rank 1). Of prefill's ranks only 1 are asked "
        "here: send it from every rank."
    )
