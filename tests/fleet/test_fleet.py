"""What a fleet does follows from its options, and what must not be is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from disagg.protocol import codec, messages
from disagg.protocol.rooms.rooms import EndedRooms
from disagg.runtime.reads.lane import Lane
from tests.fleet.__main__ import main
from tests.fleet.figures import growth
from tests.fleet.fleet import Fleet
from tests.fleet.memory import footprint
from tests.fleet.spec import Spec

ROOT = Path(__file__).parents[2]
SMALL = Spec(prefill=4, decode=8, rooms=120, in_flight=4)
FAULTY = replace(SMALL, loss=2e-3, deaths=4, chunks=2, peer_timeout=2.0)


def test_without_faults_every_room_succeeds_on_every_rank():
    figures = Fleet(SMALL).run()
    assert figures.parts == {"decode Success": 240, "prefill Success": 240}
    assert (figures.failed, figures.lost, figures.failures, figures.broken) == (0, 0, {}, ())


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("chunks", [1, 3])
def test_a_room_takes_four_messages_and_one_for_each_further_chunk_of_two_ranks(chunks, groups):
    spec = replace(SMALL, prefill_tp=4, decode_tp=2, chunks=chunks, tokens=1 << 16, rooms=24)
    sent = Fleet(replace(spec, groups=groups)).run().sent
    pairs = 24 * (4 if groups else 4 * 2)
    assert [sent[kind] for kind in ("read_request", "read_done", "release_ack")] == [pairs] * 3
    assert sent["chunk_ready"] == chunks * pairs


@pytest.mark.parametrize("seed", range(6))
def test_with_faults_every_room_ends_once_on_every_rank_and_nothing_is_left(seed):
    figures = Fleet(replace(FAULTY, seed=seed, groups=seed < 4)).run()
    assert figures.broken == ()
    for side in ("prefill", "decode"):
        assert sum(n for what, n in figures.parts.items() if what.startswith(side)) == 240
    assert figures.lost and figures.failures and 0 < figures.failed < SMALL.rooms
    assert figures.died == 4


def test_one_seed_is_one_trace_in_every_process():
    code = (
        "from dataclasses import replace\n"
        "from tests.fleet.fleet import Fleet\n"
        "from tests.fleet.test_fleet import FAULTY\n"
        "print(Fleet(replace(FAULTY, rooms=40)).run().trace)\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    trace = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environment)
    first, second = (Fleet(replace(FAULTY, rooms=40, seed=seed)).run().trace for seed in (0, 1))
    assert trace.decode().strip() == first != second


def test_a_read_takes_the_time_of_its_bytes():
    ranks = dict.fromkeys(("prefill", "decode", "prefill_tp", "decode_tp"), 1)
    times = dict.fromkeys(("compute", "latency", "turn"), 0.0)
    fleet = Fleet(Spec(**ranks, **times, rooms=10, in_flight=1, rate=1e8))
    seconds = fleet.run().seconds
    moved = fleet.decodes[0][0].endpoint.snapshot().totals.bytes_moved
    assert moved >= 10 * fleet.layouts["decode"][0].live_bytes(64)
    assert seconds == pytest.approx(moved / 1e8, rel=1e-3)


def test_a_rank_is_busy_for_each_message():
    def room(turn):
        return Fleet(replace(SMALL, compute=0.0, turn=turn)).run().room_seconds[0]

    assert room(0.01) > 5 * room(0.0)


def test_messages_of_connections_follow_time_and_not_rooms():
    """Four pings and pongs in a time-out on each connection, whatever the rooms are."""
    figures = Fleet(replace(SMALL, rooms=200, compute=1.0, peer_timeout=4.0)).run()
    assert figures.sent["hello"] == 2 * figures.links
    pings = figures.links * figures.seconds
    assert 0.5 * pings < figures.sent["ping"] <= pings + figures.links
    assert figures.sent["pong"] <= figures.sent["ping"]


@pytest.mark.parametrize(
    ("what", "ranks", "most"),
    [("fleet", 32, 0.2), ("prefill", 64, 1.05), ("decode", 64, 1.05), ("both", 32, 1.05)],
)
@pytest.mark.parametrize("groups", [True, False])
def test_a_room_costs_no_more_than_its_ranks(what, ranks, most, groups):
    spec = replace(SMALL, rooms=256, groups=groups)
    runs = [Fleet(grown).run() for grown in spec.growing(what, ranks)]
    sizes = [run.ranks for run in runs]
    assert sizes == [8, 16, 32, 64][: len(runs)] and sizes[-1] == ranks
    for run in runs:
        sides = run.spec.prefill_tp, run.spec.decode_tp
        assert run.room_messages == 4 * (max(sides) if groups else sides[0] * sides[1])
    for part in ("decode_peer", "decode_room", "prefill_peer", "prefill_room"):
        assert growth(sizes, [getattr(run.memory, part) for run in runs]) < most, part


def test_replicas_that_hand_over_to_replicas_send_as_many_messages_as_there_are_ranks():
    spec = replace(SMALL, rooms=4, in_flight=2, model="deepseek_v32", tokens=64)
    for prefill, decode in ((4, 2), (2, 3)):
        sizes = {"prefill": prefill, "prefill_tp": prefill, "decode": decode, "decode_tp": decode}
        run = Fleet(replace(spec, **sizes)).run()
        assert run.room_messages == 4 * max(prefill, decode)
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
    figures = Fleet(late).run()
    assert figures.failures["prefill lease"] and figures.broken == ()

    def lie(message):
        """Prefill says nothing of its leases' ends, and that all were kept."""
        if isinstance(message, messages.Abort):
            message = messages.Pong(generation=message.generation)
        elif isinstance(message, messages.ReleaseAck):
            message = structs.replace(message, leased=True)
        return codec.encode(message)

    monkeypatch.setattr("disagg.protocol.effects.encode", lie)
    assert any("a wrong Success" in line for line in Fleet(late).run().broken)


def test_a_room_that_ends_twice_is_found(monkeypatch):
    once = EndedRooms.take

    def twice(self):
        return once(self) * 2

    monkeypatch.setattr(EndedRooms, "take", twice)
    assert any("has ended twice" in line for line in Fleet(SMALL).run().broken)


def test_a_room_that_never_ends_is_found(monkeypatch):
    known = EndedRooms.add

    def all_but_one(self, name, failure):
        if name != 5:
            known(self, name, failure)

    monkeypatch.setattr(EndedRooms, "add", all_but_one)
    with pytest.raises(RuntimeError, match="no room has ended"):
        Fleet(SMALL).run()


def test_a_footprint_counts_each_object_once():
    inner = bytes(1000)
    assert footprint([inner]) - footprint([]) == sys.getsizeof(inner) + 8
    assert footprint([inner, inner]) - footprint([inner]) == 8
    seen = set()
    footprint(inner, seen)
    assert footprint([inner], seen) == sys.getsizeof([inner])


def test_the_command_prints_the_figures(capsys):
    options = ["--prefill", "4", "--decode", "8", "--rooms", "60", "--deaths", "1", "--seed", "3"]
    assert main(options) == main([*options, "--json"]) == 0
    table, _, document = capsys.readouterr().out.partition("\n[")
    (run,) = json.loads("[" + document)
    for word in (run["trace"], "rooms a second", "memory of a peer", "12 ranks"):
        assert word in table
    assert (run["ranks"], run["died"], run["broken"]) == (12, 1, [])
    assert (
        main(
            [
                "--rooms",
                "40",
                "--in-flight",
                "2",
                "--ranks",
                "16",
                "--grow",
                "fleet",
                "--grow",
                "decode",
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.count("ranks^") == 2


def test_the_command_says_what_is_broken(monkeypatch, capsys):
    once = EndedRooms.take
    monkeypatch.setattr(EndedRooms, "take", lambda self: once(self) * 2)
    assert main(["--prefill", "2", "--decode", "2", "--rooms", "5"]) == 1
    assert "has ended twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--prefill 3", "3 prefill ranks in engines of 2: give a multiple of 2."),
        ("--rooms 0", "rooms=0: 1 or more."),
        ("--loss 1", "loss=1.0: from 0 to less than 1."),
        ("--rate 0", "rate=0.0: more than 0 bytes a second."),
        ("--latency -1", "latency=-1.0: 0 or more."),
        ("--grow rooms", "argument --grow: invalid choice: 'rooms'"),
        ("--grow fleet --ranks 4", "ranks=4: 8 or more."),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, problem, capsys):
    with pytest.raises(SystemExit):
        main(options.split())
    assert problem in capsys.readouterr().err
