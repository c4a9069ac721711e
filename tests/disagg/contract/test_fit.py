"""What two contracts say of two engines is what their endpoints find when they shake hands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from disagg.contract.contract import Contract
from disagg.contract.fit import Fit
from disagg.protocol.versions import EARLIER, PROTOCOL
from tests.disagg.contract.sides import LAYERS, Split, shake_hands, splits

OLDER = PROTOCOL - EARLIER - 1


def objections(prefill: Split, decode: Split):
    """By way of their text, as a reader of saved contracts has them."""
    sides = [Contract.from_json(side.contract().to_json()) for side in (prefill, decode)]
    return Fit(prefill=sides[0], decode=sides[1], names=("a", "b"), tokens=100).objections()


@settings(max_examples=60)
@given(splits(), splits())
def test_it_says_yes_exactly_where_a_handshake_of_all_ranks_succeeds(prefill, decode):
    refusal = shake_hands(prefill, decode)
    found = objections(prefill, decode)
    assert bool(found) == (refusal is not None), (refusal, found)
    said = [one.reason for one in found]
    for line in (refusal or "").splitlines():
        if line.startswith(("engine", "model", "theta")):
            assert line in said


@pytest.mark.parametrize(
    ("changed", "subject", "reason"),
    [
        ({"engine": "nixl"}, "engine", "engine 'local' on prefill, 'nixl' on decode"),
        (
            {"protocol": OLDER},
            "protocol",
            f"protocol {PROTOCOL} on prefill, {OLDER} on decode, and each",
        ),
        ({"serves": ("prefill",)}, "side", "decode serves prefill only. Start it for decode."),
        ({"dtype": "f16"}, "layout", "bfloat16 on prefill, float16 on decode"),
        ({"kind": "mla"}, "layout", "prefill offers no such region"),
        ({"conventions": {"model": "b"}}, "conventions", "model: 'a' on prefill, 'b' on decode."),
    ],
)
def test_a_reason_says_what_it_is_about(changed, subject, reason):
    prefill = Split(tp=2, conventions={"model": "a"})
    found = objections(prefill, Split(**changed))
    assert {one.about for one in found} == {subject}
    assert all(reason in one.reason for one in found)
    assert found[0].prefill.startswith("prefill a rank") and found[0].decode == "decode b"


def test_all_reasons_are_listed_at_once():
    changed = {"engine": "nixl", "protocol": OLDER, "dtype": "f16", "serves": ("prefill",)}
    found = objections(Split(conventions={"m": 1}), Split(conventions={"m": 2}, **changed))
    assert [one.about for one in found] == [
        *("side", "protocol", "engine", "conventions"),
        *["layout"] * 2,
    ]


def test_a_difference_of_some_decode_ranks_names_them():
    decode = Split(layers=(1, LAYERS), said_by_last={"theta": 2})
    (found,) = objections(Split(conventions={"theta": 1}), decode)
    assert found.decode == "decode b rank 1"


def test_ranks_that_said_nothing_are_named():
    whole = Split(tp=4).contract()
    text = whole.to_json()
    part = Contract.from_json(text)
    part = type(part)(
        engine=part.engine,
        serves=part.serves,
        size=4,
        ranks=part.ranks[1:2],
        versions=part.versions,
    )
    found = Fit(prefill=part, decode=whole, names=("a", "b"), tokens=1).objections()
    assert (found[0].about, found[0].prefill) == ("ranks", "prefill a rank 1")
    assert "its contract lacks 0, 2-3" in found[0].reason
