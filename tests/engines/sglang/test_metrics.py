"""What SGLang's /metrics says: processes of its schedulers count, and its server, which has none of
the numbers, adds them up.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import until

ROOMS = ["kvpool_rooms_total", {"endpoint": "decode", "outcome": "success"}]
OPEN = ["kvpool_open_rooms", {"endpoint": "decode"}]
WIRE = ["kvpool_phase_seconds_count", {"endpoint": "decode", "phase": "wire"}]
STORED = ["kvpool_store_outcomes_total", {"store": "kv", "outcome": "hit"}]


def scheduler(rank, folder, line):
    """A process of a scheduler: a room of its rank has ended, and its store has answered."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    from disagg.connectors.rank.stats import Stats
    from disagg.connectors.sglang.metrics import publish, publish_store
    from disagg.protocol.metrics import RoomMetrics, Snapshot, Totals
    from disagg.protocol.peers.liveness import Leases
    from disagg.store.stats import Outcomes

    totals, store, stats = Totals(), Outcomes(), Stats(rank)
    room = RoomMetrics(bytes_moved=100, wire_seconds=0.5, total_seconds=0.75)
    totals.add(room)
    about = {"peers": 1, "leases": Leases(), "engine": "local", "telemetry": {}}
    stats.watch_endpoint("decode", lambda: Snapshot(totals=totals.copy(), open_rooms=2, **about))
    stats.received(room, None)
    store.count("hit", 64)
    options = SimpleNamespace(enable_metrics=True, served_model_name="llama")
    publisher = publish(stats, options)
    publish_store(lambda: store.stats(0), rank, options)
    line.recv()
    publisher.close()


def server(folder, line):
    """SGLang's own /metrics; sends what it says whenever it is asked."""
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    from sglang.srt.utils.common import add_prometheus_middleware

    app = FastAPI()
    add_prometheus_middleware(app)
    with TestClient(app) as client:
        while line.recv():
            line.send(client.get("/metrics").text)


@pytest.fixture
def processes(tmp_path):
    """Starts a process for a function, with a line to it; all end with the test."""
    started, spawn = [], multiprocessing.get_context("spawn")

    def start(target, *arguments):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=target, args=(*arguments, str(tmp_path), theirs))
        process.start()
        started.append((process, ours))
        return ours

    yield start
    for process, ours in started:
        ours.send(None)
        process.join(60)
        assert process.exitcode == 0


def test_the_server_adds_up_what_its_schedulers_count(processes):
    for rank in range(2):
        processes(scheduler, rank)
    page = processes(server)

    def number(name, labels):
        page.send("ask")
        wanted = labels.items() | {("model_name", "llama")}
        found = [
            sample.value
            for family in text_string_to_metric_families(page.recv())
            for sample in family.samples
            if sample.name == name and wanted <= sample.labels.items()
        ]
        return found[0] if len(found) == 1 else None

    wanted = json.dumps([2, 4, 2, 2])
    until(lambda: json.dumps([number(*one) for one in (ROOMS, OPEN, WIRE, STORED)]) == wanted, 120)


def test_sglang_has_the_options_that_are_asked_for():
    from sglang.srt.server_args import ServerArgs

    assert {"enable_metrics", "served_model_name"} <= ServerArgs.__dataclass_fields__.keys()
