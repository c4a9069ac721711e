"""Memory of a check's own, laid out as that of an engine's rank, with room for one request: bytes
move in the runs of the real pair, and no page of an engine is read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvpool.device import get_device
from kvpool.layout import Buffer, PoolLayout, RequestAddress, Span

if TYPE_CHECKING:
    import torch

PREFILL_BYTES = 256 << 20
"""Memory of a check for all ranks of prefill together."""
MOST_TOKENS = 1 << 14
ALIGNMENT = 4096
NOISE_BYTES = 1 << 20


class ItemCount(NamedTuple):
    """Of an id list: the first id of a request, and how many items its buffers have."""

    first: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckMemory:
    """A layout over memory that lives as long as this, for a request of at most `tokens` tokens."""

    layout: PoolLayout
    tokens: int
    slabs: Mapping[str, torch.Tensor]
    """By memory, uint8 `[N]`."""

    @classmethod
    def of(cls, layout: PoolLayout, tokens: int, device: str | None = None) -> CheckMemory:
        """Of the device that the layout names, or of another. Raises DeviceUnavailable, MemoryError
        and what the device raises.
        """
        if device is not None:
            buffers = tuple(replace(buffer, memory=device) for buffer in layout.buffers)
            layout = replace(layout, buffers=buffers)
        placed, sizes = _placed(layout, tokens)
        slabs = {
            memory: get_device(memory).allocate(size, ALIGNMENT) for memory, size in sizes.items()
        }
        moved = (
            replace(placed[buffer.name], base=placed[buffer.name].base + _pointer(slabs, buffer))
            for buffer in layout.buffers
        )
        layout = replace(layout, buffers=tuple(moved), generation="")
        return cls(layout=layout, tokens=tokens, slabs=slabs)

    def address(self, tokens: int) -> RequestAddress:
        """A request of at most so many tokens as there is room for, always in the same items."""
        spans = {}
        items = _items(self.layout, self.tokens)
        for name, numbers in _numbers(self.layout, tokens).items():
            ids = np.arange(len(numbers)) + items[name].first
            spans[name] = Span(ids, first_item=numbers.start)
        return RequestAddress(tokens, spans)

    def fill(self) -> None:
        """With noise, so that bytes that were not moved differ."""
        import torch

        noise = torch.from_numpy(
            np.random.default_rng().integers(0, 256, NOISE_BYTES, dtype=np.uint8)
        )
        for slab in self.slabs.values():
            for start in range(0, slab.numel(), NOISE_BYTES):
                part = slab[start : start + NOISE_BYTES]
                part.copy_(noise[: part.numel()])


def most_tokens(layouts: Sequence[PoolLayout]) -> int:
    """Of a request for which all ranks of a prefill have room in a check: both sides of a check
    compute it from the same contract.
    """
    low, high = 1, MOST_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        if sum(sum(_placed(layout, middle)[1].values()) for layout in layouts) <= PREFILL_BYTES:
            low = middle
        else:
            high = middle - 1
    return low


def _pointer(slabs: Mapping[str, torch.Tensor], buffer: Buffer) -> int:
    return slabs[buffer.memory].data_ptr()


def _placed(layout: PoolLayout, tokens: int) -> tuple[dict[str, Buffer], dict[str, int]]:
    """The buffers by name with room for a request, as offsets, and bytes by memory."""
    items, placed = _items(layout, tokens), dict[str, Buffer]()
    ends = {buffer.memory: 0 for buffer in layout.buffers}
    for together in _clusters(layout.buffers):
        memory, first = together[0].memory, together[0].base
        start = -(-ends[memory] // ALIGNMENT) * ALIGNMENT
        for buffer in together:
            count = items[layout.space_by_name[buffer.space].id_list].total
            buffer = replace(buffer, base=start + buffer.base - first, items=count)
            placed[buffer.name] = buffer
            ends[memory] = max(ends[memory], buffer.end)
    return placed, ends


def _clusters(buffers: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """Buffers that lie in one another, as those of layers side by side and those over one pool of
    blocks do, keep their distances.
    """
    together: list[Buffer] = []
    end = 0
    for buffer in sorted(buffers, key=lambda buffer: (buffer.memory, buffer.base)):
        if together and (buffer.memory != together[0].memory or buffer.base >= end):
            yield together
            together = []
        end = max(end, buffer.end) if together else buffer.end
        together.append(buffer)
    if together:
        yield together


def _items(layout: PoolLayout, tokens: int) -> dict[str, ItemCount]:
    """By id list. Of a block pool each list has blocks of its own, one behind the other's."""
    items, taken = dict[str, ItemCount](), dict[str, int]()
    for name, numbers in _numbers(layout, tokens).items():
        space = layout.space_by_name[name]
        size = space.items_per_block
        first = -(-space.reserved // size)
        if space.block_pool is not None:
            first = max(first, taken.get(space.block_pool, 0))
        # one more: a window that ends elsewhere may begin in the item before
        blocks = first - (-(len(numbers) + 1) // size)
        if space.block_pool is not None:
            taken[space.block_pool] = blocks
        items[name] = ItemCount(first * size, blocks * size)
    for name, (first, _) in items.items():
        space = layout.space_by_name[name]
        if space.block_pool is not None:
            items[name] = ItemCount(first, taken[space.block_pool] * space.items_per_block)
    return items


def _numbers(layout: PoolLayout, tokens: int) -> dict[str, range]:
    """By id list, the items of a request, by number in it."""
    numbers: dict[str, range] = {}
    for name in layout.items_by_space:
        space = layout.space_by_name[name]
        alive = space.alive_items(tokens)
        others = numbers.get(space.id_list, alive)
        numbers[space.id_list] = range(min(alive.start, others.start), max(alive.stop, others.stop))
    return numbers
