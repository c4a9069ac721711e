"""Over TLS only the other side's certificate gets in, and hostile handshakes disturb nobody."""

from __future__ import annotations

import ssl
import struct
import threading
from contextlib import ExitStack, suppress

import pytest

from disagg import Lost
from disagg.protocol import codec, messages
from disagg.runtime.sockets import connection, lifecycle
from tests.certificates import accept_tls, certify, dial_tls
from tests.disagg.runtime.sides import decode_side, moves, prefill_process, prefill_side
from tests.disagg.runtime.transports import TCP, arrivals, both, pair_of, receive
from tests.disagg.waiting import until
from tests.streams import Relay, Server, dial

PIECE = struct.pack(">BHHB", 22, 0x0301, 4, 1) + (131_000).to_bytes(3, "big")
"""The beginning of a ClientHello of 131,000 bytes."""


@pytest.mark.parametrize("secret", [False, True])
def test_what_travels_can_be_read_only_without_keys(keys, secret):
    options = {"keys": keys} if secret else {"insecure": True}
    with prefill_side(TCP, **options) as sender, decode_side(**options) as reader:
        (prefill, given), (decode, dest, address) = sender, reader
        with Relay(prefill.address) as relay:
            decode.connect([relay.address], timeout=20)
            moves(prefill, given, decode, dest, address, "a room by name")
    assert (b"a room by name" in b"".join(relay.seen)) is not secret


def file_of(kind, side, keys, other_keys, folder):
    """A file of `side` that is wrong in one way; None for none."""
    if kind == "another deployment's":
        return other_keys / f"{side}.pem"
    if kind == "expired":
        return certify(keys, folder / "file", side, hours=-1)
    if kind == "another service's":
        return certify(keys, folder / "file", side, uri="spiffe://a/b")
    if kind == "the wrong side's":
        return keys / ("decode.pem" if side == "prefill" else "prefill.pem")
    return None


REFUSED = {
    "none": "it shows no certificate",
    "another deployment's": "its certificate is refused: self-signed certificate in certificate ch",
    "expired": "its certificate is refused: certificate has expired",
    "another service's": "its certificate names spiffe://a/b; {0}'s has urn:kvpool:{0} in its subj",
    "the wrong side's": "unsuitable certificate purpose: {0}'s has the extended key usage {1}",
    "TLS 1.2": "it offers no TLS 1.3",
}


def closed(address, file, version):
    """Whether nothing but the end comes of a hello."""
    try:
        with dial_tls(address, file, version) as stream:
            stream.send(codec.encode(messages.Disconnect()))
            return not stream.socket.recv(1)
    except (ssl.SSLError, ConnectionError):
        return True


@pytest.mark.parametrize("kind", REFUSED)
def test_only_decodes_certificate_is_let_in_and_the_others_go_on(
    kind, keys, other_keys, tmp_path, caplog
):
    file = file_of(kind, "decode", keys, other_keys, tmp_path)
    version = ssl.TLSVersion.TLSv1_2 if kind == "TLS 1.2" else ssl.TLSVersion.TLSv1_3
    with prefill_side(TCP, keys=keys) as (prefill, _), decode_side(keys=keys) as (decode, _, _):
        assert closed(prefill.address, file, version)
        until(prefill, lambda: REFUSED[kind].format("decode", "clientAuth") in caplog.text)
        assert not prefill.machine.peers.alive
        decode.connect([prefill.address], timeout=20)


@pytest.mark.parametrize("kind", [*REFUSED][1:-1])
def test_only_prefills_certificate_is_believed(kind, keys, other_keys, tmp_path):
    file = file_of(kind, "prefill", keys, other_keys, tmp_path)
    said = REFUSED[kind].format("prefill", "serverAuth")
    with decode_side(keys=keys) as (decode, _, _), Server() as imposter:
        link = decode.connect([imposter.address])
        with suppress(ssl.SSLError, ConnectionError), accept_tls(imposter, file) as stream:
            assert not stream.socket.recv(1)
        until(decode, lambda: said in str(link.lost))
        with pytest.raises(TimeoutError, match=r"are keys the same on both sides.*The last try: "):
            decode.handshake(link, 0.1)


def test_a_refusal_by_the_peer_is_a_sentence(keys, other_keys, tmp_path):
    """With TLS 1.3 a client learns it after its handshake, by an alert."""
    ca = tmp_path / "ca"
    ca.write_bytes((keys / "ca.pem").read_bytes() + (other_keys / "ca.pem").read_bytes())
    file = certify(other_keys, tmp_path / "file", "decode")
    files = {"ca": ca, "certificate": file, "key": file}
    with prefill_side(TCP, keys=keys) as (prefill, _), decode_side(tls=files) as (decode, _, _):
        link = decode.connect([prefill.address])
        said = "it refuses this side's certificate: another authority has made it, or the peer bel"
        until(decode, lambda: said in str(link.lost))


def test_keys_on_one_side_only_are_hinted_at(keys, caplog):
    for mine, theirs in (
        ({"keys": keys}, {"insecure": True}),
        ({"insecure": True}, {"keys": keys}),
    ):
        caplog.clear()
        with prefill_side(TCP, **mine) as (prefill, _), decode_side(**theirs) as (decode, _, _):
            link = decode.connect([prefill.address])
            until(decode, lambda: "re keys set on one side only?" in caplog.text)
            with pytest.raises(TimeoutError):
                decode.handshake(link, 0.1)


# hostile handshakes


@pytest.fixture
def pair(transports):
    """A transport of prefill, which listens, its address, and one of decode."""
    return both(transports, "tls")


def client_hello():
    """What a client sends first."""
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("data", [b"", client_hello()])
def test_a_handshake_has_a_time_to_end(pair, data, monkeypatch, caplog):
    listener, address, dialler = pair
    monkeypatch.setattr(connection, "MAX_SILENT", 1)
    with dial(address) as stranger:
        stranger.socket.sendall(data)
        ends = threading.Thread(target=stranger.closed)
        ends.start()
        while ends.is_alive():
            assert not arrivals(listener, 0.01)
    assert "it did not finish its TLS handshake within 1 s" in caplog.text
    pair_of(listener, address, dialler)


def test_a_few_handshakes_are_made_a_turn(pair):
    """So that a flood of them leaves time for rooms."""
    listener, address, _ = pair
    with ExitStack() as stack:
        strangers = [stack.enter_context(dial(address)) for _ in range(3 * lifecycle.STEPS_A_TURN)]
        for stranger in strangers:
            stranger.socket.sendall(client_hello())
            stranger.socket.setblocking(False)
        listener.wait(0.1)
        assert not [*listener.poll()]  # they are accepted
        answered = set()
        for turn in range(1, 4):
            listener.wait(0.1)
            assert not [*listener.poll()]
            for number, stranger in enumerate(strangers):
                with suppress(BlockingIOError):
                    assert stranger.socket.recv(1 << 16)
                    answered.add(number)
            assert len(answered) == turn * lifecycle.STEPS_A_TURN


def test_however_many_handshakes_are_begun_a_peer_is_let_in(pair, monkeypatch):
    monkeypatch.setattr(lifecycle, "MAX_ACCEPTED", 20)
    listener, address, dialler = pair
    hello = client_hello()
    with ExitStack() as stack:
        strangers = []
        for _ in range(100):
            strangers.append(stack.enter_context(dial(address)))
            strangers[-1].socket.sendall(hello)
        name = pair_of(listener, address, dialler)
        assert sum(not stranger.closed(0.01) for stranger in strangers[:50]) == 0
        assert listener.send(name, b"welcome") is None
        assert receive(dialler, 1, beside=[listener]) == [(7, b"welcome")]


def test_handshakes_that_are_begun_take_no_more_memory_than_the_bound(keys):
    with prefill_process(TCP, keys=keys) as prefill, ExitStack() as stack:
        prefill.works("before")
        before = prefill.resident()
        for _ in range(1000):
            stack.enter_context(dial(prefill.address)).socket.sendall(PIECE)
        prefill.works("beside")
        assert prefill.resident() - before < 256 << 20


def test_a_close_notify_ends_a_connection_whose_stream_is_open(pair, keys):
    listener, address, _ = pair
    ended = threading.Event()

    def speak():
        with dial_tls(address, keys / "decode.pem") as stream:
            stream.send(b"hello", b"bye")
            with suppress(ssl.SSLError, OSError):
                stream.socket.unwrap()
            ended.wait(20)

    speaker = threading.Thread(target=speak)
    speaker.start()
    events = receive(listener, 3)
    ended.set()
    speaker.join()
    assert [data for _, data in events] == [b"hello", b"bye", Lost(connection.ENDED)]
