"""Random slices of random tensors, described, and what a transfer makes of every byte of them:
computed by slicing, never from a layout's formula or a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from hypothesis import strategies as st

from kvpool.describe import describe, describe_buffer
from kvpool.layout import LayoutError, PoolLayout, RequestAddress, Space, Span

DIMS = ("item", "layer", "role", "entry", "head", "dim")


@dataclass(frozen=True)
class Model:
    """What both sides hold parts of. `split`: each element of `dim` is a cell of its own."""

    layers: int
    roles: int
    heads: int
    width: int
    split: bool


@dataclass(frozen=True)
class Side:
    """Memory, all of which is `[item, layer, role, entry, head, dim]` in some order, the steps of
    each dim that are described, and what they are in the model.
    """

    raw: np.ndarray
    order: Sequence[str]
    shape: Mapping[str, int]
    taken: Mapping[str, range]
    layers: Sequence[int]
    roles: Sequence[int]
    heads: range
    padding: bool
    layout: PoolLayout

    def part(self, raw: np.ndarray) -> np.ndarray:
        """The described part of memory like this one's, `[item, layer, role, entry, head, dim]`."""
        return _sliced(_grid(raw, self.order, self.shape), self.taken)

    def described(self) -> np.ndarray:
        """Which bytes of `raw` are described."""
        found = np.zeros(self.raw.size, dtype=bool)
        self.part(found)[...] = True
        return found

    def dead(self, table: RequestAddress) -> np.ndarray:
        """Which bytes of `raw` are of described entries that follow a request in its last item."""
        found = np.zeros(self.raw.size, dtype=bool)
        item, entry = divmod(table.num_tokens, len(self.taken["entry"]))
        if entry:
            self.part(found)[table.spans["kv"].ids[item], :, :, entry:] = True
        return found

    def declared(self, items: Sequence[int] | None = None) -> np.ndarray:
        """Which bytes of `raw` are declared padding, in some items or all."""
        found = np.zeros(self.raw.size, dtype=bool)
        for buffer in self.layout.buffers if self.padding else ():
            for item in range(buffer.items) if items is None else items:
                at = buffer.base + item * buffer.item_stride - self.raw.ctypes.data
                found[at : at + buffer.item_bytes] = True
        return found & ~self.described()

    def table(self, tokens: int, items: Sequence[int]) -> RequestAddress:
        """The block table of a request in these items."""
        return RequestAddress(tokens, {"kv": Span(np.array(items))})


def arrived(source: Side, dest: Side, there: RequestAddress, here: RequestAddress) -> np.ndarray:
    """All of the destination's memory, once the request has come."""
    found = dest.raw.copy()
    ours, theirs = dest.part(found), source.part(source.raw)
    low = dest.heads.start - source.heads.start
    steps = slice(low, low + len(dest.heads))
    for position in range(here.num_tokens):
        (i, e), (j, f) = (divmod(position, len(side.taken["entry"])) for side in (dest, source))
        i, j = here.spans["kv"].ids[i], there.spans["kv"].ids[j]
        for (m, layer), (n, role) in product(enumerate(dest.layers), enumerate(dest.roles)):
            p, q = source.layers.index(layer), source.roles.index(role)
            ours[i, m, n, e] = theirs[j, p, q, f, steps]
    return found


@st.composite
def models(draw):
    sizes = (draw(st.integers(1, most)) for most in (3, 2, 4, 3))
    return Model(*sizes, draw(st.booleans()))


@st.composite
def sides(draw, model, items, tokens, holds=None):
    """A tensor and what is described of it: at least what `holds` has, or any part of the model."""
    page = draw(st.integers(1, 5))
    layers, roles = (
        draw(st.permutations(range(most)))[: draw(st.integers(1, most))]
        for most in (model.layers, model.roles)
    )
    low = draw(st.integers(0, model.heads - 1))
    heads = range(low, draw(st.integers(low + 1, model.heads)))
    if holds is not None:
        layers, roles = (
            draw(st.permutations(sorted({*some, *needed})))
            for some, needed in ((layers, holds.layers), (roles, holds.roles))
        )
        heads = range(min(low, holds.heads.start), max(heads.stop, holds.heads.stop))
    counts = {
        "item": items + -(-tokens // page),
        "layer": len(layers),
        "role": len(roles),
        "entry": page,
        "head": len(heads),
        "dim": model.width,
    }
    taken, shape = {}, {}
    for dim, count in counts.items():
        step = draw(st.integers(1, 2)) if dim != "dim" or model.split else 1
        start = draw(st.integers(0, 2))
        taken[dim] = range(start, start + count * step, step)
        shape[dim] = taken[dim][-1] + 1 + draw(st.integers(0, 2))
    outer = draw(st.permutations(("layer", "role")))[: draw(st.integers(0, 2))]
    inner = draw(st.permutations([d for d in DIMS if d not in ("item", "dim", *outer)]))
    inner.insert(draw(st.integers(0, len(inner))) if model.split else len(inner), "dim")
    order = (*outer, "item", *inner)
    size = int(np.prod([shape[dim] for dim in DIMS]))
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, size, dtype=np.uint8)
    padding = draw(st.booleans())
    found = raw, order, shape, taken, layers, roles, heads, padding
    return Side(*found, _layout(model, *found))


def _layout(model, raw, order, shape, taken, layers, roles, heads, padding) -> PoolLayout:
    """Described in one call where that is possible, else layer by layer in shared buffers."""
    whole = torch.from_numpy(_grid(raw, order, shape))
    part = _sliced(whole, taken)
    space = Space("kv", entries_per_item=len(taken["entry"]))
    options = {
        "cell": None if model.split else "dim",
        "shards": {"head": (heads.start, model.heads)},
    }
    names = [f"role{role}" for role in roles]
    try:
        seen = describe(part, DIMS, role=names, layer=layers, padding=padding, **options)
        return PoolLayout(seen.buffers, seen.regions, (space,), model.layers)
    except LayoutError:  # the layers' items would lie in one another
        pass
    outer = order[: order.index("item")]
    buffers, regions = {}, []
    for (m, layer), (n, role) in product(enumerate(layers), enumerate(names)):
        at = {"layer": taken["layer"][m], "role": taken["role"][n]}
        name = "home" + "".join(f".{dim}{at[dim]}" for dim in outer)
        index = [at[dim] if dim in outer else slice(None) for dim in DIMS]
        index[0] = slice(taken["item"].start, taken["item"].stop, taken["item"].step)
        dims = [dim for dim in DIMS if dim not in outer]
        home = describe_buffer(whole[tuple(index)], dims, name=name, padding=padding)
        buffers[name] = home
        dims = ("item", "entry", "head", "dim")
        one = part[:, m, n]
        regions += describe(one, dims, role=role, layer=layer, buffer=home, **options).regions
    return PoolLayout(tuple(buffers.values()), tuple(regions), (space,), model.layers)


def _grid(raw: np.ndarray, order: Sequence[str], shape: Mapping[str, int]) -> np.ndarray:
    """Memory as `[item, layer, role, entry, head, dim]`."""
    stored = raw.reshape([shape[dim] for dim in order])
    return stored.transpose([order.index(dim) for dim in DIMS])


def _sliced(grid, taken):
    return grid[tuple(slice(taken[d].start, taken[d].stop, taken[d].step) for d in DIMS)]
