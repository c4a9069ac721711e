"""With keys, control messages are encrypted, and each side talks to holders of the other's only."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from typer.testing import CliRunner

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, ZmqTransport
from disagg.engines.base import create_engine
from disagg.protocol import messages
from disagg.runtime.keys import read_keys, write_keys
from kvpool import MLAPool
from kvpool.cli import app
from tests import oracle
from tests.disagg.waiting import until

TOKENS = 40
MLA = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "dtype": "f32", "num_pages": 5, "page_size": 16}
OTHER_USER = 65534
TCP = "tcp://127.0.0.1:*"


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    write_keys(path)
    return path


def prefill_of(pool, keys=None, bind=TCP):
    return PrefillEndpoint(pool.layout, create_engine("local"), bind, keys=keys)


def decode_of(pool, keys=None):
    return DecodeEndpoint(pool.layout, create_engine("local"), keys=keys)


def hand_off(keys, through=lambda address: address):
    """A room over two endpoints in this process, byte by byte."""
    source, dest = (MLAPool(layers=range(2), **MLA) for _ in range(2))
    given, address = oracle.place(source, TOKENS), oracle.place(dest, TOKENS, 9)
    oracle.fill(source, given)
    oracle.blank(dest)
    with prefill_of(source, keys) as prefill, decode_of(dest, keys) as decode:
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


def forge(folder, side, keys, other):
    """A new folder with a file of `side`: the pair of `keys`, for a peer with the key `other`."""
    folder.mkdir(mode=0o700)
    file = folder / f"{side}.key"
    file.write_bytes(msgspec.json.encode(type(keys)(side, keys.public, keys.secret, other)))
    file.chmod(0o600)
    return folder


@pytest.mark.parametrize("theirs", ["none", "others", "prefill's own"])
def test_only_decodes_key_is_let_in_and_the_others_go_on(keys, tmp_path, theirs):
    pool, stranger = MLAPool(layers=range(2), **MLA), None
    ours = read_keys(keys, "prefill")
    if theirs == "others":
        other, _ = write_keys(tmp_path / "other")
        stranger = forge(tmp_path / "forged", "decode", other, ours.public)
    elif theirs == "prefill's own":  # a prefill's host cannot act as decode
        stranger = forge(tmp_path / "forged", "decode", ours, ours.public)
    with (
        prefill_of(pool, keys) as prefill,
        decode_of(pool, keys) as friend,
        decode_of(pool, stranger) as decode,
    ):
        with pytest.raises(TimeoutError, match="are keys the same on both sides"):
            decode.connect([prefill.address], timeout=1)
        friend.connect([prefill.address], timeout=20)
        assert decode.machine.peers.live() == 0


@pytest.mark.parametrize("theirs", ["none", "others", "decode's own"])
def test_only_prefills_key_is_believed(keys, tmp_path, theirs):
    pool, stranger = MLAPool(layers=range(2), **MLA), None
    ours = read_keys(keys, "decode")
    if theirs == "others":
        _, other = write_keys(tmp_path / "other")
        stranger = forge(tmp_path / "forged", "prefill", other, ours.public)
    elif theirs == "decode's own":  # a decode's host cannot act as prefill
        stranger = forge(tmp_path / "forged", "prefill", ours, ours.public)
    with (
        prefill_of(pool, stranger) as imposter,
        prefill_of(pool, keys) as prefill,
        decode_of(pool, keys) as decode,
    ):
        with pytest.raises(TimeoutError, match="are keys the same on both sides"):
            decode.connect([imposter.address], timeout=1)
        assert not imposter.machine.peers.alive
        decode.connect([prefill.address], timeout=20)


def test_keys_on_one_side_only_are_hinted_at(keys, caplog):
    pool = MLAPool(layers=range(2), **MLA)
    with prefill_of(pool) as plain, decode_of(pool, keys) as decode:
        link = decode.connect([plain.address])
        until(plain, lambda: "are keys set on one side only?" in caplog.text)
        with pytest.raises(TimeoutError):
            decode.handshake(link, 0.1)
    caplog.clear()
    with prefill_of(pool, keys) as prefill, decode_of(pool) as decode:
        link = decode.connect([prefill.address])
        until(decode, lambda: "are keys set on one side only?" in caplog.text)
        with pytest.raises(TimeoutError):
            decode.handshake(link, 0.1)


def test_who_knows_the_public_keys_alone_is_not_let_in(keys):
    pool = MLAPool(layers=range(2), **MLA)
    with (
        prefill_of(pool, keys) as prefill,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as stranger,
    ):
        stranger.linger = 0
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = read_keys(keys, "prefill").public.encode()
        stranger.connect(prefill.address)
        hello = messages.Hello(messages.PROTOCOL, "g", "local", pool.layout.to_msgpack(), b"", 10.0)
        stranger.send(messages.encode(hello))
        assert not stranger.poll(1000)


def test_files_of_keys_are_their_owners_alone_and_are_never_overwritten(tmp_path):
    path = tmp_path / "k"
    command = [sys.executable, "-c", "from kvpool.cli import main; main()", "keys", str(path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for side in ("prefill", "decode"):
        assert read_keys(path, side) == read_keys(path / f"{side}.key", side)
        assert read_keys(path, side).public in told.stdout
        assert read_keys(path, side).secret not in told.stdout + repr(read_keys(path, side))
        assert stat.S_IMODE((path / f"{side}.key").stat().st_mode) == 0o600
    before = (path / "decode.key").read_bytes()
    again = subprocess.run(command, capture_output=True, text=True)
    assert (again.returncode, (path / "decode.key").read_bytes()) == (1, before)
    assert "File exists" in again.stderr


def test_the_command_says_as_json_what_it_wrote(tmp_path):
    done = CliRunner().invoke(app, ["keys", str(tmp_path / "k"), "--json"])
    sides = [read_keys(tmp_path / "k", side) for side in ("prefill", "decode")]
    expected = [
        {"side": keys.side, "file": f"{tmp_path}/k/{keys.side}.key", "public": keys.public}
        for keys in sides
    ]
    assert json.loads(done.stdout) == expected
    assert not any(keys.secret in done.output for keys in sides)


def test_each_side_needs_its_own_file_only(keys):
    (keys / "prefill.key").unlink()
    assert read_keys(keys, "decode").side == "decode"
    with pytest.raises(ValueError, match=r"prefill\.key: No such file.*kvpool keys FOLDER"):
        read_keys(keys, "prefill")


def test_a_file_of_the_wrong_side_is_refused_by_name(keys):
    pool = MLAPool(layers=range(2), **MLA)
    with pytest.raises(ValueError, match=r"decode\.key: decode's, and this is prefill"):
        prefill_of(pool, keys / "decode.key")
    with pytest.raises(ValueError, match=r"prefill\.key: prefill's, and this is decode"):
        decode_of(pool, keys / "prefill.key")


@pytest.mark.parametrize(
    ("what", "mode", "sentence"),
    [
        ("decode.key", 0o640, r"decode\.key: .*mode is 0640: other users may open it.*go-rwx"),
        ("decode.key", 0o604, "mode is 0604: other users may open it"),
        ("", 0o770, r"keys: .*mode is 0770: other users may write to it. Run: chmod go-w"),
    ],
)
def test_keys_that_other_users_can_get_at_are_refused(keys, what, mode, sentence):
    (keys / what).chmod(mode)
    with pytest.raises(ValueError, match=sentence):
        read_keys(keys, "decode")


@pytest.mark.root
@pytest.mark.parametrize("what", ["decode.key", ""])
def test_another_users_file_or_folder_is_refused(keys, what):
    os.chown(keys / what, OTHER_USER, -1)
    with pytest.raises(ValueError, match=f"user {OTHER_USER} owns it.*Run: chown 0"):
        decode_of(MLAPool(layers=range(2), **MLA), keys)


def test_a_link_in_place_of_a_file_is_not_followed(keys):
    (keys / "decode.key").rename(keys / "elsewhere")
    (keys / "decode.key").symlink_to(keys / "elsewhere")
    with pytest.raises(ValueError, match="a symbolic link is not followed"):
        read_keys(keys, "decode")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"public": "x", "secret": "y"}'])
def test_a_file_that_holds_no_keys_is_refused_at_once(keys, content):
    (keys / "prefill.key").write_bytes(content)
    with pytest.raises(ValueError, match="Make it anew: kvpool keys"):
        prefill_of(MLAPool(layers=range(2), **MLA), keys)


def test_keys_that_are_no_pair_are_refused(keys, tmp_path):
    ours, (theirs, _) = read_keys(keys, "decode"), write_keys(tmp_path / "other")
    mixed = type(ours)("decode", ours.public, theirs.secret, ours.other)
    with pytest.raises(ValueError, match="no pair"):
        read_keys(forge(tmp_path / "mixed", "decode", mixed, ours.other), "decode")


# a peer that does not read


@contextmanager
def transports(keys):
    """One that listens, its address, and one that dials."""
    listener, dialler = (ZmqTransport(read_keys(keys, side)) for side in ("prefill", "decode"))
    try:
        yield listener, listener.bind(TCP), dialler
    finally:
        dialler.close()
        listener.close()


def name_of(listener, address, dialler):
    """The name by which the listener knows who has dialled."""
    dialler.connect(7, address)
    assert dialler.send(7, b"hello") is None
    return arrived(listener, 1)[0][0]


def arrived(transport, count, *beside):
    """The next `count` of what arrives, while the transports `beside` are turned as well."""
    messages, end = [], time.monotonic() + 20
    while len(messages) < count:
        assert time.monotonic() < end, f"{len(messages)} arrived"
        messages.extend(transport.poll(0.01))
        for other in beside:
            assert not [*other.poll(0.0)]
    return messages


def test_a_peer_with_a_key_that_does_not_read_holds_no_more_bytes_than_the_bound(keys, monkeypatch):
    monkeypatch.setattr("disagg.runtime.sockets.connection.MAX_UNSENT", 8 << 20)
    with transports(keys) as (listener, address, dialler):
        peer, sent = name_of(listener, address, dialler), 0
        while (problem := listener.send(peer, bytes(100_000))) is None:
            sent += 1
        assert problem.startswith("it does not read what is sent: 83 messages (8,300,000 bytes)")
        assert 83 < sent < 1000


def test_what_waits_for_a_peer_with_a_key_arrives_in_order_once_it_reads(keys):
    with transports(keys) as (listener, address, dialler):
        peer = name_of(listener, address, dialler)
        sent = [b"%d" % number + bytes(10_000) for number in range(3000)]
        assert not any(listener.send(peer, message) for message in sent)
        assert [data for _, data in arrived(dialler, 3000, listener)] == sent


def test_the_peer_with_a_key_for_which_the_most_waits_is_lost_when_too_much_waits_for_all(
    keys, monkeypatch
):
    monkeypatch.setattr("disagg.runtime.sockets.limits.MAX_UNSENT_BY_ALL", 8 << 20)
    with transports(keys) as (listener, address, dialler):
        peer, sent = name_of(listener, address, dialler), 0
        while sent < 400:
            assert listener.send(peer, bytes(100_000)) is None
            sent += 1
        ((lost, end),) = arrived(listener, 1)
        assert lost == peer and "bytes wait for it, the most of all peers" in end.reason
