"""Both machines past the hello, their messages carried by hand, and a clock that is set by hand."""

from __future__ import annotations

from msgspec.structs import replace

from disagg import KVPoll
from disagg.protocol import codec, messages
from disagg.protocol.decode import DecodeMachine
from disagg.protocol.events import (
    AbortRoom,
    ComputeDigest,
    Connect,
    ConnectLink,
    ForgetRoom,
    OfferChunk,
    ReadEnded,
    Received,
    RequestRoom,
    Send,
    StartRead,
    Tick,
)
from disagg.protocol.peers.link import Link
from disagg.protocol.prefill import PrefillMachine
from disagg.protocol.rooms.offered import layer_range
from disagg.protocol.versions import PROTOCOL
from kvpool import MLAPool, RequestAddress
from tests import oracle

MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "num_pages": 9, "page_size": 16, "dtype": "bf16"}
PROTOCOLS = PROTOCOL, PROTOCOL
"""The highest numbers of prefill and decode."""
TIMEOUT = 10.0
"""Seconds of silence after which either side is dead."""


def pool(layers=(0,), **more):
    return MLAPool(layers=layers, **MLA | more)


def hello(generation, layout=None):
    common = {"protocol": PROTOCOL, "engine": "local", "metadata": b"", "timeout": TIMEOUT}
    layout = (layout or pool().layout).to_msgpack()
    return messages.Hello(generation=generation, layout=layout, **common)


def asks(**fields):
    """A decode's request of 30 positions of room "r"."""
    request = {"generation": "p", "room": "r", "attempt": "a", "start": 0, "num_tokens": 30}
    return messages.ReadRequest(**request | {"readers": 1} | fields)


class Pair:
    """A prefill and a decode, and what they have sent and not received."""

    def __init__(
        self, verify=False, lease=None, offer_timeout=None, built=None, layers=(0,)
    ) -> None:
        self.now = 0.0
        built = built or pool(layers)
        self.table, layout = oracle.place(built, 30), built.layout
        options = {"now": 0.0, "verify": verify, "offer_timeout": offer_timeout}
        prefill, decode = (
            replace(hello(generation, layout), protocol=number)
            for generation, number in zip("pd", PROTOCOLS)
        )
        self.prefill = PrefillMachine(prefill, layout, lease, now=0.0)
        self.decode = DecodeMachine(decode, layout, 1, **options)
        self.link = Link(("x",))
        self.queues = {self.prefill: [], self.decode: []}
        self.reads, self.dials = [], []
        self.peer = b""
        self.digests = {self.prefill: [], self.decode: []}
        self.tell(self.decode, ConnectLink(self.link))
        self.pump()

    def tell(self, machine, event) -> None:
        """An event now; what it sends is queued, what it reads noted."""
        for effect in machine.handle(event, self.now):
            if isinstance(effect, Send):
                self.queues[machine].append(codec.decode(effect.data))
            elif isinstance(effect, StartRead):
                self.reads.append(effect.read)
            elif isinstance(effect, ComputeDigest):
                self.digests[machine].append(effect)
            elif isinstance(effect, Connect):
                self.dials.append((self.now, effect))
                if effect.address is not None:  # prefill knows each connection by a name of its own
                    self.peer += b"d"

    def pump(self) -> None:
        """Every message arrives, and every answer."""
        while any(self.queues.values()):
            for machine, receiver, peer in (
                (self.decode, self.prefill, self.peer),
                (self.prefill, self.decode, 0),
            ):
                sent, self.queues[machine] = self.queues[machine], []
                for message in sent:
                    self.tell(receiver, Received(peer, message))

    def lose(self, machine) -> list:
        """What a side has sent is lost; returns it."""
        lost, self.queues[machine] = self.queues[machine], []
        return lost

    def wait(self, seconds, step=0.1) -> None:
        """Time passes, and messages arrive."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            for machine in (self.decode, self.prefill):
                self.tell(machine, Tick())
            self.pump()

    def request(self, name="r", table=None, start=0, **options) -> None:
        table = table or self.table
        request = RequestRoom(room=name, table=table, start=start, link=self.link, **options)
        self.tell(self.decode, request)

    def ask(self, *args, **options) -> None:
        """A request that arrives."""
        self.request(*args, **options)
        self.pump()

    def decline(self, name="r") -> None:
        self.request(name, RequestAddress(0, {}), declined=True)

    def offer(
        self, tokens=range(30), last=True, aux=None, after=None, name="r", layers=None
    ) -> None:
        chunk = {"table": self.table, "tokens": tokens, "last": last, "after": after}
        layers = layer_range(layers, "target")
        self.tell(self.prefill, OfferChunk(room=name, aux=aux or {}, layers=layers, **chunk))

    def serve(self, *args, **options) -> None:
        """A chunk that decode hears of, if it has asked."""
        self.offer(*args, **options)
        self.pump()

    def abort(self, machine, reason="gave up", name="r") -> None:
        self.tell(machine, AbortRoom(name, reason))

    def forget(self, *machines, name="r") -> None:
        for machine in machines:
            self.tell(machine, ForgetRoom(name))

    def read(self) -> None:
        """Every read ends well."""
        while self.reads:
            self.tell(self.decode, ReadEnded(self.reads.pop(), None))

    def finish(self) -> None:
        """Every read ends well, and what follows from that arrives."""
        self.read()
        self.pump()

    def hand_over(self) -> None:
        """A room from the request to success on both sides."""
        self.ask()
        self.serve()
        self.finish()
        assert self.polls() == (KVPoll.Success, KVPoll.Success)

    def fail_and_forget(self) -> None:
        """A room fails on prefill that no decode has asked for, and is forgotten."""
        self.offer()
        self.abort(self.prefill)
        self.forget(self.prefill)

    def polls(self, name="r"):
        return self.decode.poll(name), self.prefill.poll(name)
