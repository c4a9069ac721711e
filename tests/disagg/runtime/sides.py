"""Prefills and decodes in this process, each over a pool with a request."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.runtime.transport import MemoryNetwork, MemoryTransport
from kvpool import MLAPool, RequestAddress
from tests import oracle
from tests.processes import Child

TOKENS = 75
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "dtype": "f32", "num_pages": 12, "page_size": 16}


def pool(**more):
    return MLAPool(layers=range(2), **{**MLA, **more})


@contextmanager
def prefill_side(bind=None, salt=0, **options):
    """A prefill in this process that has computed one request."""
    source = pool()
    address = oracle.place(source, TOKENS)
    oracle.write(source, address, range(TOKENS), salt)
    with PrefillEndpoint(source.layout, create_engine("local"), bind, **options) as endpoint:
        yield endpoint, address


@contextmanager
def decode_side(engine="local", **options):
    dest = pool(page_size=8, num_pages=40)
    oracle.blank(dest)
    with DecodeEndpoint(dest.layout, create_engine(engine), **options) as endpoint:
        yield endpoint, dest, oracle.place(dest, TOKENS, 9)


@contextmanager
def joined(prefill=None, **options):
    """Both of these, connected; options of each."""
    with prefill_side(**prefill or {}) as sender, decode_side(**options) as reader:
        reader[0].connect([sender[0].address], timeout=20)
        yield *sender, *reader


def _serve(pipe, engine, bind, lie, build, tokens, options):
    source = build()
    offered = oracle.filled(source, tokens)
    made, layout = create_engine(engine), source.layout
    if lie is not None:
        made, layout = lie(made, layout)
    with PrefillEndpoint(layout, made, bind, **options) as prefill:
        pipe.send(prefill.address)
        while (order := pipe.recv()) is not None:
            room, start, stop = (*order, 0, tokens)[:3]
            part = RequestAddress(stop, offered.spans)
            prefill.send(room, part, tokens=range(start, stop), last=stop == tokens)
            pipe.send(None)


class PrefillProcess(Child):
    """A prefill in a process of its own, which offers the rooms that it is asked for, whole or some
    positions of them. `build` makes its pool; `lie` changes its engine and its layout before they
    meet.
    """

    def __init__(
        self, bind=None, *, engine="local", lie=None, build=pool, tokens=TOKENS, **options
    ):
        super().__init__(_serve, engine, bind, lie, build, tokens, options)
        self.address, self._options = self.answer(), options

    def hands_over(self, room, side, link=None):
        """It does so to a `decode_side`, byte by byte, whose memory is blank afterwards."""
        decode, dest, into = side
        oracle.blank(dest)
        decode.receive(room, into, link=link)
        self.ask(room)
        arrives(decode, room, dest, into)
        oracle.blank(dest)

    def works(self, room):
        """A decode of the same options connects, and a room is handed over to it."""
        with decode_side(**self._options) as side:
            side[0].connect([self.address], timeout=30)
            self.hands_over(room, side)

    def resident(self):
        """Bytes of its memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) << 10


@contextmanager
def prefill_process(bind=None, **options):
    """It must still be able to close, and exit with status 0."""
    with PrefillProcess(bind, **options) as prefill:
        yield prefill
        assert prefill.close() == 0


def endpoints(stack, kind, holders, **options):
    """An endpoint over each of `holders`, which the stack closes."""
    made = (kind(oracle.state(h).layout, create_engine("local"), **options) for h in holders)
    return [stack.enter_context(endpoint) for endpoint in made]


@contextmanager
def connected(source, dest, *, engine=None, prefill=None, **options):
    """Prefill over `source`, and decode over `dest` with an engine and options, connected."""
    engine = engine or create_engine("local")
    with (
        PrefillEndpoint(
            oracle.state(source).layout, create_engine("local"), **(prefill or {})
        ) as sender,
        DecodeEndpoint(oracle.state(dest).layout, engine, **options) as reader,
    ):
        reader.connect([sender.address], timeout=30)
        yield sender, reader


@contextmanager
def turned(sources, dests, **options):
    """Endpoints turned by hand, connected in memory: those of `sources`, and those of `dests`."""
    network = MemoryNetwork()

    def end(kind, holder, **more):
        made = {"transport": MemoryTransport(network), "threaded": False, **more}
        return stack.enter_context(kind(holder.layout, create_engine("local"), **made))

    with ExitStack() as stack:
        names = [f"p{rank}" for rank in range(len(sources))]
        prefills = [end(PrefillEndpoint, s, bind=name) for s, name in zip(sources, names)]
        decodes = [end(DecodeEndpoint, d, ranks=len(dests), **options) for d in dests]
        for decode in decodes:
            decode.connect(names)
        yield prefills, decodes


def turn(*endpoints, rounds=20):
    """Until nothing is left to do, and nothing is read."""
    left = rounds
    while left:
        busy = [each.step() for each in endpoints]
        decodes = [each for each in endpoints if isinstance(each, DecodeEndpoint)]
        busy += [
            decode.reading(name) for decode in decodes for name in decode.machine.rooms.by_name
        ]
        left = rounds if any(busy) else left - 1


def succeeds(endpoint, room):
    state = endpoint.wait(room, 30)
    assert state is KVPoll.Success, endpoint.failure(room)


def arrives(decode, room, dest, table):
    """It succeeds, and every byte is right."""
    succeeds(decode, room)
    oracle.assert_holds(dest, table)


def moves(prefill, given, decode, dest, into, room="r", link=None):
    """A room from a decode's request to its last byte."""
    decode.receive(room, into, link=link)
    prefill.send(room, given)
    arrives(decode, room, dest, into)


def request(source, dest, tokens=TOKENS):
    """Block tables of both sides: the source holds a request, the destination is blank."""
    oracle.blank(dest)
    return oracle.filled(source, tokens), oracle.place(dest, tokens, 9)


def items_of(pool, address):
    """Where the items of a block table lie."""
    return [
        range(b.base + item * b.item_stride, b.base + (item + 1) * b.item_stride)
        for b in pool.layout.buffers
        for item in address.spans[b.space].ids.tolist()
    ]


def settle(link, *endpoints):
    """Turns endpoints until the handshake is done."""
    while not link.settled:
        for each in endpoints:
            each.step()


def send_chunks(prefill, source, table, edges, *, by_layer=False, aux=None):
    """Writes and sends a request in chunks between `edges`, each whole or layer by layer."""
    layers = sorted({region.layer for region in oracle.state(source).layout.regions})
    for start, stop in pairwise(edges):
        oracle.write(source, table, range(start, stop))
        part = table if stop == edges[-1] else RequestAddress(stop, table.spans)
        for layer in layers if by_layer else [None]:
            last = stop == edges[-1] and layer in (None, layers[-1])
            some = None if layer is None else range(layer, layer + 1)
            chunk = range(start, stop)
            prefill.send("r", part, tokens=chunk, layers=some, last=last, aux=aux if last else None)


def hand_over(sources, dests, edges, *, start=0, readers=None, by_layer=False, aux=None, **options):
    """Moves a request of chunks between `edges`, of which every destination has `start` tokens:
    each byte is right, and all ranks are released. Returns the links, and how many bytes were read.
    """
    with ExitStack() as stack:
        prefills = endpoints(stack, PrefillEndpoint, sources)
        decodes, tables, links = [], [], []
        for number, dest in enumerate(dests):
            ranks = readers(number) if readers else len(dests)
            (decode,) = endpoints(stack, DecodeEndpoint, [dest], ranks=ranks, **options)
            links.append(decode.connect([prefill.address for prefill in prefills], timeout=30))
            oracle.blank(dest)
            tables.append(oracle.place(dest, edges[-1], 90 + number))
            oracle.write(dest, tables[-1], range(start), salt=1)
            decode.receive("r", tables[-1], start=start, aux=[*(aux or ())])
            decodes.append(decode)
        for seed, (prefill, source) in enumerate(zip(prefills, sources)):
            oracle.blank(source, oracle.SOURCE)
            table = oracle.place(source, edges[-1], seed)
            send_chunks(prefill, source, table, edges, by_layer=by_layer, aux=aux)
        for decode, dest, table in zip(decodes, dests, tables):
            succeeds(decode, "r")
            assert decode.aux("r") == (aux or {})
            oracle.assert_holds(dest, table, range(start, edges[-1]), kept=range(start))
        for prefill in prefills:
            succeeds(prefill, "r")
            assert not any(prefill.leases().leased.values())
        return links, sum(decode.metrics("r").bytes_moved for decode in decodes)
