"""What a model's state costs, and how many tokens and requests fit: figures without memory.

A model is split into pipeline stages (layers) and each stage into shards (heads); all ranks of a
stage are alike, so that one stands for all. Pools are built on the meta device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from kvpool.device import get_device
from kvpool.layout import PoolLayout, Region, Space
from kvpool.models import Declaration
from kvpool.pools.budget import fixed_items, items_per_request
from kvpool.pools.placement import COUNTS, Shard, count_argument

UNITS = {"b": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgtp", 1)
}


class DoesNotFit(ValueError):
    """Not even one page of tokens fits."""


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes that one role takes in all layers held of it, of each `per`: token or request."""

    owner: str
    role: str
    per: str
    layers: tuple[int, ...]
    nbytes: float


@dataclass(frozen=True, slots=True)
class Stage:
    """One rank of a pipeline stage.

    `items` are constructor arguments of the pools that fill the memory, `nbytes` what those take.
    `tokens` fit in all, beside what `reserved_requests` keep (None: any number, none of them
    grows); or else `requests` of `context_tokens` fit at a time.
    """

    layers: tuple[int, ...]
    draft_layers: tuple[int, ...]
    shares: tuple[Share, ...]
    items: dict[str, int]
    nbytes: int
    tokens: int | None
    requests: int

    def bytes_per(self, per: str) -> float:
        """Bytes that every token, or every request, takes."""
        return sum(share.nbytes for share in self.shares if share.per == per)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a model for `memory` bytes a rank."""

    model: str
    memory: int
    tp: int
    page_size: int
    reserved_requests: int
    context_tokens: int
    stages: tuple[Stage, ...]

    @property
    def reserved(self) -> str:
        """`reserved_requests` in words."""
        return _counted(self.reserved_requests)

    @property
    def shares(self) -> tuple[Share, ...]:
        """Bytes by role over all stages, of one shard each."""
        found: dict[tuple[str, str, str], Share] = {}
        for share in (share for stage in self.stages for share in stage.shares):
            key = share.owner, share.role, share.per
            known = found.get(key, Share(*key, (), 0))
            layers = *known.layers, *share.layers
            found[key] = Share(*key, layers, known.nbytes + share.nbytes)
        return tuple(sorted(found.values(), key=lambda share: share.per == "request"))

    @property
    def tightest_for_tokens(self) -> int | None:
        """The stage where the fewest tokens fit, None if any number fits in all."""
        bound = [n for n, stage in enumerate(self.stages) if stage.tokens is not None]
        return min(bound, key=lambda n: self.stages[n].tokens or 0, default=None)

    @property
    def tightest_for_requests(self) -> int:
        """The stage where the fewest requests fit."""
        return min(range(len(self.stages)), key=lambda n: self.stages[n].requests)


def figures(
    target: Declaration,
    memory: int,
    *,
    draft: Declaration | None = None,
    tp: int = 1,
    pp: int = 1,
    page_size: int | None = None,
    requests: int = 1,
    tokens: int = 8192,
    **storage: Any,
) -> Figures:
    """Figures of a model, in `memory` bytes for state on each rank; `storage` is dtype or packing.

    The draft lies beside the last stage and shares its ids. Raises DoesNotFit if a stage cannot
    hold a page of tokens beside the windows, slots and rings of `requests` requests, and
    ValueError if the model cannot be split or stored so.
    """
    for name, value in (("tp", tp), ("pp", pp), ("requests", requests), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name}: 1 or more, got {value}.")
    size = target.page_size if page_size is None else page_size
    small = dict.fromkeys(COUNTS, 2)
    common: dict[str, Any] = {"shard": Shard(0, tp), "page_size": size, "device": "meta"}
    common |= {**storage, **small}
    more = {"speculation": True} if draft and "speculation" in target.arguments else {}
    stages = []
    for n, layers in enumerate(split(target.layers, pp)):
        layouts = [target.build(layers=layers, **more, **common).layout]
        drafted: tuple[int, ...] = ()
        if draft is not None and n == pp - 1:
            given = more if "speculation" in draft.arguments else {}
            layouts.append(draft.build(**given, **common).layout)
            drafted = draft.layers
        where = f"stage {n} (layers {layers[0]}-{layers[-1]})"
        layout = PoolLayout.merge(*layouts)
        items, held = _fill(layout, memory, requests, where)
        grows = any(_per(space) == "token" for space in layout.spaces)
        room = (items["num_pages"] - 1) * size if grows else None
        many = _requests(layout, memory, -(-tokens // size))
        stages.append(Stage(layers, drafted, shares(layout), items, held, room, many))
    return Figures(target.model, memory, tp, size, requests, tokens, tuple(stages))


def shares(layout: PoolLayout) -> tuple[Share, ...]:
    """Bytes by role that each token and each request takes, and what they leave unused as role
    `padding`: they sum to the bytes of the buffers' items.

    Windows are at their fullest while tokens come one by one.
    """
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    unused: dict[tuple[str, str, str], dict[int, float]] = {}
    inside: dict[str, list[Region]] = {}
    for region in layout.regions:
        inside.setdefault(region.buffer, []).append(region)
    for buffer in layout.buffers:
        space, regions = layout.space_by_name[buffer.space], inside[buffer.name]
        per, owner, layer = _per(space), regions[0].owner, regions[0].layer
        items = 1 / space.tokens_per_item if per == "token" else items_per_request(space, 1)
        for region in regions:
            found.setdefault((owner, region.role, per), {})[layer] = region.nbytes * items
        rest = buffer.item_bytes - sum(region.nbytes for region in regions)
        if rest:
            held = unused.setdefault((owner, "padding", per), {})
            held[layer] = held.get(layer, 0) + rest * items
    rows = [*found.items(), *unused.items()]
    return tuple(
        Share(*key, tuple(sorted(held)), sum(held.values()))
        for per in ("token", "request")
        for key, held in rows
        if key[2] == per
    )


def split(layers: Sequence[int], stages: int) -> list[tuple[int, ...]]:
    """Layers by pipeline stage: as even as can be, earlier stages larger."""
    if not 1 <= stages <= len(layers):
        raise ValueError(f"pp: {stages} stages for {len(layers)} layers. Each needs one or more.")
    size, larger = divmod(len(layers), stages)
    starts = [n * size + min(n, larger) for n in range(stages)]
    return [tuple(layers[a : a + size + (n < larger)]) for n, a in enumerate(starts)]


def parse_memory(text: str) -> int:
    """Bytes of `141GiB`, `80 GB`, `1.5TiB` or `1048576`; raises ValueError for anything else."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([a-z]{0,3})", text.strip().lower())
    unit = UNITS.get(match[2] or "b") if match else None
    nbytes = int(Decimal(match[1]) * unit) if match and unit else 0
    if nbytes < 1:
        raise ValueError(
            f"memory {text!r}: bytes, or a number of kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as "
            "141GiB."
        )
    return nbytes


def _counted(requests: int) -> str:
    return "1 request" if requests == 1 else f"{requests:,} requests"


def _per(space: Space) -> str:
    return "request" if space.per_request or space.window is not None else "token"


def _nbytes(layout: PoolLayout, items: dict[str, int]) -> int:
    """Bytes of pools like `layout`, of so many items."""
    step = get_device("meta").alignment
    lenders = {s.name: layout.space_by_name[s.id_list] for s in layout.spaces}
    named = {name: items[count_argument(lender)] for name, lender in lenders.items()}
    return sum(-(-b.item_bytes * named[b.space] // step) * step for b in layout.buffers)


def _fill(layout: PoolLayout, memory: int, requests: int, where: str) -> tuple[dict[str, int], int]:
    """Items that fill the memory, as KVPool.from_budget counts them, and their bytes."""
    fixed = fixed_items(layout, requests, 1)
    least = _nbytes(layout, {"num_pages": 2, **fixed})
    if least > memory:
        raise DoesNotFit(
            f"{where}: {memory:,} bytes hold no page of tokens beside the reserved one and "
            f"windows, slots and rings of {_counted(requests)}; {least:,} would."
        )
    pages = 2
    if any(_per(space) == "token" for space in layout.spaces):
        pages = _most(lambda n: _nbytes(layout, {"num_pages": n, **fixed}) <= memory, 2)
    items = {"num_pages": pages, **fixed}
    return items, _nbytes(layout, items)


def _requests(layout: PoolLayout, memory: int, pages: int) -> int:
    """How many requests of `pages` pages fit at a time."""

    def fits(count: int) -> bool:
        items = {"num_pages": 1 + count * pages, **fixed_items(layout, count, 1)}
        return _nbytes(layout, items) <= memory

    return _most(fits, 0)


def _most(fits: Callable[[int], bool], low: int) -> int:
    """The largest number that fits, if `low` does and every larger one takes more."""
    step = 1
    while fits(low + step):
        low, step = low + step, 2 * step
    while step > 1:
        step //= 2
        if fits(low + step):
            low += step
    return low
