"""Layers and ranks that are alike are planned at once; those that differ in anything are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from disagg.plan import plan
from disagg.plan.proof import prove
from disagg.plan.routes import records_of
from kvpool.item import Cell, Pad, Repeat, Seq, Skip
from tests.oracle import built, hand_off
from tests.pools import mla

HEADS = 4
FORMS = ("rows", "v first", "k before v", "heads outermost", "behind a gap", "padded")


def page_of(form, page, first, heads):
    """K and V of `heads` heads from `first` on, laid out in one of six ways."""
    k, v = (Cell(role, 3, "bf16") for role in "kv")

    def some(cell):
        return Repeat("head", heads, cell, first, HEADS)

    def entries(*parts):
        return Repeat("entry", page, Seq(*parts) if len(parts) > 1 else parts[0])

    rows = entries(some(k), some(v))
    return {
        "rows": rows,
        "v first": entries(some(v), some(k)),
        "k before v": Seq(entries(some(k)), entries(some(v))),
        "heads outermost": Seq(some(entries(k)), some(entries(v))),
        "behind a gap": Seq(Skip(8), rows),
        "padded": Pad(64, entries(some(k), Skip(2), some(v))),
    }[form]


@st.composite
def ranks(draw, layers, tokens, count=1):
    """All ranks of one side, `count` replicas of each; layers and ranks are laid out as they like,
    but often as the one before.
    """
    tp, forms, found = draw(st.sampled_from([1, 2, 4])), ["rows"], []
    page, some = draw(st.integers(1, 5)), draw(st.lists(st.sampled_from(FORMS), min_size=1))
    for rank in range(tp):
        for _ in range(count):
            if draw(st.booleans()):
                forms = [draw(st.sampled_from(some)) for _ in range(layers)]
            heads = HEADS // tp
            parts = [
                (layer, "kv", -(-tokens // page) + 2, page_of(form, page, rank * heads, heads))
                for layer, form in enumerate((forms * layers)[:layers])
            ]
            found.append(built(parts, page=page, padding=draw(st.booleans())))
    return found


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 13), st.integers(1, 2), st.data())
def test_whatever_is_alike_the_bytes_are_exact(layers, tokens, count, data):
    sources = data.draw(ranks(layers, tokens, count))
    dest = data.draw(st.sampled_from(data.draw(ranks(layers, tokens))))
    hand_off(sources, dest, tokens)


@pytest.mark.parametrize(("prefill", "decode"), [("page", "layer"), ("layer", "page")])
def test_layers_side_by_side_on_one_side_only_are_one_route(prefill, decode):
    made = plan([mla(placement=prefill, device="meta").layout], mla(placement=decode).layout)
    (route,) = made.routes
    assert route.layers.tolist() == [0, 1, 2, 3] and made.layer_routes is made.routes


def three_layers(**odd):
    """Layers 0 to 2, alike but for what `odd` says of layer 1."""
    forms = ["padded", odd.get("form", "padded"), "padded"]
    layout = built(
        [(n, "kv", 5, page_of(form, 4, 0, HEADS)) for n, form in enumerate(forms)], page=4
    ).layout
    first, second, third = layout.buffers
    second = replace(second, padding=odd.get("padding", True))
    return replace(layout, buffers=(first, second, third))


@pytest.mark.parametrize("odd", [{"form": "behind a gap"}, {"padding": False}])
def test_every_pair_of_a_route_is_proved(odd):
    one, two, other = three_layers(), three_layers(), three_layers(**odd)
    made = plan([one], two)
    (route,) = made.routes
    assert len(route.dst.buffers) == 3
    for sources, dest, who in (([one], other, "destination"), ([other], two, "source")):
        with pytest.raises(RuntimeError, match=f"^target layer 1 k, .*on the {who}.* target.1 on"):
            prove(records_of([*sources, dest]), made.parts, made.routes)
        assert len(plan(sources, dest).routes) == 2
