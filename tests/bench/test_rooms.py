"""Rooms of 1 KiB a second between two processes, beside as many bare frames over TCP; how long one
takes from send to Success; many prefills beside one; and what a room costs that waits.
"""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing.connection import wait

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from kvpool import MHAPool, RequestAddress, Span
from tests.bench.conftest import record
from tests.disagg.engines.peers import ENGINES
from tests.processes import Child
from tests.streams import Server, dial

OPEN = 512
MESSAGES = 2  # each way: a request and its chunk, "done" and its answer


def pool():
    """A page is 1 KiB."""
    shape = {"num_kv_heads": 1, "head_dim": 64, "dtype": "bf16", "page_size": 4}
    return MHAPool(layers=range(1), num_pages=OPEN + 1, **shape)


def tables(pages):
    return [RequestAddress(4, {"kv": Span([1 + page])}) for page in range(pages)]


def forget(endpoint, ended):
    for each in ended:
        assert each.state is KVPoll.Success, each
        endpoint.forget(each.room)
    return len(ended)


def wait_ended(endpoint, seconds):
    """What has ended, as an event loop learns of it."""
    wait([endpoint], seconds)
    return endpoint.ended()


@contextmanager
def frozen():
    """As vLLM and SGLang do once they have started: else full collections, which look at all that
    torch has made, take a tenth of a room's time.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def serve(pipe, engine):
    """Offers the rooms that the pipe names, or sends messages back."""
    gc.freeze()
    made, given = pool(), tables(OPEN)
    with Server() as server, PrefillEndpoint(made.layout, create_engine(engine)) as prefill:
        pipe.send((prefill.address, server.address))
        bare = server.accept()
        while (told := pipe.recv()) is not None:
            what, first, number = told
            if what == "echo":
                for _ in range(number):
                    bare.send(bare.receive())
            elif what == "one":
                pipe.send(time.monotonic())
                prefill.send(first, given[0])
            elif what == "rooms":
                done = 0
                for room in range(number):
                    prefill.send(first + room, given[room % OPEN])
                    if room % 64 == 63:
                        done += forget(prefill, prefill.ended())
                while done < number:
                    done += forget(prefill, wait_ended(prefill, 1))
            elif what == "cpu":
                pipe.send(time.process_time())


class Peer(Child):
    """A prefill process."""

    def __init__(self, stack, engine):
        super().__init__(serve, engine)
        stack.enter_context(self)
        self.address, bare = self.answer()
        self.bare = stack.enter_context(dial(bare))


@contextmanager
def decode_with(engine, peers=1):
    with ExitStack() as stack:
        prefills = [Peer(stack, engine) for _ in range(peers)]
        made = pool()  # its memory must outlive the endpoint
        decode = stack.enter_context(DecodeEndpoint(made.layout, create_engine(engine)))
        links = [decode.connect([each.address], timeout=60) for each in prefills]
        stack.enter_context(frozen())
        yield decode, prefills, links


def hand_over(decode, peer, first, number):
    """`number` rooms, `OPEN` of them at once."""
    into, free, held = tables(OPEN), list(range(OPEN)), {}
    peer.pipe.send(("rooms", first, number))
    asked = done = 0
    while done < number:
        while asked < number and free:
            held[first + asked] = page = free.pop()
            decode.receive(first + asked, into[page])
            asked += 1
        for each in wait_ended(decode, 10):
            assert each.state is KVPoll.Success, each
            decode.forget(each.room)
            free.append(held.pop(each.room))
            done += 1


@pytest.mark.parametrize("engine", ENGINES)
def test_many_at_once(paired, engine, timed):
    number, rooms = 2000 if timed else 20, count(0, 1_000_000)
    with decode_with(engine) as (decode, [peer], _):

        def messages():
            peer.pipe.send(("echo", 0, MESSAGES * number))
            sent = got = 0
            while got < MESSAGES * number:
                while sent < MESSAGES * number and sent - got < OPEN:
                    peer.bare.send(bytes(100))
                    sent += 1
                peer.bare.receive()
                got += 1

        paired(lambda: hand_over(decode, peer, next(rooms), number), messages, rounds=10)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_from_send_to_success(engine, timed, request):
    """Beside two round trips of bare frames."""
    number, (into,) = 300 if timed else 3, tables(1)
    ours, theirs = [], []
    with decode_with(engine) as (decode, [peer], _):
        for room in range(number):
            peer.pipe.send(("echo", 0, MESSAGES))
            began = time.monotonic()
            for _ in range(MESSAGES):
                peer.bare.send(bytes(100))
                peer.bare.receive()
            theirs.append(time.monotonic() - began)
            decode.receive(room, into)
            time.sleep(0.002)
            began = peer.ask("one", room, 1)
            assert decode.wait(room, 30) is KVPoll.Success
            ours.append(time.monotonic() - began)
            decode.forget(room)
    if timed:
        record(request, request.node.name, ours, theirs)


@pytest.mark.parametrize("engine", ENGINES)
def test_many_prefills(paired, engine, timed):
    """32 prefill processes with 16 rooms each, beside one with 512."""
    peers, number = (32, 16) if timed else (2, 2)
    rooms = count(0, 1_000_000)
    with decode_with(engine) as (alone, [peer], _), decode_with(engine, peers) as many:

        def from_many():
            decode, prefills, links = many
            first = next(rooms)
            into = tables(OPEN)
            for at, (each, link) in enumerate(zip(prefills, links)):
                mine = first + 1000 * at
                for room in range(number):
                    decode.receive(mine + room, into[at * number + room], link=link)
                each.pipe.send(("rooms", mine, number))
            done = 0
            while done < peers * number:
                done += forget(decode, wait_ended(decode, 30))

        paired(from_many, lambda: hand_over(alone, peer, next(rooms), peers * number), rounds=5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_room_that_waits(engine, timed, request):
    """Seconds of processor time on both sides, beside the seconds that it waits."""
    seconds = 3.0 if timed else 0.05
    with decode_with(engine) as (decode, [peer], _):
        for state in ("not sent", "sent, nobody asks"):
            if state == "not sent":
                decode.receive("r", tables(1)[0])
            else:
                decode.abort("r", "enough.")
                peer.ask("one", 1, 1)
            time.sleep(0.2)
            began, mine, theirs = time.monotonic(), time.process_time(), peer.ask("cpu", 0, 0)
            time.sleep(seconds)
            spent = peer.ask("cpu", 0, 0) - theirs, time.process_time() - mine
            waited = time.monotonic() - began
            for side, each in zip(("prefill", "decode"), spent):
                if timed:
                    title = f"a room that waits, {state}, {side}[{engine}]"
                    record(request, title, [each], [waited])
