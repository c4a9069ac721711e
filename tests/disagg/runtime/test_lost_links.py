"""Over a connection that is cut and comes back, prefill's pages do not wait for the lease."""

from __future__ import annotations

import pytest

from disagg import KVPoll
from tests import oracle
from tests.disagg.runtime.sides import decode_side, prefill_side
from tests.disagg.waiting import until
from tests.streams import Relay


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
        Relay(prefill.address) as relay,
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
