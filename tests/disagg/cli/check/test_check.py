"""`kvpool check` within this host: what it moves and by what, and every reason against."""

from __future__ import annotations

import json
import os

import pytest

from disagg.contract import Contract, ContractRank
from disagg.runtime.keys import write_keys
from tests.disagg.cli.check.parts import reason, run, saved, serving, told, told_by_process
from tests.disagg.engines.peers import ENGINES
from tests.disagg.runtime.sides import pool, prefill_process
from tests.ports import free_port

BYTES = "24MiB"
QUICK = "--timeout", "2"
"""Where nobody will answer, however long it waits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Keys of two authorities, and contracts."""
    place = tmp_path_factory.mktemp("check")
    for name in ("keys", "others"):
        write_keys(place / name)
    saved(place, "prefill", tp=2)
    saved(place, "decode", page=8, serves="decode")
    return place


@pytest.fixture(scope="module")
def offered(folder):
    """Where the prefill's part runs, with keys."""
    settings = json.dumps({"keys": str(folder / "keys")})
    with serving(folder / "prefill", "--settings", settings) as addresses:
        yield addresses


def keyed(folder, name="keys", **more):
    return "--settings", json.dumps({"keys": str(folder / name), **more})


def sides(folder):
    return folder / "prefill", folder / "decode"


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "local"])
def test_an_engine_moves_bytes_and_says_by_what(engine, folder, tmp_path):
    prefill = saved(tmp_path, "prefill", engine=engine, tp=2)
    decode = saved(tmp_path, "decode", engine=engine, page=8, serves="decode")
    with serving(prefill, *keyed(folder)) as (first, _):
        document = told_by_process(
            prefill, decode, "--from", first, *keyed(folder), "--bytes", BYTES
        )
    assert document["check"] is True and document["refused"] == []
    moved, transport = document["moved"], document["transport"]
    assert moved["bytes"] >= 24 << 20 and moved["complete"]
    assert moved["gib_per_second"] > 0
    assert transport["engine"] == engine and transport["messages"].startswith("TLS 1.3")
    if engine == "nixl":
        # UCX chooses: TCP, or memory of the host where the kernel allows it
        assert (
            transport["lanes"] and transport["bytes"] == f"UCX over {', '.join(transport['lanes'])}"
        )
        assert all(lane.count("/") == 1 for lane in transport["lanes"])
    else:
        assert transport["bytes"] == "tcp" and transport["lanes"] is None


def test_a_ucx_transport_that_was_chosen_is_the_one_that_is_told(folder, tmp_path):
    chosen = keyed(folder, engine_options={"transports": "tcp", "device": "lo"})
    prefill = saved(tmp_path, "prefill", engine="nixl")
    decode = saved(tmp_path, "decode", engine="nixl", serves="decode")
    with serving(prefill, *chosen) as (first,):
        document = told_by_process(prefill, decode, "--from", first, *chosen, "--bytes", BYTES)
    assert document["transport"]["lanes"] == ["tcp/lo"]


def test_it_prints_what_it_has_found(folder, offered):
    variables = dict(os.environ)
    done = run(*sides(folder), "--from", offered[0], *keyed(folder), "--bytes", BYTES)
    assert done.exit_code == 0, done.output
    assert os.environ == variables  # processes that start later find UCX as it was
    lines = done.stdout.splitlines()
    assert lines[0] == "yes"
    assert "GiB/s, equal by checksum" in done.stdout
    assert "bytes by: engine local, memory of one host" in lines
    assert "messages by: TLS 1.3, certificates of both sides" in lines
    assert "only decodes on its host can dial them" in lines[-1]


def test_all_addresses_may_be_named(folder, offered):
    places = ",".join(offered)
    assert told(*sides(folder), "--from", places, *keyed(folder), "--bytes", BYTES)["moved"]
    done = run(*sides(folder), "--from", f"{places},{places}", *keyed(folder))
    assert done.exit_code == 2 and "prefill has 2 ranks" in done.output


def test_what_runs_is_dialled_and_left_as_it_is(folder, tmp_path):
    keys = str(folder / "keys")
    with prefill_process("tcp://127.0.0.1:*", keys=keys) as prefill:
        layout = pool().layout
        for name, address in (("prefill", prefill.address), ("decode", None)):
            rank = ContractRank.of(0, layout, {}, address)
            whole = Contract(
                engine="local", serves=(name,), size=1, ranks=(rank,), versions={"kvpool": "0.1.0"}
            )
            (tmp_path / name).write_text(whole.to_json())
        both = tmp_path / "prefill", tmp_path / "decode"
        document = told(*both, *keyed(folder), "--bytes", BYTES)
        assert document["check"] is True
        assert document["handshake"] == [prefill.address]
        # prefill is on this host, so the check has served by itself
        assert document["moved"]["bytes"] >= 24 << 20
        wrong = reason(tmp_path / "prefill", tmp_path / "decode", *keyed(folder, "others"))
        assert wrong[0] == "network" and "certificate" in wrong[1]
        # its state is what it was: a room of it is handed over, byte by byte
        prefill.works("after")


@pytest.mark.parametrize("engine", ["local", "nixl"])
def test_on_one_host_two_contracts_are_enough(engine, tmp_path):
    prefill = saved(tmp_path, "prefill", engine=engine, tp=2)
    decode = saved(tmp_path, "decode", engine=engine, page=8, serves="decode")
    document = told_by_process(prefill, decode, "--bytes", BYTES)
    assert document["check"] is True and document["moved"]["bytes"] >= 24 << 20
    assert document["transport"]["engine"] == engine


def test_prefill_on_another_host_needs_a_part_there(folder, tmp_path):
    """192.0.2.0/24 is nobody's (RFC 5737)."""
    addresses = [f"tcp://192.0.2.7:{port}" for port in (9400, 9401)]
    prefill = saved(tmp_path, "prefill", tp=2, addresses=addresses)
    document = told(prefill, folder / "decode", *keyed(folder), *QUICK, status=1)
    assert document["moved"] is None
    assert [each["about"] for each in document["refused"]] == ["network"]


def test_what_cannot_serve_on_this_host_says_why(folder):
    about, words = reason(*sides(folder), *keyed(folder), "--device", "cuda:77")
    assert about == "engine" and "cuda" in words


def test_reasons_of_contracts_come_first_and_nothing_is_moved(folder, offered, tmp_path):
    other = saved(tmp_path, "decode", serves="decode", dim=16, said={"model": "other"})
    document = told(folder / "prefill", other, "--from", offered[0], *keyed(folder), status=1)
    assert {each["about"] for each in document["refused"]} == {"conventions", "layout"}
    assert document["moved"] is None
    assert "bytes, for the reasons above." in document["unchecked"]


def test_certificates_of_another_authority(folder, offered):
    about, words = reason(*sides(folder), "--from", offered[0], *keyed(folder, "others"))
    assert about == "network"
    assert "its certificate is refused: self-signed certificate" in words
    assert f"{offered[0]}: it accepts connections" in words


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "TCP needs keys on both sides"),
        ({"keys": "/nowhere"}, "/nowhere: no such file. Made once by kvpool keys FOLDER: copy it."),
        (
            {"insecure": True},
            "it accepts connections: is it of kvpool, and do both sides have keys",
        ),
    ],
)
def test_keys_that_are_lacking(folder, offered, settings, words):
    given = "--settings", json.dumps(settings)
    assert words in reason(*sides(folder), "--from", offered[0], *given, *QUICK)[1]


def test_nobody_listens(folder):
    address = f"tcp://127.0.0.1:{free_port()}"
    about, words = reason(*sides(folder), "--from", address, *keyed(folder), *QUICK)
    assert about == "network"
    assert f"{address}: connection refused: its host is there, and nothing listens" in words


def test_a_name_without_an_address(folder):
    address = "tcp://nobody.invalid:29199"
    about, words = reason(*sides(folder), "--from", address, *keyed(folder), *QUICK)
    assert about == "network" and "no address is known for its name" in words


def test_engines_that_differ(folder, offered, tmp_path):
    nixl = saved(tmp_path, "decode", engine="nixl", page=8, serves="decode")
    about, words = reason(folder / "prefill", nixl, *keyed(folder))
    assert about == "engine" and "'local' on prefill, 'nixl' on decode" in words
    about, words = reason(*sides(folder), *keyed(folder, engine="nixl"))
    assert about == "engine" and "'nixl' by --settings, 'local' by the contracts" in words
    # a prefill's part that was started with another engine than the contracts say
    both = saved(tmp_path, "p", engine="nixl", tp=2), nixl
    about, words = reason(*both, "--from", offered[0], *keyed(folder))
    assert about == "handshake" and "'local' on prefill, 'nixl' on decode" in words


def test_contracts_that_cannot_be_read(folder, tmp_path):
    document = told(tmp_path / "none", folder / "decode", status=1)
    assert [each["about"] for each in document["refused"]] == ["contract"]
    done = run(tmp_path / "none", "--serve", "tcp://127.0.0.1:*")
    assert done.exit_code == 1 and "nothing is served" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give DECODE, or --serve"),
        (
            ["--serve", "tcp://127.0.0.1:*", "--from", "tcp://127.0.0.1:1"],
            "give DECODE, or --serve",
        ),
        (["decode", "--bytes", "much"], "--bytes 'much'"),
        (["decode", "--settings", "[]"], "--settings: a JSON object"),
        (["decode", "--settings", '{"egnine": 1}'], "did you mean"),
    ],
)
def test_usage_errors(folder, arguments, words):
    given = [str(folder / word) if word == "decode" else word for word in arguments]
    done = run(folder / "prefill", *given)
    assert done.exit_code == 2 and words.lower() in " ".join(done.output.split()).lower()
