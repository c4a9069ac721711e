"""Refusals that pass, goodbyes, and what a hello tells."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest

from disagg import KVPoll, RoomError
from disagg.plan import IncompatibleLayouts
from disagg.protocol import codec, messages
from disagg.protocol.decode import DecodeMachine
from disagg.protocol.events import (
    AbortAll,
    ConnectLink,
    DisconnectLink,
    EngineRenewed,
    Malformed,
    Received,
    Send,
    Tick,
)
from disagg.protocol.peers.link import Link
from disagg.protocol.peers.liveness import CHECKS_PER_TIMEOUT
from disagg.protocol.peers.prefill_peers import shared_part
from disagg.protocol.prefill import PrefillMachine
from kvpool import MLAPool, NSAPool
from kvpool.item import Cell
from kvpool.layout import PoolLayout, Space
from tests import oracle
from tests.disagg.protocol.pair import MLA, TIMEOUT, Pair, hello, pool
from tests.pools import CLASSES


def answers(machine, peer, message, now=0.0) -> list:
    """What a machine sends to a peer, told a message of it."""
    effects = machine.handle(Received(peer, message), now)
    sent = [effect for effect in effects if isinstance(effect, Send) and effect.peer == peer]
    return [codec.decode(effect.data) for effect in sent]


def a_prefill() -> PrefillMachine:
    return PrefillMachine(hello("p"), pool().layout, now=0.0)


# refusals


def test_what_cannot_work_together_is_refused_for_good_also_by_a_prefill_that_is_full(monkeypatch):
    monkeypatch.setattr("disagg.protocol.peers.prefill_peers.MAX_PEERS", 0)
    prefill = a_prefill()
    stranger = msgspec.structs.replace(hello("d"), engine="nixl")
    (refused,) = answers(prefill, b"d", stranger)
    assert refused.final
    assert "engine 'local' on prefill, 'nixl' on decode" in refused.reasons[0]


# one hello a connection


def test_a_hello_is_answered_once_a_connection():
    """The answer is hundreds of times as large."""
    prefill = a_prefill()
    (answer,) = answers(prefill, b"d", hello("d"))
    assert isinstance(answer, messages.Hello)
    assert not answers(prefill, b"d", hello("d"))  # what comes twice has no effect
    for generation in ("other", "d", "other", "d"):
        (refused,) = answers(prefill, b"d", hello(generation))
        assert not refused.final
        assert f"generation '{generation}' says hello over a connection" in refused.reasons[0]
        assert not prefill.peers.alive
    (answer,) = answers(prefill, b"another connection", hello("d"))
    assert isinstance(answer, messages.Hello)


def test_a_prefill_whose_engine_was_renewed_sends_all_away_and_answers_by_its_new_metadata():
    prefill = a_prefill()
    for peer in (b"1", b"2"):
        (answer,) = answers(prefill, peer, hello("d"))
        assert answer.metadata == b""
    effects = prefill.handle(EngineRenewed("it was ended.", b"new"), 0.0)
    told = {effect.peer: type(codec.decode(effect.data)) for effect in effects}
    assert told == dict.fromkeys((b"1", b"2"), messages.UnknownPeer)
    assert not prefill.peers.alive
    (answer,) = answers(prefill, b"3", hello("d"))
    assert answer.metadata == b"new"


def test_of_the_connections_that_were_answered_the_latest_are_kept(monkeypatch):
    monkeypatch.setattr("disagg.protocol.peers.prefill_peers.MAX_GREETED", 2)
    prefill = a_prefill()
    for name in (b"1", b"2", b"3"):
        answers(prefill, name, hello("d"))
        prefill.handle(Received(name, messages.Disconnect()), 0.0)
    kinds = [type(*answers(prefill, name, hello("d"))) for name in (b"3", b"2", b"1")]
    assert kinds == [messages.Refuse, messages.Refuse, messages.Hello]


def test_a_decode_that_was_refused_for_a_second_hello_connects_again_and_is_served():
    pair = Pair()
    pair.tell(pair.prefill, Received(b"d", hello("another")))
    pair.pump()
    assert "says hello over a connection" in pair.link.lost
    pair.wait(TIMEOUT)
    assert pair.link.lost is None and pair.link.plan is not None


REFUSED = messages.Refuse(["1024 decodes are connected already."], final=False)


def test_who_is_refused_for_now_dials_again_after_pauses_that_grow_and_is_served_in_the_end():
    pair = Pair()
    pair.dials.clear()
    pair.link = Link(("y",))
    pair.tell(pair.decode, ConnectLink(pair.link))
    pair.lose(pair.decode)
    pair.request("r")
    dialled, hung_up = [], []
    while len(hung_up) < 5:
        if pair.link.ranks[0].redial is None:
            pair.tell(pair.decode, Received(1, REFUSED))
        pair.now += 0.1
        pair.tell(pair.decode, Tick())
        pair.lose(pair.decode)
        own = [(now, effect.address) for now, effect in pair.dials if effect.peer == 1]
        dialled, hung_up = ([now for now, to in own if to == address] for address in ("y", None))
    assert hung_up == pytest.approx(dialled, abs=0.01)  # no socket while it waits
    pauses = [late - early for early, late in pairwise(dialled)]
    shares = [pause / TIMEOUT for pause in pauses]
    assert shares == pytest.approx([1 / 4, 1 / 2, 1, 1], abs=1 / CHECKS_PER_TIMEOUT + 0.02)
    assert pair.decode.poll("r") is KVPoll.Bootstrapping  # it was never asked for: it waits on
    assert "1024 decodes are connected already" in pair.link.lost
    while pair.link.ranks[0].redial is not None:
        pair.now += 0.1
        pair.tell(pair.decode, Tick())
    pair.tell(pair.decode, Received(1, hello("p2")))
    assert pair.decode.poll("r") is KVPoll.WaitingForInput
    assert pair.link.lost is None


def test_rooms_that_were_asked_for_fail_when_prefill_refuses_for_now_and_new_ones_at_once():
    pair = Pair()
    pair.request()
    pair.tell(pair.decode, Received(0, REFUSED))
    failure = pair.decode.failure("r")
    assert (failure.side, failure.kind) == ("prefill", "refused")
    reason = "rank 0 of prefill (x) is lost: it refuses this decode: 1024 decodes are connected "
    assert failure.reason == reason + "already."
    pair.request("next", oracle.elsewhere(pool(), pair.table))
    assert pair.decode.failure("next").reason == failure.reason


def test_what_a_peer_sends_while_it_is_not_dialled_is_not_looked_at():
    pair = Pair()
    pair.tell(pair.decode, Received(0, REFUSED))
    pair.lose(pair.decode)
    pair.tell(pair.decode, Received(0, hello("p")))
    pair.tell(pair.decode, Malformed(0, "rubbish"))
    assert pair.link.plan is None
    assert not pair.queues[pair.decode]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_one_malformed_message_costs_the_open_rooms_and_not_the_link(side):
    pair = Pair()
    pair.request()
    pair.serve(range(16), False)
    refuses = getattr(pair, side)
    pair.tell(refuses, Malformed(b"d" if side == "prefill" else 0, "it sent rubbish"))
    pair.pump()
    assert pair.polls() == (KVPoll.Failed, KVPoll.Failed)
    for machine in (pair.prefill, pair.decode):
        assert machine.failure("r").kind == "refused"
        assert "it sent rubbish" in machine.failure("r").reason
    pair.wait(TIMEOUT / 3)
    assert pair.link.plan is not None
    pair.ask("next", oracle.elsewhere(pool(), pair.table))
    assert pair.polls("next") == (KVPoll.WaitingForInput, KVPoll.WaitingForInput)


def test_a_message_of_the_wrong_side_is_refused_for_now():
    pair = Pair()
    pair.tell(pair.decode, Received(0, messages.ReadDone(generation="p", room="r", attempt="a")))
    assert pair.link.refusal is None
    (refused,) = pair.lose(pair.decode)
    assert not refused.final


# goodbyes


@pytest.mark.parametrize("how", [DisconnectLink, AbortAll])
def test_a_decode_that_leaves_says_so_and_its_rooms_end_on_prefill(how):
    pair = Pair()
    pair.ask()
    leave = {DisconnectLink: DisconnectLink(pair.link), AbortAll: AbortAll("closed.", closing=True)}
    pair.tell(pair.decode, leave[how])
    assert [type(m) for m in pair.queues[pair.decode]] == [messages.Abort, messages.Disconnect]
    pair.queues[pair.decode].pop(0)  # also where the abort is lost
    pair.pump()
    assert str(pair.prefill.failure("r")) == "decode: decode has disconnected."
    assert not pair.prefill.peers.alive


# what a hello tells


BOTH = NSAPool(layers=range(3), **MLA)
DSV4 = CLASSES["dsv4"](num_pages=20, num_window_pages=40, device="meta")


def heard(prefill_layout, decode_layout) -> messages.Hello | messages.Refuse:
    """Prefill's answer to the hello of a decode."""
    prefill = PrefillMachine(hello("p", prefill_layout), prefill_layout, now=0.0)
    (answer,) = answers(prefill, b"d", hello("d", decode_layout))
    return answer


def test_a_hello_tells_only_the_regions_that_decode_has_too_of_all_layers():
    whole = MLAPool(layers=range(3), **MLA)
    answer = heard(BOTH.layout, MLAPool(layers=[1], total_kv_layers=3, **MLA).layout)
    told = PoolLayout.from_msgpack(answer.layout)
    assert {(r.owner, r.role) for r in told.regions} == {("target", "latent"), ("target", "rope")}
    assert {r.layer for r in told.regions} == {0, 1, 2}
    assert {b.name for b in told.buffers} == {r.buffer for r in told.regions}
    assert len(told.regions) == len(whole.layout.regions)
    assert (told.generation, told.model) == (BOTH.layout.generation, BOTH.layout.model)


def test_spaces_are_told_with_those_whose_ids_they_share():
    layout = DSV4.layout
    decode = replace(layout, regions=[r for r in layout.regions if r.role == "c2.index_key"])
    told = PoolLayout.from_msgpack(heard(layout, decode).layout)
    used = {told.space_of(region) for region in told.regions}
    assert used < {*told.spaces} < {*layout.spaces}
    assert {space.name for space in told.spaces} == {"kv", *(space.name for space in used)}


@pytest.mark.parametrize("owner", ["target", "draft"])
def test_a_decode_that_needs_nothing_is_told_one_region_of_each_role_and_no_memory(owner):
    unlike = CLASSES["mha"](layers=[0], owner=owner).layout
    greeting = msgspec.structs.replace(hello("p"), metadata=b"memory")
    prefill = PrefillMachine(greeting, BOTH.layout, now=0.0)
    (needed,) = answers(prefill, b"d1", hello("d1", BOTH.layout))
    (unneeded,) = answers(prefill, b"d2", hello("d2", unlike))
    assert (needed.metadata, unneeded.metadata) == (b"memory", b"")
    told = PoolLayout.from_msgpack(unneeded.layout)
    roles = {(region.owner, region.role) for region in BOTH.layout.regions}
    assert {(region.owner, region.role) for region in told.regions} == roles
    assert len(told.regions) == len(roles) < len(BOTH.layout.regions)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (PoolLayout((), (), (), 0).to_msgpack(), "decode's layout has no region"),
        (b"\xc1", "malformed layout"),
        (msgspec.msgpack.encode({"version": 1, "regions": [{"owner": 1}]}), "malformed layout"),
        (msgspec.msgpack.encode({"version": 99, "regions": []}), "layout version 99"),
        (b"\0" * ((8 << 20) + 1), "a layout of 8388609 bytes"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused_for_good(data, reason):
    prefill = a_prefill()
    (answer,) = answers(prefill, b"d", msgspec.structs.replace(hello("d"), layout=data))
    assert isinstance(answer, messages.Refuse) and answer.final
    assert reason in answer.reasons[0]
    assert not prefill.peers.alive


def planned(prefill_layout, decode_layout, **options):
    """The link of a decode that has heard this prefill."""
    decode = DecodeMachine(hello("d", decode_layout), decode_layout, 1, now=0.0, **options)
    decode.handle(ConnectLink(link := Link(("x",))), 0.0)
    decode.handle(Received(0, heard(prefill_layout, decode_layout)), 0.0)
    return link


@pytest.mark.parametrize(
    ("decode_pool", "reason"),
    [
        (
            CLASSES["mha"](layers=[0]),
            "target layer 0 k: prefill offers no such region (it holds none, but target index_key, "
            "target index_key.scale, target latent, target rope). Connect pools of the same model",
        ),
        (
            MLAPool(layers=[1, 7], total_kv_layers=8, **MLA),
            "target layer 7 latent: prefill offers no such region (it holds layers 0-2)",
        ),
    ],
    ids=["another model", "more layers"],
)
def test_a_refusal_says_what_prefill_holds(decode_pool, reason):
    link = planned(BOTH.layout, decode_pool.layout)
    assert isinstance(link.error, IncompatibleLayouts)
    assert reason in link.refusal


def test_a_plan_knows_of_regions_that_are_not_sent_only_where_decode_has_their_role():
    link = planned(BOTH.layout, MLAPool(layers=[1], total_kv_layers=3, **MLA).layout)
    unsent = {(layer, role) for layer in (0, 2) for role in ("latent", "rope")}
    assert {key[1:] for key in link.plan.unsent} == unsent


def test_an_owner_that_prefill_has_in_other_roles_cannot_be_taken_for_missing():
    pools = pool(), pool(layers=[1], total_kv_layers=1, owner="draft")
    target, draft = (pool.layout for pool in pools)
    merged = PoolLayout.merge(target, draft)
    renamed = [replace(region, role=f"old.{region.role}") for region in draft.regions]
    offered = PoolLayout.merge(target, replace(draft, regions=renamed))
    link = planned(offered, merged, allow_missing={"draft"})
    assert "draft layer 1 latent: prefill offers no such region" in link.refusal


def test_bytes_that_a_decode_is_not_told_of_are_no_padding():
    whole = pool().layout
    assert {region.buffer for region in whole.regions} == {"target.kv.0"}
    assert shared_part(whole, {("target", "latent"), ("target", "rope")}) == whole
    (part,) = shared_part(whole, {("target", "latent")}).buffers
    assert whole.buffers[0].padding and not part.padding


def test_what_a_decode_is_told_of_a_block_pool_keeps_it():
    spaces = Space("kv", block_pool="blocks"), Space("swa", window=4, block_pool="blocks")
    parts = {"kv": [(0, Cell("k", 4, "bf16"))], "swa": [(1, Cell("latent", 8, "bf16"))]}
    whole = oracle.overlaid(parts, spaces, 6).layout
    assert shared_part(whole, {("target", "k"), ("target", "latent")}) == whole
    assert shared_part(whole, {("target", "latent")}).block_pools == {"blocks": ("swa",)}


# many ranks


def linked(decode, *layouts):
    """A link whose ranks have these layouts, and have answered."""
    decode.handle(ConnectLink(link := Link(tuple("xyz"[: len(layouts)]))), 0.0)
    for rank, layout in zip(link.ranks, layouts):
        decode.handle(Received(rank.number, hello(f"p{rank.number}", layout)), 0.0)
    return link


def moved(layout, by):
    """The layout of a rank that is alike and has its memory elsewhere."""
    buffers = (replace(buffer, base=buffer.base + by) for buffer in layout.buffers)
    return replace(layout, buffers=tuple(buffers))


def test_of_prefills_alike_decode_keeps_regions_once_and_each_ones_pointers():
    layout = pool().layout
    decode = DecodeMachine(hello("d"), layout, 1, now=0.0)
    links = [linked(decode, moved(layout, 4096 * n)) for n in range(3)]
    plans = [link.plan.sources[0] for link in links]
    assert [plan.buffers[0].base - layout.buffers[0].base for plan in plans] == [0, 4096, 8192]
    assert all(plan.regions is plans[0].regions for plan in plans)
    assert [link.hellos[0].layout for link in links] == [b""] * 3
    assert [link.hellos[0].generation for link in links] == ["p0", "p1", "p2"]


def test_prefills_of_equal_regions_and_other_spaces_are_told_apart():
    layout = pool().layout
    fewer = replace(layout, spaces=tuple(replace(space, reserved=2) for space in layout.spaces))
    decode = DecodeMachine(hello("d"), layout, 1, now=0.0)
    sources = [linked(decode, source).plan.sources[0] for source in (layout, fewer)]
    assert [source.spaces[0].reserved for source in sources] == [1, 2]


def test_a_rank_that_is_back_has_the_layout_of_its_new_life():
    layout = pool(layers=(0, 1)).layout
    stages = [pool(layers=[n], total_kv_layers=2).layout for n in range(2)]
    decode = DecodeMachine(hello("d", layout), layout, 1, now=0.0)
    link = linked(decode, *stages)
    assert link.plan is not None
    decode.handle(Received(1, messages.UnknownPeer(generation="p1")), 1.0)
    assert link.plan is None and link.ranks[1].layout is None
    decode.handle(Received(1, hello("again", moved(stages[1], 1 << 20))), 2.0)
    bases = [source.buffers[0].base for source in link.plan.sources]
    assert bases == [stages[0].buffers[0].base, stages[1].buffers[0].base + (1 << 20)]


def test_a_link_of_another_endpoint_is_none_of_this_one():
    layout = pool().layout
    decode, stranger = (DecodeMachine(hello(name), layout, 1, now=0.0) for name in "de")
    link, theirs = linked(decode, layout), linked(stranger, layout)
    assert link.ranks[0].number == theirs.ranks[0].number
    with pytest.raises(RoomError, match="the link is another endpoint's"):
        decode.handle(DisconnectLink(theirs), 0.0)
