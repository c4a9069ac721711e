"""A request that decode cannot read gives prefill's pages back at once, over a socket too."""

from __future__ import annotations

import pytest

from disagg import KVPoll, create_engine
from kvpool import MLAPool
from tests import oracle
from tests.disagg.stepping import MLA, stepped

TOKENS = 40


def sent(engine, room="r") -> None:
    """A request of prefill, whole."""
    source, _ = engine.pools
    engine.prefill.send(room, oracle.place(source, TOKENS))


def asked(engine, link, room="r") -> None:
    engine.decode.receive(room, oracle.place(engine.pools[1], TOKENS), link=link)


@pytest.mark.parametrize("when", ["before the hello", "after it", "before prefill sends"])
def test_prefills_pages_come_back_when_decode_refuses_its_layout(when):
    other = MLAPool(layers=range(3), **MLA)
    with stepped(dest=other, connected=False, prefill_lease=None) as engine:
        if when != "before prefill sends":
            sent(engine)
        link = engine.decode.connect([engine.prefill.address])
        if when == "after it":
            engine.step_until(lambda: link.settled)
            engine.step(5)
        asked(engine, link)
        if when == "before prefill sends":
            engine.step_until(lambda: engine.decode.poll("r").ended)
            engine.step(5)
            sent(engine)
        assert engine.step_until_ended("r") == [KVPoll.Failed, KVPoll.Failed]
        assert [each.room for each in engine.prefill.ended()] == ["r"]
        assert not any(engine.prefill.leases().leased.values())
        assert "target layer 2 latent" in engine.prefill.failure("r").reason


def test_prefills_pages_come_back_when_prefill_refuses_decode():
    moves = create_engine("local")
    moves.name = "other"
    with stepped(connected=False, prefill_lease=None, decode_engine=moves) as engine:
        sent(engine)
        asked(engine, engine.decode.connect([engine.prefill.address]))
        assert engine.step_until_ended("r") == [KVPoll.Failed, KVPoll.Failed]
        assert not any(engine.prefill.leases().leased.values())
        assert "engine 'local' here, 'other' there" in engine.prefill.failure("r").reason
