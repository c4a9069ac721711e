"""Who may offer memory to engine local, and what of it is believed."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import TransferError
from disagg.engines.local import LocalEngine, offer as offers
from disagg.engines.local.offer import Offer, OfferServer, dial, read_offer, receive_files
from disagg.engines.shared_files import Segment
from disagg.host.unix_sockets import Credentials, new_path
from kvpool import MLAPool, RequestAddress, Span
from kvpool.layout import Slab
from tests import oracle
from tests.disagg.engines.local_peers import (
    SIZE,
    FakePeer,
    blank,
    bound,
    files,
    memory_file,
    metadata,
    offer,
    offering,
    reading,
)
from tests.disagg.engines.owners import batch_of, memory_of, read
from tests.processes import Child, forked, until

NOBODY = 65534
PAGE = {"layers": [0], "kv_lora_rank": 192, "qk_rope_head_dim": 64, "dtype": "f32", "page_size": 1}
ITEM = 1024
SECRET = b"TOP SECRET " * 400


# a prefill that lies


class Liar(LocalEngine):
    """Registers nothing and tells what it is given."""

    def __init__(self, told):
        super().__init__()
        self._told = told

    def register(self, slabs):
        """Its layout names memory that is not its own."""

    def metadata(self):
        return self._told


def page_after_a_room_with(told, wanted):
    """Decode's page after a room with a prefill of that metadata, whose layout says that its page 1
    lies at pointer `wanted`; the room must have failed.
    """
    pool, address = MLAPool(**PAGE, num_pages=4), RequestAddress(1, {"kv": Span([1])})
    oracle.blank(pool)
    before = oracle.state(pool).memory[0].copy()
    (buffer,) = pool.layout.buffers
    assert buffer.item_stride == ITEM
    lie = replace(pool.layout, buffers=(replace(buffer, base=wanted - ITEM),), generation="")
    with (
        PrefillEndpoint(lie, Liar(told)) as prefill,
        DecodeEndpoint(pool.layout, LocalEngine()) as decode,
    ):
        decode.connect([prefill.address], timeout=20)
        decode.receive("r", address)
        prefill.send("r", address)
        state, why = decode.wait("r", 20), decode.failure("r")
    assert state is KVPoll.Failed
    assert np.array_equal(oracle.state(pool).memory[0], before)
    return str(why)


HOLD = f"""
import ctypes, mmap, sys
memory = mmap.mmap(-1, 1 << 16)
memory.write({SECRET!r})
print(ctypes.addressof(ctypes.c_char.from_buffer(memory)), flush=True)
sys.stdin.read()
"""


@contextmanager
def holder(whose):
    """A process number, and a pointer to memory there that nobody registered. It is no heap: those
    of two processes of one program may lie at the same pointers.
    """
    if whose == "own":
        memory = mmap.mmap(-1, 1 << 16)
        memory.write(SECRET)
        yield os.getpid(), ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()


def is_mapped(process, pointer):
    """Whether a process has memory at a pointer."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        low, _, high = line.split()[0].partition("-")
        if int(low, 16) <= pointer < int(high, 16):
            return True
    return False


def serve_offer(pipe):
    """Says at a socket what the pipe says."""
    with FakePeer() as peer:
        peer.data = pipe.recv()
        pipe.send(peer.metadata)
        pipe.recv()


@pytest.mark.parametrize("whose", ["own", "another's"])
def test_a_process_that_offers_a_pointer_of_others_is_read_itself(whose):
    with Child(serve_offer) as child, ExitStack() as holders:
        # another pointer, if the process that is read has memory of its own there
        pointers = (holders.enter_context(holder(whose))[1] for _ in range(64))
        base = next(each for each in pointers if not is_mapped(child.process.pid, each))
        child.pipe.send(offer([(base, ITEM, -1, 0)]))
        why = page_after_a_room_with(child.answer(), base)
        assert f"memory of process {child.process.pid} cannot be read" in why
        assert child.close() == 0


def test_metadata_tells_no_more_than_where_to_ask():
    with offering(blank()) as (_, told):
        assert msgspec.msgpack.decode(told).keys() == {"host", "socket"}


# who serves the socket


def listen(one):
    os.setuid(NOBODY)
    one.listen()


def test_a_socket_that_another_user_serves_is_refused(monkeypatch):
    path = new_path()
    with bound(path) as one, reading(memory := blank()) as engine:
        sentence = rf"is of user {NOBODY}, this process runs as user {os.geteuid()}: .* one user"
        if os.geteuid() == 0:
            with forked(listen, one), pytest.raises(TransferError, match=sentence):
                engine.connect(metadata(str(path)))
        else:
            one.listen()
            monkeypatch.setattr(offers, "peer_credentials", lambda _: Credentials(1, NOBODY))
            with pytest.raises(TransferError, match=sentence):
                engine.connect(metadata(str(path)))
        path.unlink()
    assert not memory.any()


@pytest.mark.root
def test_a_socket_in_a_folder_of_another_user_is_not_dialled(tmp_path):
    os.chown(tmp_path, NOBODY, NOBODY)
    with bound(tmp_path / "s") as one:
        one.listen()
        with pytest.raises(TransferError, match=rf"of user {NOBODY}, this process runs as user 0"):
            LocalEngine().connect(metadata(str(tmp_path / "s")))
        one.setblocking(False)
        with pytest.raises(BlockingIOError):
            one.accept()


def test_sockets_of_services_are_not_dialled(tmp_path):
    tmp_path.chmod(0o755)
    with bound(tmp_path / "s") as one:
        one.listen()
        with pytest.raises(TransferError, match="in a folder that other users may open"):
            LocalEngine().connect(metadata(str(tmp_path / "s")))


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (b"", "no absolute path"),
        (b"relative", "no absolute path"),
        (b"\0abstract", "no absolute path"),
        (b"/tmp/\0x", "no absolute path"),
        (b"/" + b"x" * 107, "no absolute path"),
        (b"/nowhere/to/be/found", r"cannot be reached \(No such file"),
        (b"/proc/self/mem", "in a folder that other users may open|cannot be reached"),
    ],
)
def test_a_path_where_nobody_offers_is_refused_at_once(path, sentence):
    with pytest.raises(TransferError, match=sentence):
        LocalEngine().connect(metadata(path))


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "datagram", "nobody listens"])
def test_what_is_no_listening_socket_is_refused_at_once(tmp_path, kind):
    path = tmp_path / "s"
    if kind == "file":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    sort = socket.SOCK_DGRAM if kind == "datagram" else socket.SOCK_STREAM
    with nullcontext() if path.exists() else bound(path, sort):
        before = files()
        with pytest.raises(TransferError, match="cannot be reached"):
            LocalEngine().connect(metadata(str(path)))
        assert files() == before


def test_memory_cannot_be_added_to_what_was_offered():
    with offering(blank()) as (engine, told):
        assert engine.metadata() == told
        with pytest.raises(TransferError, match="register all of it before"):
            engine.register([Slab(blank().ctypes.data, SIZE)])


def test_a_closed_engine_offers_nothing_and_leaves_no_path():
    memory = blank()
    with offering(memory) as (engine, told):
        path = os.fsdecode(msgspec.msgpack.decode(told)["socket"])
        assert os.path.exists(path)
        engine.close()
        assert not os.path.exists(path)
        with pytest.raises(TransferError, match="its process has ended"):
            LocalEngine().connect(told)


def ask(path):
    os.setuid(NOBODY)
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)
        return one.recv(1)


@pytest.mark.root
def test_another_user_is_offered_nothing_even_where_it_can_dial(monkeypatch, caplog):
    folder = Path(tempfile.mkdtemp())
    path = folder / "s"
    monkeypatch.setattr(offers, "new_path", lambda: path)
    handle, memory = memory_file(SIZE), blank()
    with caplog.at_level(logging.WARNING):
        server = OfferServer(Offer([Segment(4096, SIZE, 0, 0)], []), [handle])
        folder.chmod(0o755)
        path.chmod(0o777)
        for _ in range(3):
            with forked(ask, str(path)) as (_, answer):
                assert answer == "b''"
        folder.chmod(0o700)
        with reading(memory) as engine:
            peer = engine.connect(metadata(str(path)))
            read(engine, peer, batch_of((4096, memory.ctypes.data, 64)))
        assert memory[:64].all()
        server.close()
    folder.rmdir()
    assert len([line for line in caplog.messages if f"user {NOBODY} asked for memory" in line]) == 1
    os.close(handle)


# what is offered


def pipe_end():
    read, write = os.pipe()
    os.close(write)
    return read


def good():
    return memory_file(64)


WHOLE, UNFIT = [(4096, 64, 0, 0)], "not a regular one, or is not sealed"
SPOILT = {
    "a pipe": (WHOLE, [pipe_end], UNFIT),
    "a folder": (WHOLE, [lambda: os.open("/tmp", os.O_RDONLY)], UNFIT),
    "a device": (WHOLE, [lambda: os.open("/dev/zero", os.O_RDONLY)], UNFIT),
    "a file that may shrink": (WHOLE, [lambda: memory_file(64, sealed=False)], UNFIT),
    "fewer files": ([*WHOLE, (8192, 64, 1, 0)], [good], "1 files"),
    "more files": (WHOLE, [good] * 2, "2 files came"),
    "files for none": ([(4096, 64, -1, 0)], [good], "1 files came"),
    "no such index": ([(4096, 64, -2, 0)], [], "0 files came"),
    "beyond the file": ([(4096, 65, 0, 0)], [good], "0 to 65 of a file of 64"),
    "before the file": ([(4096, 8, 0, -8)], [good], "-8 to 0 of a file"),
    "far away": ([(4096, 8, 0, 1 << 62)], [good], "of a file of 64 bytes"),
    "no bytes": ([(4096, 0, -1, 0)], [], "0 bytes at 0x1000 overlap another range or are invalid"),
    "fewer than none": ([(4096, -1, -1, 0)], [], "-1 bytes at 0x1000 overlap"),
    "too many bytes": ([(4096, (1 << 63) - 1, -1, 0)], [], "or are invalid"),
    "a negative pointer": ([(-4096, 64, -1, 0)], [], "-0x1000 overlap"),
    "twice the same": ([(4096, 64, -1, 0), (4159, 9, -1, 0)], [], "9 bytes at 0x103f overlap"),
    "too many files": ([(4096, 64, -1, 0)], [good] * 252, "are more than 250, or this process"),
    "too many segments": ([(4096 * n, 1, -1, 0) for n in range(10)], [], "10 segments"),
}


NO_OFFER = [
    (b"", [], "malformed offer"),
    (b"\xc1", [], "malformed offer"),
    (b"\x92\x90", [], "malformed offer"),
    (msgspec.msgpack.encode([[], [], []]), [], "malformed offer"),
    (msgspec.msgpack.encode([[[4096, 1 << 64 - 1, -1, 0]], []]), [], "malformed offer"),
    (bytes((16 << 20) + 1), [], f"{(16 << 20) + 1} bytes, at most"),
    (None, [], "no file came"),
    (None, [pipe_end], "not a regular one"),
    (None, [lambda: memory_file(8, sealed=False)], "not sealed"),
]


@pytest.mark.parametrize(
    ("data", "makers", "sentence"),
    [*((offer(segments), *more) for segments, *more in SPOILT.values()), *NO_OFFER],
    ids=[*SPOILT, *(str(data)[:20] for data, *_ in NO_OFFER)],
)
def test_what_is_no_offer_is_refused_and_leaves_no_file_open(data, makers, sentence, monkeypatch):
    monkeypatch.setattr(offers, "MAX_REGIONS", 9)
    with FakePeer(data, [make() for make in makers]) as peer, reading(blank()) as engine:
        before = files()
        with pytest.raises(TransferError, match=sentence):
            engine.connect(peer.metadata)
        peer.hang_up()
        until(lambda: files() == before)


def test_a_peer_that_hangs_up_is_refused():
    with FakePeer(silent=True) as peer, reading(blank()) as engine:
        peer.hangs_up = True
        with pytest.raises(TransferError, match="has ended"):
            engine.connect(peer.metadata)


def test_only_the_offered_part_of_a_file_can_be_read():
    memory = blank()
    dst = memory.ctypes.data
    segments = [(1 << 30, 100, 0, 4000), ((1 << 30) + 4096, 100, 0, 9000)]
    with FakePeer(offer(segments), [memory_file(3 * 4096)]) as peer, reading(memory) as engine:
        other = engine.connect(peer.metadata)
        read(engine, other, batch_of((1 << 30, dst, 100), ((1 << 30) + 4096, dst + 200, 100)))
        for start in ((1 << 30) - 1, (1 << 30) + 93, (1 << 30) + 4096 - 8, (1 << 30) + 4189):
            with pytest.raises(TransferError, match="do not lie in memory that the peer has"):
                read(engine, other, batch_of((start, dst + 400, 8)))
    assert memory[:100].all() and memory[200:300].all() and memory.sum() == 200


def test_as_many_files_as_one_message_carries_arrive():
    handles = [memory_file(8) for _ in range(250)]
    segments = [Segment(4096 * (n + 1), 8, n, 0) for n in range(250)]
    server, memory = OfferServer(Offer(segments, []), handles), blank()
    with reading(memory) as engine:
        peer = engine.connect(metadata(server.path))
        runs = [(4096 * (n + 1), memory.ctypes.data + 8 * n, 8) for n in range(250)]
        read(engine, peer, batch_of(*runs))
    assert memory[:2000].all() and not memory[2000:].any()
    server.close()
    for handle in handles:
        os.close(handle)


def test_peers_cannot_write_what_they_are_offered():
    memory = memory_of("shared", SIZE)
    with offering(memory) as (_, told):
        link, _ = dial(msgspec.msgpack.decode(told)["socket"])
        files = receive_files(link, 20)
        assert read_offer(files[0]) == Offer([Segment(memory.ctypes.data, SIZE, 0, 0)], [])
        for file in files:
            with pytest.raises(OSError, match=r"Bad file descriptor|Operation not permitted"):
                os.write(file, b"x")
            os.close(file)
        link.close()


def test_more_files_than_a_peer_takes_are_refused_where_they_are_offered():
    with pytest.raises(TransferError, match="memory in 251 shared files"):
        OfferServer(Offer([], []), [0] * 251)
