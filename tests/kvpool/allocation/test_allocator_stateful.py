"""Requests that grow, fork, end and are refused in any order, beside a model of dicts and sets.

The model learns ids where items are handed out and then holds the allocator to them. Every entry
is written with a mark of its own, so that an item that is shared, moved or handed out wrongly
shows another request's mark where it is read. Rooms pin requests; what they were given stays.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from kvpool import OutOfPages, RequestAddress, RequestPinned
from kvpool.allocation.allocator import Request
from kvpool.layout import Pin
from tests.kvpool.allocation.machine import PICK, Machine, machine_test, start, worlds
from tests.pools import dsv4, hybrid, mha, mla, swa

SMALL = {"num_pages": 10, "num_window_pages": 8, "num_slots": 4}
PICKS = st.sets(st.integers(0, 4), min_size=1)
TOKENS = st.integers(0, 15).map(lambda tokens: 300 if tokens == 15 else tokens)


@dataclass
class Room:
    """A room that offers or receives a request: pools by number, and what must stay in them, by
    space: (item, entry) and mark.
    """

    side: str
    pools: range
    last: bool
    tokens: int
    keeps: dict[str, dict[tuple[int, int], int]]
    ended: bool = False


@dataclass
class Held:
    """What one request must reach: ids by item number, and marks by entry."""

    request: Request
    ids: dict[str, dict[int, int]]
    marks: dict[str, dict[int, int]]
    tokens: int = 0
    first: Counter[str] = field(default_factory=Counter)  # items before it went back
    since: int = 0  # tokens at which all that was alive is in place
    received: int = 0  # tokens that had last been received
    lost: Counter[str] = field(default_factory=Counter)  # of a ring, entries before it
    # of the rings of pages, by page and step: the entry that was there last
    there: dict[str, dict[tuple[int, int], int]] = field(default_factory=dict)
    rooms: list[Room] = field(default_factory=list)
    table: RequestAddress | None = None  # of some time before

    def lacks(self, space, entry: int) -> bool:
        """Whether a later entry has been in the place of an entry of a page's ring."""
        place = entry // space.entries_per_item, entry % (space.ring or 1)
        return space.ring is not None and self.there[space.name][place] != entry

    def open_rooms(self) -> list[Room]:
        return [room for room in self.rooms if not room.ended]


class Lives(Machine):
    """One allocator, its pools, and the model of both."""

    def __init__(self) -> None:
        super().__init__()
        self.lists = self.items
        self.count = 0

    def siblings(self, name: str) -> list[str]:
        """The id lists that take their ids from the same pool."""
        pool = self.by_name[name].block_pool
        return [n for n in self.lists if n == name or (pool and self.by_name[n].block_pool == pool)]

    def free_ids(self, name: str) -> set[int]:
        lists = self.siblings(name)
        held = {n for each in self.live for one in lists for n in each.ids[one].values()}
        return set(range(1, self.lists[name])) - held

    def write(self, held: Held, name: str, entry: int, location: int) -> None:
        self.count += 1
        size = self.spaces[name].ring or self.spaces[name].entries_per_item
        mark = held.marks[name][entry] = self.count % 255 + 1
        for view in self.memory[name]:
            view[location // size, location % size] = mark

    def take(self, held: Held, name: str, first: int, stop: int) -> None:
        """Checks the ids that a request has now, and learns those that are new."""
        span = held.request.address().spans[name]
        assert list(range(span.first_item, span.first_item + span.ids.size)) == [
            *range(first, stop)
        ]
        known, free = held.ids[name], self.free_ids(name)
        for number, item in zip(range(first, stop), span.ids.tolist()):
            if number not in known:
                free.remove(item)  # a KeyError: handed out twice, or padding
                known[number] = item
            assert known[number] == item
        held.first[name] = first

    @rule()
    def begin(self) -> None:
        empty = [{name: {} for name in names} for names in (self.lists, self.spaces, self.spaces)]
        self.live.append(Held(self.alloc.new_request(), *empty[:2], there=empty[2]))

    @precondition(lambda self: self.live)
    @rule(number=PICK, tokens=TOKENS, received=st.booleans())
    def extend(self, number: int, tokens: int, received: bool) -> None:
        self.grow([self.pick(number)], [tokens], received, alone=True)

    @precondition(lambda self: self.live)
    @rule(
        numbers=PICKS,
        tokens=st.lists(TOKENS, min_size=5, max_size=5),
        equal=st.booleans(),
        received=st.booleans(),
    )
    def extend_batch(
        self, numbers: set[int], tokens: list[int], equal: bool, received: bool
    ) -> None:
        batch = [each for n, each in enumerate(self.live) if n in numbers][::-1]
        self.grow(batch, tokens[:1] * len(batch) if equal else tokens[: len(batch)], received)

    def live_entries(self, name: str, tokens: int) -> range:
        space = self.spaces[name]
        if space.kind == "slot":
            return range(min(tokens, 1))
        return range(start(space, tokens), tokens // space.tokens_per_entry)

    def spaces_of(self, pools: range) -> set[str]:
        return {buffer.space for n in pools for buffer in self.pools[n].layout.buffers}

    def lost(self, pools: range, held: int, tokens: int, first: dict[str, int]) -> bool:
        """Whether a request of `tokens` tokens lacks what was alive of `held` in these pools."""
        for name in self.spaces_of(pools):
            space, alive = self.spaces[name], self.live_entries(name, held)
            if space.kind != "paged" or space.ring:
                if alive and tokens != held:
                    return True
            elif alive and alive[0] // space.entries_per_item < first[space.id_list]:
                return True
        return False

    @precondition(lambda self: self.live)
    @rule(number=PICK)
    def remember(self, number: int) -> None:
        held = self.pick(number)
        held.table = held.request.address()

    @precondition(lambda self: self.live)
    @rule(
        number=PICK,
        pool=st.integers(-1, 2),
        side=st.sampled_from(["offered", "offered", "received"]),
        last=st.booleans(),
        old=st.booleans(),
        first=st.integers(0, 12),
    )
    def pin(self, number: int, pool: int, side: str, last: bool, old: bool, first: int) -> None:
        """A room takes a request: whole or a chunk of it, maybe by a block table that is old."""
        held, last = self.pick(number), last or side == "received"
        table = (old and held.table) or held.request.address()
        pools = range(len(self.pools)) if pool < 0 else range(pool % len(self.pools), 99)[:1]
        layout = self.alloc.layout if pool < 0 else self.pools[pools[0]].layout
        tokens, keeps = table.num_tokens, {}
        room = Room(side, pools, last, tokens, keeps)
        named = Pin(self.count, side, table, layout, last, lambda: not room.ended, first)
        self.count += 1
        shared = any(
            item in each.ids[name].values()
            for name, ids in held.ids.items()
            for n, item in ids.items()
            for each in self.live
            if each is not held and n >= first // self.by_name[name].tokens_per_item
        )
        clash = any(
            "received" in (side, other.side) and {*pools} & {*other.pools}
            for other in held.open_rooms()
        )
        stale = tokens > held.tokens or any(
            held.ids[name].get(n, item) != item
            for name, span in table.spans.items()
            for n, item in enumerate(span.ids.tolist(), span.first_item)
        )
        if stale or (last and self.lost(pools, tokens, held.tokens, held.first)):
            with pytest.raises(ValueError, match=r"address\(\) again"):
                held.request.pin(named)
        elif side == "received" and shared:
            with pytest.raises(ValueError, match="of this request to items"):
                held.request.pin(named)
        elif clash:
            with pytest.raises(RequestPinned):
                held.request.pin(named)
        else:
            held.request.pin(named)
            held.rooms.append(room)
            for name in self.spaces_of(pools) if last else ():
                space, ids = self.spaces[name], held.ids[self.spaces[name].id_list]
                keeps[name] = {
                    (
                        ids[n // space.entries_per_item if space.kind == "paged" else 0],
                        n % (space.ring or space.entries_per_item),
                    ): held.marks[name][n]
                    for n in self.live_entries(name, tokens)
                }

    @precondition(lambda self: any(each.open_rooms() for each in self.live))
    @rule(number=PICK)
    def room_ends(self, number: int) -> None:
        rooms = [room for each in self.live for room in each.open_rooms()]
        rooms[number % len(rooms)].ended = True

    def grow(self, batch: list[Held], more: list[int], received: bool, alone: bool = False) -> None:
        wanted: dict[str, list[tuple[int, int]]] = {}
        spare: dict[str, int] = {}
        for name in self.lists:
            back: Counter[int] = Counter()
            needed = 0
            for each, tokens in zip(batch, more):
                reach = each.tokens + tokens if received else each.tokens
                first, stop = self.bounds(name, each.tokens + tokens, reach)
                first = max(first, each.first[name])
                wanted.setdefault(name, []).append((first, stop))
                back.update(item for n, item in each.ids[name].items() if n < first)
                needed += sum(n not in each.ids[name] for n in range(first, stop))
            all_held = Counter(n for each in self.live for n in each.ids[name].values())
            freed = sum(all_held[item] == count for item, count in back.items())
            spare[name] = freed - needed
        fits = all(
            sum(spare[each] for each in self.siblings(name)) + len(self.free_ids(name)) >= 0
            for name in self.lists
        )
        requests = [each.request for each in batch]
        given = more if len({*more}) > 1 else more[0] if more else 0
        if not fits:
            with pytest.raises(OutOfPages, match="more items"):
                self.alloc.extend_batch(requests, given, received=received)
            return
        firsts = [{name: ends[n][0] for name, ends in wanted.items()} for n in range(len(batch))]
        if any(
            room.last and self.lost(room.pools, room.tokens, each.tokens + tokens, first)
            for each, tokens, first in zip(batch, more, firsts)
            for room in each.open_rooms()
        ):
            with pytest.raises(RequestPinned, match="it would lose"):
                self.alloc.extend_batch(requests, given, received=received)
            return
        if alone:
            found = self.alloc.extend(requests[0], given, received=received)
            found = {name: where[None] for name, where in found.items()}
        else:
            found = self.alloc.extend_batch(requests, given, received=received)
        assert set(found) == set(self.spaces)
        for name, ends in wanted.items():
            for each, (first, _) in zip(batch, ends):
                each.ids[name] = {n: i for n, i in each.ids[name].items() if n >= first}
        for name, ends in wanted.items():
            for each, (first, stop) in zip(batch, ends):
                self.take(each, name, first, stop)
        for number, (each, tokens) in enumerate(zip(batch, more)):
            before, each.tokens = each.tokens, each.tokens + tokens
            each.since = each.tokens if received else before
            each.received = each.tokens if received else each.received
            for name, where in found.items():
                assert (where[number, tokens:] == -1).all()
                self.fill(each, name, range(before, each.tokens), where[number, :tokens], received)

    def fill(
        self, held: Held, name: str, positions: range, where: np.ndarray, received: bool
    ) -> None:
        """Writes what tokens leave behind, or, of received ones, what is alive in the end."""
        space = self.spaces[name]
        assert (where.dtype, where.size) == (np.int64, len(positions))
        for position, location in zip(positions, where.tolist()):
            entry, whole = divmod(position + 1, space.tokens_per_entry)
            if space.kind == "slot":
                self.write(held, name, 0, location)
                continue
            dead = received and entry - 1 < start(space, held.tokens)
            if space.ring:
                at = position // space.entries_per_item, position % space.ring
                held.there[name][at] = position
            elif space.kind == "paged" and not dead:
                assert location >= 0
            if location >= 0 and not whole and not dead:
                self.write(held, name, entry - 1, location)

    @precondition(lambda self: self.live)
    @rule(number=PICK, back=st.one_of(st.just(0), st.integers(0, 4), st.integers(0, 40)))
    def fork(self, number: int, back: int) -> None:
        parent = self.pick(number)
        tokens = max(0, parent.tokens - back)
        if any(room.side == "received" for room in parent.open_rooms()):
            with pytest.raises(RequestPinned, match="a fork would"):
                self.alloc.fork(parent.request, tokens)
            return
        gone = False
        copied = {}
        for name in self.lists:
            space = self.by_name[name]
            first, stop = self.bounds(name, tokens, tokens)
            if space.kind == "paged":
                incomplete = tokens % (space.entries_per_item * space.tokens_per_entry)
                lost = start(space, tokens) < start(space, parent.received)
                gone |= tokens > 0 and (lost or first < parent.first[name])
            else:
                gone |= tokens not in (0, parent.tokens)
                incomplete = tokens
            copied[name] = stop - 1 if incomplete else None
        for space in self.spaces.values() if tokens else ():
            if space.ring:
                alive = self.live_entries(space.name, tokens)
                gone |= alive.start < start(space, parent.received)
                gone |= not gone and any(parent.lacks(space, entry) for entry in alive)
        out = any(
            sum(copied[each] is not None for each in self.siblings(name)) > len(self.free_ids(name))
            for name in self.lists
        )
        if gone or out:
            refused = {ValueError} if not out else {OutOfPages} if not gone else {0}
            with pytest.raises((ValueError, OutOfPages)) as raised:
                self.alloc.fork(parent.request, tokens)
            assert refused == {0} or raised.type in refused
            return
        child = Held(self.alloc.fork(parent.request, tokens), {}, {}, tokens, since=tokens)
        child.received = min(parent.received, tokens)
        child.lost = Counter(parent.lost if tokens else {})
        child.there = {name: dict(there) for name, there in parent.there.items()}
        self.live.append(child)
        for name in self.lists:
            first, stop = self.bounds(name, tokens, tokens)
            kept = (n for n in range(first, stop) if n != copied[name])
            child.ids[name] = {n: parent.ids[name][n] for n in kept}
        for name in self.lists:
            self.take(child, name, *self.bounds(name, tokens, tokens))
        for name in self.spaces:
            child.marks[name] = dict(parent.marks[name])

    def gone(self, held: Held, name: str, tokens: int) -> bool:
        """Whether the request lacks what is alive in a space at that many tokens."""
        space, alive = self.spaces[name], self.live_entries(name, tokens)
        if not alive:
            return False
        if space.kind == "slot":
            return tokens != held.tokens
        first = held.first[space.id_list] * space.entries_per_item
        if space.kind == "ring":  # what has been written there since
            last = held.tokens // space.tokens_per_entry
            first = max(held.lost[name], last - space.entries_per_item)
        if any(held.lacks(space, entry) for entry in alive):
            return True
        return alive[0] < max(first, start(space, held.received))

    @precondition(lambda self: self.live)
    @rule(
        numbers=PICKS,
        back=st.lists(st.one_of(st.integers(0, 4), st.integers(0, 40)), min_size=5, max_size=5),
    )
    def truncate(self, numbers: set[int], back: list[int]) -> None:
        batch = [each for n, each in enumerate(self.live) if n in numbers]
        ends = [max(0, each.tokens - n) for each, n in zip(batch, back)]
        fewer = [(each, end) for each, end in zip(batch, ends) if end < each.tokens]
        refusals: set[type] = set()
        spare, copied = Counter(), {}
        for name in self.lists:
            space = self.by_name[name]
            counts = Counter(n for each in self.live for n in each.ids[name].values())
            back_: Counter[int] = Counter()
            for number, (each, tokens) in enumerate(fewer):
                stop = self.bounds(name, tokens, tokens)[1]
                back_.update(item for n, item in each.ids[name].items() if n >= stop)
                partial = tokens % (space.entries_per_item * space.tokens_per_entry)
                last = each.ids[name].get(stop - 1)
                if space.kind == "paged" and partial and last is not None and counts[last] > 1:
                    copied[number, name] = stop - 1
                    spare[name] -= 1
            spare[name] += sum(counts[item] == count for item, count in back_.items())
        for number, (each, tokens) in enumerate(fewer):
            if any(self.gone(each, name, tokens) for name in self.spaces):
                refusals.add(ValueError)
            moved = any(n == number for n, _ in copied)
            if any(room.tokens > tokens or moved for room in each.open_rooms()):
                refusals.add(RequestPinned)
        if any(
            sum(spare[each] for each in self.siblings(name)) + len(self.free_ids(name)) < 0
            for name in self.lists
        ):
            refusals.add(OutOfPages)
        requests = [each.request for each in batch]
        if refusals:
            with pytest.raises(tuple(refusals)):
                self.alloc.truncate_batch(requests, ends)
            return
        if len(batch) == 1:
            self.alloc.truncate(requests[0], ends[0])
        else:
            self.alloc.truncate_batch(requests, ends)
        for number, (each, tokens) in enumerate(fewer):
            for name in self.spaces:
                space = self.spaces[name]
                if space.kind == "ring":
                    most, left = (t // space.tokens_per_entry for t in (each.tokens, tokens))
                    rest = min(most - space.entries_per_item, left)
                    each.lost[name] = max(each.lost[name], rest) if tokens else 0
            for name in self.lists:
                stop = self.bounds(name, tokens, tokens)[1]
                kept = {n: item for n, item in each.ids[name].items() if n < stop}
                kept.pop(copied.get((number, name)), None)
                each.ids[name] = kept
            each.tokens, each.since = tokens, min(each.since, tokens)
            each.received = min(each.received, tokens)
        for each, tokens in fewer:
            for name in self.lists:
                stop = self.bounds(name, tokens, tokens)[1]
                self.take(each, name, min(each.first[name], stop), stop)

    @precondition(lambda self: self.live)
    @rule(number=PICK)
    def end(self, number: int) -> None:
        if self.pick(number).open_rooms():
            with pytest.raises(RequestPinned, match="free would give up"):
                self.alloc.free(self.pick(number).request)
            return
        gone = self.live.pop(number % len(self.live))
        self.alloc.free(gone.request)
        assert gone.request.num_tokens == 0

    @invariant()
    def every_item_is_free_or_held_as_counted(self) -> None:
        self.alloc.check_integrity()
        for name in self.lists:
            assert self.alloc.free_items(name) == len(self.free_ids(name))

    @invariant()
    def every_position_lies_where_the_model_says(self) -> None:
        for held in self.live:
            assert held.request.num_tokens == held.tokens
            found = self.alloc.locations(held.request)
            for name, space in self.spaces.items():
                size, ids = space.entries_per_item, held.ids[space.id_list]
                for position, location in enumerate(found[name].tolist()):
                    entry = position // space.tokens_per_entry
                    item = ids.get(entry // size if space.kind == "paged" else 0)
                    lacks = held.lacks(space, entry)
                    late = held.tokens // space.tokens_per_entry - size
                    late = max(late, held.lost[name])
                    if item is None or lacks or (space.kind == "ring" and entry < late):
                        assert location == -1
                    elif space.ring:
                        assert location == item * space.ring + entry % space.ring
                    else:
                        assert location == item * size + entry % size

    @invariant()
    def every_entry_that_may_be_read_has_its_mark(self) -> None:
        for held in self.live:
            for name, space in self.spaces.items():
                size, ids = space.entries_per_item, held.ids[space.id_list]
                if space.kind == "slot":
                    alive = range(min(held.tokens, 1))
                else:  # what the next of several tokens reads is still in pages, not in rings
                    whole = space.kind == "paged" and not space.ring
                    since = held.since if whole else held.tokens
                    alive = range(start(space, since), held.tokens // space.tokens_per_entry)
                items = [ids[n // size if space.kind == "paged" else 0] for n in alive]
                marks = np.array([held.marks[name][n] for n in alive], dtype=np.uint8)
                steps = [n % (space.ring or size) for n in alive]
                for view in self.memory[name] if items else ():
                    read = view[items, steps].reshape(len(alive), -1)
                    assert (read == marks[:, None]).all(), f"{name}: {read[:, 0]} is not {marks}"

    @invariant()
    def what_rooms_were_given_is_neither_changed_nor_free(self) -> None:
        rooms = [room for each in self.live for room in each.open_rooms()]
        for name, keeps in [pair for room in rooms for pair in room.keeps.items()]:
            id_list = self.spaces[name].id_list
            assert not {item for item, _ in keeps} & self.free_ids(id_list)
            for view in self.memory[name]:
                for at, mark in keeps.items():
                    assert (view[at] == mark).all(), f"{name}: {view[at]} is not {mark}"


BLOCKS = {"placement": "block", "num_pages": 20}
WORLDS = {
    **worlds(**SMALL),
    "LongRings": lambda: [dsv4(layers=[1, 2], speculation=True, **SMALL)],
    "RingsOfPages": lambda: [dsv4(layers=[1, 2], page_rings=True, window_page_size=8, **SMALL)],
    "LongRingsOfPages": lambda: [
        dsv4(layers=[1], page_rings=True, speculation=True, window_page_size=16, **SMALL)
    ],
    "SWAInBlocks": lambda: [swa(**BLOCKS)],
    "DSv4InBlocks": lambda: [dsv4(layers=[1, 2], **BLOCKS)],
    "DraftInBlocks": lambda: [
        swa(layers=[0, 1], **BLOCKS),
        mla(owner="draft", layers=[4], **BLOCKS),
        hybrid(owner="draft1", layers=[0, 3], own_spaces=True, **{**SMALL, **BLOCKS}),
        mha(owner="draft2", layers=[0], own_spaces=True, **SMALL),
    ],
}
globals().update(
    {f"Test{name}": machine_test(Lives, build, 2 / 5, 40) for name, build in WORLDS.items()}
)
