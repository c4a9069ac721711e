"""What a fleet does follows from its options, and what must not be is found."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from disagg.protocol import codec, messages
from disagg.protocol.status import EndedRooms
from disagg.runtime.reader import Lane
from tests.fleet.__main__ import main
from tests.fleet.fleet import Fleet, growth
from tests.fleet.spec import Spec

ROOT = Path(__file__).parents[2]
SMALL = Spec(prefill=4, decode=8, rooms=120, in_flight=4)
FAULTY = replace(SMALL, loss=2e-3, deaths=4, chunks=2, peer_timeout=2.0)


def test_without_faults_every_room_succeeds_on_every_rank():
    run = Fleet(SMALL).run()
    assert run.parts == {"decode Success": 240, "prefill Success": 240}
    assert (run.failed, run.network.lost, run.failures, run.broken) == (0, 0, {}, [])


@pytest.mark.parametrize("seed", range(4))
def test_with_faults_every_room_ends_once_on_every_rank_and_nothing_is_left(seed):
    figures = Fleet(replace(FAULTY, seed=seed, groups=seed < 3)).run()
    assert figures.broken == []
    for side in ("prefill", "decode"):
        assert sum(n for what, n in figures.parts.items() if what.startswith(side)) == 240
    assert figures.network.lost and figures.failures and 0 < figures.failed < SMALL.rooms
    assert figures.died == 4


def test_one_seed_is_one_trace_in_every_process():
    code = (
        "from dataclasses import replace\n"
        "from tests.fleet.fleet import Fleet\n"
        "from tests.fleet.test_fleet import FAULTY\n"
        "print(Fleet(replace(FAULTY, rooms=40)).run().timeline.trace)\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    trace = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment)
    runs = [Fleet(replace(FAULTY, rooms=40, seed=seed)).run() for seed in (0, 1)]
    first, second = (run.timeline.trace for run in runs)
    assert trace.decode().strip() == first != second


def test_a_read_takes_the_time_of_its_bytes():
    ranks = dict.fromkeys(("prefill", "decode", "prefill_tp", "decode_tp"), 1)
    times = dict.fromkeys(("compute", "latency", "turn"), 0.0)
    fleet = Fleet(Spec(**ranks, **times, rooms=10, in_flight=1, rate=1e8)).run()
    moved = fleet.decodes[0].endpoint.snapshot().totals.bytes_moved
    assert moved >= 10 * fleet.layouts["decode"][0].live_bytes(64)
    assert fleet.seconds == pytest.approx(moved / 1e8, rel=1e-3)


def test_a_rank_is_busy_for_each_message():
    def room(turn):
        return Fleet(replace(SMALL, compute=0.0, turn=turn)).run().room_seconds(0.5)

    assert room(0.01) > 5 * room(0.0)


def test_messages_of_connections_follow_time_and_not_rooms():
    """Four pings and pongs in a time-out on each connection, whatever the rooms are."""
    figures = Fleet(replace(SMALL, rooms=200, compute=1.0, peer_timeout=4.0)).run()
    sent, pings = figures.network.sent, figures.links * figures.seconds
    assert sent["hello"] == 2 * figures.links
    assert 0.5 * pings < sent["ping"] <= pings + figures.links
    assert sent["pong"] <= sent["ping"]


@pytest.mark.parametrize(
    ("what", "ranks", "most"),
    [("fleet", 32, 0.2), ("prefill", 64, 1.05), ("decode", 64, 1.05), ("both", 32, 1.05)],
)
@pytest.mark.parametrize("groups", [True, False])
def test_a_room_costs_no_more_than_its_ranks(what, ranks, most, groups):
    spec = replace(SMALL, rooms=256, groups=groups)
    runs = [Fleet(grown).run() for grown in spec.growing(what, ranks)]
    sizes = [run.spec.ranks for run in runs]
    assert sizes == [8, 16, 32, 64][: len(runs)] and sizes[-1] == ranks
    for run in runs:
        sides = run.spec.prefill_tp, run.spec.decode_tp
        assert run.per_room(run.network.sent) == 4 * (max(sides) if groups else sides[0] * sides[1])
    for part in ("decode_peer", "decode_room", "prefill_peer", "prefill_room"):
        assert growth(sizes, [run.memory[part] for run in runs]) < most, part


def test_replicas_that_hand_over_to_replicas_send_as_many_messages_as_there_are_ranks():
    spec = replace(SMALL, rooms=4, in_flight=2, model="deepseek_v32", tokens=64)
    for prefill, decode in ((4, 2), (2, 3)):
        sizes = {"prefill": prefill, "prefill_tp": prefill, "decode": decode, "decode_tp": decode}
        run = Fleet(replace(spec, **sizes)).run()
        assert run.per_room(run.network.sent) == 4 * max(prefill, decode)
        assert run.parts == {"decode Success": 4 * decode, "prefill Success": 4 * prefill}


def test_a_turn_looks_at_ranks_of_which_something_is_read(monkeypatch):
    step, steps = Lane.step, [0]

    def counted(self):
        steps[0] += 1
        return step(self)

    monkeypatch.setattr(Lane, "step", counted)
    per_room = []
    for spec in replace(SMALL, rooms=256).growing("fleet", 32):
        before = steps[0]
        Fleet(spec).run()
        per_room.append((steps[0] - before) / spec.rooms)
    assert per_room[-1] < 1.5 * per_room[0]


def test_leases_that_end_during_reads_fail_rooms_and_none_succeeds_wrongly(monkeypatch):
    late = replace(SMALL, lease=0.05, offer_timeout=1.0, rate=1e8, loss=1e-12)
    run = Fleet(late).run()
    assert run.failures["prefill lease"] and run.broken == []

    def lie(message, protocol):
        """Prefill says nothing of its leases' ends, and that all were kept."""
        if isinstance(message, messages.Abort):
            message = messages.Pong(generation=message.generation)
        elif isinstance(message, messages.ReleaseAck):
            message = structs.replace(message, leased=True)
        return codec.encode(message, protocol)

    monkeypatch.setattr("disagg.protocol.events.encode", lie)
    assert any("a wrong Success" in line for line in Fleet(late).run().broken)


def test_a_room_that_never_ends_is_found(monkeypatch):
    known = EndedRooms.note_ended

    def all_but_one(self, name, failure):
        if name != 5:
            known(self, name, failure)

    monkeypatch.setattr(EndedRooms, "note_ended", all_but_one)
    with pytest.raises(RuntimeError, match="no room has ended"):
        Fleet(SMALL).run()


def test_the_command_prints_the_figures(capsys):
    options = "--prefill 4 --decode 8 --rooms 60 --deaths 1 --seed 3"
    run = Fleet(Spec(prefill=4, decode=8, rooms=60, deaths=1, seed=3)).run()
    assert main(options.split()) == 0
    table = capsys.readouterr().out
    for words in (run.timeline.trace, "rooms a second", "memory of a peer", "12 ranks"):
        assert words in table
    grown = "--rooms 40 --in-flight 2 --ranks 16 --grow fleet --grow decode"
    assert main(grown.split()) == 0
    assert capsys.readouterr().out.count("ranks^") == 2


def test_the_command_says_what_is_broken(monkeypatch, capsys):
    once = EndedRooms.take_ended
    monkeypatch.setattr(EndedRooms, "take_ended", lambda self: once(self) * 2)
    assert main(["--prefill", "2", "--decode", "2", "--rooms", "5"]) == 1
    assert "has ended twice" in capsys.readouterr().err
