"""What a byte of an input costs does not grow with the input."""

from __future__ import annotations

import json
import os

import pytest

from tests.fuzz import growth
from tests.fuzz.growing import TARGETS
from tests.fuzz.growth import Growth, check, sized
from tests.fuzz.guard import Finding
from tests.fuzz.trees import Pairs, growers, to_json, to_msgpack, tree

LARGEST = int(os.environ.get("KVPOOL_GROW", growth.SMALL * growth.TIMES))
"""Bytes. `KVPOOL_GROW=1048576` grows inputs further, in two minutes."""


@pytest.mark.parametrize("name", TARGETS)
def test_a_byte_of_a_larger_input_costs_no_more(name):
    for how in TARGETS[name].growers:
        check(TARGETS[name], how, LARGEST)


# would it be found?


def of_names(run):
    return Growth(run, {"names": lambda count: b"x" * count})


def test_work_by_the_square_of_the_input_is_reported():
    def pairs(data):
        names = [*range(len(data) // 8)]
        return [names.count(name) for name in names]

    with pytest.raises(Finding, match="us a byte of a smaller one"):
        check(of_names(pairs), "names")


def test_work_in_proportion_is_not_reported():
    check(of_names(lambda data: [data.count(b"y") for _ in range(100)]), "names")


def test_a_byte_that_costs_too_much_is_reported(monkeypatch):
    monkeypatch.setattr(growth, "MAX_SECONDS_A_BYTE", 1e-9)
    monkeypatch.setattr(growth, "BASE_SECONDS", 0.0)
    with pytest.raises(Finding, match="s for 4096 bytes"):
        check(of_names(lambda data: [data.count(b"y") for _ in range(100)]), "names")


def test_samples_grow_in_every_place():
    sample = {"a": [{"b": 1, "c": "x"}], "d": {}}
    ways = dict(growers(tree(sample), to_json))
    assert {"all", "a", "a.*", "a.*.b", "a.*.c", "d"} == {way.partition(": ")[0] for way in ways}
    assert json.loads(ways["a: repeated"](3))["a"] == 3 * sample["a"]
    twice = ways["a.*: twice at last"](3)
    assert twice.count(b'"b0"') == twice.count(b'"b2"') == 1 and twice.count(b'"c2"') == 2
    assert ways["a.*.c: nested"](2) == b'{"a":[{"b":1,"c":[["x"]]}],"d":{}}'
    assert ways["a.*.b: long"](3) == b'{"a":[{"b":999,"c":"x"}],"d":{}}'
    assert len(sized(ways["all: numbered"], 5000)) >= 5000


def test_trees_are_written_as_they_are():
    value = Pairs([("a", [1, Pairs([("b", None)])]), ("a", b"x")])
    assert to_msgpack(value).count(b"\xa1a") == 2
    assert to_json(Pairs(value[:1] * 2)) == b'{"a":[1,{"b":null}],"a":[1,{"b":null}]}'
