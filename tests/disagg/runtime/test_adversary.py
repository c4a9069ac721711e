"""A prefill that lies, a squatter and a stranger, against every engine."""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import msgspec
import pytest

from disagg import KVPoll
from disagg.protocol.codec import decode as decode_message, encode
from disagg.protocol.messages import Hello
from kvpool.layout import PoolLayout
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.disagg.protocol.pair import asks
from tests.disagg.runtime.sides import TOKENS, PrefillProcess, decode_side, pool, prefill_process
from tests.processes import Child
from tests.streams import dial

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


def elsewhere(base, engine, layout):
    """What it says of its memory is true of memory at `base`, or behind its own ("beyond")."""
    slabs = layout.slabs()
    if base == "beyond":
        base = max(slab.end for slab in slabs) - 4096
    return OtherMemory(engine, slabs), moved(layout, base)


def untouched(dest):
    return all((memory == oracle.DEST).all() for memory in oracle.state(dest).memory)


@contextmanager
def holder(whose):
    """A pointer to memory of this process or of another one, which no engine registered."""
    if whose == "beyond":
        yield whose
    elif whose == "decode's":
        held = ctypes.create_string_buffer(SECRET)
        assert len(SECRET) >= pool().nbytes  # or it is refused for that
        yield ctypes.addressof(held)
    else:
        with Child(hold) as other:
            yield other.answer()


def hold(pipe):
    held = ctypes.create_string_buffer(SECRET)
    pipe.send(ctypes.addressof(held))
    pipe.recv()


@each_engine
@pytest.mark.parametrize("whose", ["decode's", "another's", "beyond"])
def test_a_prefill_that_names_memory_it_has_not_registered_gets_nothing_read(engine, whose):
    with (
        holder(whose) as base,
        decode_side(engine) as side,
        prefill_process(engine=engine) as honest,
        PrefillProcess(engine=engine, lie=partial(elsewhere, base)) as liar,
    ):
        decode, dest, into = side
        link = decode.connect([liar.address], timeout=30)
        decode.receive("r", into, link=link)
        liar.ask("r")
        assert decode.wait("r", 60) is KVPoll.Failed
        assert untouched(dest)
        honest.hands_over("good", side, decode.connect([honest.address], timeout=30))


@each_engine
def test_a_squatter_without_the_keys_gets_nothing(engine, keys, other_keys):
    secret = {"engine": engine, "keys": keys}
    with decode_side(peer_timeout=3.0, **secret) as side:
        decode, dest, into = side
        with PrefillProcess(LOOPBACK, **secret) as prefill:
            address = prefill.address
            link = decode.connect([address], timeout=30)
            prefill.hands_over("before", side, link)
        for room, options in (("plain", {"insecure": True}), ("others", {"keys": other_keys})):
            with PrefillProcess(address, engine=engine, **options) as squatter:
                squatter.ask(room)
                decode.receive(room, into, link=link)
                assert decode.wait(room, 30) is KVPoll.Failed
                assert untouched(dest)
                assert not link.settled
        with prefill_process(address, **secret) as prefill:
            decode.handshake(link, 30)
            prefill.hands_over("after", side, link)


@each_engine
def test_a_stranger_without_a_layout_learns_nothing_and_disturbs_nobody(engine):
    """What it may be told: that its layout does not fit. No pointer, no metadata, no room."""
    with prefill_process(engine=engine) as prefill, decode_side(engine) as side:
        decode = side[0]
        empty = PoolLayout((), (), (), 0, generation="stranger")
        hello = msgspec.structs.replace(
            decode.machine.hello, layout=empty.to_msgpack(), generation="stranger", metadata=b""
        )
        with dial(prefill.address) as stranger:
            stranger.send(encode(hello))
            answer = decode_message(stranger.receive())
            assert not isinstance(answer, Hello)
            told = encode(answer)
            for engine_word in (b"socket", b"ranges", b"hostname"):
                assert engine_word not in told
            stranger.send(encode(asks(generation="guessed", room="good", num_tokens=TOKENS)))
            assert type(decode_message(stranger.receive())).__name__ == "UnknownPeer"
            prefill.hands_over("good", side, decode.connect([prefill.address], timeout=30))


def test_a_thousand_strangers_leave_room_for_a_decode():
    with prefill_process() as prefill, decode_side() as side, ExitStack() as strangers:
        for number in range(1000):
            stranger = strangers.enter_context(dial(prefill.address))
            stranger.socket.sendall(os.urandom(1 + number % 50))
        prefill.hands_over("good", side, side[0].connect([prefill.address], timeout=30))
