"""The hand-off between ranks that share out positions, over engine `local`, with digests."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from disagg import DecodeEndpoint, KVPoll, PrefillEndpoint
from disagg.plan import IncompatibleLayouts
from kvpool.item import Cell, Repeat, Seq
from kvpool.layout import Interleave, Space
from tests.disagg.runtime.sides import endpoints, hand_over, succeeds
from tests.disagg.waiting import until
from tests.oracle import assert_holds, blank, built, fill, packed, place

TOKENS, LAYERS, ITEMS = 101, 2, 40
ROW = 12  # bytes of an entry
CUTS = ([0, TOKENS], [0, 3, 40, TOKENS], [16, 50, 70, TOKENS])


def state(size, rank, ranks, page=8):
    """Latents of two layers, of which a rank holds some positions, and index keys that each rank
    holds of all, in pages of the same ids.
    """
    spaces = [
        Space("kv", "paged", page, interleave=Interleave(size, rank, ranks)),
        Space("index", "paged", page * ranks, ids="kv"),
    ]
    row = Repeat("entry", page, Seq(Cell("latent", 4, "bf16"), Cell("rope", 2, "bf16")))
    keys = Repeat("entry", page * ranks, Cell("index_key", 3, "uint8"))
    parts = [(layer, "kv", ITEMS, row) for layer in range(LAYERS)]
    return built([*parts, (0, "index", ITEMS, keys)], spaces)


def filled(holders):
    """Block tables of sources, which hold a request."""
    tables = [place(each, TOKENS, seed) for seed, each in enumerate(holders)]
    for each, table in zip(holders, tables):
        fill(each, table)
    return tables


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize(
    ("sources", "dests", "cuts"),
    [(2, 1, CUTS[0]), (1, 2, CUTS[1]), (2, 3, CUTS[2]), (3, 3, CUTS[1])],
)
def test_ranks_of_prefill_hand_over_to_other_ranks(sources, dests, size, cuts):
    theirs = [state(size, rank, sources) for rank in range(sources)]
    ours = [state(size, rank, dests) for rank in range(dests)]
    start, edges = cuts[0], [0, *cuts[1:]]
    _, read = hand_over(theirs, ours, edges, start=start, verify="checksum")
    # each row is one rank's, each index key every rank's
    assert read == (TOKENS - start) * (LAYERS * ROW + dests * 3)


def test_equal_ranks_read_from_their_like_and_wait_for_all():
    """Nothing of it is read from rank 0, which must say all the same that it has computed it."""
    theirs = [state(4, rank, 2) for rank in range(2)]
    dest = state(4, 1, 2)
    tables = filled(theirs)
    blank(dest)
    with ExitStack() as stack:
        prefills = endpoints(stack, PrefillEndpoint, theirs)
        (decode,) = endpoints(stack, DecodeEndpoint, [dest], verify="checksum")
        decode.connect([prefill.address for prefill in prefills], timeout=30)
        decode.receive("r", table := place(dest, TOKENS, 9))
        prefills[1].send("r", tables[1])
        until(decode, lambda: decode.metrics("r").bytes_moved and not decode.reading("r"))
        with pytest.raises(TimeoutError, match="chunks from position 0 on, of rank 0 of prefill"):
            decode.wait("r", 0.1)
        prefills[0].send("r", tables[0])
        succeeds(decode, "r")
        assert_holds(dest, table)


def test_a_digest_names_the_position_in_the_request():
    """A byte of decode's memory that changes after it was read from rank 1 of 2."""
    theirs = [state(8, rank, 2) for rank in range(2)]
    dest = state(1, 2, 3)
    tables, table = filled(theirs), place(dest, TOKENS, 9)
    position = 59  # of prefill's rank 1 (56 to 63), and of decode's rank 2 of 3
    with ExitStack() as stack:
        prefills = endpoints(stack, PrefillEndpoint, theirs)
        (decode,) = endpoints(stack, DecodeEndpoint, [dest], verify="checksum")
        decode.connect([prefill.address for prefill in prefills], timeout=30)
        decode.receive("r", table)
        for prefill, each in zip(prefills, tables):
            prefill.send("r", each, tokens=range(96), last=False)
        until(decode, lambda: decode.metrics("r").bytes_moved == 32 * LAYERS * ROW + 96 * 3)
        page, step = divmod(packed(dest.layout.space_by_name["kv"], TOKENS)[position], 8)
        dest.views["target", 1, "latent"][table.spans["kv"].ids[page], step, 0] ^= 1
        for prefill, each in zip(prefills, tables):
            prefill.send("r", each)
        assert decode.wait("r", 30) is KVPoll.Failed
        said = str(decode.failure("r"))
        assert "what was read differs from what rank 1 of prefill" in said
        assert said.endswith(f"target layer 1 latent: position {position} differs.")


def test_a_prefill_that_lacks_a_rank_is_refused():
    theirs = [state(4, rank, 4) for rank in (0, 1, 3)]
    with ExitStack() as stack:
        prefills = endpoints(stack, PrefillEndpoint, theirs)
        (decode,) = endpoints(stack, DecodeEndpoint, [state(1, 0, 1)])
        said = "rank 2 of 4 of prefill's space kv, in stretches of 4 positions, is missing"
        with pytest.raises(IncompatibleLayouts, match=said):
            decode.connect([prefill.address for prefill in prefills], timeout=30)
