"""Every pool in every packing gives the same bytes with the kernels as on the CPU device."""

from __future__ import annotations

import pytest
import torch

from kvpool.layout.formats import scale_role
from tests.kvpool_cuda.devices import NAME
from tests.pools import PACKED

COUNT = 5


def writes(pool, seed):
    """(layer, locations, values by role): all that pools of this kind keep, some entries of each,
    on the last layer and on one for each set of roles.
    """
    random = torch.Generator().manual_seed(seed)
    roles_of = {n: {r.role for r in pool.layout.regions if r.layer == n} for n in pool.layers}
    kinds = {tuple(sorted(roles)): layer for layer, roles in reversed(roles_of.items())}
    for layer in sorted({*kinds.values(), pool.layers[-1]}):
        by_space: dict[str, list[str]] = {}
        regions = [region for region in pool.layout.regions if region.layer == layer]
        scales = {scale_role(region.role) for region in regions}
        for region in regions:
            if region.role not in scales:
                by_space.setdefault(pool.layout.space_of(region).name, []).append(region.role)
        for name, roles in by_space.items():
            space = pool.layout.space_by_name[name]
            entries = 1 if space.kind == "slot" else space.steps
            items = min(pool.layout.buffer_of(r).items for r in regions if r.role in roles)
            where = torch.randperm(items * entries, generator=random)[:COUNT]
            values = {}
            for role in roles:
                view = pool.view(role, layer)
                shape = view.shape[1:] if space.kind == "slot" else view.shape[2:]
                held = view.dtype if view.element_size() > 1 else torch.bfloat16
                values[role] = (torch.randn(len(where), *shape, generator=random) * 9).to(held)
            yield layer, where, values


def assert_same(pool, reference):
    """All items are equal, and the bytes between them are zero."""
    for ours, theirs in zip(pool.layout.buffers, reference.layout.buffers):
        held = pool.item_bytes_view(ours)
        assert torch.equal(held.cpu(), reference.item_bytes_view(theirs)), ours.name
    slab = pool._slab.clone()
    for buffer in pool.layout.buffers:
        at = buffer.base - pool._base
        items = slab.as_strided([buffer.items, buffer.item_bytes], [buffer.item_stride, 1], at)
        items.zero_()
    assert not slab.any(), "bytes of no buffer were written"


BUILDS = {
    **PACKED,
    **{
        f"{name} by page": PACKED[name].but(placement="page")
        for name in ("mha hnd bf16", "nsa fp8", "hybrid bf16", "dsv4 fp8")
    },
}


@pytest.mark.parametrize("name", BUILDS)
def test_writes_reads_and_copies_equal_those_of_a_cpu_pool(name):
    pool, reference = BUILDS[name](device=NAME), BUILDS[name](device="cpu")
    for layer, where, values in writes(reference, seed=0):
        reference.write(layer, where, values)
        pool.write(
            layer, where, {role: given.to(pool._slab.device) for role, given in values.items()}
        )
        for role in values:
            read, wanted = pool.read(role, layer, where).cpu(), reference.read(role, layer, where)
            assert read.dtype == wanted.dtype and torch.equal(read, wanted), (layer, role)
    assert_same(pool, reference)
    for space in {each.id_list for each in pool.layout.spaces}:
        for src, dst in (([1], [3]), ([1, 2], [2, 1])):
            for each in (pool, reference):
                each.copy_items(space, src, dst)
    assert_same(pool, reference)
