"""Engines of one label fit, whatever their ranks and pages are; a label is short."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from disagg.contract.contract import Contract, ContractRank
from disagg.contract.fit import Fit
from disagg.contract.labelling import labels
from disagg.protocol.versions import EARLIER, PROTOCOL
from kvpool.layout import LayoutError
from tests.disagg.contract.sides import LAYERS, Split, splits
from tests.disagg.plan.test_geometry import geometries
from tests.fuzz import samples

OLDER = PROTOCOL - EARLIER - 1


def label(split: Split):
    return labels(split.contract()).get("contract")


def of(layouts, **changes) -> Contract:
    ranks = tuple(ContractRank.of(n, layout, {}) for n, layout in enumerate(layouts))
    numbers = {"engine": "local", "serves": ("prefill", "decode"), "versions": {}}
    return Contract(size=len(ranks), ranks=ranks, **numbers | changes)


def fits(prefill: Contract, decode: Contract) -> bool:
    return not Fit(prefill=prefill, decode=decode, names=("a", "b"), tokens=9).objections()


@settings(max_examples=150)
@given(splits(), splits())
def test_engines_of_one_label_fit_on_either_side(one, other):
    sides = one.contract(), other.contract()
    values = [labels(side).get("contract") for side in sides]
    if values[0] is not None and values[0] == values[1]:
        assert fits(*sides) and fits(*reversed(sides))


LAYOUTS = [
    *([layout] for layout in samples.LAYOUTS),
    *(list(peers) for case in samples.CASES for peers in case.peers),
]


def test_so_do_engines_with_windows_rings_states_and_positions_that_are_shared_out():
    sides = [of(layouts) for layouts in LAYOUTS]
    alike = 0
    for one in sides:
        for other in sides:
            values = [labels(side).get("contract") for side in (one, other)]
            if values[0] is not None and values[0] == values[1]:
                assert fits(one, other)
                alike += one is not other
    assert alike > 10


@settings(max_examples=60)
@given(geometries(layers=4, heads=4, dim=3, pp=2, tp=4, page=5))
def test_two_ways_to_split_and_store_a_model_have_one_label(geometry):
    model, source, dest, _ = geometry
    sides = []
    for side in (source, dest):
        pools = [side.pool(model, *rank, 5) for rank in side.ranks()]
        sides.append(of([pool.layout for pool in pools]))
    values = [labels(side).get("contract") for side in sides]
    assert values[0] == values[1]


@pytest.mark.parametrize("changed", [{"tp": 4}, {"page": 8}, {"layers": (1, 2, LAYERS)}])
def test_ranks_stages_and_pages_do_not_change_it(changed):
    assert label(Split(**changed)) == label(Split()) is not None


@pytest.mark.parametrize(
    "changed",
    [
        *({"dtype": "f16"}, {"kind": "wide"}, {"kind": "mla"}, {"engine": "nixl"}),
        *({"protocol": OLDER}, {"conventions": {"theta": 1}}),
    ],
)
def test_what_does_not_fit_or_may_not_has_another(changed):
    assert label(Split(**changed)) not in (label(Split()), None)


def test_an_engine_whose_ranks_do_not_hold_all_has_none():
    contract = Split(tp=4).contract()
    assert "contract" not in labels(replace(contract, ranks=contract.ranks[1:]))
    parts = replace(contract, ranks=contract.ranks[:3], size=3)  # and none is missing
    assert "contract" not in labels(parts)
    assert label(Split(layers=(1, LAYERS), said_by_last={"a": 1}, conventions={"a": 2})) is None


def test_labels_are_short_texts_of_few_characters():
    said = {"model": "a model/with ünusual " + 70 * "x"}
    contract = replace(
        Split(conventions=said).contract(),
        versions={"kvpool": "0.1.0+cpu", "vllm": "0.33.0"},
        serves=("prefill", "decode"),
    )
    values = labels(contract)
    assert re.fullmatch(r"[0-9a-f]{16}", values.pop("contract"))
    assert values.pop("model").startswith("a-model-with-nusual-xxx")
    assert values == {
        "engine": "local",
        "protocol": str(PROTOCOL),
        "serves": "prefill-decode",
        "kvpool": "0.1.0-cpu",
        "vllm": "0.33.0",
    }


@given(st.data())
def test_what_is_refused_after_a_change_of_one_region_has_another(data):
    contract = of([data.draw(st.sampled_from(samples.LAYOUTS))])
    (rank,) = contract.ranks
    regions = [*rank.layout.regions]
    number = data.draw(st.integers(0, len(regions) - 1))
    changes = {"layer": 7}, {"role": "other"}, {"owner": "draft"}, {"dtype": "uint8"}
    regions[number] = replace(regions[number], **data.draw(st.sampled_from(changes)))
    try:
        changed = of([replace(rank.layout, regions=tuple(regions))])
    except LayoutError:
        return
    value = labels(contract).get("contract")
    if not fits(changed, contract) or not fits(contract, changed):
        assert value is None or labels(changed).get("contract") != value
