"""Bytes of a tensor that nobody described are neither read nor written.

Every byte of both sides' tensors is compared, described or not.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint, create_engine
from disagg.plan import plan
from disagg.plan.proof import prove
from disagg.plan.routes import records_of
from kvpool import MHAPool, Shard
from kvpool.describe import describe
from kvpool.layout import PoolLayout, RequestAddress, Space, Span
from kvpool.layout.grid import rows_of
from tests.oracle import copy, copy_through_buffer, covered
from tests.slices import arrived, models, sides

TOKENS, PAGE = 40, 16
THERE, HERE = [1, 2, 3], [4, 5, 6]
HALF = Shard(1, 2)
NHD, ROW = ("item", "entry", "head", "dim"), ("item", "entry", "dim")
SLICES = {
    "heads 0 to 3 of 8": ((10, PAGE, 8, 8), np.s_[:, :, :4], NHD, "k", {"head": (0, 8)}),
    "k alone, k and v in a row": ((10, PAGE, 2, 4, 8), np.s_[:, :, 0], NHD, "k", {}),
    "k alone, k before v in a page": ((10, 2, PAGE, 4, 8), np.s_[:, 0], NHD, "k", {}),
    "latents alone of rows of 576": ((10, PAGE, 576), np.s_[..., :512], ROW, "latent", {}),
    "one layer of token-major pages": ((10, PAGE, 3, 4, 8), np.s_[:, :, 1], NHD, "k", {}),
}
IN_ROWS = [name for name in SLICES if name != "k alone, k before v in a page"]


def sliced(name, fill=0, padding=False):
    """A tensor, and the layout of the slice of it that is described."""
    shape, where, dims, role, shards = SLICES[name]
    raw = torch.full(shape, fill, dtype=torch.bfloat16)
    seen = describe(raw[where], dims, role=role, layer=0, shards=shards, padding=padding)
    space = Space("kv", entries_per_item=PAGE)
    return raw, PoolLayout(seen.buffers, seen.regions, (space,), 1)


def pages(ids, tokens=TOKENS):
    return RequestAddress(tokens, {"kv": Span(np.array(ids))})


@pytest.mark.parametrize("name", SLICES)
def test_a_hand_off_of_a_slice_leaves_the_rest_of_the_tensor_alone(name):
    (theirs, there), (ours, here) = sliced(name, 1), sliced(name, 2)
    before, expected, where = theirs.clone(), ours.clone(), SLICES[name][1]
    expected[where][HERE[:2]] = before[where][THERE[:2]]
    expected[where][HERE[2], : TOKENS % PAGE] = before[where][THERE[2], : TOKENS % PAGE]
    with (
        PrefillEndpoint(there, create_engine("local")) as prefill,
        DecodeEndpoint(here, create_engine("local"), verify="checksum") as decode,
    ):
        decode.connect([prefill.address], timeout=60)
        decode.receive("r", pages(HERE))
        prefill.send("r", pages(THERE))
        assert decode.wait("r", 60) is KVPoll.Success, decode.failure("r")
    assert torch.equal(ours, expected)
    assert torch.equal(theirs, before)


def swapped(name, declared):
    """A plan of layouts that declare padding where `declared` says so, with the runs of a plan of
    layouts that both do; and that plan's sources, destination and routes.
    """
    sides = [sliced(name, padding=True) for _ in range(2)]
    made = plan([sides[0][1]], sides[1][1])
    there, here = (
        replace(layout, buffers=tuple(replace(b, padding=padding) for b in layout.buffers))
        for (_, layout), padding in zip(sides, declared)
    )
    return replace(made, sources=(there,), dest=here), sides


@pytest.mark.parametrize(("declared", "who"), [((False, True), "source"), ((True, False), "dest")])
@pytest.mark.parametrize("name", IN_ROWS)
def test_runs_over_bytes_of_somebody_else_are_refused_by_the_proof(name, declared, who):
    made, _memory = swapped(name, declared)
    with pytest.raises(
        RuntimeError, match=rf"target layer 0 \w+: on the {who}.* one run, and \d+ of them"
    ):
        prove(records_of((*made.sources, made.dest)), made.parts, made.routes)


def damaged(route):
    """Routes whose runs leave bytes out, move others, or move some twice."""
    runs_of = route.runs

    def with_runs(**changed):
        return replace(route, runs=runs_of._replace(**changed))

    columns = (("start", (0, -1)), ("start", (1, -1)), ("nbytes", (-1,)))
    for (name, last), change in product(columns, (1, -1)):
        for part in ("chains", "singles", "whole"):
            runs = getattr(runs_of, part)
            if runs is not None and runs.size:
                column = getattr(runs, name).copy()
                column[last] += change * 2
                yield with_runs(**{part: replace(runs, **{name: column})})
    for part in ("chains", "singles"):
        runs = getattr(runs_of, part)
        if runs.size:
            yield with_runs(**{part: rows_of(runs, np.arange(runs.size - 1))})
            yield with_runs(**{part: rows_of(runs, np.arange(runs.size + 1) % runs.size)})
            yield with_runs(**{part: replace(runs, step=np.add(runs.step, [[0], [2]]))})
    if not runs_of.linear:
        yield with_runs(linear=True)
    if not runs_of.dense and runs_of.whole is not None:
        yield with_runs(dense=True)


@pytest.mark.parametrize("placement", ["layer", "page"])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("held", [range(4), range(1, 3)])
def test_a_damaged_route_is_refused(order, placement, held):
    numbers = {"num_kv_heads": 8, "head_dim": 4, "dtype": "bf16", "num_pages": 5, "page_size": 4}
    source = MHAPool(layers=range(4), **numbers, placement=placement)
    dest = MHAPool(
        layers=held, total_kv_layers=4, **numbers, order=order, placement=placement, shard=HALF
    )
    made = plan([source.layout], dest.layout)
    count = 0
    for number, route in enumerate(made.routes):
        for wrong in damaged(route):
            count += 1
            routes = [*made.routes[:number], wrong, *made.routes[number + 1 :]]
            with pytest.raises(RuntimeError, match=r"target layer \d [kv].* was not used"):
                prove(records_of((*made.sources, made.dest)), made.parts, routes)
    assert count > 9


def test_what_is_explained_is_what_travels():
    for padding, nbytes in ((False, TOKENS * 4 * 8 * 2), (True, 4928)):
        (_, there), (_, here) = (sliced("heads 0 to 3 of 8", padding=padding) for _ in range(2))
        made = plan([there], here)
        batch = made.bind(0, pages([1, 3, 5]), pages([7, 5, 3]))
        assert made.explain(TOKENS).nbytes == batch.total == nbytes
        assert made.explain(TOKENS).runs == batch.runs == (3 if padding else TOKENS)
        (row,) = made.explain(TOKENS).rows
        why = "whole items, among other regions" if padding else "other bytes lie in between"
        assert row.why == why


@st.composite
def requests(draw):
    """Two tensors of one model, and a request's pages in both."""
    model, tokens, spare = draw(models()), draw(st.integers(1, 12)), 3
    dest = draw(sides(model, spare, tokens))
    source = draw(sides(model, spare, tokens, dest))
    tables = []
    for side in (source, dest):
        page, items = len(side.taken["entry"]), len(side.taken["item"])
        ids = draw(st.permutations(range(1, items)))[: -(-tokens // page)]
        tables.append(side.table(tokens, sorted(ids) if draw(st.booleans()) else ids))
    return source, dest, *tables


def tail(source, dest, there, here, batch):
    """Dead bytes of the last page that a batch may write: what the source has in their place."""
    dead, page = dest.dead(here), len(dest.taken["entry"])
    if page != len(source.taken["entry"]):
        return np.zeros_like(dead)
    whole = -(-here.num_tokens // page) * page
    full = arrived(source, dest, *(replace(each, num_tokens=whole) for each in (there, here)))
    came = dest.raw.copy()
    for dst, src, size in zip(batch.dst.tolist(), batch.src.tolist(), batch.nbytes.tolist()):
        at, start = dst - dest.raw.ctypes.data, src - source.raw.ctypes.data
        came[at : at + size] = source.raw[start : start + size]
    return dead & (came == full)


@settings(max_examples=300)
@given(requests())
def test_only_what_is_described_is_read_and_written(request):
    source, dest, there, here = request
    made = plan([source.layout], dest.layout)
    batch = made.bind(0, there, here)
    padding = source.padding and dest.padding  # it travels only where both sides declare it
    free = [
        side.declared(table.spans["kv"].ids) & padding
        for side, table in ((source, there), (dest, here))
    ]
    read = covered(source.raw, batch.src, batch.nbytes)
    assert not (read & ~source.described() & ~free[0]).any()
    if not padding:
        moved, dead = dest.layout.live_bytes(here.num_tokens), int(dest.dead(here).sum())
        assert batch.total in (moved, moved + dead)
        assert batch.total == made.explain(here.num_tokens).nbytes
    expected, theirs = arrived(source, dest, there, here), source.raw.copy()
    free[1] |= tail(source, dest, there, here, batch)
    copy(batch)
    assert not ((dest.raw != expected) & ~free[1]).any()
    assert (source.raw == theirs).all()


@settings(max_examples=300)
@given(requests())
def test_a_read_through_a_buffer_leaves_out_what_is_not_described(request):
    source, dest, there, here = request
    batch = plan([source.layout], dest.layout).bind(0, there, here)
    padding = source.padding and dest.padding
    free = dest.declared(here.spans["kv"].ids) & padding
    free |= tail(source, dest, there, here, batch)
    expected = arrived(source, dest, there, here)
    read = copy_through_buffer(batch, source.layout)
    if read is None:
        return
    bytes_read = covered(source.raw, read.src, read.nbytes)
    assert not (bytes_read & ~source.described() & ~source.declared()).any()
    assert not ((dest.raw != expected) & ~free).any()
