"""An allocator, its pools and their memory, for machines that try requests in any order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine

from kvpool import Allocator, PrefixCache
from tests.pools import dsv4, hybrid, mha, mla, swa

PICK = st.integers(0, 99)


def start(space: Any, tokens: int) -> int:
    """First entry that is alive of `tokens` tokens."""
    entries = tokens // space.tokens_per_entry
    if space.window is None:
        return 0
    while entries % space.window_step:
        entries -= 1
    return max(0, entries - space.window)


class Machine(RuleBasedStateMachine):
    """`memory`: by space, the bytes `[item, entry, ..]` of regions. `live`: models of requests."""

    prefix: Callable[[], PrefixCache | None] = staticmethod(lambda: None)

    @staticmethod
    def build() -> list[Any]:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.pools, self.cache = self.build(), self.prefix()
        self.alloc = Allocator(*self.pools, prefix=self.cache)
        layout = self.alloc.layout
        self.by_name = layout.space_by_name
        self.spaces = {b.space: self.by_name[b.space] for b in layout.buffers}
        self.items = {
            name: min(b.items for b in layout.buffers if self.spaces[b.space].id_list == name)
            for name in self.alloc.lists
        }
        self.memory: dict[str, list[np.ndarray]] = {name: [] for name in self.spaces}
        for pool in self.pools:
            for region in pool.layout.regions:
                view = pool.view(region.role, region.layer).view(torch.uint8).numpy()
                name = pool.layout.space_of(region).name
                self.memory[name].append(view if region.axis("entry") else view[:, None])
        self.live: list[Any] = []

    def bounds(self, name: str, tokens: int, reach: int) -> tuple[int, int]:
        """Numbers of the items that `tokens` tokens need, of whose first `reach` all is alive."""
        space = self.by_name[name]
        if space.kind != "paged":
            return 0, min(tokens, 1)
        stop = -(-tokens // (space.entries_per_item * space.tokens_per_entry))
        return min(start(space, reach) // space.entries_per_item, stop), stop

    def pick(self, number: int) -> Any:
        return self.live[number % len(self.live)]


def machine_test(machine: type, build: Callable[[], list[Any]], share: float, steps: int) -> type:
    """A test of a machine over pools, with a share of the usual examples: each is many calls."""
    made = type("Made", (machine,), {"build": staticmethod(build)})
    examples = int(share * settings.default.max_examples)
    made.TestCase.settings = settings(max_examples=examples, stateful_step_count=steps)
    return made.TestCase


def drafts(**sizes: int) -> list[Any]:
    """A target and two drafts, of which one has ids of its own."""
    return [
        swa(layers=[0, 1], **sizes),
        mla(owner="draft", layers=[4], **{**sizes, "num_pages": 12}),
        hybrid(owner="draft1", layers=[0, 3], own_spaces=True, **sizes),
    ]


def worlds(**sizes: int) -> dict[str, Callable[[], list[Any]]]:
    """Pools of every sort of space."""
    return {
        "MHA": lambda: [mha(layers=[0], head_dim=2, v_head_dim=1, **sizes)],
        "SWA": lambda: [swa(layers=[0, 1], **sizes)],
        "OnlyWindows": lambda: [swa(layers=[0, 2], **sizes)],
        "HybridLinear": lambda: [hybrid(layers=[2, 3], **sizes)],
        "DSv4": lambda: [dsv4(layers=[1, 2], **sizes)],
        "Draft": lambda: drafts(**sizes),
    }
