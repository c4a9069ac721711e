"""What each side counts of its peers: refusals by kind, losses, links by state; and quarantine."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from disagg.protocol import messages
from disagg.protocol.decode import DecodeMachine
from disagg.protocol.events import (
    ConnectLink,
    EngineConnected,
    Malformed,
    Received,
    Tick,
    Unreachable,
)
from disagg.protocol.peers import prefill_peers
from disagg.protocol.peers.link import Link
from disagg.protocol.prefill import PrefillMachine
from disagg.protocol.versions import PROTOCOL
from tests.disagg.protocol.pair import TIMEOUT, Pair, hello, pool

LAYOUT = pool().layout
NARROW = pool(kv_lora_rank=32).layout


def snapshots(pair):
    return pair.prefill.snapshot("local", {}), pair.decode.snapshot("local", {})


class Differing(Pair):
    """A pair of which the hellos differ."""

    def __init__(self, prefill=(), decode=(), layout=LAYOUT):
        theirs = replace(hello("p", LAYOUT), **dict(prefill))
        own = replace(hello("d", layout), **dict(decode))
        self.now, self.link, self.peer = 0.0, Link(("x",)), b""
        self.prefill = PrefillMachine(theirs, LAYOUT, None, now=0.0)
        self.decode = DecodeMachine(own, layout, 1, now=0.0)
        self.queues = {self.prefill: [], self.decode: []}
        self.digests = {self.prefill: [], self.decode: []}
        self.reads, self.dials = [], []
        self.tell(self.decode, ConnectLink(self.link))
        self.pump()


@pytest.mark.parametrize(
    ("differs", "side", "kind"),
    [
        ({"decode": {"engine": "nixl"}}, "prefill", "engine"),
        ({"decode": {"protocol": PROTOCOL + 3}}, "prefill", "protocol"),
        ({"decode": {"conventions": {"rope": 1}}, "prefill": {"conventions": {"rope": 2}}},
         "decode", "conventions"),
        ({"layout": NARROW}, "decode", "layout"),
    ],
)  # fmt: skip
def test_a_refused_link_is_counted_by_who_refused_and_why(differs, side, kind):
    prefill, decode = snapshots(Differing(**differs))
    told = {(side, "told"): 1}
    by_side = {"prefill": prefill.refusals, "decode": decode.refusals}
    other = {"prefill": "decode", "decode": "prefill"}[side]
    assert by_side[side] == {(side, kind): 1}
    assert by_side[other] == told
    assert decode.links == {"connecting": 0, "open": 0, "lost": 0, "refused": 1}


def test_a_link_with_several_reasons_counts_under_each_of_their_kinds():
    pair = Differing(
        layout=NARROW,
        prefill={"conventions": {"rope": 1}},
        decode={"conventions": {"rope": 2}},
    )
    _, decode = snapshots(pair)
    assert decode.refusals == {("decode", "conventions"): 1, ("decode", "layout"): 1}


def test_a_prefill_that_is_full_says_so(monkeypatch):
    monkeypatch.setattr(prefill_peers, "MAX_PEERS", 0)
    prefill, decode = snapshots(Differing())
    assert prefill.refusals == {("prefill", "full"): 1}
    assert decode.refusals == {("prefill", "told"): 1}
    assert decode.links["lost"] == 1  # it is dialled again


def test_a_peer_that_breaks_the_protocol_is_counted_by_who_refuses_it():
    pair = Pair()
    number = pair.link.ranks[0].number
    pair.tell(pair.decode, Malformed(number, "no message"))
    pair.tell(pair.prefill, Malformed(pair.peer, "no message"))
    prefill, decode = snapshots(pair)
    assert prefill.refusals == {("prefill", "breach"): 1}
    assert decode.refusals == {("decode", "breach"): 1}
    assert decode.losses == 0


def test_links_are_open_lost_and_open_again_and_each_loss_counts():
    pair = Pair()
    number, peer = pair.link.ranks[0].number, pair.peer
    assert snapshots(pair)[1].links["connecting"] == 1
    pair.tell(pair.decode, EngineConnected(pair.link.ranks[0]))
    assert snapshots(pair)[1].links["open"] == 1
    pair.tell(pair.decode, Unreachable(number, "its connection has ended."))
    _, decode = snapshots(pair)
    assert (decode.links["open"], decode.links["lost"], decode.losses) == (0, 1, 1)
    pair.tell(pair.decode, Unreachable(number, "nobody listens."))  # of what was lost before
    pair.tell(pair.prefill, Unreachable(peer, "its connection has ended."))
    prefill, decode = snapshots(pair)
    assert (prefill.losses, decode.losses) == (1, 1)
    pair.tell(pair.prefill, Unreachable(b"stranger", "its connection has ended."))
    assert snapshots(pair)[0].losses == 1


def test_a_decode_that_is_silent_is_lost_once():
    pair = Pair()
    for pair.now in (TIMEOUT / 8 * n for n in range(24)):
        pair.tell(pair.prefill, Tick())
    assert snapshots(pair)[0].losses == 1


def test_a_failed_room_is_in_quarantine_until_its_read_has_ended():
    pair = Pair()
    pair.ask()
    pair.serve()
    assert snapshots(pair)[1].quarantined_rooms == 0
    pair.abort(pair.decode)
    assert [side.quarantined_rooms for side in snapshots(pair)] == [0, 1]
    pair.read()
    assert snapshots(pair)[1].quarantined_rooms == 0


def test_who_leaves_in_order_is_not_lost():
    pair = Pair()
    pair.tell(pair.prefill, Received(pair.peer, messages.Disconnect()))
    assert snapshots(pair)[0].losses == 0
