"""The hand-off without sockets, threads or waiting: real endpoints over real pools, turned by hand,
and a network that carries messages as late as it likes.

What happens to them is noted in `World.faults`, so that a failure that nothing has caused is seen.
A network may lose messages over connections that live on, which is worse than what TCP does.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np

from disagg import DecodeEndpoint, Group, KVPoll, Link, PrefillEndpoint, TransferPlan
from disagg.protocol.codec import decode
from disagg.protocol.messages import ReleaseAck, WireError
from disagg.runtime.staging import StagingBuffers
from disagg.runtime.transport import MemoryConnection, MemoryNetwork, MemoryTransport
from kvpool import Allocator
from tests import oracle
from tests.disagg.protocol.slow_engine import ALL, SlowEngine, WatchedBuffers

KEPT = 20
"""Messages of each direction of a connection that may come once more."""
FREED = 255
"""What is written over pages that are given back."""
STEP = 0.5
"""Seconds between two looks of everybody while time passes."""
READ_TIMEOUT = 6.0
LAYERS = range(2)
"""Of every pool here, or of several stages."""
LOSS = 0.15
"""Part of the messages that a network loses that does."""


@dataclass(eq=False)
class Conn(MemoryConnection):
    """One connection: messages `up` to the prefill that listens, and `down` to the decode that has
    dialled. `lost`: it is gone, and the prefill has not noticed.
    """

    decode: Decode | None = None
    lost: bool = False
    queues: dict[str, deque[bytes]] = field(
        default_factory=lambda: {"up": deque(), "down": deque()}
    )
    past: dict[str, deque[bytes]] = field(default_factory=dict)

    def put(self, way: str, data: bytes) -> None:
        if way == "up" or not (self.closed or self.lost):
            self.queues[way].append(data)
            self.past.setdefault(way, deque(maxlen=KEPT)).append(data)


@dataclass(eq=False)
class RoomPages:
    """Pages of one request; on prefill it was computed here, on decode it is wanted."""

    request: object
    tokens: int
    salt: int = 0
    start: int = 0
    service: int = 0
    declined: bool = False
    spare: int | None = None
    """How many tokens more decode has pages for, if it does not know how many come."""
    attempt: str = ""
    link: Link | None = field(default=None, repr=False)
    plan: TransferPlan | None = field(default=None, repr=False)
    begun: tuple[range, int] | None = None
    """A chunk of prefill's that was sent of one layer."""
    ended: KVPoll | None = None
    given_back: bool = False
    reported: int = 0
    """How often `ended()` has had it."""

    @property
    def pages(self) -> list[int]:
        return [] if self.given_back else self.request.address().spans["kv"].ids.tolist()


class World(MemoryNetwork):
    """Everybody, one clock, and what was done to whom."""

    def __init__(
        self,
        lease: float | None,
        offer: float | None = None,
        network: frozenset[str] = frozenset(),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.now = self.began = 100.0
        self.lease, self.offer, self.network = lease, offer, network
        self.loss, self.random = LOSS if "loss" in network else 0.0, random.Random(seed)
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
        return [node for node in self.prefills.values() if node.service == service]

    def everybody(self) -> list[Node]:
        return [*self.prefills.values(), *self.decodes]

    def able(self) -> list[Node]:
        return [node for node in self.everybody() if node.able]

    # the network

    def dial(self, dialler, peer, address) -> Conn:
        conn = Conn(dialler, peer, address, self.identity(), decode=dialler.node)
        self.conns.append(conn)
        return conn

    def hang_up(self, connection) -> None:
        """Closes a connection; what was sent on it is still under way."""
        super().hang_up(connection)
        connection.queues["down"].clear()
        self.sweep()

    def carry(self, connection, way, data) -> None:
        if way == "down":
            self.prefills[connection.address].says(decode(data))
        if self.random.random() >= self.loss:
            connection.put(way, data)

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
        return self.prefills[conn.address].able and not conn.lost

    def arrive(self, conn: Conn, way: str) -> None:
        """The next message arrives, unless what is done before prevents it."""
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
        self.deliver(conn, way, data)
        (self.prefills[conn.address] if way == "up" else conn.decode).turn()
        self.sweep()

    def live(self, rounds: int = 1, pace: int = ALL) -> None:
        """Everybody who can takes what waits, sends and reads; engines land `pace` runs each."""
        for _ in range(rounds):
            for conn, way in self.ways():
                for _ in range(len(conn.queues[way])):
                    if conn.queues[way] and self._takes(conn, way):
                        self.arrive(conn, way)
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
        self.forget(conn, noticed)
        conn.past.clear()
        kept = list(conn.queues["up"])
        conn.queues["up"] = deque(kept[max(0, len(kept) - up) :] if not conn.closed else ())
        conn.queues["down"] = deque(list(conn.queues["down"])[:down])
        if not conn.closed:
            conn.identity = self.identity()

    def forget(self, conn: Conn, noticed: bool) -> None:
        """Prefill's end of a connection is gone; unless noticed, what it sends there is lost."""
        connections = self.prefills[conn.address].transport.connections
        if connections.pop(conn.identity, None) is not None and not noticed:
            lost = Conn(None, 0, conn.address, b"", lost=True)
            connections[conn.identity] = lost

    def renew(self, prefill: Prefill) -> None:
        """What serves reads of a prefill ends, and it lives on."""
        for node in self.decodes:
            self.note("renewal", node, prefill.address)
        prefill.engine.renew()

    def kill(self, node: Node, keep: int, noticed: bool) -> None:
        """A generation ends; of what it has sent, `keep` messages a connection still arrive."""
        node.alive = node.stopped = False
        if isinstance(node, Prefill):
            for conn in [conn for conn in self.conns if conn.address == node.address]:
                self.cut(conn, 0, keep, noticed)
            return
        for rank, conn in list(node.transport.connections.items()):
            self.note("cut", node, conn.address)
            conn.queues["up"] = deque(list(conn.queues["up"])[:keep])
            if not noticed:
                self.forget(conn, noticed)
                conn.queues["up"].clear()
            node.transport.connect(rank, None)

    def restart(self, node: Node) -> None:
        """Another generation at the same place."""
        if isinstance(node, Prefill):
            Prefill(self, node.build, node.timeout, node.address, node.service)
            for conn in [conn for conn in self.conns if conn.address == node.address]:
                if conn.closed:
                    conn.queues["up"].clear()
                else:
                    conn.identity = self.identity()
            self.sweep()
        else:
            fresh = Decode(self, node.build, node.timeout, node.number, **node.settings)
            fresh.engine.eager = node.engine.eager
            self.decodes[node.number] = fresh
            for service in {prefill.service: 0 for prefill in self.prefills.values()}:
                fresh.connect(service)

    def sweep(self) -> None:
        """Closed connections are gone once all that was sent on them has arrived."""
        for conn in [conn for conn in self.conns if conn.closed and not conn.queues["up"]]:
            self.conns.remove(conn)
            self.forget(conn, True)


class NodeTransport(MemoryTransport):
    """The transport of a node; to `unread` peers no message can be sent."""

    def __init__(self, node: Node) -> None:
        super().__init__(node.world)
        self.node, self.unread = node, set()

    def send(self, peer, data):
        if peer in self.unread:
            self.unread.remove(peer)
            return "100000 messages to it are unread."
        return super().send(peer, data)


class Node:
    """One generation of an endpoint: its pool, its pages, its engine."""

    def __init__(self, world: World, build, timeout: float) -> None:
        self.world, self.build, self.timeout = world, build, timeout
        self.life = len(world.lives)
        world.lives.append(self)
        self.alive, self.stopped = True, False
        self.pool = build()
        self.layout = replace(self.pool.layout, generation=f"life {self.life}")
        self.alloc = Allocator(self.pool)
        self.pages = self.alloc.free_pages
        self.owners: dict[int, RoomPages] = {}
        self.rooms: dict[object, RoomPages] = {}
        self.engine = SlowEngine(self, world.broken)
        self.transport = NodeTransport(self)

    @property
    def able(self) -> bool:
        return self.alive and not self.stopped

    @property
    def machine(self):
        return self.endpoint.machine

    def options_of(self) -> dict:
        """What every endpoint here is made with."""
        options = {"transport": self.transport, "clock": self.world.clock, "threaded": False}
        return options | {"peer_timeout": self.timeout}

    def grow(self, room: RoomPages, tokens: int) -> None:
        """Makes room for more tokens; raises OutOfPages."""
        self.alloc.extend(room.request, tokens)
        self.owners.update(dict.fromkeys(room.pages, room))

    def give_back(self, room: RoomPages) -> None:
        """What was in its pages is gone at once."""
        for page in room.pages:
            del self.owners[page]
        for view in oracle.state(self.pool).views.values():
            view[room.pages] = FREED
        room.given_back = True
        self.alloc.free(room.request)

    def abort(self, name) -> None:
        """Ends a room, with a reason of its own."""
        number = next(self.world.numbers)
        service = self.service if isinstance(self, Prefill) else self.rooms[name].service
        self.world.aborts[number] = service, name
        self.endpoint.abort(name, f"abort {number}.")
        self.observe()

    def turn(self) -> None:
        """One turn of the loop, and of the engine's user."""
        self.endpoint.step()
        self.observe()

    def take_ended(self) -> None:
        """Notes which rooms the endpoint says have ended since it was asked last."""
        for name, state, failure in self.endpoint.ended():
            assert (state, failure) == (self.machine.poll(name), self.machine.failure(name))
            assert isinstance(self, Prefill) or not self.machine.rooms.known(name).reading
            if name in self.rooms:
                self.rooms[name].reported += 1

    def just_ended(self, name, room: RoomPages) -> bool:
        """Notes a room's state, which is final once it has ended."""
        state = self.machine.poll(name)
        if room.ended is not None:
            assert state is room.ended, f"{name!r} was {room.ended} and is {state}"
            return False
        if not state.ended:
            return False
        room.ended = state
        failure = self.machine.failure(name)
        if state is KVPoll.Failed:
            assert failure.side in ("prefill", "decode")
            assert failure.reason
        else:
            assert failure is None
        return True


class Prefill(Node):
    """One generation of a prefill rank."""

    def __init__(self, world: World, build, timeout: float, address: str, service: int) -> None:
        super().__init__(world, build, timeout)
        self.address, self.service = address, service
        options = self.options_of()
        self.endpoint = PrefillEndpoint(
            self.layout, self.engine, address, lease=world.lease, **options
        )
        world.prefills[address] = self

    def send(self, name, stop: int, total: int, layer: int | None = None) -> None:
        """Computes and offers up to position `stop` of `total`, of both layers or of one; then the
        next call is for the other layer. Raises OutOfPages.
        """
        room = self.rooms.get(name)
        if room is None:
            room = RoomPages(self.alloc.new_request(), total, next(self.world.numbers))
        chunk = range(room.request.num_tokens, stop)
        if room.begun is not None:
            chunk, layer = room.begun[0], 1 - room.begun[1]
        self.grow(room, chunk.stop - room.request.num_tokens)
        self.rooms[name] = room
        address, some = room.request.address(), None if layer is None else range(layer, layer + 1)
        oracle.write(oracle.of_layers(self.pool, some or LAYERS), address, chunk, room.salt)
        last = chunk.stop == room.tokens and (layer is None or room.begun is not None)
        aux = {self.address: room.salt} if last else {}
        room.begun = (chunk, layer) if room.begun is None and layer is not None else None
        self.endpoint.send(name, address, tokens=chunk, layers=some, last=last, aux=aux)
        self.observe()

    def forget(self, name) -> None:
        self.endpoint.forget(name)
        self.rooms.pop(name, None)

    def says(self, message) -> None:
        """A message leaves: what it vouches for must be true now."""
        key = getattr(message, "attempt", ""), self.address
        if isinstance(message, ReleaseAck) and message.leased and key not in self.world.released:
            room = self.rooms[message.room]
            assert not room.given_back, "pages are said to be leased that were given back"
            self.world.released[key] = room.salt

    def observe(self) -> None:
        """Pages of rooms that have ended are given back."""
        for name, room in self.rooms.items():
            if self.just_ended(name, room):
                self.give_back(room)
        self.take_ended()


class Decode(Node):
    """One generation of a decode rank."""

    def __init__(
        self,
        world: World,
        build,
        timeout,
        number: int,
        *,
        readers: int | Group,
        verify: bool,
        asks: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(world, build, timeout)
        self.number, self.readers, self.asks = number, readers, asks
        self.settings = {"readers": readers, "verify": verify, "asks": asks}
        self.links: dict[int, Link] = {}
        stage = (
            WatchedBuffers(self, 4 * self.engine.max_bytes) if self.life % 2 else StagingBuffers()
        )
        self.engine.stage = stage if self.life % 2 else None
        with patch("disagg.runtime.decode_endpoint.staging_buffers", lambda *_, **__: stage):
            self.endpoint = DecodeEndpoint(
                self.layout,
                self.engine,
                ranks=readers,
                read_timeout=READ_TIMEOUT,
                offer_timeout=world.offer,
                verify="checksum" if verify else None,
                **self.options_of(),
            )

    def connect(self, service: int) -> None:
        """Says hello to all ranks of a service."""
        addresses = [prefill.address for prefill in self.world.ranks(service)]
        self.links[service] = self.endpoint.connect(addresses)

    def asked(self, link: Link, service: int) -> list[str]:
        """Addresses of the ranks that it asks, as the test says and not as the table does."""
        return (
            [*link.addresses]
            if self.asks is None
            else [link.addresses[n] for n in self.asks[service]]
        )

    def disconnect(self, service: int) -> None:
        link = self.links.pop(service)
        for address in link.addresses:
            self.world.note("disconnect", self, address)
        self.endpoint.disconnect(link)
        self.observe()

    def want(self, name, service: int, tokens: int, start: int, spare: int | None = None) -> None:
        """Makes room and asks for it, with `spare` tokens more and not knowing how many come;
        raises OutOfPages.
        """
        request = self.alloc.new_request()
        room = RoomPages(request, tokens, start=start, service=service, spare=spare)
        self.grow(room, tokens + (spare or 0))
        room.link = self.links[service]
        options = {"start": start, "link": room.link, "at_most": spare is not None}
        aux = self.asked(room.link, service)
        self.endpoint.receive(name, room.request.address(), aux=aux, **options)
        self._hold(name, room)

    def decline(self, name, service: int) -> None:
        """Has everything already, and asks for nothing."""
        room = RoomPages(self.alloc.new_request(), 0, service=service, declined=True)
        room.link = self.links[service]
        self.endpoint.decline(name, room.link)
        self._hold(name, room)

    def _hold(self, name, room: RoomPages) -> None:
        room.attempt = self.machine.rooms.by_name[name].attempt
        self.rooms[name] = room
        self.world.faults.add(("wanted", self.number, room.service, name, room.attempt))
        self.observe()

    def forget(self, name) -> None:
        self.endpoint.forget(name)
        del self.rooms[name]

    def lose(self, rank: int) -> None:
        """A rank leaves too much unread."""
        self.world.note("unread", self, self.transport.connections[rank].address)
        self.transport.unread.add(rank)

    def observe(self) -> None:
        """What has succeeded is right; pages of what has ended, and is not read, are given back."""
        for name, room in self.rooms.items():
            room.plan = room.link.plan or room.plan  # its link may be lost in the turn that ends it
            if self.just_ended(name, room) and room.ended is KVPoll.Success:
                self._check(name, room)
            over = room.ended is not None and not self.machine.rooms.known(name).reading
            if over and not room.given_back:
                self.give_back(room)
        self.take_ended()

    def _check(self, name, room: RoomPages) -> None:
        asked = self.asked(room.link, room.service)
        salts = {address: self.world.released.get((room.attempt, address)) for address in asked}
        assert None not in salts.values(), f"{name!r} succeeded and not every rank had said so"
        assert not self.machine.rooms.known(name).reading
        layers = {region.layer for region in self.layout.regions}
        assert all(self.endpoint.layer_ready(name, layer) for layer in layers)
        layouts = dict(zip(room.link.addresses, room.plan.sources))
        sources = [(layouts[address], salt) for address, salt in salts.items()]
        tokens = 0 if room.declined else self.endpoint.num_tokens(name)
        if room.spare is None:
            assert tokens == room.tokens
        table = replace(room.request.address(), num_tokens=tokens)
        check_bytes(self.pool, table, range(room.start, tokens), sources)
        assert self.machine.rooms.known(name).aux == salts


def check_bytes(pool, address, positions: range, sources) -> None:
    """Each byte of `positions` is one that a source (a layout, and the salt of its values) has."""
    state = oracle.state(pool)
    for region in state.layout.regions:
        space = state.layout.space_of(region)
        entries = oracle.live(space, positions, address.num_tokens)
        if not entries.size:
            continue
        span, size = address.spans[space.id_list], space.entries_per_item
        items = span.ids[entries // size - span.first_item]
        stored = state.views[region.key][items, entries % size]
        right = np.zeros(stored.shape, dtype=bool)
        axes = region.inner_axes
        for layout, salt in sources:
            offered = layout.region_by_key.get(region.key)
            if offered is None:
                continue
            pairs = [(axis, offered.axis(axis.name)) for axis in axes]
            common = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs]
            steps = [*map(np.array, common), np.arange(region.width)]
            cut = (
                slice(None),
                *(slice(r.start - a.start, r.stop - a.start) for a, r in zip(axes, common)),
            )
            right[cut] |= (stored[cut] == oracle.values(region.key, [entries, *steps], salt)).all()
        assert right.all(), f"{region} of {positions} is not what was there"
