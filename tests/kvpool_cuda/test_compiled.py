"""The compiled kernels: the compiler is stricter than the interpreter."""

from __future__ import annotations

import json

import pytest

from tests.processes import python

WIDE = {"v2.b64", "v4.b32", "v4.u32", "v2.u64"}


@pytest.fixture(scope="module")
def accesses(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("triton"))
    environment = {"CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": cache}
    given = "-m", "tests.kvpool_cuda.compiling"
    return json.loads(python(*given, drop="TRITON_INTERPRET", limit=250, **environment))


def widths(accesses, kind):
    """How bytes are read (`ld`) or written (`st`) by a launch."""
    start = f"{kind}.global."
    return {each.removeprefix(start) for each in accesses if each.startswith(start)}


@pytest.mark.parametrize(
    "launch", ["k and v, nhd", "k and v, hnd", "k and v, loaded", "mla", "runs of 656"]
)
def test_rows_move_16_bytes_a_lane(accesses, launch):
    assert widths(accesses[launch], "st") <= WIDE
    assert widths(accesses[launch], "ld") & WIDE


@pytest.mark.parametrize("launch", ["mla fp8", "dsv4 fp8", "keys int8"])
def test_floats_are_quantised_16_bytes_a_lane_and_divided_as_ieee_says(accesses, launch):
    assert widths(accesses[launch], "ld") & WIDE
    assert widths(accesses[launch], "st") & WIDE
    divisions = {each for each in accesses[launch] if each.startswith("div")}
    assert divisions == {"div.rn.f32"}


def test_every_other_launch_compiles_for_an_h200(accesses):
    others = {
        "mla fp8, loaded",
        "keys int8, loaded",
        "move",
        "staged move",
        "runs of 132",
        "runs of 131",
    }
    assert others < accesses.keys()
    assert widths(accesses["move"], "st") >= {"v2.b64", "b32", "b8"}
