"""Over a connection that is cut and comes back, prefill's pages do not wait for the lease."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager, suppress

import pytest

from disagg import KVPoll
from tests import oracle
from tests.disagg.runtime.sides import decode_side, prefill_side
from tests.disagg.waiting import until


class Relay:
    """A port of loopback that passes bytes on to another one, until it is cut."""

    def __init__(self, there):
        host, _, port = there.removeprefix("tcp://").rpartition(":")
        self._there, self._port, self._ends = (host, int(port)), 0, []
        self.mend()
        self.address = f"tcp://127.0.0.1:{self._port}"

    def cut(self):
        """Ends all connections, and takes no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()

    def mend(self):
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, args=(self._listener,))
        self._accepting.start()

    def _accept(self, listener):
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(self._there)
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=pair).start()

    @staticmethod
    def _pass(source, sink):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextmanager
def relayed(prefill):
    relay = Relay(prefill.address)
    try:
        yield relay
    finally:
        relay.cut()


@pytest.mark.parametrize(
    ("received", "sent"),
    [
        ("before", "meanwhile"),
        ("before", "after"),
        ("meanwhile", "before"),
        ("meanwhile", "meanwhile"),
        ("meanwhile", "after"),
    ],
)
def test_a_room_that_decode_fails_as_its_link_is_lost_ends_on_prefill_too(received, sent):
    with (
        prefill_side("tcp://127.0.0.1:*", lease=None, insecure=True) as (prefill, given),
        decode_side(insecure=True) as (decode, dest, address),
        relayed(prefill) as relay,
    ):
        link = decode.connect([relay.address], timeout=20)

        def act(when):
            if when == received:
                decode.receive("r", address)
            if when == received == "before":
                until(prefill, lambda: "r" in prefill.machine.rooms())
            if when == sent:
                prefill.send("r", given)

        act("before")
        relay.cut()
        until(decode, lambda: link.lost is not None)
        act("meanwhile")
        assert decode.wait("r", 20) is KVPoll.Failed
        relay.mend()
        decode.handshake(link, 20)
        act("after")
        assert prefill.wait("r", 20) is KVPoll.Failed
        assert not any(prefill.leases().leased.values())
        for side in (prefill, decode):
            side.forget("r")
        decode.receive("r", address)
        prefill.send("r", given)
        assert decode.wait("r", 20) is KVPoll.Success, decode.failure("r")
        oracle.assert_holds(dest, address)
