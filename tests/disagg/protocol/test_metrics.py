"""What is counted, by hand and by the plan; what Prometheus gets; the line of a failure."""

from __future__ import annotations

import json
import logging
import socket
import sys
import urllib.request
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest import mock

import pytest
from hypothesis import given, strategies as st

from disagg import KVPoll, ReadTimes
from disagg.exporter import export
from disagg.plan import plan
from disagg.protocol.events import ReadBegun, ReadEnded, ReadMoved
from disagg.protocol.metrics import (
    BOUNDS,
    PHASES,
    Histogram,
    RoleMetrics,
    RoomMetrics,
    Snapshot,
    Totals,
    log_end,
)
from disagg.protocol.peers.liveness import Leases
from disagg.protocol.rooms.offered import LayerRange
from disagg.protocol.status import Failure
from disagg.store import Store
from disagg.store.stats import OUTCOMES
from kvpool import Allocator, PrefixCache
from kvpool.extras import MissingExtra
from tests.disagg.protocol.pair import Pair
from tests.oracle import merged, place
from tests.pools import mla, swa
from tests.processes import until

TOKENS = 29
ROOM = {"num_pages": 20, "num_window_pages": 40}


def test_bytes_by_role_are_those_of_rows_times_tokens_times_layers():
    source, target = (merged(mla(**ROOM), mla(layers=[0], owner="draft", **ROOM)) for _ in range(2))
    transfer_plan, metrics = plan([source.layout], target.layout), RoomMetrics()
    row = 2 * (16 + 8)
    for chunk in (range(13), range(13, TOKENS)):
        copy = metrics.copy()
        batch = transfer_plan.bind(0, place(source, TOKENS), place(target, TOKENS), tokens=chunk)
        metrics.bound(batch.shares, 0.5)
    sizes = {roles: role.nbytes for roles, role in metrics.by_role.items()}
    assert sizes == {
        ("target", "latent, rope"): 4 * TOKENS * row,
        ("draft", "latent, rope"): TOKENS * row,
    }
    assert (metrics.chunks, metrics.bind_seconds, metrics.bytes_bound) == (2, 1.0, 5 * TOKENS * row)
    assert metrics.runs == sum(role.runs for role in metrics.by_role.values())
    assert metrics.bytes_per_run == metrics.bytes_bound / metrics.runs
    metrics.moved(100, 2.0)
    assert metrics.rate == 50
    # the copy is of its moment
    assert (copy.chunks, copy.bytes_moved) == (1, 0)
    assert copy.by_role["draft", "latent, rope"].nbytes == 13 * row


counts = st.integers(0, 1 << 50)
rooms = st.builds(
    RoomMetrics,
    chunks=counts,
    bytes_moved=counts,
    **{f"{phase}_seconds": st.integers(0, 1000) for phase in PHASES},
    by_role=st.dictionaries(
        st.tuples(st.sampled_from(("target", "draft")), st.sampled_from(("k", "v"))),
        st.builds(RoleMetrics, counts, counts),
    ),
)
failures = st.builds(
    Failure,
    st.sampled_from(("decode", "prefill")),
    st.just("why"),
    st.sampled_from(("abort", "lost")),
)
ended = st.lists(st.tuples(rooms, st.one_of(st.none(), failures)), max_size=8)


@given(ended, ended)
def test_totals_are_sums_over_rooms_and_a_copy_is_of_its_moment(first, more):
    totals = Totals()
    for room in first:
        totals.count_ended(*room)
    copy = totals.copy()
    for room in more:
        totals.count_ended(*room)
    for counted, given_rooms in ((copy, first), (totals, first + more)):
        failed = [(failure.side, failure.kind) for _, failure in given_rooms if failure]
        assert counted.rooms == {"success": len(given_rooms) - len(failed), "failed": len(failed)}
        assert counted.failures == {key: failed.count(key) for key in failed}
        assert counted.chunks == sum(room.chunks for room, _ in given_rooms)
        assert counted.bytes_moved == sum(room.bytes_moved for room, _ in given_rooms)
        for roles in {roles for room, _ in given_rooms for roles in room.by_role}:
            parts = [room.by_role.get(roles, (0, 0)) for room, _ in given_rooms]
            assert counted.by_role[roles] == tuple(map(sum, zip(*parts)))
        for phase in PHASES:
            times = [
                getattr(room, f"{phase}_seconds") for room, failure in given_rooms if not failure
            ]
            histogram = counted.phases.get(phase, Histogram())
            assert histogram.total == sum(times)
            assert sum(histogram.counts) == sum(time > 0 for time in times)


@given(st.lists(st.floats(0, 200)))
def test_a_histogram_counts_each_time_in_the_bucket_that_ends_at_it_or_above(times):
    histogram = Histogram()
    for time in times:
        histogram.observe(time)
    edges = [-1.0, *BOUNDS, 1e9]
    assert histogram.counts == [
        sum(low < time <= high for time in times) for low, high in pairwise(edges)
    ]


# the exporter, over HTTP


@dataclass
class Endpoint:
    """One that answers with what it was given."""

    now: Snapshot | Exception
    asked: int = 0

    def snapshot(self):
        self.asked += 1
        if isinstance(self.now, Exception):
            raise self.now
        return self.now


def busy():
    totals = Totals()
    done = RoomMetrics(
        chunks=3,
        bytes_moved=4096,
        wire_seconds=0.5,
        by_role={
            ("target", "latent, rope"): RoleMetrics(7, 4000),
            ("draft", "k"): RoleMetrics(1, 96),
        },
    )
    totals.count_ended(done)
    totals.count_ended(RoomMetrics(total_seconds=2.0), Failure("prefill", "gone", "lost"))
    leases = Leases({"kv": 12, "swa": 2}, {"kv": 1})
    return Snapshot(
        totals=totals,
        open_rooms=4,
        peers=2,
        leases=leases,
        engine="nixl",
        telemetry={"tx_bytes": 5.5},
        losses=6,
        refusals={("decode", "layout"): 2, ("prefill", "told"): 1},
        links={"open": 1, "lost": 0},
        quarantined_rooms=1,
        plans={"hit": 3, "miss": 1},
        plan_seconds=0.25,
    )


def scrape(server) -> set[str]:
    """All samples, as they are served."""
    url = f"http://{server.addr}:{server.port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line for line in lines if not line.startswith("#")}


def test_every_number_of_an_endpoint_is_served_under_its_name():
    with export({"d": Endpoint(busy())}) as server:
        samples = scrape(server)
    expected = """
        kvpool_up{endpoint="d"} 1.0
        kvpool_rooms_total{endpoint="d",outcome="success"} 1.0
        kvpool_rooms_total{endpoint="d",outcome="failed"} 1.0
        kvpool_failures_total{endpoint="d",kind="lost",side="prefill"} 1.0
        kvpool_chunks_total{endpoint="d"} 3.0
        kvpool_moved_bytes_total{endpoint="d"} 4096.0
        kvpool_bound_bytes_total{endpoint="d",owner="target",roles="latent, rope"} 4000.0
        kvpool_bound_bytes_total{endpoint="d",owner="draft",roles="k"} 96.0
        kvpool_runs_total{endpoint="d",owner="target",roles="latent, rope"} 7.0
        kvpool_runs_total{endpoint="d",owner="draft",roles="k"} 1.0
        kvpool_plans_total{cache="hit",endpoint="d"} 3.0
        kvpool_plans_total{cache="miss",endpoint="d"} 1.0
        kvpool_plan_seconds_total{endpoint="d"} 0.25
        kvpool_phase_seconds_sum{endpoint="d",phase="wire"} 0.5
        kvpool_phase_seconds_count{endpoint="d",phase="wire"} 1.0
        kvpool_refusals_total{endpoint="d",kind="layout",side="decode"} 2.0
        kvpool_refusals_total{endpoint="d",kind="told",side="prefill"} 1.0
        kvpool_lost_peers_total{endpoint="d"} 6.0
        kvpool_links{endpoint="d",state="open"} 1.0
        kvpool_links{endpoint="d",state="lost"} 0.0
        kvpool_quarantined_rooms{endpoint="d"} 1.0
        kvpool_draining{endpoint="d"} 0.0
        kvpool_open_rooms{endpoint="d"} 4.0
        kvpool_alive_peers{endpoint="d"} 2.0
        kvpool_leased_items{endpoint="d",space="kv"} 12.0
        kvpool_leased_items{endpoint="d",space="swa"} 2.0
        kvpool_quarantined_items{endpoint="d",space="kv"} 1.0
        kvpool_engine{counter="tx_bytes",endpoint="d",transfer_engine="nixl"} 5.5
    """
    lines = {line.strip() for line in expected.strip().splitlines()}
    bounds = [*map(str, BOUNDS), "+Inf"]
    assert samples == lines | {
        f'kvpool_phase_seconds_bucket{{endpoint="d",le="{bound}",phase="wire"}} '
        f"{float(float(bound) >= 0.5)}"
        for bound in bounds
    }


def test_numbers_are_read_when_they_are_asked_for_and_endpoints_come_and_go():
    first, two = Endpoint(busy()), Endpoint(busy())
    endpoints = {"one": first}
    with export(endpoints) as server:
        assert first.asked == 0
        scrape(server)
        endpoints["two"] = two
        first.now = replace(first.now, open_rooms=9)
        rooms = {'kvpool_open_rooms{endpoint="one"} 9.0', 'kvpool_open_rooms{endpoint="two"} 4.0'}
        assert rooms < scrape(server)
        assert (first.asked, two.asked) == (2, 1)
        del endpoints["one"]
        assert not any('endpoint="one"' in sample for sample in scrape(server))


def test_an_endpoint_that_does_not_answer_takes_no_other_with_it(caplog):
    broken = Endpoint(RuntimeError("the endpoint was closed."))
    with export({"broken": broken, "well": Endpoint(busy())}) as server:
        samples = scrape(server)
    assert {'kvpool_up{endpoint="broken"} 0.0', 'kvpool_up{endpoint="well"} 1.0'} < samples
    assert 'kvpool_open_rooms{endpoint="well"} 4.0' in samples
    assert "endpoint 'broken' has no metrics: the endpoint was closed." in caplog.text


def test_free_and_used_items_and_requests_of_allocators_are_served():
    """A prefix of one page is shared, and counts once; one is copied, and one is each request's."""
    allocator = Allocator(swa(num_pages=10, num_window_pages=20))
    request = allocator.new_request()
    allocator.extend(request, 6)  # 2 pages of 4, 3 window pages of 2
    allocator.fork(request, 6)
    with export({}, allocators={"a": allocator}) as server:
        in_use = scrape(server)
        allocator.free(request)
        rest = scrape(server)
    assert in_use == {
        'kvpool_used_items{allocator="a",ids="kv"} 3.0',
        'kvpool_used_items{allocator="a",ids="swa"} 3.0',
        'kvpool_free_items{allocator="a",ids="kv"} 6.0',
        'kvpool_free_items{allocator="a",ids="swa"} 16.0',
        'kvpool_requests{allocator="a"} 2.0',
    }
    used = 'kvpool_used_items{allocator="a",ids="kv"} 2.0'
    assert {used, 'kvpool_requests{allocator="a"} 1.0'} < rest


def test_what_a_prefix_cache_found_and_keeps_is_served():
    allocator = Allocator(mla(num_pages=5), prefix=PrefixCache())
    for tokens in (range(12), range(13), range(100, 120)):  # 3 pages of 4, again, 4 that evict
        request = allocator.new_request(tokens)
        allocator.extend(request, min(16, len(tokens)) - request.num_tokens)
        allocator.store(request, tokens[12 if len(tokens) == 13 else 0 : request.num_tokens])
        allocator.free(request)
    with export({}, allocators={"a": allocator}) as server:
        samples = scrape(server)
    assert samples > {
        'kvpool_prefix_lookups_total{allocator="a",outcome="hit"} 1.0',
        'kvpool_prefix_lookups_total{allocator="a",outcome="miss"} 2.0',
        'kvpool_prefix_tokens_total{allocator="a",tokens="asked"} 45.0',
        'kvpool_prefix_tokens_total{allocator="a",tokens="found"} 12.0',
        'kvpool_prefix_items_total{allocator="a",change="stored"} 7.0',
        'kvpool_prefix_items_total{allocator="a",change="removed"} 3.0',
        'kvpool_kept_items{allocator="a",ids="kv"} 4.0',
    }


def test_what_has_become_of_a_store_is_served():
    pool = mla(num_pages=9)
    with Store("memory://metrics", pool.layout, chunk_tokens=16) as store:
        assert store.lookup(range(40)) == 0
        store.write(range(40), place(pool, 32))
        until(lambda: not store.stats().queued_bytes)
        assert store.lookup(range(40)) == 32
        with export({}, stores={"s": store}) as server:
            samples = scrape(server)
    chunk = 4 * 16 * (16 + 8) * 2  # of four layers
    assert samples > {
        'kvpool_store_outcomes_total{outcome="hit",store="s"} 1.0',
        'kvpool_store_outcomes_total{outcome="miss",store="s"} 1.0',
        'kvpool_store_outcomes_total{outcome="written",store="s"} 2.0',
        'kvpool_store_tokens_total{outcome="hit",store="s"} 32.0',
        f'kvpool_store_bytes_total{{outcome="written",store="s"}} {2.0 * chunk}',
        'kvpool_store_bytes_total{outcome="dropped",store="s"} 0.0',
        'kvpool_store_queued_bytes{store="s"} 0.0',
    }
    outcomes = [s for s in samples if s.startswith("kvpool_store_outcomes_total")]
    sizes = [s for s in samples if s.startswith(("kvpool_store_tokens", "kvpool_store_bytes"))]
    assert len(outcomes) == len(sizes) == len(OUTCOMES)


def test_no_endpoints_are_served_as_such_and_a_closed_server_gives_its_port_back():
    server = export({})
    assert scrape(server) == set()
    server.close()
    with export({}, server.port) as again:
        assert again.port == server.port


def test_a_port_that_is_taken_is_refused_by_number():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"export at 127\.0\.0\.1, port {port}: "):
            export({}, port)
    with pytest.raises(ValueError, match=r"port 65536: "):
        export({}, 65536)


def test_without_its_package_the_exporter_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtra, match=r"pip install 'kvpool\[metrics\]'"):
        export({})


# the line of a failure


@given(st.text(), st.text(), st.one_of(st.integers(0, 2**63 - 1), st.text()))
def test_a_failure_is_one_line_that_reads_back(reason, peer, name):
    facts = {"room": name, "peer": peer, "start": 3, "bytes_moved": 1 << 40, "seconds": 0.123457}
    with mock.patch.object(logging.getLogger("disagg"), "log") as log:
        log_end("decode", Failure("decode", reason, "read"), **facts)
    (level, form, line), _ = log.call_args
    assert (level, form) == (logging.WARNING, "%s")
    assert line.isascii() and len(line.splitlines()) == 1
    failure = {"event": "room failed", "side": "decode", "kind": "read", "reason": reason}
    assert json.loads(line) == failure | facts


# when the chunks of a room were ready, read and released, by a clock that is set by hand


def test_times_of_a_room_count_from_its_request():
    pair = Pair()
    pair.now = 100.0
    pair.request()
    pair.now = 101.0
    pair.pump()
    pair.now = 103.0
    pair.serve(range(16), last=False)
    pair.now = 104.0
    pair.serve(range(16, 30))
    second, first = pair.reads.pop(), pair.reads.pop()
    for read, begun in ((first, 103.5), (second, 105.0)):
        pair.tell(pair.decode, ReadBegun(read, begun, 0.0, ()))
    for read, pair.now, nbytes in ((second, 106.0, 300), (first, 109.0, 500)):
        for part in (100, nbytes - 100):
            pair.tell(pair.decode, ReadMoved(read, part, 0.5))
        pair.tell(pair.decode, ReadEnded(read, None))
    pair.now = 112.0
    pair.pump()
    metrics = pair.decode.rooms.known("r").metrics
    assert pair.polls()[0] is KVPoll.Success
    every = {"source": 0, "layers": None}
    assert metrics.reads == [
        ReadTimes(**every, start=16, stop=30, nbytes=300, ready=4.0, begun=5.0, ended=6.0),
        ReadTimes(**every, start=0, stop=16, nbytes=500, ready=3.0, begun=3.5, ended=9.0),
    ]
    assert (metrics.asked_seconds, metrics.wait_seconds, metrics.done_seconds) == (0.0, 3.0, 9.0)
    assert (metrics.released, metrics.total_seconds) == ({0: 12.0}, 12.0)


def test_a_read_that_had_no_turn_has_ended_and_not_begun():
    pair = Pair()
    pair.ask()
    pair.serve()
    pair.now = 5.0
    pair.abort(pair.decode)
    pair.read()
    metrics = pair.decode.rooms.known("r").metrics
    assert [(read.begun, read.ended) for read in metrics.reads] == [(None, 5.0)]
    assert (metrics.done_seconds, metrics.released) == (0.0, {})


def test_parts_of_a_chunk_say_their_layers():
    pair = Pair(layers=range(4))
    pair.ask()
    for low in (0, 2):
        pair.serve(last=low == 2, layers=range(low, low + 2))
    pair.read()
    layers = [read.layers for read in pair.decode.rooms.known("r").metrics.reads]
    assert sorted(layers, key=str) == [LayerRange("target", 0, 2), LayerRange("target", 2, 4)]


@pytest.mark.parametrize("verify", [False, True])
def test_a_room_is_done_once_it_was_verified(verify):
    pair = Pair(verify=verify)
    pair.ask()
    pair.serve()
    pair.now = 3.0
    pair.read()
    assert pair.decode.rooms.known("r").metrics.done_seconds == (0.0 if verify else 3.0)
