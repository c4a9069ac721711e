"""The hand-off in any order of calls, messages, failures and time, beside what it must keep.

After every step: what has succeeded holds the source's bytes, and every rank had said that it still
held them; nothing lands in pages that were given back; leased, quarantined and free pages are all;
an ended room stays as it ended; a failure has a side, a reason, and a cause among what was done. In
the end everybody is heard, every room ends within its bound, whatever message was lost, nothing is
left behind, and everything works again.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from unittest.mock import Mock

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disagg.engines.base import TransferError
from disagg.plan import Group, TransferPlan
from disagg.protocol.codec import decode as decoded
from disagg.protocol.status import KVPoll
from kvpool import OutOfPages, RequestAddress, Span
from kvpool.layout.formats import Shard
from tests.disagg.protocol.protocol_model import Decode, Node, Prefill, World
from tests.disagg.protocol.protocol_promises import check, forget, settle
from tests.disagg.protocol.slow_engine import ALL
from tests.pools import mha, mla

SMALL = {"layers": [0, 1], "num_pages": 9, "page_size": 2}
HEADS = mha.but(num_kv_heads=2, head_dim=2, v_head_dim=1, **SMALL)
ROWS = mla.but(kv_lora_rank=4, qk_rope_head_dim=2, **SMALL)
HALVES = [HEADS.but(shard=Shard(rank, 2)) for rank in range(2)]

GROUP = ("group", "group")

# services of some ranks each, decodes, and how many of these each decode takes for readers, or that
# they are each other's group
TOPOLOGIES = {
    "two ranks to one": ([HALVES, [HEADS.but(page_size=4)]], [HEADS, HEADS], (1, 1)),
    "replicas, two readers": ([[ROWS, ROWS], [ROWS.but(page_size=3)]], [ROWS, ROWS], (2, 2)),
    "one rank to two": ([[HEADS], [HEADS.but(page_size=3)]], HALVES, (2, 2)),
    "readers that disagree": ([[ROWS], [ROWS, ROWS]], [ROWS, ROWS], (1, 2)),
    "replicas, a group": ([[ROWS, ROWS, ROWS], [ROWS.but(page_size=3)]], [ROWS, ROWS], GROUP),
    "halves to halves, a group": ([HALVES, [HEADS.but(page_size=4)]], HALVES, GROUP),
}
ASKED = {
    "replicas, a group": ([[0], [0]], [[1, 2], [0]]),
    "halves to halves, a group": ([[0], [0]], [[1], [0]]),
}
"""By decode and service, the ranks that members of a group ask."""
HELD_ELSEWHERE = RequestAddress(0, {"kv": Span([])})
TOKENS = {0: 5, 1: 8, "four": 4, "none": 0}
PREFILL_TIMEOUT, DECODE_TIMEOUT, LEASE, OFFER = 5.0, 3.0, 12.0, 9.0

TIMES = {"a moment": 0.5, "a ping": 1.5, "a time-out": 6.0, "a lease": 13.0}
CALLS = ["connect", "read", "poll", "fence"]
CONNECTIONS = ["break", "break unseen", "unread", "rubbish up", "rubbish down", "disconnect"]
LIVES = ["stop", "kill", "kill unseen", "close"]
ENDS = ["abort", "abort in a call", "renew"]
STRIKES = [*CALLS, "fail", "stick", "patience", *CONNECTIONS, *LIVES, *ENDS]
MESSAGES = [
    *("Hello", "ReadRequest", "DigestRequest", "ReadDone", "Ping", "Disconnect", "Refuse"),
    *("ChunkReady", "Digests", "ReleaseAck", "Pong", "UnknownPeer", "Abort"),
]
RACES = [
    *("receiver aborts", "sender aborts", "receiver forgets", "a lease passes"),
    *("receiver stops", "receiver is killed", "break", "twice", "overtake"),
]

PICK, NAMES = st.integers(0, 99), st.sampled_from(list(TOKENS))
SERVICE, WHO = st.sampled_from([0, 0, 1]), st.sampled_from([2, 2, 2, 0, 1])  # 2: all
DECLINE = -1
START = st.sampled_from([0, 0, 0, 3, 9, DECLINE])
LAYER = st.sampled_from([None, 0, 1])
SPARE = st.sampled_from([None, None, 0, 1, 3])
ROUNDS, PACE = st.sampled_from([1, 2, 4, 8, 25]), st.sampled_from([ALL, 1, 4, 0])
RARELY = st.integers(0, 9).map(lambda number: number == 9)


@pytest.fixture(autouse=True)
def quiet():
    """What fails by the thousand is not told one by one."""
    logging.getLogger("disagg").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("disagg").setLevel(logging.NOTSET)


class Protocol(RuleBasedStateMachine):
    """Two services, two decodes, and whatever happens to them."""

    network: frozenset[str] = frozenset()

    @initialize(
        topology=st.sampled_from(list(TOPOLOGIES)),
        lease=st.sampled_from([LEASE, None]),
        offer=st.sampled_from([OFFER, None]),
        seed=st.integers(0, 1 << 16),
        verify=st.booleans(),
        eager=RARELY,
        patient=st.booleans(),
    )
    def begin(
        self, topology, lease=LEASE, offer=OFFER, seed=0, verify=False, eager=False, patient=False
    ) -> None:
        services, decodes, self.readers = TOPOLOGIES[topology]
        if "loss" in self.network:  # only with both bounds does every room end
            lease, offer = LEASE, OFFER
        self.world = World(lease, offer, self.network, seed)
        for service, ranks in enumerate(services):
            for rank, build in enumerate(ranks):
                address = f"service {service} rank {rank}"
                Prefill(self.world, build, PREFILL_TIMEOUT, address, service)
        layouts = tuple(build().layout for build in decodes)
        for number, build in enumerate(decodes):
            readers = self.readers[number]
            if readers == "group":
                readers = Group(layouts, number)
            asks = ASKED[topology][number] if topology in ASKED else None
            node = Decode(
                self.world, build, DECODE_TIMEOUT, number, readers=readers, verify=verify, asks=asks
            )
            node.engine.eager, node.engine.patient = eager, patient
            self.world.decodes.append(node)
            for service in range(len(services)):
                node.connect(service)
        self.world.live(3)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            settle(self.world)

    @invariant()
    def all_is_kept(self) -> None:
        check(self.world)

    # calls

    @rule(
        service=SERVICE,
        name=NAMES,
        one=PICK,
        who=WHO,
        start=START,
        spare=SPARE,
        layer=LAYER,
        rounds=ROUNDS,
        pace=PACE,
        then=st.sampled_from(["", "", *STRIKES, *TIMES]),
        pick=PICK,
    )
    def hand_over(
        self, service, name, one, who, start, spare, layer, rounds, pace, then, pick
    ) -> None:
        """A room is sent and wanted, all goes on for a while, and then something happens to it."""
        every = self.readers in ((2, 2), GROUP) or (self.readers == (1, 2) and one % 3 == 2)
        readers = one_or_all(self.world.decodes, 2 if every else one % 2)
        ranks = one_or_all(self.world.ranks(service), who)
        for node in (*readers, *ranks):
            if name in node.rooms and node.rooms[name].given_back:
                node.forget(name)
        for node in ranks:
            self._send(node, name, 9, layer)
        for node in readers:
            self._want(node, name, service, start, spare)
        self.world.live(rounds, pace)
        for node in ranks:
            if node.able and name in node.rooms and node.rooms[name].begun and pick % 4:
                self._send(node, name, 9)
        if layer is not None:
            self.world.live(rounds, pace)
        if then in TIMES:
            self.world.pass_time(TIMES[then], False)
        elif then:
            self.strike(then, pick, readers, self.world.ranks(service))

    @rule(service=SERVICE, name=NAMES, one=PICK, start=START, spare=SPARE)
    def hand_over_in_peace(self, service, name, one, start, spare) -> None:
        always = {"who": 2, "layer": None, "rounds": 25, "pace": ALL, "then": "", "pick": 0}
        self.hand_over(service=service, name=name, one=one, start=start, spare=spare, **always)

    @rule(service=SERVICE, name=NAMES, who=WHO, start=START, spare=SPARE)
    def want(self, service, name, who, start, spare) -> None:
        for node in one_or_all(self.world.decodes, who):
            self._want(node, name, service, start, spare)

    def _want(self, node, name, service, start, spare) -> None:
        if service in node.links and node.links[service].refusal is not None:
            node.disconnect(service)
        if service not in node.links:
            node.connect(service)
        if name in node.rooms:
            with pytest.raises(ValueError, match="exists already"):
                node.endpoint.receive(name, HELD_ELSEWHERE, link=node.links[service])
            room = node.rooms[name]
            if room.declined and room.link is node.links[service]:
                node.endpoint.decline(name, room.link)  # which changes nothing
            return
        if start == DECLINE:
            node.decline(name, service)
            return
        with suppress(OutOfPages):
            node.want(name, service, TOKENS[name], min(start, TOKENS[name]), spare)

    @rule(service=SERVICE, name=NAMES, who=WHO, more=st.integers(0, 9), layer=LAYER, longer=RARELY)
    def send(self, service, name, who, more, layer, longer) -> None:
        for node in one_or_all(self.world.ranks(service), who):
            self._send(node, name, more, layer, longer)

    def _send(self, node, name, more, layer=None, longer=False) -> None:
        room = node.rooms.get(name)
        if room is None:
            total, sent = TOKENS[name] + longer, 0
            if longer:
                self.world.faults.add(("longer", node.service, name))
        elif room.given_back or node.machine.rooms.by_name[name].offered.closed:
            return
        else:
            total, sent = room.tokens, room.request.num_tokens
        with suppress(OutOfPages):
            # of no tokens only once by layer: the next would be the same chunk again
            node.send(name, min(sent + more, total), total, layer if more else None)

    @precondition(lambda self: self.some_room(lambda room: room.given_back))
    @rule(pick=PICK)
    def forget_what_has_ended(self, pick) -> None:
        able = self.world.able()
        if able:
            forget(able[pick % len(able)])

    @precondition(lambda self: self.some_room(lambda room: room.ended is KVPoll.Failed))
    @rule(pick=PICK)
    def retry_elsewhere(self, pick) -> None:
        failed = [
            (node, name)
            for node in self.world.decodes
            for name, room in node.rooms.items()
            if node.able and room.given_back and room.ended is KVPoll.Failed
        ]
        if failed:
            node, name = failed[pick % len(failed)]
            elsewhere = 1 - node.rooms[name].service
            node.forget(name)
            self._want(node, name, elsewhere, 0, None)

    def some_room(self, what) -> bool:
        """Whether a decode has a room that is so."""
        return any(what(room) for node in self.world.decodes for room in node.rooms.values())

    # time and messages

    @rule(seconds=st.sampled_from(list(TIMES)), living=st.booleans())
    def time_passes(self, seconds, living) -> None:
        self.world.pass_time(TIMES[seconds], living)

    @rule(rounds=ROUNDS, pace=PACE)
    def all_goes_on(self, rounds, pace) -> None:
        self.world.live(rounds, pace)

    @rule(what=st.sampled_from(["message", "turn", "bytes"]), pick=PICK, at=PICK)
    def one_goes_on(self, what, pick, at) -> None:
        """One message arrives, one side turns, or a run lands."""
        ways, able = self.world.ways(), self.world.able()
        reads = [(n.engine, t) for n in self.world.decodes if n.alive for t in n.engine.transfers]
        if what == "message" and ways:
            self.world.arrive(*ways[pick % len(ways)])
        elif what == "bytes" and reads:
            engine, transfer = reads[pick % len(reads)]
            engine.land(transfer, 1 + at % 3, at)
        elif what == "turn" and able:
            able[pick % len(able)].turn()

    @precondition(lambda self: "repeat" in self.network)
    @rule(pick=PICK, at=PICK, way=st.sampled_from(["up", "down"]))
    def a_message_comes_once_more(self, pick, at, way) -> None:
        conns = [c for c in self.world.conns if c.past.get(way) and not c.closed]
        if conns:
            conn = conns[pick % len(conns)]
            conn.queues[way].append(conn.past[way][at % len(conn.past[way])])

    @precondition(lambda self: "reorder" in self.network)
    @rule(pick=PICK, at=PICK)
    def a_message_overtakes(self, pick, at) -> None:
        queues = [conn.queues[way] for conn, way in self.world.ways()]
        queues = [queue for queue in queues if len(queue) > 1]
        if queues:
            queue = queues[pick % len(queues)]
            queue.rotate(-1 - at % (len(queue) - 1))

    # what happens to whom

    @rule(what=st.sampled_from(STRIKES), pick=PICK)
    def something_happens(self, what, pick) -> None:
        gone = [node for node in self.world.everybody() if not node.able]
        if not gone or (pick % 3 == 0 and len(gone) < 3):
            self.strike(what, pick // 3, self.world.decodes, [*self.world.prefills.values()])
            return
        node = gone[pick % len(gone)]
        node.stopped = False
        if not node.alive:
            self.world.restart(node)

    def strike(self, what, pick, decodes, prefills) -> None:
        nodes = [node for node in (*decodes, *prefills) if node.able]
        decodes = [node for node in decodes if node.able]
        if not decodes:
            return
        if what in LIVES:
            self.end(what, nodes[pick % len(nodes)], pick)
        elif what in CONNECTIONS:
            addresses = [prefill.address for prefill in prefills]
            conns = [c for c in self.world.conns if c.decode in decodes and c.address in addresses]
            if conns:
                self.cross(what, conns[pick % len(conns)], pick)
        elif what == "renew":
            if prefills:
                self.world.renew(prefills[pick % len(prefills)])
        elif what == "abort":
            rooms = [(node, name) for node in nodes for name in node.machine.rooms.open]
            if rooms:
                rooms.sort(key=lambda room: (room[0].life, str(room[1])))
                node, name = rooms[pick % len(rooms)]
                node.abort(name)
        else:
            self.trouble(what, decodes[pick % len(decodes)], pick)

    def end(self, what, node: Node, pick: int) -> None:
        if what == "stop":
            node.stopped = True
            return
        if what == "close":
            self.abort_all(node)
            node.endpoint.close()
            node.observe()
        self.world.kill(node, 99 if what == "close" else pick % 4, what != "kill unseen")

    def cross(self, what, conn, pick: int) -> None:
        node, service = conn.decode, self.world.prefills[conn.address].service
        if what.startswith("break"):
            self.world.cut(conn, pick % 3, pick % 4, what == "break")
        elif what.startswith("rubbish"):
            self.world.note("rubbish", node, conn.address)
            conn.put(what.split()[1], b"rubbish")
        elif conn.closed:
            return
        elif what == "unread":
            node.lose(conn.peer)
        elif service in node.links:
            node.disconnect(service)

    def trouble(self, what, node: Decode, pick: int) -> None:
        engine, transfers = node.engine, node.engine.transfers
        for address in self.world.prefills:
            self.world.note("engine", node, address)
        if what == "patience":
            engine.patient = not engine.patient
        elif what == "abort in a call":
            engine.meanwhile = partial(self.abort_all, node)
        elif what in CALLS:
            error = RuntimeError if pick % 2 else TransferError
            engine.trouble[what] = error(f"{what} goes wrong.")
        elif transfers and pick % 2:
            transfers[pick % len(transfers)].fate = what
        else:
            engine.fate = what

    def abort_all(self, node: Node) -> None:
        for name in sorted(node.machine.rooms.open, key=str):
            node.abort(name)

    @rule(message=st.sampled_from(MESSAGES), what=st.sampled_from(RACES))
    def before_a_message_arrives(self, message, what) -> None:
        self.world.traps[message] = partial(self.race, what)

    def race(self, what, conn, way, message) -> None:
        queue, name = conn.queues[way], getattr(message, "room", None)
        receiver, sender = self.world.prefills[conn.address], conn.decode
        if way == "down":
            receiver, sender = sender, receiver
        if what in ("receiver aborts", "sender aborts"):
            node = receiver if what == "receiver aborts" else sender
            if node.able and name in node.machine.rooms.open:
                node.abort(name)
        elif what == "receiver forgets":
            forget(receiver)
        elif what == "a lease passes":
            self.world.pass_time(LEASE + 1, False)
        elif what == "receiver stops":
            receiver.stopped = True
        elif what == "receiver is killed":
            self.world.kill(receiver, 2, True)
        elif what == "break":
            self.world.cut(conn, 0, 1, True)
        elif what == "twice" and "repeat" in self.network:
            queue.append(queue[0])
        elif what == "overtake" and "reorder" in self.network:
            queue.rotate(-1)


REPEATS = {"repeat"}

# what a network does to messages, over connections that live on, and how many worlds are tried
NETWORKS = {
    "InOrder": ((), 40, 2000),
    "Repeated": (REPEATS, 20, 1500),
    "OutOfOrder": ({"repeat", "reorder"}, 20, 1500),
    "Lost": ({"loss"}, 25, 2000),
    "LostAndOutOfOrder": ({"repeat", "reorder", "loss"}, 15, 1000),
}


def one_or_all(nodes, who: int) -> list:
    """All of them, or one, of those that live and run."""
    return [node for number, node in enumerate(nodes) if node.able and who in (2, number)]


def machine(network=()) -> type[Protocol]:
    """The machine over such a network."""
    return type("Protocol", (Protocol,), {"network": frozenset(network)})


def case(network, examples: int):
    kind = machine(network).TestCase
    kind.settings = settings(max_examples=examples, stateful_step_count=60)
    return kind


for _name, (_network, _examples, _more) in NETWORKS.items():
    globals()[f"Test{_name}"] = case(_network, _examples)
    # without a name of its own, by which pytest would find the last one twice
    globals()[f"Test{_name}AtLength"] = pytest.mark.long(
        pytest.mark.timeout(3600)(case(_network, _more))
    )


@pytest.fixture
def begin():
    """Makes machines, whose worlds must settle in the end: each with its world, its decodes, and
    the one rank of the second service, which has sent room 0 that all `readers` want.
    """
    begun = []

    def begin(topology: str, network=(), readers: int = 1, fate: str = "", trouble: str = ""):
        begun.append(machine(network)())
        begun[-1].begin(topology)
        world = begun[-1].world
        decodes, (prefill,) = world.decodes[:readers], world.ranks(1)
        decodes[-1].engine.fate = fate
        if trouble:
            begun[-1].trouble(trouble, decodes[-1], 0)
        prefill.send(0, 5, 5)
        for decode in decodes:
            decode.want(0, 1, 5, 0)
        return begun[-1], *decodes, prefill

    yield begin
    for state in begun:
        state.teardown()


def sent_by(decode: Decode, prefill: Prefill) -> tuple:
    """The connection between two, and what came on it, by type: the first of each."""
    (conn,) = (c for c in decode.transport.connections.values() if c.address == prefill.address)
    return conn, {type(decoded(m)).__name__: m for m in reversed(conn.past["up"])}


def test_a_room_fails_at_once_where_nothing_was_posted_and_its_peer_cannot_be_given_up(
    begin, monkeypatch
):
    monkeypatch.setattr(TransferPlan, "bind", Mock(side_effect=RuntimeError("bind goes wrong")))
    state, decode, prefill = begin("two ranks to one", trouble="fence")
    state.world.live(5)
    for node in (decode, prefill):
        assert "bind goes wrong" in node.machine.failure(0).reason
    assert not decode.machine.rooms.known(0).reading


def test_a_reader_that_is_done_may_be_lost_while_another_still_reads(begin):
    state, first, second, prefill = begin("replicas, two readers", readers=2, fate="stick")
    state.world.live(30)
    assert (first.machine.poll(0), second.machine.poll(0)) == (KVPoll.Success, KVPoll.Transferring)
    conn, _ = sent_by(first, prefill)
    state.cross("rubbish up", conn, 0)
    state.world.live(2)
    second.engine.transfers[0].fate = ""
    state.world.live(30)
    for node in (second, prefill):
        assert node.machine.poll(0) is KVPoll.Success


def test_a_done_that_comes_twice_ends_a_room_once(begin):
    state, decode, prefill = begin("two ranks to one", REPEATS)
    state.world.live(30)
    conn, past = sent_by(decode, prefill)
    conn.put("up", past["ReadDone"])
    state.world.live(3)
    assert prefill.machine.totals.rooms == {"success": 1, "failed": 0}


def test_a_want_that_comes_again_does_not_subscribe_to_the_next_room_of_that_name(begin):
    state, decode, prefill = begin("two ranks to one", REPEATS, fate="stick")
    state.world.live(5)
    conn, past = sent_by(decode, prefill)
    prefill.abort(0)
    prefill.forget(0)
    prefill.send(0, 5, 5)
    for message in ("Hello", "ReadRequest"):
        conn.put("up", past[message])
    state.world.live(3)
    assert prefill.machine.poll(0) is KVPoll.Bootstrapping
