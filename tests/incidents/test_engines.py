"""Museum rows that an engine must answer, on layouts alone: so much memory is not here."""

from __future__ import annotations

import numpy as np
import pytest

from disagg.engines.nixl.lists import MAX_PLACES, Places
from disagg.plan import plan
from kvpool import MHAPool, RequestAddress, Span

TOKENS, LAYERS, HEADS, DIM = 1_700_000, 80, 16, 64
ROW = HEADS * DIM * 2


def pool(page, **options):
    """K and V of 80 layers: 160 buffers of 1.7 M tokens."""
    return MHAPool(
        layers=range(LAYERS),
        num_kv_heads=HEADS,
        head_dim=DIM,
        num_pages=TOKENS // page + 1,
        page_size=page,
        dtype="bf16",
        device="meta",
        **options,
    )


def bound(source, dest, page, tokens):
    """A plan, and one request in the last pages of both pools."""
    made = plan([source.layout], dest.layout)
    ids = np.arange(TOKENS // page, TOKENS // page - tokens // page, -1)
    address = RequestAddress(tokens, {"kv": Span(ids)})
    return made, made.bind(0, address, address)


def addresses(rows, numbers):
    """What NIXL makes of numbers, in Python's own integers."""
    start, _, _, stride, count = rows.astype(object).T
    first = np.cumsum(count) - count
    row = np.searchsorted(first.astype(np.int64), numbers, side="right") - 1
    return (start[row] + (numbers.astype(object) - first[row]) * stride[row]).tolist()


@pytest.mark.parametrize("page", [1, 64])
def test_numbers_of_places_do_not_wrap(page):
    """Museum 25: 1.7 M tokens x 160 regions, flat indices beyond 2^31 (int32 wrap)."""
    made, batch = bound(pool(page), pool(page), page, 64 * page)
    places = Places(made.routes, made.sources[0], made.dest)
    found = places.number(batch)
    assert found.others.size == 0 and found.src.size == batch.runs == 160 * 64
    assert int(batch.src.max()) > 2**38 > 2**31
    assert addresses(places.src_rows, found.src) == batch.src.tolist()
    assert addresses(places.dst_rows, found.dst) == batch.dst.tolist()


def test_what_has_more_places_than_numbers_goes_by_address(caplog):
    """Museum 25: heads of each token apart are 4.4e9 places, which NIXL would wrap unseen."""
    made, batch = bound(pool(64), pool(64, order="hnd"), 64, 640)
    assert 160 * HEADS * (TOKENS // 64 + 1) * 64 > 2**32 > MAX_PLACES
    places = Places(made.routes, made.sources[0], made.dest)
    found = places.number(batch)
    assert not found.src.size and np.array_equal(found.others, np.arange(batch.runs))
    assert "too many places" in caplog.text
    last = {b.base + TOKENS // 64 * 64 * ROW for b in made.sources[0].buffers}
    assert last <= set(batch.src.tolist())
