"""The same writes, reads and copies on two pools, which must leave the same bytes."""

from __future__ import annotations

import numpy as np
import torch

from kvpool.device.torch_ops import bits


def write_everything(pool) -> list[torch.Tensor]:
    """Writes stored values to every role of every layer and floats to those with scales, and copies
    items; returns everything that it reads.
    """
    random, read = np.random.default_rng(5), []
    regions = pool.layout.region_by_key
    for layer in pool.layers:
        spaces: dict[str, dict[str, torch.Tensor]] = {}
        floats: dict[str, dict[str, torch.Tensor]] = {}
        where: dict[str, np.ndarray] = {}
        for (_, at, role), region in regions.items():
            if at != layer:
                continue
            space = pool.layout.space_of(region)
            view = pool._entries(role, layer)
            slots = where.setdefault(
                space.name, random.permutation(view.shape[0] * view.shape[1])[:5]
            )
            size = (len(slots), *view.shape[2:-1], view.shape[-1] * view.element_size())
            stored = torch.from_numpy(random.integers(0, 255, size, dtype=np.uint8))
            spaces.setdefault(space.name, {})[role] = stored.view(view.dtype).to(view.device)
            if ("target", layer, f"{role}.scale") in regions:
                given = torch.from_numpy(random.standard_normal((len(slots), *view.shape[2:])))
                given = given.to(view.device, getattr(torch, pool.dtype))
                floats.setdefault(space.name, {})[role] = given
        for space, values in spaces.items():
            pool.scatter(layer, where[space], values)
            read += [pool.gather(role, layer, where[space]) for role in values]
            read += pool.read_roles(values, layer, where[space])
        for space, values in floats.items():
            pool.write(layer, where[space], values)
            read += pool.read_roles(values, layer, where[space])
    for space in pool.layout.spaces:
        if space.ids is None:
            pool.copy_items(space.name, [1, 2], [3, 1])
    return read


def same_bytes(one, other, work) -> None:
    """Runs `work` on both pools; its results (of a NaN, that it is one) and all bytes of both
    pools' items must be equal.
    """
    for mine, theirs in zip(work(one), work(other), strict=True):
        mine, theirs = mine.cpu(), theirs.cpu()
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        if mine.dtype.is_floating_point and mine.element_size() > 1:  # not codes
            assert torch.equal(mine.isnan(), theirs.isnan())
            mine, theirs = (each.masked_fill(each.isnan(), 0) for each in (mine, theirs))
        assert torch.equal(bits(mine), bits(theirs))
    buffers = one.layout.buffer_by_name, other.layout.buffer_by_name
    assert buffers[0].keys() == buffers[1].keys()
    for name in buffers[0]:
        pair = one.item_bytes_view(buffers[0][name]), other.item_bytes_view(buffers[1][name])
        assert torch.equal(*(items.cpu() for items in pair)), name
    # and no byte outside of items
    assert one._slab.count_nonzero() == other._slab.count_nonzero()
