"""What a byte of an input costs does not grow with the input."""

from __future__ import annotations

import json

import pytest

from tests.fuzz.growing import TARGETS
from tests.fuzz.growth import Growth, check, sized
from tests.fuzz.guard import Finding
from tests.fuzz.trees import growers, to_json, tree


@pytest.mark.parametrize("name", TARGETS)
def test_a_byte_of_a_larger_input_costs_no_more(name):
    for how in TARGETS[name].growers:
        check(TARGETS[name], how)


# would it be found?


def test_work_by_the_square_of_the_input_is_reported():
    def pairs(data):
        names = [*range(len(data) // 8)]
        return [names.count(name) for name in names]

    with pytest.raises(Finding, match="us a byte of a smaller one"):
        check(Growth(pairs, {"names": lambda count: b"x" * count}), "names")


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
