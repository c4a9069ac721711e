"""The hand-off without sockets, threads or waiting: the state machines of both sides over real
pools, and a network that carries encoded bytes as late as it likes.

`Prefill` and `Decode` do what the drivers of endpoints do. What happens to them is noted in
`World.faults`, so that a failure that nothing has caused is seen.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from disagg.digest.digest import from_wire
from disagg.digest.digester import Digester
from disagg.protocol.decode import DecodeRooms
from disagg.protocol.decode_state import Link
from disagg.protocol.messages import PROTOCOL, Hello, ReadDone, ReleaseAck, WireError, decode
from disagg.protocol.prefill import PrefillRooms
from disagg.protocol.status import KVPoll
from disagg.runtime.reader import Reader
from kvpool import Allocator
from tests import oracle
from tests.disagg.protocol.slow_engine import ALL, SlowEngine, WatchedStage

KEPT = 20
"""Messages of each direction of a connection that may come once more."""
FREED = 255
"""What is written over pages that are given back."""
STEP = 0.5
"""Seconds between two looks of everybody while time passes."""
READ_TIMEOUT = 6.0


@dataclass(eq=False)
class Conn:
    """One connection, which its prefill knows as `peer`: messages `up` to it, and `down`."""

    decode: Decode
    address: str
    peer: bytes = b""
    queues: dict[str, deque[bytes]] = field(
        default_factory=lambda: {"up": deque(), "down": deque()}
    )
    past: dict[str, deque[bytes]] = field(default_factory=dict)
    closed: bool = False

    def put(self, way: str, data: bytes) -> None:
        if way == "up" or not self.closed:
            self.queues[way].append(data)
            self.past.setdefault(way, deque(maxlen=KEPT)).append(data)


@dataclass(eq=False)
class Held:
    """Pages of one request; on prefill it was computed here, on decode it is wanted."""

    request: object
    tokens: int
    salt: int = 0
    start: int = 0
    service: int = 0
    attempt: str = ""
    link: Link | None = field(default=None, repr=False)
    ended: KVPoll | None = None
    given_back: bool = False

    @property
    def pages(self) -> list[int]:
        return [] if self.given_back else self.request.address().spans["kv"].ids.tolist()


class World:
    """Everybody, one clock, and what was done to whom."""

    def __init__(self, lease: float | None, network: frozenset[str] = frozenset()) -> None:
        self.now = self.began = 100.0
        self.lease, self.network = lease, network
        self.lives: list[Node] = []
        self.prefills: dict[str, Prefill] = {}
        self.decodes: list[Decode] = []
        self.conns: list[Conn] = []
        self.faults: set[tuple] = set()
        self.broken: list[str] = []
        self.released: dict[tuple[str, str], int] = {}
        """Salts of what ranks held when they said so, by attempt and address."""
        self.traps: dict[str, Callable] = {}
        """What is done before the next message of a type arrives: `(conn, way, message)`."""
        self.aborts: dict[int, tuple] = {}
        """Service and room that were aborted, by the number in the reason."""
        self.numbers = itertools.count(1)

    def clock(self) -> float:
        return self.now

    def note(self, what: str, decode: Decode, address: str) -> None:
        self.faults.add((what, decode.number, address))

    def ranks(self, service: int) -> list[Prefill]:
        return [each for each in self.prefills.values() if each.service == service]

    def everybody(self) -> list[Node]:
        return [*self.prefills.values(), *self.decodes]

    def able(self) -> list[Node]:
        return [node for node in self.everybody() if node.able]

    def ways(self) -> list[tuple[Conn, str]]:
        """Connections and directions in which a message waits that somebody can take."""
        return [
            (conn, way)
            for conn in self.conns
            for way, queue in conn.queues.items()
            if queue and self._takes(conn, way)
        ]

    def _takes(self, conn: Conn, way: str) -> bool:
        if way == "down":
            return conn.decode.able and not conn.closed
        prefill = self.prefills[conn.address]
        return prefill.able and prefill.peers.get(conn.peer) is conn

    def deliver(self, conn: Conn, way: str) -> None:
        """Hands over the next message, unless what is done before prevents it."""
        queue = conn.queues[way]
        data = queue[0]
        try:
            message = decode(data)
        except WireError:
            message = None
        before = self.traps.pop(type(message).__name__, None)
        if before is not None:
            before(conn, way, message)
            if not (queue and queue[0] is data and self._takes(conn, way)):
                return
        queue.popleft()
        if way == "up":
            self.prefills[conn.address].take(conn.peer, message)
        else:
            conn.decode.take(conn, message)
        self.sweep()

    def live(self, rounds: int = 1, pace: int = ALL) -> None:
        """Everybody who can takes what waits, sends and reads; engines land `pace` runs each."""
        for _ in range(rounds):
            for conn, way in self.ways():
                for _ in range(len(conn.queues[way])):
                    if conn.queues[way] and self._takes(conn, way):
                        self.deliver(conn, way)
            for node in self.able():
                node.turn()
            for node in self.decodes:
                if node.alive:
                    node.engine.go_on(pace)

    def pass_time(self, seconds: float, living: bool) -> None:
        """Time passes, with or without messages; whoever can looks often."""
        for _ in range(int(seconds / STEP)):
            self.now += STEP
            if living:
                self.live()
            else:
                for node in self.able():
                    node.turn()
            for conn in self.conns:
                if not (living and conn.decode.able):
                    self.note("mute decode", conn.decode, conn.address)
                if not (living and self.prefills[conn.address].able):
                    self.note("mute prefill", conn.decode, conn.address)

    def cut(self, conn: Conn, up: int, down: int, noticed: bool) -> None:
        """A connection breaks and is made again: what was under way is lost, but not the last `up`
        messages that had not left decode, nor the first `down` that had reached it.
        """
        self.note("cut", conn.decode, conn.address)
        peers = self.prefills[conn.address].peers
        if noticed:
            peers.pop(conn.peer, None)
        else:
            peers[conn.peer] = None
        conn.past.clear()
        kept = list(conn.queues["up"])
        conn.queues["up"] = deque(kept[max(0, len(kept) - up) :] if not conn.closed else ())
        conn.queues["down"] = deque(list(conn.queues["down"])[:down])
        if not conn.closed:
            self.name(conn)

    def kill(self, node: Node, keep: int, noticed: bool) -> None:
        """A life ends; of what it has sent, `keep` messages a connection still arrive."""
        node.alive = node.stopped = False
        if isinstance(node, Prefill):
            for conn in [conn for conn in self.conns if conn.address == node.address]:
                self.cut(conn, 0, keep, noticed)
            return
        for rank, conn in list(node.conns.items()):
            self.note("cut", node, conn.address)
            conn.queues["up"] = deque(list(conn.queues["up"])[:keep])
            if not noticed:
                self.prefills[conn.address].peers[conn.peer] = None
            node.hang_up(rank)

    def restart(self, node: Node) -> None:
        """Another life at the same place."""
        if isinstance(node, Prefill):
            Prefill(self, node.build, node.timeout, node.address, node.service)
            for conn in [conn for conn in self.conns if conn.address == node.address]:
                if conn.closed:
                    conn.queues["up"].clear()
                else:
                    self.name(conn)
            self.sweep()
        else:
            fresh = Decode(self, node.build, node.timeout, node.number, *node.options)
            fresh.engine.eager = node.engine.eager
            self.decodes[node.number] = fresh
            for service in {each.service: 0 for each in self.prefills.values()}:
                fresh.connect(service)

    def name(self, conn: Conn) -> None:
        """A connection gets a name that its prefill has never used."""
        conn.peer = f"peer {next(self.numbers)}".encode()
        self.prefills[conn.address].peers[conn.peer] = conn

    def sweep(self) -> None:
        """Closed connections are gone once all that was sent on them has arrived."""
        for conn in [conn for conn in self.conns if conn.closed and not conn.queues["up"]]:
            self.conns.remove(conn)
            peers = self.prefills[conn.address].peers
            if peers.get(conn.peer) is conn:
                del peers[conn.peer]


class Node:
    """One life of an endpoint: its pool, its pages, its engine."""

    def __init__(self, world: World, build, timeout: float) -> None:
        self.world, self.build, self.timeout = world, build, timeout
        self.life = len(world.lives)
        world.lives.append(self)
        self.alive, self.stopped = True, False
        self.pool = build()
        self.layout = replace(self.pool.layout, generation=f"life {self.life}")
        self.alloc = Allocator(self.pool)
        self.pages = self.alloc.free_pages
        self.owners: dict[int, Held] = {}
        self.held: dict[object, Held] = {}
        self.others: deque[Held] = deque()
        self.engine = SlowEngine(self, world.broken)
        self.digester = Digester()
        layout, metadata = self.layout.to_msgpack(), self.engine.metadata()
        name = self.layout.generation
        self.hello = Hello(PROTOCOL, name, self.engine.name, layout, metadata, timeout)

    @property
    def able(self) -> bool:
        return self.alive and not self.stopped

    def grow(self, held: Held, tokens: int) -> None:
        """Makes room for more tokens; raises OutOfPages."""
        self.alloc.extend(held.request, tokens)
        self.owners.update(dict.fromkeys(held.pages, held))

    def give_back(self, held: Held) -> None:
        """What was in its pages is gone at once."""
        for page in held.pages:
            del self.owners[page]
        for view in oracle.state(self.pool).views.values():
            view[held.pages] = FREED
        held.given_back = True
        self.alloc.free(held.request)

    def occupy(self, tokens: int) -> None:
        """A request that has nothing to do with the hand-off; raises OutOfPages."""
        held = Held(self.alloc.new_request(), tokens, next(self.world.numbers))
        self.grow(held, tokens)
        oracle.write(self.pool, held.request.address(), range(tokens), held.salt)
        self.others.append(held)

    def vacate(self) -> None:
        """The oldest such ends, and still has its values."""
        held = self.others.popleft()
        address = held.request.address()
        check_bytes(self.pool, address, range(held.tokens), [(self.layout, held.salt)])
        self.give_back(held)

    def abort(self, name) -> None:
        """Ends a room, with a reason of its own."""
        number = next(self.world.numbers)
        service = self.service if isinstance(self, Prefill) else self.held[name].service
        self.world.aborts[number] = service, name
        self.rooms.abort(name, f"abort {number}.")
        self.observe()

    def end(self) -> None:
        """Without live requests, the allocator of the pool's memory holds nobody up."""
        for request in list(self.alloc._live.values()):
            self.alloc.free(request)

    def just_ended(self, name, held: Held) -> bool:
        """Notes a room's state, which is final once it has ended."""
        state = self.rooms.poll(name)
        if held.ended is not None:
            assert state is held.ended, f"{name!r} was {held.ended} and is {state}"
            return False
        if not state.ended:
            return False
        held.ended = state
        failure = self.rooms.failure(name)
        if state is KVPoll.Failed:
            assert failure.side in ("prefill", "decode")
            assert failure.reason
        else:
            assert failure is None
        return True


class Prefill(Node):
    """One life of a prefill rank."""

    def __init__(self, world: World, build, timeout: float, address: str, service: int) -> None:
        super().__init__(world, build, timeout)
        self.address, self.service = address, service
        self.peers: dict[bytes, Conn | None] = {}
        """None: its connection is gone, and nobody has noticed."""
        self.rooms = PrefillRooms(self.hello, world.lease, world.clock)
        world.prefills[address] = self

    def send(self, name, stop: int, total: int) -> None:
        """Computes and offers up to position `stop` of `total`; raises OutOfPages."""
        held = self.held.get(name)
        if held is None:
            held = Held(self.alloc.new_request(), total, next(self.world.numbers))
        start = held.request.num_tokens
        self.grow(held, stop - start)
        self.held[name] = held
        address, chunk = held.request.address(), range(start, stop)
        oracle.write(self.pool, address, chunk, held.salt)
        last = stop == held.tokens
        aux = {"first": held.salt} if last and self.address.endswith("rank 0") else {}
        self.rooms.send(name, address, chunk, last, aux)
        self.observe()

    def forget(self, name) -> None:
        self.rooms.forget(name)
        self.held.pop(name, None)

    def take(self, peer: bytes, message) -> None:
        """One message of a peer; None is rubbish."""
        before = len(self.rooms.outbox)
        if message is None:
            self.rooms.decodes.refuse(peer, "it sent what cannot be served.")
        else:
            self.rooms.receive(peer, message)
        if isinstance(message, ReadDone):
            for _, data in self.rooms.outbox[before:]:
                self._answers(decode(data))
        self.observe()

    def _answers(self, answer) -> None:
        key = getattr(answer, "attempt", ""), self.address
        if isinstance(answer, ReleaseAck) and answer.leased and key not in self.world.released:
            held = self.held[answer.room]
            assert not held.given_back, "pages are said to be leased that were given back"
            self.world.released[key] = held.salt

    def turn(self) -> None:
        """What the driver's thread does between messages."""
        while self.digester.step():
            pass
        self.rooms.tick()
        outbox, self.rooms.outbox = self.rooms.outbox, []
        for peer, data in outbox:
            conn = self.peers.get(peer)
            if conn is not None:
                conn.put("down", data)
            elif peer not in self.peers:
                self.rooms.decodes.lost(peer, "decode: it cannot be reached.")
        checks, self.rooms.checks = self.rooms.checks, []
        for peer, check, address in checks:
            then = partial(self._checked, peer, check)
            self.digester.add(self.layout, address, from_wire(check.pieces), check.each, then)
        self.observe()

    def _checked(self, peer, check, values, problem) -> None:
        self.rooms.checked(peer, check, values or b"", problem)

    def observe(self) -> None:
        """Pages of rooms that have ended are given back."""
        for name, held in self.held.items():
            if self.just_ended(name, held):
                self.give_back(held)


class Decode(Node):
    """One life of a decode rank."""

    def __init__(self, world: World, build, timeout, number: int, readers: int, verify) -> None:
        super().__init__(world, build, timeout)
        self.number, self.options = number, (readers, verify)
        self.links: dict[int, Link] = {}
        self.conns: dict[int, Conn] = {}
        self.rooms = DecodeRooms(self.hello, self.layout, readers, verify, world.clock)
        if self.life % 2:
            self.engine.stage = WatchedStage(self, 4 * self.engine.max_bytes)
        self.reader = Reader(
            self.engine,
            READ_TIMEOUT,
            lambda read: self.rooms.metrics(read.room) if self.rooms.wanted(read) else None,
            self.rooms.read_failed,
            self.rooms.read_ended,
            world.clock,
            self.engine.stage,
        )

    def connect(self, service: int) -> None:
        """Greets all ranks of a service."""
        addresses = [each.address for each in self.world.ranks(service)]
        link = self.links[service] = self.rooms.links.connect(addresses)
        for rank, address in enumerate(addresses, link.first):
            self._dial(rank, address)

    def disconnect(self, service: int) -> None:
        link = self.links.pop(service)
        for address in link.addresses:
            self.world.note("disconnect", self, address)
        self.rooms.links.disconnect(link, "decode has disconnected.")
        self.observe()

    def want(self, name, service: int, tokens: int, start: int) -> None:
        """Makes room and asks for it; raises OutOfPages."""
        held = Held(self.alloc.new_request(), tokens, start=start, service=service)
        self.grow(held, tokens)
        held.link = self.links[service]
        self.rooms.want(name, held.request.address(), start, held.link, {"first"})
        held.attempt = self.rooms._rooms[name].attempt
        self.held[name] = held
        self.world.faults.add(("wanted", self.number, service, name, held.attempt))
        self.observe()

    def forget(self, name) -> None:
        self.rooms.forget(name)
        del self.held[name]

    def lose(self, rank: int) -> None:
        """A rank leaves too much unread."""
        self.world.note("unread", self, self.conns[rank].address)
        self.rooms.lost(rank, "it has left 100000 messages unread.")
        self.observe()

    def take(self, conn: Conn, message) -> None:
        """One message that has come on a connection; None is rubbish."""
        rank = next(rank for rank, each in self.conns.items() if each is conn)
        at = self.rooms.links.at(rank)
        if message is not None:
            self.rooms.receive(rank, message)
        elif at is not None:
            self.rooms.links.refuse(*at, "it sent what cannot be served.")
        self.observe()

    def turn(self) -> None:
        """What the driver's thread does between messages."""
        self.reader.step()
        self.digester.step()
        self.rooms.tick()
        links = self.rooms.links
        while links.dials:
            at = links.at(rank := links.dials.pop())
            if at is not None:
                self._dial(rank, at[0].addresses[at[1]])
        outbox, links.outbox = links.outbox, []
        for rank, data in outbox:
            self.conns[rank].put("up", data)
        for rank in [rank for rank in self.conns if links.at(rank) is None]:
            self.hang_up(rank)
        while links.partings:
            self.reader.part(*links.partings.pop())
        for read in self.rooms.reads:
            self.reader.add(read)
        self.rooms.reads.clear()
        for check in self.rooms.checks:
            then = partial(self.rooms.checked, check)
            self.digester.add(self.layout, check.address, check.pieces, check.each, then)
        self.rooms.checks.clear()
        self.observe()

    def _dial(self, rank: int, address: str) -> None:
        if rank in self.conns:
            self.hang_up(rank)
        conn = self.conns[rank] = Conn(self, address)
        self.world.conns.append(conn)
        self.world.name(conn)

    def hang_up(self, rank: int) -> None:
        """Closes a connection; what was sent on it is still under way."""
        conn = self.conns.pop(rank)
        conn.closed = True
        conn.queues["down"].clear()
        self.world.sweep()

    def observe(self) -> None:
        """What has succeeded is right; pages of what has ended, and is not read, are given back."""
        for name, held in self.held.items():
            if self.just_ended(name, held) and held.ended is KVPoll.Success:
                self._check(name, held)
            if held.ended is not None and not held.given_back and not self.rooms.reading(name):
                self.give_back(held)

    def _check(self, name, held: Held) -> None:
        salts = [self.world.released.get((held.attempt, a)) for a in held.link.addresses]
        assert None not in salts, f"{name!r} succeeded and not every rank had said so"
        assert not self.rooms.reading(name)
        sources = list(zip(held.link.plan.sources, salts))
        positions = range(held.start, held.tokens)
        check_bytes(self.pool, held.request.address(), positions, sources)
        assert self.rooms.aux(name) == {"first": salts[0]}


def check_bytes(pool, address, positions: range, sources) -> None:
    """Each byte of `positions` is one that a source (a layout, and the salt of its values) has."""
    held = oracle.state(pool)
    for region in held.layout.regions:
        space = held.layout.space_of(region)
        entries = oracle.live(space, positions, address.num_tokens)
        if not entries.size:
            continue
        span, size = address.spans[space.id_list], space.entries_per_item
        found = held.views[region.key][span.ids[entries // size - span.first_item], entries % size]
        right = np.zeros(found.shape, dtype=bool)
        axes = region.inner_axes
        for layout, salt in sources:
            given = layout.region_by_key[region.key]
            common = [_common(axis, given.axis(axis.name)) for axis in axes]
            steps = [*map(np.array, common), np.arange(region.width)]
            cut = (
                slice(None),
                *(slice(r.start - a.start, r.stop - a.start) for a, r in zip(axes, common)),
            )
            right[cut] |= (found[cut] == oracle.values(region.key, [entries, *steps], salt)).all()
        assert right.all(), f"{region} of {positions} is not what was there"


def _common(one, other) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
