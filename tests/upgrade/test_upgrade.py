"""Two prefills and two decodes are replaced one after another, by another version and by other
weights, and requests go on: no answer is mixed, and only those fail whose process was killed.
"""

from __future__ import annotations

import pytest

from disagg.protocol.versions import PROTOCOL, fields_lacked, spoken
from tests.upgrade.fleet import PLACES, Fleet, Violation
from tests.upgrade.servers import Build

OLDEST, OLD = spoken(PROTOCOL)[0], spoken(PROTOCOL)[-2]
NEW = Build(name="new", weights="a")
NEXT = Build(name="next", weights="b")
OLDER = Build(name="old", weights="a", protocol=OLD)
SILENT = Build(name="old", weights="a", protocol=OLDEST, says=False)
SILENT_NEW = Build(name="new", weights="a", says=False)
WAYS = {
    "version": (SILENT, SILENT_NEW),
    "version, with conventions": (OLDER, NEW),
    "weights": (NEW, NEXT),
    "version and weights": (OLDER, NEXT),
    "back": (SILENT_NEW, SILENT),
}


CASES = [
    *((way, "local", False) for way in WAYS),
    # over TCP, NIXL may end a process whose reader is killed: see docs/engines.md
    ("version", "nixl", True),
    ("version and weights", "nixl", True),
]


@pytest.mark.parametrize(("way", "engine", "drained"), CASES)
def test_requests_go_on_while_every_process_is_replaced(way, engine, drained, tmp_path):
    before, after = WAYS[way]
    with Fleet(before, engine, tmp_path) as fleet:
        fleet.until_served()
        for place in PLACES:
            fleet.replace(place, after, drained=drained)
            fleet.until_served()
        fleet.finish()
        assert not (drained and fleet.counts["failed on killed"])
        everyone = [*fleet.replaced, *fleet.servers.values()]
        assert len(everyone) == 2 * len(PLACES)
        assert all(server.answered for server in everyone)
        across = fleet.counts[before.name, after.name], fleet.counts[after.name, before.name]
        # a release without conventions is refused by one that has some
        compared = before.says and "conventions" in fields_lacked("hello", OLD)
        fits = before.weights == after.weights and not (before.protocol and compared)
        assert all(across) if fits else not any(across)
        assert bool(fleet.counts["refused"]) == (not fits)


def test_mixed_weights_are_seen_where_nobody_says_them(tmp_path):
    """The control: without a fingerprint two weights work together, and the bytes show it."""
    with Fleet(SILENT_NEW, "local", tmp_path) as fleet:
        fleet.until_served()
        fleet.replace(PLACES[0], Build(name="next", weights="b", says=False))
        with pytest.raises(Violation, match="mixed"):
            fleet.until_served()
