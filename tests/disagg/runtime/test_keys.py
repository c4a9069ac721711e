"""With keys, control messages are encrypted and nobody without them connects."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
import threading

import pytest
import zmq

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.engines.base import create_engine
from disagg.protocol import messages
from disagg.runtime.keys import read_keys, write_keys
from kvpool import MLAPool
from tests import oracle

TOKENS = 40
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "dtype": "f32", "num_pages": 5, "page_size": 16}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "cluster.key"
    write_keys(path)
    return path


def hand_off(keys, through=lambda address: address):
    """A room over two endpoints in this process, byte by byte."""
    source, dest = (MLAPool(layers=range(2), **MLA) for _ in range(2))
    given, address = oracle.place(source, TOKENS), oracle.place(dest, TOKENS, 9)
    oracle.fill(source, given)
    oracle.blank(dest)
    with (
        PrefillEndpoint(source.layout, create_engine("local"), keys=keys) as prefill,
        DecodeEndpoint(dest.layout, create_engine("local"), keys=keys) as decode,
    ):
        decode.connect([through(prefill.address)], timeout=20)
        decode.receive("a room by name", address)
        prefill.send("a room by name", given)
        assert decode.wait("a room by name", 20) is KVPoll.Success
        oracle.assert_holds(dest, address)


class Tap:
    """A TCP relay that keeps what it has carried."""

    def __init__(self, address):
        self.to = address.removeprefix("tcp://").split(":")
        self.server = socket.create_server(("127.0.0.1", 0))
        self.seen = []
        threading.Thread(target=self._serve, daemon=True).start()
        self.address = f"tcp://127.0.0.1:{self.server.getsockname()[1]}"

    def _serve(self):
        here, _ = self.server.accept()
        there = socket.create_connection((self.to[0], int(self.to[1])))
        for ends in ((here, there), (there, here)):
            threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, one, other):
        while data := one.recv(65536):
            self.seen.append(data)
            other.sendall(data)


@pytest.mark.parametrize("secret", [False, True])
def test_what_travels_can_be_read_only_without_keys(keys, secret):
    taps = []

    def through(address):
        taps.append(Tap(address))
        return taps[0].address

    hand_off(keys if secret else None, through)
    assert (b"a room by name" in b"".join(taps[0].seen)) is not secret


@pytest.mark.parametrize("theirs", ["none", "others"])
def test_nobody_connects_without_the_keys_and_the_others_go_on(keys, tmp_path, theirs):
    other = None
    if theirs == "others":
        write_keys(other := tmp_path / "other.key")
    pool = MLAPool(layers=range(2), **MLA)
    with (
        PrefillEndpoint(pool.layout, create_engine("local"), keys=keys) as prefill,
        DecodeEndpoint(pool.layout, create_engine("local"), keys=keys) as friend,
        DecodeEndpoint(pool.layout, create_engine("local"), keys=other) as stranger,
    ):
        with pytest.raises(TimeoutError, match="are keys the same on both sides"):
            stranger.connect([prefill.address], timeout=1)
        friend.connect([prefill.address], timeout=20)


def test_who_knows_the_public_key_alone_is_not_let_in(keys):
    pool = MLAPool(layers=range(2), **MLA)
    with (
        PrefillEndpoint(pool.layout, create_engine("local"), keys=keys) as prefill,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        stranger.linger = 0
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = read_keys(keys).public.encode()
        stranger.connect(prefill.address)
        hello = messages.Hello(messages.PROTOCOL, "g", "local", pool.layout.to_msgpack(), b"", 10.0)
        stranger.send(messages.encode(hello))
        assert not stranger.poll(1000)


def test_a_key_file_is_its_owners_alone_and_is_never_overwritten(tmp_path):
    path = tmp_path / "k"
    command = [sys.executable, "-c", "from kvpool.cli import main; main()", "keys", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert read_keys(path).public in told.stdout
    assert read_keys(path).secret not in told.stdout + repr(read_keys(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    again = subprocess.run(command, capture_output=True, text=True)
    assert (again.returncode, path.read_bytes()) == (1, before)
    assert "File exists" in again.stderr
    path.chmod(0o640)
    with pytest.raises(ValueError, match="other users may open it"):
        read_keys(path)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"public": "x", "secret": "y"}'])
def test_a_file_that_holds_no_keys_is_refused_at_once(tmp_path, content):
    path = tmp_path / "k"
    path.write_bytes(content)
    path.chmod(0o600)
    pool = MLAPool(layers=range(2), **MLA)
    with pytest.raises(ValueError, match="Make it anew: kvpool keys"):
        PrefillEndpoint(pool.layout, create_engine("local"), keys=path)
    with pytest.raises(ValueError, match="Make it: kvpool keys"):
        DecodeEndpoint(pool.layout, create_engine("local"), keys=tmp_path / "none")
