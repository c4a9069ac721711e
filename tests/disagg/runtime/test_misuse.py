"""What endpoints answer to misuse, rubbish and bad luck: a sentence, and everybody else goes on."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest

from disagg import (
    DecodeEndpoint,
    EndpointClosed,
    KVPoll,
    PrefillEndpoint,
    RoomError,
    SocketTransport,
)
from disagg.engines.base import create_engine
from disagg.engines.local import LocalEngine
from kvpool import MLAPool, RequestAddress, Span
from kvpool.layout import Slab
from tests import oracle
from tests.disagg.engines.owners import batch_of, read
from tests.disagg.runtime.sides import (
    MLA,
    TOKENS,
    arrives,
    connected,
    joined,
    moves,
    request,
    succeeds,
)
from tests.disagg.waiting import until


@pytest.fixture
def pair():
    """Both endpoints in this process over `local`, connected, with their pools."""
    with joined() as ends:
        yield ends


def works(pair, room):
    """A hand-off still succeeds, byte by byte."""
    oracle.blank(pair[3])
    moves(*pair, room)
    succeeds(pair[0], room)


def test_what_is_no_block_table_and_no_engine_is_a_sentence(pair):
    prefill, _, decode, *_ = pair
    words = r"a block table: a RequestAddress, got list. .* `request.address\(\)`"
    for call in (decode.receive, prefill.send):
        with pytest.raises(TypeError, match=words):
            call("r", [1, 2])
    for endpoint in (PrefillEndpoint, DecodeEndpoint):
        with pytest.raises(TypeError, match=r"engine: an Engine such as create_engine\('local'\)"):
            endpoint(prefill.layout, "local")
    works(pair, "r")


def test_without_a_prefill_a_room_says_to_connect_first(pair):
    *_, pool, address = pair
    words = "0 prefills are connected: call connect first"
    alone = DecodeEndpoint(pool.layout, create_engine("local"))
    with alone, pytest.raises(RoomError, match=words):
        alone.receive("r", address)


@pytest.mark.parametrize("room", [-1, 1 << 63, True, None, 1.5, "x" * 257, "\udce9", b"r", (1, 2)])
def test_a_room_that_cannot_travel_is_refused_at_once(pair, room):
    prefill, given, decode, _, address = pair
    for call in (lambda: decode.receive(room, address), lambda: prefill.send(room, given)):
        with pytest.raises(ValueError, match="a number from 0 to"):
            call()
    works(pair, "r")


@pytest.mark.parametrize(
    ("addresses", "sentence"),
    [
        ("tcp://127.0.0.1:1", "a list of one or more addresses"),
        ([], "a list of one or more addresses"),
        (["localhost:1234"], "address 'localhost:1234'"),
        (["tcp://127.0.0.1:*"], "names no port to dial"),
        (["tcp://127.0.0.1:65536"], "a port is at most 65535"),
        (["ipc://"], "a unix socket is ipc://PATH"),
        (["ipc:///" + "x" * 107], "at most 107 bytes"),
        (["ipc:///nobody", "nonsense"], "address 'nonsense'"),
    ],
)
def test_an_address_that_is_none_is_refused_at_once(pair, addresses, sentence):
    with pytest.raises(ValueError, match=sentence):
        pair[2].connect(addresses, timeout=1)
    works(pair, "r")


def test_chunks_that_do_not_follow_one_another_are_refused_at_once(pair):
    prefill, given, *_ = pair
    prefill.send("r", given, tokens=range(10), last=False)
    with pytest.raises(ValueError, match="positions up to 10 were sent"):
        prefill.send("r", given, tokens=range(12, 20), last=False)
    with pytest.raises(ValueError, match=f"holds {TOKENS} tokens"):
        prefill.send("r", given, tokens=range(10, 20), last=True)
    with pytest.raises(ValueError, match="aux values travel with the last chunk"):
        prefill.send("r", given, tokens=range(10, 20), last=False, aux={"a": 1})
    with pytest.raises(ValueError, match="aux: "):
        prefill.send("r", given, aux={"a": object()})
    prefill.send("r", given)
    with pytest.raises(ValueError, match="last chunk was sent already"):
        prefill.send("r", given)


def test_numpy_integers_are_integers(pair):
    prefill, given, decode, dest, address = pair
    decode.receive(np.int64(5), RequestAddress(np.int64(TOKENS), address.spans), start=np.int32(0))
    spans = {"kv": Span(given.spans["kv"].ids, np.int64(0))}
    prefill.send(np.uint8(5), RequestAddress(np.int32(TOKENS), spans))
    arrives(decode, 5, dest, address)


def test_a_reason_of_any_text_and_length_reaches_the_other_side(pair):
    prefill, _, decode, _, address = pair
    decode.receive("long", address)
    until(prefill, lambda: prefill.poll("long") is KVPoll.WaitingForInput)
    prefill.abort("long", "x" * 70_000)
    assert decode.wait("long", 20) is KVPoll.Failed
    assert len(str(decode.failure("long"))) > 4000
    decode.receive("odd", address)
    until(prefill, lambda: prefill.poll("odd") is KVPoll.WaitingForInput)
    decode.abort("odd", "caf\udce9")
    assert prefill.wait("odd", 20) is KVPoll.Failed
    assert "caf\\udce9" in str(prefill.failure("odd"))


def test_aux_values_may_be_any_number(pair):
    prefill, given, decode, _, address = pair
    decode.receive("r", address)
    prefill.send("r", given, aux={"logprob": float("nan"), "hidden": b"\0" * 1000})
    succeeds(decode, "r")
    assert np.isnan(decode.aux("r")["logprob"])


def test_after_close_calls_are_refused_and_no_stranger_is_written_to(pair, tmp_path):
    prefill, given, *_ = pair
    before = {int(name) for name in os.listdir("/proc/self/fd")}
    prefill.close()
    # these get the numbers of the files that were closed
    files = [os.open(tmp_path / str(n), os.O_RDWR | os.O_CREAT) for n in range(20)]
    assert before & {*files}
    for call in (lambda: prefill.send("r", given), lambda: prefill.abort("r", "late")):
        with pytest.raises(EndpointClosed):
            call()
    assert all(os.fstat(file).st_size == 0 for file in files)
    for file in files:
        os.close(file)


def test_who_waits_when_the_endpoint_closes_is_told(pair):
    decode, address = pair[2], pair[4]
    decode.receive("r", address)
    ended: list[object] = []
    waiter = threading.Thread(target=lambda: ended.append(decode.wait("r")))
    waiter.start()
    decode.close()
    waiter.join(20)
    assert ended == [KVPoll.Failed]
    assert "closed" in str(decode.failure("r"))


def test_an_address_in_use_is_a_sentence_and_leaves_nothing_behind(pair):
    before = len(os.listdir("/proc/self/fd"))
    for bind in (pair[0].address, "8000"):
        with pytest.raises(ValueError, match="bind"):
            PrefillEndpoint(pair[3].layout, create_engine("local"), bind=bind)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_endpoints_leave_no_file_and_no_thread_behind():
    pool = MLAPool(layers=[0], **MLA)

    def once():
        with connected(pool, pool):
            pass

    def held():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    once()
    files, threads = held()
    for _ in range(25):
        once()
    end = time.monotonic() + 20  # threads that touch memory in the background end by themselves
    while held()[1] > threads and time.monotonic() < end:
        time.sleep(0.01)
    left = held()
    assert left[0] <= files and left[1] <= threads


def test_rubbish_from_a_known_peer_costs_its_rooms_and_not_the_link():
    source, dest = (MLAPool(layers=range(2), **MLA) for _ in range(2))
    given, address = request(source, dest)
    transport, options = SocketTransport(), {"peer_timeout": 4}
    with connected(source, dest, prefill=options, transport=transport, **options) as ends:
        prefill, decode = ends
        (link,) = decode.machine.peers.links
        decode.receive("r", address)
        until(prefill, lambda: prefill.poll("r") is KVPoll.WaitingForInput)
        rubbish, send = [b"rubbish"], transport.send

        def bad(peer, data):
            return send(peer, rubbish.pop() if rubbish else data)

        transport.send = bad  # the next message, a ping
        for side in (prefill, decode):
            assert side.wait("r", 20) is KVPoll.Failed
            assert "it sent what cannot be served" in str(side.failure("r"))
        decode.handshake(link, 20)
        works((prefill, given, decode, dest, address), "next")
    transport.close()


def test_a_wait_that_takes_too_long_says_what_the_room_waits_for(pair):
    prefill, given, decode, _, address = pair
    prefill.send("r", RequestAddress(16, given.spans), last=False)
    for room, state, what in (
        ("r", "Bootstrapping", "a decode to ask for it"),
        ("r", "Transferring", r"the chunk from position 16 \(`send`\)"),
    ):
        with pytest.raises(TimeoutError, match=f"'{room}' is {state} .* it waits for {what}"):
            prefill.wait(room, 0.05)
        if state == "Bootstrapping":
            decode.receive("r", address)
            until(decode, lambda: decode.metrics("r").bytes_moved and not decode.reading("r"))
    sentence = (
        r"'r' is Transferring after 0.05 s: it waits for chunks from position 16 on, of rank 0"
    )
    with pytest.raises(TimeoutError, match=sentence):
        decode.wait("r", 0.05)
    prefill.send("r", given)
    succeeds(decode, "r")


def test_a_fault_in_the_loop_fails_its_rooms_by_name_and_the_loop_goes_on(pair, monkeypatch):
    *_, decode, _, address = pair
    decode.receive("r", address)

    def broken():
        monkeypatch.undo()
        raise OSError("cable pulled")

    monkeypatch.setattr(decode.engine, "progress", broken)
    assert decode.wait("r", 20) is KVPoll.Failed
    assert "cable pulled" in str(decode.failure("r"))
    works(pair, "next")


def test_private_memory_that_the_kernel_keeps_in_two_mappings_is_one_segment():
    memory = np.empty(8 << 20, dtype=np.uint8)  # numpy asks for huge pages: the ends split off
    memory[:] = 7
    engine = LocalEngine()
    engine.register([Slab(memory.ctypes.data, memory.size)])
    dest = np.zeros_like(memory)
    peer = engine.connect(engine.metadata())
    read(engine, peer, batch_of((memory.ctypes.data, dest.ctypes.data, 8 << 20)))
    assert (dest == 7).all()
    assert peer.ranges.starts.tolist() == [memory.ctypes.data]
    engine.close()


def test_a_dropped_pool_of_the_same_process_stays_readable_while_it_is_mapped():
    pool = MLAPool(layers=[0], **MLA)
    pool.view("latent", 0)[:] = 3
    engine, reader = LocalEngine(), LocalEngine()
    engine.register(pool.layout.slabs())
    base = pool.layout.buffers[0].base
    peer = reader.connect(engine.metadata())
    del pool
    gc.collect()
    dest = np.zeros(16, dtype=np.float32)
    read(reader, peer, batch_of((base, dest.ctypes.data, 64)))
    assert (dest == 3).all()
