"""A request's state goes to host memory and comes back, to the same items or to others."""

from __future__ import annotations

import pytest

from kvpool import DeviceUnavailable, RequestAddress, Span
from tests.oracle import blank, fill, place, state
from tests.pools import dsv4, hybrid, mha, mla, swa

MANY = {"num_pages": 20, "num_window_pages": 25}


def test_saved_is_host_memory_of_its_own():
    pool = mla(**MANY)
    address = place(pool, 9)
    fill(pool, address)
    saved = pool.save(address)
    assert saved.nbytes == 3 * 4 * 4 * 48  # pages, tokens, layers, bytes of a row
    assert saved.num_tokens == 9
    blank(pool)
    assert all((rows != 255).any() for rows in saved.items.values())


# refused, with nothing written


def refused(pool, address, saved, says):
    blank(pool)
    with pytest.raises(ValueError, match=says):
        pool.load(address, saved)
    assert all((memory == 255).all() for memory in state(pool).memory)


@pytest.mark.parametrize(
    ("build", "other", "says"),
    [
        (mla, {"page_size": 3}, r"buffer target.kv.0: .*entries_per_item=4.* when saved, .*=3"),
        (mla, {"layers": [0, 1, 2]}, r"buffer target.kv.3: .* when saved, absent here"),
        (
            mla,
            {"layers": range(5), "total_kv_layers": 5},
            r"buffer target.kv.4: absent when saved, ",
        ),
        (mla, {"packing": "f32"}, r"dtype='bfloat16'.* when saved, .*dtype='float32'.* here"),
        (mha, {"order": "hnd"}, r"buffer target.k.0: .* Load into a pool of the same layout"),
        (swa, {"window": 4}, r"buffer target.swa.kv.0: .*window=6.* when saved, .*window=4"),
        (hybrid, {"conv_dtype": "float16"}, r"buffer target.conv.0: "),
        (dsv4, {"speculation": True}, r"buffer target.c2.index_state.1: "),
    ],
)
def test_a_pool_of_another_layout_is_refused(build, other, says):
    source = build(**MANY)
    saved = source.save(place(source, 9))
    pool = build(**{**MANY, **other})
    refused(pool, place(pool, 9), saved, says)


def test_placement_and_numbers_of_items_may_differ():
    source, dest = dsv4(**MANY), dsv4(num_pages=12, num_window_pages=15, placement="page")
    there, here = place(source, 29, 1), place(dest, 29, 2)
    fill(source, there)
    blank(dest, 254)
    dest.load(here, source.save(there))
    for region in dest.layout.regions:
        one, two = (state(pool).views[region.key] for pool in (source, dest))
        name = dest.layout.space_of(region).id_list
        for number in range(4, 6) if name == "swa" else range(1):
            ids = [address.spans[name].ids[number] for address in (there, here)]
            assert (one[ids[0]] == two[ids[1]]).all()


def test_another_number_of_tokens_is_refused():
    pool = mla(**MANY)
    saved = pool.save(place(pool, 9))
    refused(pool, place(pool, 10), saved, "9 tokens were saved, the block table has 10")


@pytest.mark.parametrize("do", ["save", "load"])
@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ({}, "no ids for space 'kv' of buffer target.kv.0"),
        ({"kv": Span([1, 2])}, "space kv: items 0 to 2 of the request are live, its ids cover 0"),
        ({"kv": Span([1, 2, 3], 1)}, "items 0 to 2 of the request are live, its ids cover 1 to 3"),
        ({"kv": Span([1, 20, 3])}, "space kv: ids from 1 to 20, items are 1 to 19"),
        ({"kv": Span([1, 0, 3])}, "space kv: ids from 0 to 3, items are 1 to 19"),
    ],
)
def test_an_address_that_does_not_fit_is_refused(do, spans, says):
    pool = mla(**MANY)
    saved = pool.save(place(pool, 9))
    address = RequestAddress(9, spans)
    if do == "load":
        refused(pool, address, saved, says)
    else:
        with pytest.raises(ValueError, match=says):
            pool.save(address)


def test_an_address_that_does_not_fit_in_its_last_space_changes_no_other():
    pool = hybrid(**MANY)
    good = place(pool, 9)
    saved = pool.save(good)
    bad = RequestAddress(9, {**good.spans, "state": Span([5])})
    refused(pool, bad, saved, "space state: ids from 5 to 5, items are 1 to 4")


def test_a_pool_without_memory_refuses_to_save_and_to_load():
    pool, other = mla(device="meta", **MANY), mla(**MANY)
    with pytest.raises(DeviceUnavailable, match="no memory to save or load"):
        pool.save(place(pool, 9))
    with pytest.raises(DeviceUnavailable, match="no memory to save or load"):
        pool.load(place(pool, 9), other.save(place(other, 9)))


# copy_items


@pytest.mark.parametrize(
    ("space", "src", "dst", "error", "says"),
    [
        ("kv", [9], [1], IndexError, "target item of kv 9 of 9"),
        ("kv", [1], [-1], IndexError, "target item of kv -1 of 9"),
        ("ring", [1, 2], [4, 5], IndexError, "target item of ring 5 of 5"),
        ("swa", [1, 2], [3], ValueError, "space swa: 2 source items, 1 targets"),
        (
            "c2",
            [1],
            [2],
            KeyError,
            r"target space 'c2': this pool has id lists \['kv', 'ring', 'swa",
        ),
        ("state", [1], [2], KeyError, r"target space 'state': this pool has id lists"),
        ("kv", [1.5], [2], ValueError, "Give a flat list of integers"),
        ("kv", [True], [False], ValueError, "Give a flat list of integers"),
    ],
)
def test_items_that_cannot_be_copied_are_refused_and_nothing_is_written(
    space, src, dst, error, says
):
    pool = dsv4()
    fill(pool, place(pool, 9))
    before = state(pool).memory[0].copy()
    with pytest.raises(error, match=says):
        pool.copy_items(space, src, dst)
    assert (state(pool).memory[0] == before).all()


def test_a_list_that_has_no_buffers_here_is_refused():
    with pytest.raises(KeyError, match=r"target space 'swa': this pool has id lists \['kv'\]"):
        swa(layers=[1]).copy_items("swa", [1], [2])


def test_copies_go_by_the_spaces_that_a_draft_has():
    pool = dsv4(owner="draft", own_spaces=True)
    for name in ("draft.kv", "draft.swa", "draft.ring"):
        pool.copy_items(name, [1], [2])
    with pytest.raises(KeyError, match="draft space 'kv'"):
        pool.copy_items("kv", [1], [2])
