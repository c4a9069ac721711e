"""Reported failures of whole hand-offs, reproduced between endpoints."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product

import numpy as np
import pytest
import torch

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from disagg.engines.local import LocalEngine
from disagg.protocol import codec
from disagg.protocol.messages import Abort, ChunkReady, ReadDone, ReadRequest, ReleaseAck
from kvpool import MHAPool, MLAPool, RequestAddress, Shard, Span
from kvpool.describe import describe
from kvpool.layout import PoolLayout, Space
from tests.disagg.engines.peers import ENGINES
from tests.disagg.waiting import until
from tests.fuzz import build
from tests.oracle import DEST, SOURCE, State, blank, hand_off, state, write
from tests.streams import Server, dial

MHA = {"layers": range(2), "num_kv_heads": 8, "head_dim": 4, "dtype": "bf16"}
MLA = {"layers": range(8), "kv_lora_rank": 16, "qk_rope_head_dim": 8, "dtype": "bf16"}


def requests(pool, lengths):
    """Block tables of several requests in one pool, in shuffled, disjoint pages."""
    ids = np.random.default_rng(len(lengths)).permutation(np.arange(1, pool.num_pages))
    addresses = []
    for tokens in lengths:
        count = -(-tokens // pool.page_size)
        addresses.append(RequestAddress(tokens, {"kv": Span(ids[:count])}))
        ids = ids[count:]
    return addresses


def hold(source, rooms):
    """Fills a source with requests, by (address, salt)."""
    blank(source, SOURCE)
    for address, salt in rooms:
        write(source, address, range(address.num_tokens), salt)


def assert_only(dest, rooms):
    """The pool holds the values of `rooms`, (address, salt) each, and nothing else."""
    (memory,) = state(dest).memory
    actual = memory.copy()
    blank(dest)
    for address, salt in rooms:
        write(dest, address, range(address.num_tokens), salt)
    assert np.array_equal(actual, memory)


def chunks(address, size):
    tokens = address.num_tokens
    return [range(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def offer(prefill, room, address, tokens):
    last = tokens.stop == address.num_tokens
    part = address if last else RequestAddress(tokens.stop, address.spans)
    prefill.send(room, part, tokens=tokens, last=last)


def offer_in_turn(prefill, rooms, size):
    """Sends one chunk of each room, then the next of each."""
    parts = {room: chunks(address, size) for room, address in rooms.items()}
    for turn in range(max(map(len, parts.values()))):
        for room, address in rooms.items():
            for tokens in parts[room][turn : turn + 1]:
                offer(prefill, room, address, tokens)


def prefill_of(pool, engine="local"):
    return PrefillEndpoint(pool.layout, create_engine(engine))


def decode_of(pool, engine="local", **options):
    return DecodeEndpoint(pool.layout, create_engine(engine), **options)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_prefill_serves_decodes_of_tp4_and_of_tp8_at_once(engine):
    """sglang: NIXL's list of sources was built once, for the first decode to connect."""
    lengths = (50, 17, 33, 64)
    source = MHAPool(**MHA, num_pages=20, page_size=16)
    given = requests(source, lengths)
    hold(source, zip(given, range(len(given))))
    with prefill_of(source, engine) as prefill, ExitStack() as stack:
        ranks = []
        for tp, page in ((4, 16), (8, 5)):
            for rank in range(tp):
                more = {"num_pages": 40, "page_size": page, "shard": Shard(rank, tp)}
                dest = MHAPool(**MHA, **more, order="hnd" if tp == 8 else "nhd")
                blank(dest)
                decode = stack.enter_context(decode_of(dest, engine, ranks=tp))
                decode.connect([prefill.address])
                ranks.append((tp, decode, dest, requests(dest, lengths)))
        # every other room is one group's
        rooms = {room: (4, 8)[room % 2] for room in range(len(lengths))}
        for tp, decode, _, into in ranks:
            for room in (room for room in rooms if rooms[room] == tp):
                decode.receive(room, into[room])
        offer_in_turn(prefill, dict(enumerate(given)), 20)
        for tp, decode, dest, into in ranks:
            mine = [room for room in rooms if rooms[room] == tp]
            for room in mine:
                assert decode.wait(room, 60) is KVPoll.Success, decode.failure(room)
            assert_only(dest, [(into[room], room) for room in mine])
        assert all(prefill.wait(room, 60) is KVPoll.Success for room in rooms)


PAGE, PAGES = 16, 7


def tensors(*parts):
    """Tensors as a serving engine has them, from (dims, layers, roles, elements per row)."""
    described, memory, views = [], [], {}
    for dims, layers, roles, dim in parts:
        sizes = {"layer": len(layers), "role": len(roles), "item": PAGES, "entry": PAGE, "dim": dim}
        tensor = torch.zeros([sizes[name] for name in dims], dtype=torch.bfloat16)
        memory.append(tensor.view(torch.uint8).view(-1).numpy())
        described.append(describe(tensor, dims, role=roles, layer=layers))
        for layer, role in product(range(len(layers)), range(len(roles))):
            steps = {"layer": layer, "role": role}
            rows = tensor[tuple(steps.get(name, slice(None)) for name in dims)]
            views["target", layers[layer], roles[role]] = rows.view(torch.uint8).numpy()
    spaces = (Space("kv", entries_per_item=PAGE),)
    return State(PoolLayout.of(*described, spaces=spaces, total_kv_layers=5), memory, views)


STACKED = ("layer", "item", "entry", "dim")


def test_stages_whose_tensors_are_composed_differently_are_paired_by_region():
    """vllm-ascend#15900: tensors were paired by their position in a list."""
    sources = [
        tensors((("role", "layer", "item", "entry", "dim"), [2, 0, 1], ["v", "k"], 24)),
        tensors((STACKED, [4, 3], ["k"], 24), (STACKED, [3, 4], ["v"], 24)),
    ]
    paged = ("item", "role", "entry", "dim")
    dest = tensors(*((paged, [layer], ["k", "v"], 24) for layer in (3, 0, 4, 2, 1)))
    hand_off(sources, dest, 37)


class Faulty(LocalEngine):
    """Raises an unexpected error from `where` ("read" or "poll") if `bad(batch)`."""

    def __init__(self, where, bad):
        super().__init__()
        self.where, self.bad = where, bad

    def read(self, peer, batch):
        bad = self.bad(batch)
        if bad and self.where == "read":
            raise ZeroDivisionError("injected")
        return super().read(peer, batch), bad

    def poll(self, transfer):
        inner, bad = transfer
        if bad:
            raise ZeroDivisionError("injected")
        return super().poll(inner)


@pytest.mark.parametrize("where", ["read", "poll"])
def test_an_exception_in_one_request_fails_that_request_only(where):
    """sglang: one exception ended the thread that serves all requests."""
    source, dest = (MLAPool(**{**MLA, "layers": [0]}, num_pages=40, page_size=4) for _ in range(2))
    rooms = ["a", "bad", "b", "after"]
    lengths = [21, 33, 19, 30]
    given = dict(zip(rooms, requests(source, lengths)))
    into = dict(zip(rooms, reversed(requests(dest, lengths[::-1]))))
    hold(source, zip(given.values(), range(4)))
    blank(dest)
    (buffer,) = dest.layout.buffers

    def bad(batch):
        return np.isin((batch.dst - buffer.base) // buffer.item_stride, into["bad"].spans["kv"].ids)

    engine = Faulty(where, lambda batch: bad(batch).any())
    with prefill_of(source) as prefill, DecodeEndpoint(dest.layout, engine) as decode:
        decode.connect([prefill.address])
        for room in rooms[:3]:
            decode.receive(room, into[room])
        offer_in_turn(prefill, {room: given[room] for room in rooms[:3]}, 11)
        for side in (decode, prefill):
            assert side.wait("bad", 30) is KVPoll.Failed
            assert "injected" in str(side.failure("bad"))
            assert side.wait("a", 30) is side.wait("b", 30) is KVPoll.Success
        decode.receive("after", into["after"])
        prefill.send("after", given["after"])
        assert decode.wait("after", 30) is KVPoll.Success, decode.failure("after")
        dest.item_bytes_view(buffer)[into["bad"].spans["kv"].ids.tolist()] = DEST
        assert_only(dest, [(into[room], salt) for salt, room in enumerate(rooms) if room != "bad"])


def encoded(hello, *kinds):
    """A side's hello, and messages of some types about room `first`."""
    about = {"generation": hello.generation, "room": "first"}
    messages = (build.message(kind, build.Seeded(29), **about) for kind in kinds)
    return [codec.encode(hello), *map(build.packed, messages)]


def rubbish(messages):
    """Valid messages, truncated and corrupted ones, and arbitrary bytes."""
    random = np.random.default_rng(29)
    frames = [b"\xc1", b"\x81\xa4type", random.bytes(10_000), *messages]
    for data in messages:
        frames.extend(data[:length] for length in random.integers(1, len(data), 4))
        for _ in range(10):
            changed = np.frombuffer(data, np.uint8).copy()
            changed[random.integers(0, changed.size, 3)] = random.integers(0, 256, 3)
            frames.append(changed.tobytes())
    return frames


def test_hostile_decodes_and_prefills_do_not_affect_others():
    """sglang: one bad frame ended the bootstrap thread.

    Strangers on either side say that side's hello, then corrupted messages.
    """
    source, dest = (MLAPool(**MLA, num_pages=40, page_size=4) for _ in range(2))
    given, into = requests(source, (50, 30)), requests(dest, (50, 30, 20))
    hold(source, zip(given, range(len(given))))
    blank(dest)
    # strangers listen at TCP
    with prefill_of(source) as prefill, decode_of(dest, insecure=True) as decode:
        good = decode.connect([prefill.address], timeout=30)
        decode.receive("first", into[0], link=good)
        offer(prefill, "first", given[0], range(25))
        with dial(prefill.address) as stranger:
            stranger.socket.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
        said = encoded(decode.machine.peers.hello, ReadRequest, ReadDone, Abort)
        for data in rubbish(said):
            with dial(prefill.address) as stranger:
                stranger.send(said[0], data)
        said = encoded(prefill.machine.hello, ChunkReady, ReleaseAck, Abort)
        with Server() as server, ExitStack() as strangers:
            for number, data in enumerate(rubbish(said)):
                bad = decode.connect([server.address])
                decode.receive(number, into[2], link=bad)
                stranger = strangers.enter_context(server.accept())
                stranger.receive()
                stranger.send(said[0], data)
                until(decode, lambda link=bad: link.settled or link.lost)
                decode.abort(number, "its pages are the next room's")
                until(decode, lambda room=number: not decode.reading(room))
            prefill.send("first", given[0])
            assert decode.wait("first", 30) is KVPoll.Success, decode.failure("first")
        decode.receive("second", into[1], link=good)
        prefill.send("second", given[1])
        assert decode.wait("second", 30) is KVPoll.Success, decode.failure("second")
        assert all(decode.poll(room) is not KVPoll.Success for room in range(number))
        assert_only(dest, list(zip(into, range(2))))
