"""A contract as text: what is written is read back; what a stranger writes is read or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version

import pytest
from hypothesis import given, settings

from disagg.contract import contract as module
from disagg.contract.contract import MAX_RANKS, Contract, ContractRank, joined, versions
from disagg.protocol.versions import PROTOCOL
from kvpool import MLAPool
from tests.disagg.contract.sides import Split, splits

WHOLE = Split(tp=2, conventions={"model": "a", "theta": 1.5, "n": 7}).contract()


def document(**changes):
    return json.dumps(json.loads(WHOLE.to_json()) | changes)


@settings(max_examples=40)
@given(splits())
def test_what_is_written_is_read_back(split):
    contract = split.contract()
    text = contract.to_json()
    assert Contract.from_json(text) == contract == Contract.from_json(text.encode())


def test_it_holds_no_pointer_and_no_socket_of_its_host():
    pool = MLAPool(
        layers=range(2), kv_lora_rank=8, qk_rope_head_dim=8, num_pages=3, page_size=8, dtype="bf16"
    )
    layout = replace(pool.layout, generation="secret")
    rank = ContractRank.of(0, layout, {}, "ipc:///run/kvpool/socket")
    assert rank.address is None
    assert rank.layout.generation == ""
    assert min(buffer.base for buffer in rank.layout.buffers) == 0
    assert rank.layout.fingerprint() == layout.fingerprint()
    for address in ("tcp://10.0.0.1:7000", "tcp://[::1]:7000"):
        assert ContractRank.of(0, layout, {}, address).address == address


RANK = json.loads(WHOLE.to_json())["ranks"][0]
NEWER = RANK["layout"] | {"version": 2}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 2}, "contract version 2: this kvpool reads version 1"),
        ({"version": 1 << 70}, "contract version"),
        ({"version": "1"}, "malformed contract"),
        ({"more": 1}, "unknown field `more`"),
        ({"protocol": -1}, "malformed contract"),
        ({"engine": ""}, "malformed contract"),
        ({"engine": "a\nb"}, "of printable characters"),
        ({"engine": "a" * 200}, "malformed contract"),
        ({"serves": []}, "malformed contract"),
        ({"serves": ["prefill", "prefill"]}, "each side once"),
        ({"serves": ["store"]}, "malformed contract"),
        ({"size": 0}, "malformed contract"),
        ({"size": MAX_RANKS + 1}, "malformed contract"),
        ({"size": 1}, "numbers below size 1, rising"),
        ({"ranks": []}, "malformed contract"),
        ({"ranks": [RANK, RANK]}, "numbers below size 2, rising"),
        ({"ranks": [RANK | {"number": -1}]}, "malformed contract"),
        ({"ranks": [RANK | {"layout": {}}]}, "rank 0: malformed layout"),
        ({"ranks": [RANK | {"layout": 7}]}, "rank 0: malformed layout"),
        (
            {"ranks": [RANK | {"layout": RANK["layout"] | {"version": 2}}]},
            "rank 0: layout version 2",
        ),
        ({"ranks": [RANK | {"conventions": {"a": True}}]}, "malformed contract"),
        ({"ranks": [RANK | {"conventions": {"a": "x" * 300}}]}, "malformed contract"),
        ({"ranks": [RANK | {"conventions": {str(n): n for n in range(2000)}}]}, "malformed"),
        ({"ranks": [RANK | {"address": "a\x1b[2K"}]}, "of printable characters"),
        ({"versions": {str(n): "1" for n in range(99)}}, "malformed contract"),
        ({"allow_missing": ["x"] * 99}, "malformed contract"),
    ],
)
def test_what_no_engine_would_say_is_refused(changes, reason):
    with pytest.raises(ValueError, match=reason) as refused:
        Contract.from_json(document(**changes))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("text", ["", "[]", "7", "{", "[" * 100_000, '{"a": ' * 50_000, "\ud800"])
def test_what_is_no_document_is_refused(text):
    with pytest.raises(ValueError, match="malformed contract"):
        Contract.from_json(text)


def test_a_text_that_is_too_long_is_not_read(monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match="at most 100 are read"):
        Contract.from_json(WHOLE.to_json())
    with pytest.raises(ValueError, match="at most 100 are read"):
        WHOLE.to_json()


def test_what_nobody_would_read_is_not_written():
    with pytest.raises(ValueError, match="malformed contract"):
        replace(WHOLE, engine="a\nb").to_json()
    with pytest.raises(ValueError, match="rising"):
        replace(WHOLE, ranks=WHOLE.ranks[::-1]).to_json()


def test_ranks_that_give_their_own_are_joined_in_any_order():
    parts = [replace(WHOLE, ranks=(rank,)) for rank in WHOLE.ranks]
    assert [part.missing for part in parts] == [[1], [0]]
    assert joined(parts) == joined(parts[::-1]) == WHOLE
    assert joined(parts[:1]).missing == [1]


def test_parts_of_different_engines_are_not_joined():
    first, second = (replace(WHOLE, ranks=(rank,)) for rank in WHOLE.ranks)
    with pytest.raises(ValueError, match="different engines: engine 'local' and 'nixl'"):
        joined([first, replace(second, engine="nixl")])
    with pytest.raises(ValueError, match="rank 0 comes twice"):
        joined([first, first])


def test_versions_are_those_of_packages_that_are_imported():
    numbers = {"kvpool": version("kvpool"), "numpy": version("numpy")}
    assert versions("numpy", "no_such_package") == numbers
    assert WHOLE.protocol == PROTOCOL
