"""As many pages as fit and no more, beside what so many requests need at once."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings, strategies as st

from kvpool import Allocator, Space
from kvpool.models.sizing import shares
from kvpool.pools.budget import DoesNotFit, items_per_request
from tests.pools import CLASSES, PACKED, dsv4, every_packing, hybrid, mla, swa

NUMBERS = ("num_pages", "num_window_pages", "num_slots")
META = {"device": "meta"}
# pages that are no multiples of the alignment
ODD = {
    f"{page} rows of {latent} and {rope} bytes": mla.but(
        packing="uint8", kv_lora_rank=latent, qk_rope_head_dim=rope, page_size=page
    )
    for page, latent, rope in ((1, 1, 1), (3, 1000, 9), (7, 63, 1))
}
BUILDS = PACKED | ODD
STAGES = {
    "linear layers only": hybrid.but(layers=[0, 1]),
    "windows only": swa.but(layers=[0, 2]),
    "no compressed layer": dsv4.but(layers=[0]),
}


def numbers(pool) -> dict[str, int]:
    return {name: getattr(pool, name) for name in NUMBERS}


def grows(pool) -> bool:
    return pool.bytes_per_token > 0


def enough(refused) -> int:
    """The bytes that a refusal says are enough."""
    return int(str(refused).split()[-4].replace(",", ""))


def fits_exactly(build, nbytes, **more):
    """Builds, and checks that one more page would not fit; returns the pool."""
    pool = build.from_budget(nbytes, **META, **more)
    assert pool.nbytes <= nbytes
    pool.check_integrity()
    next_larger = {**numbers(pool), "num_pages": pool.num_pages + 1}
    given = {key: value for key, value in more.items() if key not in ("requests", "chunk_tokens")}
    assert build(**META, **given, **next_larger).nbytes > nbytes
    return pool


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(BUILDS)),
    st.integers(60_000, 12_000_000),
    st.sampled_from(["layer", "page", "block"]),
    st.integers(1, 4),
    st.integers(1, 40),
)
@example("dsv4, rings of pages bf16", 60_000, "layer", 3, 16)
def test_any_budget_is_used_up(name, nbytes, placement, requests, chunk_tokens):
    more = {"placement": placement, "requests": requests, "chunk_tokens": chunk_tokens}
    try:
        assert fits_exactly(BUILDS[name], nbytes, **more).num_pages >= 2
    except DoesNotFit as refused:
        least = enough(refused)
        assert nbytes < least == BUILDS[name].from_budget(least, **META, **more).nbytes


@every_packing
def test_the_least_budget_holds_one_page_and_a_byte_less_is_refused(build):
    with pytest.raises(ValueError, match="target: 1 bytes are too few for a page of") as refused:
        build.from_budget(1, **META)
    least = enough(refused.value)
    assert build.from_budget(least, **META).num_pages == 2
    assert build.from_budget(least, **META).nbytes == least
    with pytest.raises(ValueError, match=f"{least:,} bytes are enough"):
        build.from_budget(least - 1, **META)


@pytest.mark.parametrize("build", STAGES.values(), ids=STAGES.keys())
def test_what_does_not_grow_takes_what_requests_need_and_no_more(build):
    one, two = (build.from_budget(n, requests=3, **META) for n in (100_000, 10_000_000))
    assert numbers(one) == numbers(two)
    assert (one.num_pages, one.nbytes) == (2, two.nbytes)
    assert not grows(one)


@pytest.mark.parametrize("build", [*CLASSES.values(), *STAGES.values()])
@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 33])
def test_requests_of_any_length_never_run_out_of_windows_or_slots(build, requests, chunk_tokens):
    more = {"requests": requests, "chunk_tokens": chunk_tokens}
    pool = build.from_budget(1_000_000, **META, **more)
    alloc = Allocator(pool)
    usable = (pool.num_pages - 1) * pool.page_size // requests
    batch = [alloc.new_request() for _ in range(requests)]
    for number, request in enumerate(batch):  # windows begin at different places in their pages
        alloc.extend(request, min(number, chunk_tokens))
    chunks = min(60, (usable - pool.page_size - requests) // chunk_tokens)
    assert chunks > 5 or not grows(pool)
    for _ in range(chunks if grows(pool) else 60):
        alloc.extend_batch(batch, chunk_tokens)
    alloc.check_integrity()
    assert {alloc.free_items(name) for name in {"state", "ring"} & set(alloc.lists)} <= {0}


@settings(max_examples=60)
@given(
    st.integers(0, 9),
    st.sampled_from([1, 1, 2, 4]),
    st.sampled_from([1, 1, 2, 4]),
    st.integers(1, 5),
    st.integers(1, 12),
)
def test_items_per_request_are_those_of_the_worst_place_in_a_page(window, step, per, size, chunk):
    window = max(window, 1 if step == 1 else 0)
    space = Space("w", "paged", size, per, window=window, window_step=step)
    worst = 0
    for before in range(4 * size * per * step + window * per):
        entries = before // per
        first = max(0, entries - entries % step - window) // size
        last = (before + chunk - 1) // (per * size)
        worst = max(worst, last + 1 - first)
    assert worst <= items_per_request(space, chunk)
    if step == 1:
        assert worst == items_per_request(space, chunk)


@pytest.mark.parametrize("space", [Space("s", "slot"), Space("r", "ring", 8, window=4)])
def test_a_request_has_one_slot_or_ring(space):
    assert items_per_request(space, 1000) == 1


@pytest.mark.parametrize(("requests", "chunk_tokens"), [(0, 1), (1, 0), (-1, 5)])
def test_no_requests_and_no_chunks_are_refused(requests, chunk_tokens):
    with pytest.raises(ValueError, match=f"1 or more, got {requests}, {chunk_tokens}"):
        swa.from_budget(10**6, requests=requests, chunk_tokens=chunk_tokens, **META)


@pytest.mark.parametrize(
    ("memory", "weights", "utilisation", "state"),
    [
        (1_000_000, 0, 1.0, 1_000_000),
        (1_000_000, 300_000, 1.0, 700_000),
        (1_000_000, 0, 0.5, 500_000),
        (2_000_000, 1_500_001, 0.9, 299_999),
    ],
)
def test_weights_and_utilisation_leave_the_rest_for_state(memory, weights, utilisation, state):
    taken = {"weights": weights, "utilisation": utilisation}
    for build in (mla, swa, dsv4):
        found = build.from_budget(memory, requests=2, **taken, **META)
        assert numbers(found) == numbers(build.from_budget(state, requests=2, **META))


def test_weights_that_leave_nothing_are_refused_with_both_numbers():
    says = r"target: 0.5 of 1,000 bytes are 500, and weights take 500\."
    with pytest.raises(DoesNotFit, match=says):
        mla.from_budget(1000, weights=500, utilisation=0.5, **META)
    for wrong in ({"weights": -1}, {"utilisation": 0.0}, {"utilisation": 1.01}):
        with pytest.raises(ValueError, match="utilisation: over 0, up to 1; got "):
            mla.from_budget(1000, **wrong, **META)


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(("requests", "chunk_tokens"), [(1, 1), (3, 1), (2, 9)])
def test_a_pool_for_so_many_requests_has_what_from_budget_gives_them(name, requests, chunk_tokens):
    build = CLASSES[name]
    need = {"requests": requests, "chunk_tokens": chunk_tokens}
    found = build.from_budget(1_000_000, **need, **META)
    left_out = {key: value for key, value in build.arguments.items() if key not in NUMBERS}
    made = build.kind(**left_out, **need, **META, num_pages=found.num_pages)
    assert made.layout == found.layout


def test_a_number_that_is_given_is_not_derived():
    pool = swa(num_window_pages=7, requests=100, **META)
    assert pool.num_window_pages == 7
    with pytest.raises(ValueError, match=r"num_slots: 2 or more, .* With requests=N they may be"):
        hybrid(num_slots=0)
    with pytest.raises(ValueError, match="1 or more, got 0, 1"):
        swa(num_window_pages=0, requests=0)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_of_items_beside_a_budget_is_refused(number):
    with pytest.raises(ValueError, match=f"{number}: from_budget computes them"):
        swa.from_budget(10**6, **{number: 5})


def test_rings_of_pages_are_counted_with_the_pages_of_the_window():
    """A window of 6 tokens lies in 3 pages of 4 at most; a ring is 4 tokens of 4 x 12 floats."""
    layout = dsv4(page_rings=True, layers=[1], device="meta").layout
    found = {share.role: share.nbytes for share in shares(layout)}
    assert found["c2.state"] == 3 * 4 * (4 * 12) * 4


@pytest.mark.parametrize(
    ("nbytes", "more", "says"),
    [
        ("80GiB", {}, r"target nbytes: a number, got '80GiB'\. .* 80 << 30 is 80 GiB"),
        (None, {}, "target nbytes: a number, got None"),
        (1 << 20, {"weights": "1GiB"}, "target weights: a number, got '1GiB'"),
        (1 << 20, {"utilisation": "0.9"}, "target utilisation: a number, got '0.9'"),
    ],
)
def test_bytes_are_a_number_and_no_text(nbytes, more, says):
    with pytest.raises(TypeError, match=says):
        mla.from_budget(nbytes, **META, **more)
