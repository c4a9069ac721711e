"""Prefix reuse in any order of requests, beside a model of dicts of tuples and lists.

The model says with how many tokens, and which items, a request begins, and which item goes next.
Every entry has a mark that is made of all tokens up to it: whatever a request begins with must show
the marks of its own tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import lcm
from zlib import crc32

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvpool import OutOfPages, PinnedPrefix, PrefixCache
from kvpool.allocation.allocator import Request
from tests.kvpool.allocation.machine import PICK, Machine, machine_test, start, worlds
from tests.pools import dsv4, hybrid, swa

SMALL = {"num_pages": 14, "num_window_pages": 14, "num_slots": 5}
CHECKPOINT = 8
FIRST = tuple(np.random.default_rng(0).integers(0, 2**31, 40).tolist())
SCRIPTS = [  # that begin alike
    FIRST,
    FIRST[:21] + tuple(range(19)),
    FIRST[:9] + tuple(range(100, 131)),
]


def mark(salt: str, tokens: tuple[int, ...]) -> int:
    return crc32(repr((salt, tokens)).encode()) % 255 + 1


@dataclass
class Held:
    """A request: its tokens will be those of `script`."""

    request: Request
    salt: str
    script: tuple[int, ...]
    tokens: int
    stored: int
    ids: dict[str, dict[int, int]]
    since: int = 0  # tokens at which all that was alive was there
    received: int = 0
    keeps: bool = True  # since the last `clear`

    def prefix(self, tokens: int) -> tuple[str, tuple[int, ...]]:
        return self.salt, self.script[:tokens]


@dataclass
class Free:
    """What is free in an id list or a block pool: nobody's, and idle ones, the next one first."""

    items: set[int]
    users: list[List] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.items) + len(self.idle)

    def kept(self) -> set[int]:
        return {item for each in self.users for item in each.kept.values()}

    def give(self, item: int) -> None:
        """An item was handed out: a free one, or else the one that is idle longest."""
        if self.items:
            self.items.remove(item)  # a KeyError: it was kept, or held
        else:
            assert item == self.idle.pop(0)
            self.forget(item)

    def forget(self, item: int) -> None:
        for each in self.users:
            each.kept = {key: other for key, other in each.kept.items() if other != item}


@dataclass
class List:
    """An id list: tokens of an item, and the item of each prefix."""

    tokens: int
    free: Free
    kept: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)


class Prefixes(Machine):
    """An allocator with a prefix cache, its pools, and the model of all."""

    prefix = staticmethod(lambda: PrefixCache(checkpoint_tokens=CHECKPOINT, events=True))

    def __init__(self) -> None:
        super().__init__()
        self.lists: dict[str, List] = {}
        self.free: dict[str, Free] = {}
        for name in self.alloc.lists:
            space = self.by_name[name]
            paged = space.kind == "paged"
            tokens = space.entries_per_item * space.tokens_per_entry if paged else CHECKPOINT
            free = self.free.setdefault(
                space.block_pool or name, Free(set(range(1, self.items[name])))
            )
            self.lists[name] = List(tokens, free)
            free.users.append(self.lists[name])
        self.step = lcm(*(each.tokens for each in self.lists.values()))
        self.pinned: list[tuple[PinnedPrefix, dict[str, list[int]]]] = []
        # a page may be idle without those before it: they were taken back, or computed twice
        self.cut = False
        self.published: dict[tuple[int, bytes], tuple] = {}

    # the model

    def holders(self, name: str) -> Counter[int]:
        held: Counter[int] = Counter()
        for other in (n for n, each in self.lists.items() if each.free is self.lists[name].free):
            held.update(item for each in self.live for item in each.ids[other].values())
            held.update(item for _, items in self.pinned for item in items[other])
        return held

    def needed(self, name: str, prefix: tuple[str, tuple[int, ...]]) -> list:
        """The prefixes that end with the items of which a request begins."""
        salt, tokens = prefix
        space, size = self.by_name[name], self.lists[name].tokens
        if space.kind != "paged":
            return [prefix] if tokens else []
        return [
            (salt, tokens[: size * (number + 1)])
            for number in range(*self.bounds(name, len(tokens), len(tokens)))
        ]

    def longest(self, salt: str, tokens: tuple[int, ...]) -> int:
        for stop in range(len(tokens) // self.step * self.step, 0, -self.step):
            prefix = salt, tokens[:stop]
            if all(
                key in each.kept
                for name, each in self.lists.items()
                for key in self.needed(name, prefix)
            ):
                return stop
        return 0

    def fits(self, needed: dict[str, int]) -> bool:
        """Whether as many items are free, by id list."""
        return all(
            sum(count for name, count in needed.items() if self.lists[name].free is free)
            <= len(free)
            for free in self.free.values()
        )

    def lacks_a_copy(self, needs: dict[str, list[int]]) -> bool:
        """Whether a request that begins with these items would write to one that is pinned."""
        left = {
            name: len(free) - len({n for items in needs.values() for n in items} & {*free.idle})
            for name, free in self.free.items()
        }
        for name, items in needs.items():
            if self.by_name[name].kind == "paged" or not items:
                continue
            pool = self.by_name[name].block_pool or name
            pinned = any(items[0] in others[name] for _, others in self.pinned)
            if not left[pool] and pinned:
                return True
            left[pool] -= pinned  # else what was copied is free again, or was not copied
        return False

    def hold(self, name: str, items: list[int]) -> None:
        free = self.lists[name].free
        free.idle = [item for item in free.idle if item not in items]

    def put(self, name: str, items: list[int]) -> None:
        """Items lost a holder, in the order of the request."""
        free, held = self.lists[name].free, self.holders(name)
        kept = free.kept()
        for item in reversed(items):
            if not held[item]:
                free.idle.append(item) if item in kept else free.items.add(item)

    def keep(self, held: Held, name: str, first: int, stop: int) -> None:
        each = self.lists[name]
        for number in range(first, stop):
            prefix, item = held.prefix((number + 1) * each.tokens), held.ids[name].get(number)
            self.cut |= item is not None and each.kept.get(prefix, item) != item
            if item is not None and prefix not in each.kept and item not in each.free.kept():
                each.kept[prefix] = item

    def read(self, held: Held) -> None:
        """Takes the ids that a request has from its block table."""
        for name, span in held.request.address().spans.items():
            numbers = range(span.first_item, span.first_item + span.ids.size)
            held.ids[name] = dict(zip(numbers, span.ids.tolist()))

    # what requests write and read

    def entries(self, name: str, tokens: int, since: int) -> range:
        """Entries that may be read: all that is alive, and in pages what was at `since` tokens."""
        space = self.spaces[name]
        if space.kind == "slot":
            return range(min(tokens, 1))
        since = since if space.kind == "paged" and not space.ring else tokens
        return range(start(space, since), tokens // space.tokens_per_entry)

    def place(self, held: Held, name: str, entry: int) -> tuple[int, int, int]:
        """Item and step of an entry, and its mark."""
        space = self.spaces[name]
        size, tokens = space.entries_per_item, (entry + 1) * space.tokens_per_entry
        number = entry // size if space.kind == "paged" else 0
        if space.kind == "slot":
            tokens = held.tokens
        step = entry % (space.ring or size)
        return held.ids[space.id_list][number], step, mark(*held.prefix(tokens))

    def write(self, held: Held, before: int, since: int) -> None:
        """Writes what the tokens from `before` on leave behind, of what is alive at `since`."""
        for name, space in self.spaces.items():
            entries = self.entries(name, held.tokens, since)
            if space.kind == "ring" and since < held.tokens:  # computed, one after the other
                entries = range(max(0, entries.stop - space.entries_per_item), entries.stop)
            if space.ring and since < held.tokens:
                first = min(held.ids[space.id_list], default=0) * space.entries_per_item
                entries = range(max(first, before), entries.stop)
            for entry in entries:
                if (entry + 1) * self.spaces[name].tokens_per_entry > before or (
                    self.spaces[name].kind == "slot" and held.tokens > before
                ):
                    item, step, value = self.place(held, name, entry)
                    for view in self.memory[name]:
                        view[item, step] = value

    @rule(
        script=st.integers(0, 2),
        tokens=st.integers(0, 40),
        salt=st.sampled_from(["", "", "", "adapter"]),
    )
    def begin(self, script: int, tokens: int, salt: str) -> None:
        asked = SCRIPTS[script][:tokens]
        found = self.longest(salt, asked)
        assert self.cache.lookup(asked, salt=salt) == found
        prefix = salt, asked[:found]
        needs = {
            name: [each.kept[key] for key in self.needed(name, prefix)]
            for name, each in self.lists.items()
        }
        if self.lacks_a_copy(needs):
            with pytest.raises(OutOfPages, match="pinned"):
                self.alloc.new_request(asked, salt=salt)
            self.resync()
            return
        request = self.alloc.new_request(np.array(asked, dtype=np.int64), salt=salt)
        assert request.num_tokens == found
        held = Held(request, salt, SCRIPTS[script], found, found, {}, since=found)
        for name, items in needs.items():
            self.hold(name, items)
        self.read(held)
        for name, items in needs.items():
            ids = list(held.ids[name].values())
            if self.by_name[name].kind == "paged" or not found:
                assert ids == items
            elif len(self.lists[name].free):  # a copy
                self.lists[name].free.give(*ids)
                held.ids[name] = {}
                self.put(name, items)
                held.ids[name] = {0: ids[0]}
            else:
                assert ids == items
                self.lists[name].free.forget(*ids)
        self.live.append(held)

    def resync(self) -> None:
        """After a refusal that gave items back: the order of what is idle may have changed."""
        for name, each in self.lists.items():
            index = self.alloc.lists[name].free_list.kept
            order = [*index.idle]
            assert sorted(order) == sorted(each.free.idle)
            each.free.idle = order

    @precondition(lambda self: self.live)
    @rule(number=PICK, more=st.integers(1, 16), received=st.booleans(), store=st.booleans())
    def extend(self, number: int, more: int, received: bool, store: bool) -> None:
        held = self.pick(number)
        tokens = min(held.tokens + more, len(held.script))
        reach = tokens if received else held.tokens
        gone, fresh = {}, {}
        for name in self.lists:
            first, stop = self.bounds(name, tokens, reach)
            first = max(first, min(held.ids[name], default=0))
            gone[name] = [item for n, item in held.ids[name].items() if n < first]
            fresh[name] = [n for n in range(first, stop) if n not in held.ids[name]]
        back = {
            name: sum(self.holders(name)[item] == 1 for item in items)
            for name, items in gone.items()
        }
        if not self.fits({name: len(fresh[name]) - back[name] for name in self.lists}):
            with pytest.raises(OutOfPages):
                self.alloc.extend(held.request, tokens - held.tokens, received=received)
            return
        self.alloc.extend(held.request, tokens - held.tokens, received=received)
        for name, items in gone.items():
            held.ids[name] = {n: i for n, i in held.ids[name].items() if i not in items}
            self.put(name, items)
        self.read(held)
        for name, numbers in fresh.items():
            items = [held.ids[name][n] for n in numbers]
            for item in items:
                self.lists[name].free.give(item)
        before, held.tokens = held.tokens, tokens
        held.since = tokens if received else before
        held.received = tokens if received else held.received
        self.write(held, before, held.since)
        if store:
            self.store_tokens(held, tokens)

    @precondition(lambda self: self.live)
    @rule(number=PICK, tokens=st.integers(0, 40))
    def store(self, number: int, tokens: int) -> None:
        held = self.pick(number)
        self.store_tokens(held, min(held.stored + tokens, held.tokens))

    def store_tokens(self, held: Held, stop: int) -> None:
        self.alloc.store(held.request, held.script[held.stored : stop])
        before, held.stored = held.stored, stop
        for name, each in self.lists.items() if held.keeps and stop > before else ():
            space = self.by_name[name]
            if space.kind == "paged":
                whole = -(-start(space, held.received) // space.entries_per_item)
                for ring in (one for one in self.spaces.values() if one.ring and one.ids == name):
                    reach, ends = start(ring, held.received), ring.entries_per_item
                    while start(ring, (whole + 1) * ends) < reach:
                        whole += 1
                self.keep(held, name, max(before // each.tokens, whole), stop // each.tokens)
            elif stop == held.tokens and stop % CHECKPOINT == 0 and len(self.lists[name].free):
                prefix = held.prefix(stop)
                if prefix not in each.kept:
                    ids = self.alloc.lists[name].free_list.kept.ids(name)
                    added = set(ids.tolist()) - set(each.kept.values())
                    # none: the next list's checkpoint has taken the only free item again
                    (item,) = added or each.free.idle[:1] or each.free.items
                    each.free.give(item)
                    each.kept[prefix] = item
                    each.free.idle.append(item)

    @precondition(lambda self: self.live)
    @rule(number=PICK)
    def fork(self, number: int) -> None:
        parent = self.pick(number)
        copied = {}
        for name in self.lists:
            whole = parent.tokens % self.lists[name].tokens == 0
            paged = self.by_name[name].kind == "paged"
            copied[name] = bool(parent.tokens) and not (paged and whole)
        if not self.fits(copied):
            return
        if any(
            start(self.by_name[name], parent.tokens) < start(self.by_name[name], parent.received)
            for name in self.lists
        ):
            return
        request = self.alloc.fork(parent.request, parent.tokens)
        child = Held(request, parent.salt, parent.script, parent.tokens, parent.stored, {})
        child.since, child.received, child.keeps = child.tokens, parent.received, parent.keeps
        self.read(child)
        for name, makes in copied.items():
            if makes:
                self.lists[name].free.give(list(child.ids[name].values())[-1])
        self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(number=PICK, back=st.integers(1, 12))
    def truncate(self, number: int, back: int) -> None:
        held = self.pick(number)
        tokens = max(0, held.tokens - back)
        try:
            self.alloc.truncate(held.request, tokens)
        except (ValueError, OutOfPages):  # test_allocator_stateful.py has when
            return
        gone, copied = {}, {}
        before, held.ids = held.ids, {name: {} for name in self.lists}
        self.read(held)
        for name, ids in before.items():
            gone[name] = [item for n, item in ids.items() if n not in held.ids[name]]
            copied[name] = [n for n, item in held.ids[name].items() if item != ids[n]]
            # until they are copied, what is copied is held
            held.ids[name] = {n: ids[n] for n in held.ids[name]}
        for name, items in gone.items():
            self.put(name, items)
        after = {name: dict(ids) for name, ids in held.ids.items()}
        now = held.request.address().spans
        for name, numbers in copied.items():
            for n in numbers:
                after[name][n] = int(now[name].ids[n - now[name].first_item])
                self.lists[name].free.give(after[name][n])
        for name, numbers in copied.items():
            items = [held.ids[name][n] for n in numbers]
            held.ids[name] = after[name]
            self.put(name, items)
        for name, each in self.lists.items():
            n, more = divmod(tokens, each.tokens)
            if self.by_name[name].kind == "paged" and more and n in held.ids[name]:
                each.free.forget(held.ids[name][n])
        self.cut |= tokens < held.stored
        held.tokens, held.stored = tokens, min(held.stored, tokens)
        held.since, held.received = min(held.since, tokens), min(held.received, tokens)
        # the next tokens are others than those that were taken back
        held.script = held.script[:tokens] + tuple(n ^ 1 for n in held.script[tokens:])

    @precondition(lambda self: self.live)
    @rule(number=PICK)
    def end(self, number: int) -> None:
        held = self.live.pop(number % len(self.live))
        self.alloc.free(held.request)
        for name, ids in held.ids.items():
            self.put(name, list(ids.values()))

    @rule(script=st.integers(0, 2), tokens=st.integers(0, 40))
    def pin(self, script: int, tokens: int) -> None:
        asked = SCRIPTS[script][:tokens]
        found = self.longest("", asked)
        made = self.cache.pin(asked)
        assert made.num_tokens == found
        items = {
            name: [each.kept[key] for key in self.needed(name, ("", asked[:found]))]
            for name, each in self.lists.items()
        }
        assert {name: ids.tolist() for name, ids in made.items.items()} == items
        for name, ids in items.items():
            self.hold(name, ids)
        self.pinned.append((made, items))

    @precondition(lambda self: self.pinned)
    @rule(number=PICK)
    def unpin(self, number: int) -> None:
        made, items = self.pinned.pop(number % len(self.pinned))
        self.cache.unpin(made)
        for name, ids in items.items():
            self.put(name, ids)

    @precondition(lambda self: self.live)
    @rule(again=st.integers(0, 9))
    def clear(self, again: int) -> None:
        if again:  # seldom
            return
        self.cache.clear()
        for held in self.live:
            held.keeps = False
        for each in self.lists.values():
            each.kept = {}
        for free in self.free.values():
            free.items |= set(free.idle)
            free.idle = []

    # what always holds

    @invariant()
    def every_item_is_free_or_held_as_counted(self) -> None:
        self.alloc.check_integrity()
        for name, each in self.lists.items():
            assert self.alloc.free_items(name) == len(self.lists[name].free)
            assert self.cache.stats.kept[name] == len(each.kept)

    @invariant()
    def no_page_is_next_while_a_later_one_is_idle(self) -> None:
        for name, each in self.lists.items() if not self.cut else ():
            space, rank = self.by_name[name], {item: n for n, item in enumerate(each.free.idle)}
            held = self.holders(name)
            for (salt, tokens), item in each.kept.items():
                if not space.grows or held[item] or len(tokens) == each.tokens:
                    continue
                before = each.kept[salt, tokens[: -each.tokens]]
                assert held[before] or rank[before] > rank[item]

    @invariant()
    def every_entry_that_may_be_read_has_its_mark(self) -> None:
        for held in self.live:
            for name in self.spaces:
                for entry in self.entries(name, held.tokens, held.since):
                    item, step, value = self.place(held, name, entry)
                    for view in self.memory[name]:
                        assert (view[item, step] == value).all(), (name, entry)

    @invariant()
    def events_say_what_is_kept(self) -> None:
        for event in self.cache.take_events():
            match type(event).__name__:
                case "AllBlocksCleared":
                    self.published.clear()
                case "BlockRemoved":
                    for digest in event.block_hashes:
                        del self.published[event.group_idx, digest]
                case "BlockStored":
                    size, salt = event.block_size, event.extra_keys
                    for n, digest in enumerate(event.block_hashes):
                        assert (event.group_idx, digest) not in self.published
                        tokens = tuple(event.token_ids[n * size : (n + 1) * size])
                        found = salt and salt[n], tokens
                        self.published[event.group_idx, digest] = found
        groups = {name: n for n, name in enumerate(self.alloc.lists)}
        said = Counter((group, *found) for (group, _), found in self.published.items())
        assert said == Counter(
            (groups[name], (salt,) if salt else None, tokens[-each.tokens :])
            for name, each in self.lists.items()
            for salt, tokens in each.kept
        )


BLOCKS = {"placement": "block", "num_pages": 24}
WORLDS = {
    **worlds(**SMALL),
    "OnlyStates": lambda: [hybrid(layers=[0, 1], **SMALL)],
    "RingsOfPages": lambda: [
        dsv4(layers=[1], page_rings=True, window=12, window_page_size=8, **SMALL)
    ],
    "SWAInBlocks": lambda: [swa(layers=[0, 1], **BLOCKS)],
    "HybridInBlocks": lambda: [hybrid(layers=[2, 3], **BLOCKS)],
    "DSv4InBlocks": lambda: [dsv4(layers=[1, 2], **{**BLOCKS, "num_pages": 34})],
}
globals().update(
    {f"Test{name}": machine_test(Prefixes, build, 1 / 4, 30) for name, build in WORLDS.items()}
)
