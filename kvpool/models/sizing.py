"""What a model's state costs, and how many tokens and requests fit, without allocating memory.

A model is split into pipeline stages (layers) and each stage into shards (heads). All ranks of a
stage are alike, so one is computed for all. Pools are built on the meta device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.layout import Buffer, PoolLayout
from kvpool.layout.formats import LinearState, Shard
from kvpool.layout.units import parse_memory as parse_memory
from kvpool.models import Declaration
from kvpool.models.weights import Weights, given
from kvpool.pools import budget
from kvpool.pools.base import KVPool
from kvpool.pools.budget import DoesNotFit as DoesNotFit
from kvpool.pools.placement import ITEM_COUNTS
from kvpool.pools.states import UnionPool

LINEAR_DTYPES = ("conv_dtype", "temporal_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleBytes:
    """Bytes of one role in all its layers held here, per `per`: token or request."""

    owner: str
    role: str
    per: str
    layers: tuple[int, ...]
    nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One rank of a pipeline stage. `weights` and `state` are the bytes that each has.

    `items` are the constructor arguments of pools that fill the memory, `nbytes` their bytes.
    `tokens` fit in total, besides the windows, slots and rings of `reserved_requests` (None: any
    number, as no buffer grows); or `requests` of `context_tokens` fit at a time.
    """

    layers: tuple[int, ...]
    draft_layers: tuple[int, ...]
    weights: int
    state: int
    layout: PoolLayout
    items: dict[str, int]
    nbytes: int
    tokens: int | None
    requests: int

    def bytes_per(self, per: str) -> float:
        return sum(share.nbytes for share in shares(self.layout) if share.per == per)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a model for `memory` bytes a rank. `weights` say where their bytes are from."""

    model: str
    memory: int
    weights: Weights
    utilisation: float
    tp: int
    page_size: int
    block_pool: bool
    reserved_requests: int
    context_tokens: int
    stages: tuple[PipelineStage, ...]

    @property
    def shares(self) -> tuple[RoleBytes, ...]:
        """Bytes by role over all stages, of one shard each."""
        return shares(*(stage.layout for stage in self.stages))

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
    weights: int | Weights = 0,
    utilisation: float = 1.0,
    draft: Declaration | None = None,
    tp: int = 1,
    pp: int = 1,
    page_size: int | None = None,
    requests: int = 1,
    tokens: int = 8192,
    **storage: Any,
) -> Figures:
    """Figures of a model on ranks of `memory` bytes each, of which state gets the fraction
    `utilisation` less the bytes of `weights` on the rank: a number is that of each rank. `storage`
    is dtype or packing, a placement, and conv_dtype and temporal_dtype of linear attention.

    The draft is held by the last stage and shares its ids. Raises DoesNotFit if a stage cannot hold
    a page of tokens besides the windows, slots and rings of `requests` requests, and ValueError if
    the model cannot be split or stored as asked.
    """
    for name, value in (("tp", tp), ("pp", pp), ("requests", requests), ("tokens", tokens)):
        if value < 1:
            raise ValueError(f"{name}: 1 or more, got {value}.")
    for name in LINEAR_DTYPES:
        if name in storage and LinearState not in target.kinds:
            raise ValueError(f"{name}: {target.model} has no linear attention. Leave it out.")
    weights = weights if isinstance(weights, Weights) else given(weights)
    per_page = target.page_size if page_size is None else page_size
    common: dict[str, Any] = {"shard": Shard(0, tp), "page_size": per_page, "device": "meta"}
    common |= {**storage, **dict.fromkeys(ITEM_COUNTS, 2)}
    stages = []
    for number, pools in enumerate(stage_pools(target, draft, pp, **common)):
        layers, name = pools[0].layers, target.model
        own = weights.on_rank(layers, tp=tp, draft=len(pools) > 1)
        name += f", stage {number} (layers {layers[0]}-{layers[-1]})" if pp > 1 else ""
        state = budget.state_bytes(memory, own, utilisation, name)
        pages = -(-tokens // per_page)
        stage = _stage(pools, own, state, number=number, requests=requests, pages=pages)
        stages.append(stage)
    return Figures(
        model=target.model,
        memory=memory,
        weights=weights,
        utilisation=utilisation,
        tp=tp,
        page_size=per_page,
        block_pool=storage.get("placement") == "block",
        reserved_requests=requests,
        context_tokens=tokens,
        stages=tuple(stages),
    )


def _stage(
    pools: Sequence[KVPool], weights: int, state: int, *, number: int, requests: int, pages: int
) -> PipelineStage:
    """A rank of a stage with `state` bytes; `pages` are those of a request that is counted."""
    layers, step = pools[0].layers, pools[0].device.alignment

    def fits(count: int) -> bool:
        needed = budget.needed_items(budget.spaces_of(pools), count, count * pages, 1)
        return budget.size(pools, needed, step) <= state

    name = f"stage {number} (layers {layers[0]}-{layers[-1]})"
    items = budget.fit(pools, state, requests, 1, step=step, where=name)
    room = budget.pages_of_tokens(pools, items["num_pages"], requests)
    return PipelineStage(
        layers=layers,
        draft_layers=pools[1].layers if len(pools) > 1 else (),
        weights=weights,
        state=state,
        layout=PoolLayout.merge(*(pool.layout for pool in pools)),
        items=items,
        nbytes=budget.size(pools, items, step),
        tokens=None if room is None else room * pools[0].page_size,
        requests=budget.largest(fits, 0),
    )


def stage_pools(
    target: Declaration, draft: Declaration | None, pp: int, **common: Any
) -> Iterator[list[UnionPool]]:
    """The pools of a rank of each pipeline stage: the target's, which speculates if there is a
    draft, and in the last stage the draft's, which shares its ids.
    """
    for layers in split(target.layers, pp):
        speculation = target.speculation if draft else {}
        pools = [target.build(layers=layers, **speculation, **common)]
        if draft and layers[-1] == target.layers[-1]:
            shared = {name: v for name, v in common.items() if name not in LINEAR_DTYPES}
            pools.append(draft.build(**draft.speculation, **shared))
        yield pools


def shares(*layouts: PoolLayout) -> tuple[RoleBytes, ...]:
    """Bytes of each token and each request by role, over the layouts of all stages, unused bytes as
    role `padding`: the sum is the bytes of the buffers' items, or of the blocks that they lie in.
    Windows are counted at their largest, with chunks of one token.
    """
    # bytes of owner, role and token or request, by layer
    sizes: dict[tuple[str, str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for layout in layouts:
        rests, regions = _rests_of_blocks(layout), layout.regions_in
        for buffer in layout.buffers:
            space, inside = layout.space_by_name[buffer.space], regions[buffer.name]
            space = layout.space_by_name[space.id_list]  # whose items a request holds
            per = "token" if space.grows else "request"
            items = 1 / space.tokens_per_item if space.grows else budget.items_per_request(space, 1)
            for region in inside:
                sizes[region.owner, region.role, per][region.layer] += region.nbytes * items
            rest = buffer.item_bytes - sum(region.nbytes for region in inside)
            if rest := rest + rests.get(buffer.name, 0):
                sizes[inside[0].owner, "padding", per][inside[0].layer] += rest * items
    rows = [
        RoleBytes(
            owner=owner, role=role, per=per, layers=tuple(sorted(parts)), nbytes=sum(parts.values())
        )
        for (owner, role, per), parts in sizes.items()
    ]
    return tuple(sorted(rows, key=lambda row: (row.per == "request", row.role == "padding")))


def _rests_of_blocks(layout: PoolLayout) -> dict[str, int]:
    """What the items of an id list leave of a block, by the last of their buffers."""
    records: dict[tuple[str, str], list[Buffer]] = defaultdict(list)
    for region in layout.regions:
        buffer, ids = layout.buffer_of(region), layout.space_of(region).id_list
        if layout.space_by_name[ids].block_pool is not None:
            records[region.owner, ids].append(buffer)
    return {
        rows[-1].name: max(0, rows[-1].item_stride - sum(buffer.item_bytes for buffer in {*rows}))
        for rows in records.values()
    }


def split(layers: Sequence[int], stages: int) -> list[tuple[int, ...]]:
    """Layers by pipeline stage, as even as possible, earlier stages larger."""
    if not 1 <= stages <= len(layers):
        raise ValueError(f"pp: {stages} stages for {len(layers)} layers. Each needs one or more.")
    return [tuple(part.tolist()) for part in np.array_split(layers, stages)]
