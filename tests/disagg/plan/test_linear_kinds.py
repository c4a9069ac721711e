"""Linear states of every kind are resharded and handed over byte by byte."""

from __future__ import annotations

import pytest

from kvpool import MHA, HybridLinearPool, Shard, lightning, mamba1, mamba2, short_conv
from tests.oracle import hand_off

KINDS = {
    "mamba-1": (lambda order: mamba1(8, 5, 4, order), {}),
    "short conv": (lambda order: short_conv(8, 3, order), {}),
    "lightning": (lambda order: lightning(4, 6), {}),
    "mamba-2 and attention in a layer": (
        lambda order: mamba2(8, 3, 2, 5, 4, order),
        {"full_layers": range(4), "linear_layers": range(4)},
    ),
    "slots alone": (
        lambda order: mamba1(8, 5, 4, order),
        {"full": None, "linear_layers": range(4)},
    ),
}
ORDERS = ("channels_first", "taps_first")


def pools(kind: str, order: str, ranks: int, **more: object) -> list[HybridLinearPool]:
    """The ranks of an engine."""
    linear, given = KINDS[kind]
    common = {
        "layers": range(4), "full": MHA(4, 8), "linear_layers": [0, 2], "page_size": 4,
        "num_pages": 12, "num_slots": 5, "dtype": "bf16", "linear": linear(order),
    }  # fmt: skip
    arguments = {**common, **given, **more}
    return [HybridLinearPool(shard=Shard(rank, ranks), **arguments) for rank in range(ranks)]


@pytest.mark.parametrize(("prefill", "decode"), [(4, 1), (2, 4)])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_linear_states_are_resharded(kind, order, prefill, decode):
    sources = pools(kind, order, prefill, placement="page" if prefill == 4 else "layer")
    for dest in pools(kind, ORDERS[prefill > 1], decode, page_size=8, num_pages=7):
        hand_off(sources, dest, 21)
