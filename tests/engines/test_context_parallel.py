"""Where vLLM's own kernels put a token under decode context parallelism, and the layout's items.

vLLM runs it on GPUs only. Its kernels are Triton: here their source runs as Python, over numpy.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.utils import PAD_SLOT_ID, get_dcp_local_seq_lens
from vllm.v1.worker.gpu import block_table

from disagg.connectors.vllm.layout import engine_layout
from kvpool.layout import Interleave
from tests.disagg.connectors.vllm import kernels
from tests.engines.test_backend_classes import (
    D,
    allocate,
    assert_found,
    config_for,
    flash,
    heads_spec,
    names,
)

TOKENS, BLOCKS = 150, 6
IDS = [3, 1, 4, 2, 5]
CASES = [(1, 2, 16), (1, 4, 16), (4, 2, 16), (8, 3, 16), (16, 2, 16), (32, 2, 32)]


class Pointer:
    """A pointer into an array, as Triton adds to them."""

    def __init__(self, array, at=0):
        self.array, self.at = array, at

    def __add__(self, offset):
        return Pointer(self.array, self.at + offset)


class Values(np.ndarray):
    """numpy's values with Triton's `to`."""

    def to(self, kind):
        return self.astype(kind)


class Language:
    """What the kernels use of `triton.language`."""

    constexpr, int32, int64 = object, np.int32, np.int64

    def __init__(self, *ids, counts):
        self.ids, self.counts = ids, counts

    def program_id(self, axis):
        return self.ids[axis]

    def num_programs(self, axis):
        return self.counts[axis]

    def load(self, pointer, mask=True, other=0):
        at, mask = np.broadcast_arrays(pointer.at, mask)
        found = pointer.array.ravel()[np.where(mask, at, 0)]
        return np.where(mask, found, other).astype(found.dtype).view(Values)

    def store(self, pointer, values, mask=True):
        at, mask, values = np.broadcast_arrays(pointer.at, mask, values)
        pointer.array[at[mask]] = values[mask]

    arange = staticmethod(np.arange)
    where = staticmethod(np.where)


def slots(monkeypatch, size, rank, ranks, block, sharded=True):
    """`BlockTables.compute_slot_mappings` of one request's positions 0 to TOKENS."""
    found = np.zeros(TOKENS, dtype=np.int64)
    monkeypatch.setattr(block_table, "tl", Language(0, 0, counts=(1, 2)))
    monkeypatch.setattr(block_table, "_load_ptr", lambda *_: Pointer(np.array(IDS)))
    one = (len(IDS), block, True, sharded)
    block_table._compute_slot_mappings_kernel(
        TOKENS,
        Pointer(np.array([0])),
        Pointer(np.array([0, TOKENS])),
        Pointer(np.arange(TOKENS)),
        Pointer(np.zeros(1)),
        *(Pointer(np.array([value])) for value in one),
        Pointer(found),
        0,
        rank,
        ranks,
        size,
        PAD_SLOT_ID,
        1024,
    )
    return found


class BySlots(kernels.KeysAndValues):
    """Tokens where vLLM's slot mapping says."""

    slots: np.ndarray

    def at(self, token):
        return divmod(int(self.slots[token]), self.block_tokens)

    def holds(self, token):
        return self.slots[token] != PAD_SLOT_ID


@pytest.mark.parametrize(("size", "ranks", "block"), CASES)
def test_tokens_are_where_the_interleaved_space_says(size, ranks, block, monkeypatch):
    spec = heads_spec(block_size=block, num_kv_heads=1)
    held_by_all = np.zeros(TOKENS, dtype=int)
    for rank in range(ranks):
        config, raw, views = allocate([(names(0), spec)], blocks=BLOCKS)
        made = config_for(
            flash(0), tp=ranks, rank=rank, kv_heads=1, decode_context_parallel_size=ranks,
            cp_kv_cache_interleave_size=size,
        )  # fmt: skip
        seen = engine_layout(made, config, views)
        (space,), (group,) = seen.layout.spaces, seen.groups
        assert (space.interleave, group.tokens) == (Interleave(size, rank, ranks), block * ranks)
        tokens = min(TOKENS, len(IDS) * group.tokens)
        kernel = BySlots(views[names(0)[0]], 0, IDS, range(1), key=D)
        kernel.slots = slots(monkeypatch, size, rank, ranks, block)
        plain = kernels.Rank(kernel.view, 0, IDS, share=(size, rank, ranks))
        mine = [token for token in range(tokens) if kernel.holds(token)]
        assert mine == [token for token in range(tokens) if plain.holds(token)]
        assert [kernel.at(token) for token in mine] == [plain.at(token) for token in mine]
        kernel.write(range(tokens))
        assert_found(seen, raw, tokens, IDS[: -(-tokens // group.tokens)])
        lengths = get_dcp_local_seq_lens(torch.arange(tokens + 1), ranks, rank, size)
        assert lengths.tolist() == [len(space.alive(n)) for n in range(tokens + 1)]
        held_by_all[mine] += 1
    assert (held_by_all[:tokens] == 1).all()


def test_a_cache_that_ranks_do_not_share_is_mapped_as_without_them(monkeypatch):
    """`dcp_sharded` False: a draft's under a target that shares."""
    found = slots(monkeypatch, 4, 1, 2, 32, sharded=False)
    assert found.tolist() == [IDS[t // 32] * 32 + t % 32 for t in range(TOKENS)]
    spec = heads_spec(dcp_sharded=False)
    config, _, views = allocate([(names(0), spec)])
    seen = engine_layout(config_for(flash(0), decode_context_parallel_size=2), config, views)
    assert seen.layout.spaces[0].interleave is None and seen.groups[0].tokens == spec.block_size
