"""How many requests fit into one block pool, against static splits of the same bytes.

Requests of a mix of lengths are admitted in the order of their arrival until one does not fit.
`split for this mix` is the best static split of all, searched with the very requests in hand: no
engine could choose it before they come. `one split` is the one that serves its worst mix best.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvpool import Allocator, OutOfPages
from kvpool.models import declare

GEMMA3_27B = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_size": 5376,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
}
MODELS = {
    "gemma3 27B, pages of 64": (GEMMA3_27B, {"page_size": 64}),
    "qwen3_next 80B, pages of 256": ("qwen3_next_80b", {"page_size": 256}),
    "deepseek_v4, pages of 256": ("deepseek_v4", {"page_size": 256}),
    "deepseek_v4, pages of 512": ("deepseek_v4", {"page_size": 512}),
}
CHATS, DOCUMENTS = (200, 4_000), (16_000, 64_000)
MIXES = {"short chats": 0.0, "both, a tenth documents": 0.1, "long documents": 1.0}
ARGUMENTS = {"kv": "num_pages", "swa": "num_window_pages", "state": "num_slots"}
ARGUMENTS["ring"] = "num_slots"


def lengths(documents: float, count: int) -> list[int]:
    random = np.random.default_rng(1)
    long = random.random(count) < documents
    return np.where(
        long, random.integers(*DOCUMENTS, size=count), random.integers(*CHATS, size=count)
    ).tolist()


def admitted(pool, tokens: list[int]) -> int:
    """Requests of these lengths that an allocator takes before the first that does not fit."""
    alloc = Allocator(pool)
    for number, count in enumerate(tokens):
        try:
            alloc.extend(alloc.new_request(), count, received=True)
        except OutOfPages:
            return number
    raise AssertionError("more requests are needed")


class Splits:
    """What static splits of `memory` bytes hold, by arithmetic over what one request takes."""

    def __init__(self, probe, mixes: dict[str, list[int]], memory: int) -> None:
        alloc, layout = Allocator(probe), probe.layout
        self.memory, self.lists = memory, [*alloc.lists]
        self.nbytes = np.array([
            sum(
                b.item_bytes
                for b in layout.buffers
                if layout.space_by_name[b.space].id_list == name
            )
            for name in self.lists
        ])  # fmt: skip
        self.taken = {mix: self._taken(alloc, tokens) for mix, tokens in mixes.items()}

    def _taken(self, alloc: Allocator, tokens: list[int]) -> np.ndarray:
        """Items `[list, N]` that the first N requests hold."""
        held = []
        for count in tokens:
            request = alloc.new_request()
            alloc.extend(request, count, received=True)
            spans = request.address().spans
            held.append([spans[name].ids.size for name in self.lists])
            alloc.free(request)
        return np.cumsum(held, axis=0).T

    def best_for(self, mix: str) -> tuple[int, np.ndarray]:
        """The most requests that any split holds of a mix, and that split."""
        needed = (self.nbytes[:, None] * (self.taken[mix] + 1)).sum(axis=0)
        count = int(np.searchsorted(needed, self.memory, side="right"))
        return count, self.taken[mix][:, count - 1] + 1

    def fits(self, mix: str, items: np.ndarray) -> int:
        """Requests of a mix that `items` hold."""
        return min(
            int(np.searchsorted(taken, count - 1, side="right"))
            for taken, count in zip(self.taken[mix], items)
        )

    def best_for_all(self, steps: int) -> np.ndarray:
        """The split, in `steps` parts of the memory, whose worst mix is nearest to that mix's own
        best.
        """
        best = {mix: self.best_for(mix)[0] for mix in self.taken}
        found: tuple[float, np.ndarray] = (-1.0, self.nbytes)
        for parts in product(range(1, steps), repeat=len(self.lists) - 1):
            if sum(parts) >= steps:
                continue
            shares = np.array([*parts, steps - sum(parts)])
            items = shares * self.memory // steps // self.nbytes
            worst = min(self.fits(mix, items) / most for mix, most in best.items())
            if worst > found[0]:
                found = worst, items
        return found[1]


@pytest.mark.parametrize("name", MODELS)
def test_requests_that_fit(name, timed, capsys):
    memory, count, steps = (64 << 30, 3_000, 48) if timed else (4 << 30, 180, 8)
    config, more = MODELS[name]
    declared, common = declare(config), {"dtype": "bf16", "device": "meta", **more}
    mixes = {mix: lengths(part, count) for mix, part in MIXES.items()}
    many = dict.fromkeys(ARGUMENTS.values(), 5_000)
    splits = Splits(declared.build(**common, **many), mixes, memory)

    def static(items: np.ndarray):
        named = {ARGUMENTS[n]: int(count) for n, count in zip(splits.lists, items)}
        return declared.build(**common, **named)

    pool = declared.from_budget(memory, placement="block", **common)
    shared = static(splits.best_for_all(steps))
    assert max(pool.nbytes, shared.nbytes) <= memory
    rows = []
    for mix, tokens in mixes.items():
        most, items = splits.best_for(mix)
        own = static(items)
        assert own.nbytes <= memory + len(splits.lists) * 62 * 4096  # but for alignment
        assert admitted(own, tokens) >= most
        rows.append((mix, admitted(pool, tokens), admitted(shared, tokens), most))
    ours, theirs = (min(row[at] / row[3] for row in rows) for at in (1, 2))
    if timed:
        with capsys.disabled():
            print(f"\n{name}: {len(pool.layout.block_pools['blocks'])} groups of layers")
            for mix, blocks, one, most in rows:
                print(
                    f"  {mix}: {blocks} in a block pool, {one} in one split, {most} in this mix's "
                    f"own: {blocks / one:.2f}, {blocks / most:.2f}"
                )
    assert ours > theirs
