"""Links to prefills that are gone, refused or not used are closed; others stay."""

from __future__ import annotations

import pytest

from disagg.connectors.rank.links import DEAD_SECONDS, UNUSED_SECONDS, Links
from kvpool import MLAPool
from tests.disagg.stepping import MLA, stepped


def linked(engine, links):
    """A link whose handshake has ended."""
    link = links.to((engine.prefill.address,))
    engine.step_until(lambda: link.settled)
    return link


def test_a_link_is_closed_when_it_was_not_used_for_long():
    with stepped(connected=False) as engine:
        links = Links(engine.decode, engine.clock)
        link = linked(engine, links)
        engine.clock.now += UNUSED_SECONDS - 1
        assert links.to((engine.prefill.address,)) is link
        engine.clock.now += UNUSED_SECONDS - 1
        links.close_unused({})
        assert engine.decode.machine.peers.links == [link]
        engine.clock.now += 2
        links.close_unused({link})
        assert engine.decode.machine.peers.links == [link]
        engine.clock.now += UNUSED_SECONDS + 1
        links.close_unused({})
        assert not engine.decode.machine.peers.links
        again = linked(engine, links)
        assert again is not link
        engine.decode.disconnect(again)  # such a link is closed without a word
        engine.clock.now += UNUSED_SECONDS + 1
        links.close_unused({})
        assert linked(engine, links) is not again


@pytest.mark.parametrize("why", ["gone", "refused"])
def test_a_link_to_a_prefill_that_does_not_serve_is_closed_soon_however_often_it_is_asked(why):
    dest = MLAPool(layers=range(3), **MLA) if why == "refused" else None
    with stepped(dest=dest, connected=False) as engine:
        links = Links(engine.decode, engine.clock)
        link = linked(engine, links)
        if why == "gone":
            engine.prefill.close()
            while link.lost is None:
                engine.decode.step()
        for _ in range(3):
            engine.clock.now += DEAD_SECONDS / 4
            links.close_unused({})
            assert links.to(link.addresses) is link
        links.close_unused({link})
        assert engine.decode.machine.peers.links == [link]
        engine.clock.now += DEAD_SECONDS
        links.close_unused({})
        assert not engine.decode.machine.peers.links
