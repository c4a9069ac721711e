"""Ranks of engines: decode converts (`cast`), or prefill does (`convert_to`)."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from disagg.connectors.contracts import RankDescription, ServingEngine
from disagg.connectors.rank.rank import Rank
from disagg.connectors.settings import Settings
from tests import oracle
from tests.cast.test_endpoints import Prefill, is_right
from tests.cast.test_pools import built
from tests.disagg.connectors.vllm.engines import until
from tests.pools import mha

TOKENS = 45
SIZES = {"layers": range(3), "num_pages": 40, "page_size": 4}
log = logging.getLogger("tests.cast")


class Side:
    """A rank over a pool, and what its engine was told."""

    def __init__(self, pool, settings, said=None, produces=False):
        roles = {"produces": produces, "consumes": not produces}
        self.pool, self.sent, self.received, self.failed = pool, set(), set(), set()
        self.rank = Rank(settings, pool.layout, **roles, readers=1, log=log, conventions=said or {})

    def step(self):
        results = self.rank.results({"r"})
        self.sent |= results.sent
        self.received |= results.received
        self.failed |= results.failed


def handed_over(prefill, decode, sent, table):
    """Asks for a request and sends it; whether it was received."""
    peers = (prefill.rank.prefill.address,)
    decode.rank.receive("r", "r", table, start=0, peers=peers)
    prefill.rank.send("r", "r", sent, range(TOKENS), last=True)
    until(lambda: decode.received and prefill.sent, decode, prefill)
    return not decode.failed


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (Settings(), Settings(cast=True)),
        (Settings(convert_to="e4m3", convert_room="1MiB"), Settings()),
    ],
    ids=["decode converts", "prefill converts"],
)
def test_either_side_converts(there, here):
    pool = built(mha, "bf16", **SIZES)
    dest, want = (built(mha, "e4m3", **SIZES) for _ in range(2))
    source = Prefill(pool)
    for each in (dest, want):
        oracle.blank(each)
    table = oracle.place(dest, TOKENS, 5)
    # as engines say of such a pool
    plain = {f"{which}_scale of layer {n}": 1.0 for which in "kv" for n in range(3)}
    prefill, decode = Side(pool, there, produces=True), Side(dest, here, plain)
    try:
        assert handed_over(prefill, decode, source.table, table)
        is_right([source], dest, want, table)
    finally:
        for side in (decode, prefill):
            side.rank.close()


def test_what_prefill_converts_has_no_other_scale_than_decodes(caplog):
    pool, dest = built(mha, "bf16", **SIZES), built(mha, "e4m3", **SIZES)
    prefill = Side(pool, Settings(convert_to="e4m3"), produces=True)
    decode = Side(dest, Settings(), {"v_scale of layer 1": 0.5})
    try:
        source = Prefill(pool)
        assert not handed_over(prefill, decode, source.table, oracle.place(dest, TOKENS, 5))
        assert "v_scale of layer 1: 1.0 on prefill, 0.5 on decode" in caplog.text
    finally:
        for side in (decode, prefill):
            side.rank.close()


def test_a_contract_says_the_scales_of_what_prefill_converts():
    settings = Settings(convert_to="e4m3")
    prefill = Side(built(mha, "bf16", **SIZES), settings, produces=True)
    engine = ServingEngine(package="torch", produces=True, consumes=False, size=1)
    contract = engine.contract(settings, [RankDescription.of(prefill.rank, {"model": "m"})])
    prefill.rank.close()
    (rank,) = contract.ranks
    scales = {f"{which}_scale of layer {n}": 1.0 for which in "kv" for n in range(3)}
    assert rank.conventions == {"model": "m", **scales}
    assert {region.dtype for region in rank.layout.regions} == {"float8_e4m3fn"}


def test_an_engine_that_decodes_too_does_not_convert_what_it_sends():
    pool = built(mha, "bf16", **SIZES)
    roles = {"produces": True, "consumes": True, "readers": 1}
    with pytest.raises(ValueError, match="convert_to: only an engine that decodes nothing"):
        Rank(Settings(convert_to="e4m3"), pool.layout, **roles, log=log, conventions={})
    with pytest.raises(ValueError, match="convert_to='fp9': a type of floats"):
        Settings(convert_to="fp9")
    assert np.array_equal(Settings(convert_room="2KiB").bytes_of("convert_room"), 2048)
