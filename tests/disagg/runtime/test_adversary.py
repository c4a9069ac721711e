"""A prefill that lies, a squatter and a stranger, against every engine."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.protocol.codec import decode as decode_message, encode
from disagg.protocol.messages import Hello, ReadRequest
from kvpool import MLAPool
from kvpool.layout import PoolLayout
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.processes import Child
from tests.streams import dial

TOKENS = 75
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "dtype": "f32", "num_pages": 12, "page_size": 16}
LOOPBACK = "tcp://127.0.0.1:*"
SECRET = b"A SECRET OF SOMEBODY ELSE " * 2000
each_engine = pytest.mark.parametrize("engine", ENGINES)


class OtherMemory:
    """An engine that registers memory of its own, whatever a layout says."""

    def __init__(self, engine, slabs):
        self._engine, self._slabs = engine, slabs

    def register(self, slabs):
        self._engine.register(self._slabs)

    def __getattr__(self, name):
        return getattr(self._engine, name)


def moved(layout: PoolLayout, base: int) -> PoolLayout:
    """The layout as if its first buffer lay at `base`."""
    shift = base - min(buffer.base for buffer in layout.buffers)
    return replace(layout, buffers=[replace(b, base=b.base + shift) for b in layout.buffers])


def serve(pipe, engine, bind, options, lie):
    """Offers each room that the pipe names; with `lie`, from memory that it has not registered."""
    pool = MLAPool(layers=range(2), **MLA)
    given = oracle.place(pool, TOKENS)
    oracle.fill(pool, given)
    layout, made = pool.layout, create_engine(engine)
    if lie is not None:
        made = OtherMemory(made, layout.slabs())
        end = max(slab.end for slab in layout.slabs())
        layout = moved(layout, end - 4096 if lie == "beyond" else lie)
    with PrefillEndpoint(layout, made, bind, **options) as prefill:
        pipe.send(prefill.address)
        while (order := pipe.recv()) is not None:
            (room,) = order
            prefill.send(room, oracle.RequestAddress(TOKENS, given.spans))
            pipe.send(None)


class Prefill(Child):
    """A prefill in a process of its own."""

    def __init__(self, engine, bind=None, options=None, lie=None):
        super().__init__(serve, engine, bind, options or {}, lie)
        self.address = self.answer()

    def close(self):
        """It must still be able to close, and exit well."""
        assert super().close() == 0


class Decode:
    """A decode endpoint of this process, whose pool is blank but for what a room brings."""

    def __init__(self, engine, **options):
        self.pool = MLAPool(layers=range(2), **MLA)
        self.table = oracle.place(self.pool, TOKENS, 9)
        oracle.blank(self.pool)
        self.endpoint = DecodeEndpoint(self.pool.layout, create_engine(engine), **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.endpoint.close()

    def receives(self, room, prefill, link):
        """A room is handed over byte by byte."""
        oracle.blank(self.pool)
        self.endpoint.receive(room, self.table, link=link)
        prefill.ask(room)
        state = self.endpoint.wait(room, 60)
        assert state is KVPoll.Success, self.endpoint.failure(room)
        oracle.assert_holds(self.pool, self.table)
        oracle.blank(self.pool)

    def untouched(self):
        return all((memory == oracle.DEST).all() for memory in oracle.state(self.pool).memory)


@contextmanager
def holder(whose):
    """A pointer to memory that no engine registered, of this process or of another one."""
    if whose == "decode's":
        held = ctypes.create_string_buffer(SECRET)
        assert len(SECRET) >= MLAPool(layers=range(2), **MLA).nbytes  # or it is refused for that
        yield ctypes.addressof(held)
        return
    with Child(hold) as other:
        yield other.answer()


def hold(pipe):
    held = ctypes.create_string_buffer(SECRET)
    pipe.send(ctypes.addressof(held))
    pipe.recv()


@each_engine
@pytest.mark.parametrize("whose", ["decode's", "another's", "beyond"])
def test_a_prefill_that_names_memory_it_has_not_registered_gets_nothing_read(engine, whose):
    with holder(whose) as base, Decode(engine) as decode, Prefill(engine) as honest:
        lie = "beyond" if whose == "beyond" else base
        with Prefill(engine, lie=lie) as liar:
            link = decode.endpoint.connect([liar.address], timeout=30)
            decode.endpoint.receive("r", decode.table, link=link)
            liar.ask("r")
            assert decode.endpoint.wait("r", 60) is KVPoll.Failed
            assert decode.untouched()
            good = decode.endpoint.connect([honest.address], timeout=30)
            decode.receives("good", honest, good)
        honest.close()


@each_engine
def test_a_squatter_without_the_keys_gets_nothing(engine, keys, other_keys):
    keys = {"keys": keys}
    with Decode(engine, peer_timeout=3.0, **keys) as decode:
        with Prefill(engine, LOOPBACK, keys) as prefill:
            address = prefill.address
            link = decode.endpoint.connect([address], timeout=30)
            decode.receives("before", prefill, link)
        for name, options in (("plain", {"insecure": True}), ("others", {"keys": other_keys})):
            with Prefill(engine, address, options) as squatter:
                squatter.ask(name)
                decode.endpoint.receive(name, decode.table, link=link)
                assert decode.endpoint.wait(name, 30) is KVPoll.Failed
                assert decode.untouched()
                assert not link.settled
        with Prefill(engine, address, keys) as prefill:
            decode.endpoint.handshake(link, 30)
            decode.receives("after", prefill, link)
            prefill.close()


@each_engine
def test_a_stranger_without_a_layout_learns_nothing_and_disturbs_nobody(engine):
    """What it may be told: that its layout does not fit. No pointer, no metadata, no room."""
    with Prefill(engine) as prefill, Decode(engine) as decode:
        empty = PoolLayout((), (), (), 0, generation="stranger")
        hello = replace_hello(decode.endpoint.machine.hello, empty)
        with dial(prefill.address) as stranger:
            stranger.send(encode(hello))
            answer = decode_message(stranger.receive())
            assert not isinstance(answer, Hello)
            told = encode(answer)
            for engine_word in (b"socket", b"ranges", b"hostname"):
                assert engine_word not in told
            request = ReadRequest(
                generation="guessed",
                room="good",
                attempt="attempt",
                start=0,
                num_tokens=TOKENS,
                readers=1,
            )
            stranger.send(encode(request))
            assert type(decode_message(stranger.receive())).__name__ == "UnknownPeer"
            link = decode.endpoint.connect([prefill.address], timeout=30)
            decode.receives("good", prefill, link)
        prefill.close()


def replace_hello(hello, layout):
    return msgspec.structs.replace(
        hello, layout=layout.to_msgpack(), generation=layout.generation, metadata=b""
    )
