"""Every pool over every engine in every shape: bytes exact, between processes.

A new pool, engine or shape joins by one line in a list.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import product

import pytest

from disagg import DecodeEndpoint, KVPoll
from disagg.engines.base import create_engine
from kvpool import Shard
from tests import oracle
from tests.disagg.engines.peers import ENGINES
from tests.kvpool_npu.pools import NPU
from tests.pools import CLASSES, PACKED, nsa

TOKENS = 21  # pages of 4, of 8 and of 12 end in a partial one
CHUNKS = (range(7), range(7, 16), range(16, TOKENS))
MANY = {"num_pages": 12, "num_window_pages": 16}
# every class, and some packings; all others are in the long runs
USUAL = {
    **CLASSES,
    **{name: PACKED[name] for name in ("mha mxfp8", "hybrid nsa fp8", "dsv4 fp8")},
    **{f"npu {name}": NPU[name].but(device="npu-reference") for name in ("mha", "nsa fp8")},
}
OTHER = {name: build for name, build in PACKED.items() if name not in USUAL and "bf16" not in name}


def shards(build, size, **more):
    """A rank for each part, of one pool each."""
    return [(build.but(shard=Shard(rank, size), **more),) for rank in range(size)]


def stages(build):
    """Two pipeline stages, of three layers and of one."""
    return [(build.but(layers=part, total_kv_layers=4),) for part in (range(3), range(3, 4))]


def other_pages(build):
    """Pages three times as long, windows in pages of another size, rings of another length."""
    arguments = build.arguments
    more = {"page_size": 3 * arguments["page_size"]}
    if "window_page_size" in arguments:
        more["window_page_size"] = arguments["window_page_size"] + 1
    if "compress_ratios" in arguments:
        more["speculation"] = not arguments.get("speculation", False)
    if "page_rings" in arguments:  # rings divide pages
        more["window_page_size"] = 4 * arguments["window_page_size"]
    return build.but(**more)


def with_draft(build, **more):
    """A target, and a draft of one layer with index keys beside it."""
    page = build.arguments["page_size"]
    draft = nsa.but(owner="draft", layers=[4], index_layers=None, page_size=page, **MANY)
    return [(build.but(**more), draft.but(**more))]


# what the ranks of prefill hold, and what those of decode
SHAPES = {
    "equal": lambda build: ([(build,)], [(build,)]),
    "TP up": lambda build: ([(build,)], shards(build, 2)),
    "TP down": lambda build: (shards(build, 2, placement="page"), [(build,)]),
    "PP": lambda build: (stages(build), [(build,)]),
    "pages": lambda build: ([(build,)], [(other_pages(build),)]),
    "draft": lambda build: (with_draft(build), with_draft(build, placement="page")),
}


def cases(pools, *marks):
    return [
        pytest.param(build.but(**MANY), shape, engine, id=f"{pool}-{name}-{engine}", marks=marks)
        for (pool, build), (name, shape), engine in product(pools.items(), SHAPES.items(), ENGINES)
    ]


@pytest.mark.parametrize(
    ("build", "shape", "engine"), [*cases(USUAL), *cases(OTHER, pytest.mark.long)]
)
def test_every_pool_moves_over_every_engine_in_every_shape(farm, build, shape, engine):
    sources, dests = shape(build)
    with farm.case(engine, sources, TOKENS) as (addresses, prefill), ExitStack() as stack:
        ranks = []
        for seed, builds in enumerate(dests, 90):
            dest = oracle.merged(*(each() for each in builds))
            oracle.blank(dest)
            decode = DecodeEndpoint(dest.layout, create_engine(engine), ranks=len(dests))
            stack.enter_context(decode).connect(addresses)
            decode.receive("r", address := oracle.place(dest, TOKENS, seed))
            ranks.append((decode, dest, address))
        for chunk in CHUNKS:
            prefill("send", "r", chunk)
        for decode, dest, address in ranks:
            assert decode.wait("r", 30) is KVPoll.Success, decode.failure("r")
            oracle.assert_holds(dest, address)
        assert prefill("wait", "r") == [(KVPoll.Success, None)] * len(sources)
