"""Index spaces: which list of ids addresses a buffer's items, and which positions an item holds."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.layout.grid import Numbers
from kvpool.layout.kinds import KINDS, KindName, SpaceKind
from kvpool.layout.types import LayoutError, need_int, need_name

MAX_RANKS = 1 << 10
"""Ranks over which a space's positions are interleaved."""
MAX_ITEMS_PER_BLOCK = 1 << 12
"""Items that one block of a block pool is."""
MAX_ROUND = 1 << 40
"""Positions of one stretch of every rank."""


@dataclass(frozen=True, slots=True)
class Interleave:
    """What rank `rank` of `ranks` holds of consecutive numbers (positions, or entries): every
    `ranks`-th stretch of `size`, so number x if `x // size % ranks == rank`.

    The numbers that it holds are counted densely: its `index` 0, 1, ... are the first, the second.
    `Interleave(16, rank=1, ranks=2)` holds 16-31, 48-63, ...: 48 is index 16, `below(50)` is 18.
    """

    size: int
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        need_int(self.size, 1, "interleave size")
        need_int(self.ranks, 1, "interleave ranks", MAX_RANKS)
        if not 0 <= self.rank < self.ranks:
            raise LayoutError(
                f"interleave rank: 0 to {self.ranks - 1} of {self.ranks} ranks, got {self.rank}."
            )
        if self.size * self.ranks > MAX_ROUND:
            raise LayoutError(
                f"interleave: stretches of {self.size} over {self.ranks} ranks: at most 2**40 in "
                "all."
            )

    def number(self, index: Numbers) -> Numbers:
        """The number of an index: 20, of 4 on the second of two ranks with stretches of 16."""
        return (index // self.size * self.ranks + self.rank) * self.size + index % self.size

    def index(self, number: Numbers) -> Numbers:
        """The index of a number that this rank holds."""
        return number // (self.size * self.ranks) * self.size + number % self.size

    def below(self, number: int) -> int:
        """How many numbers below `number` this rank holds."""
        rounds, rest = divmod(number, self.size * self.ranks)
        return rounds * self.size + min(max(rest - self.rank * self.size, 0), self.size)

    def part(self, numbers: range) -> range:
        """Indices of those of consecutive numbers that this rank holds: of 20 to 51, the second of
        two ranks with stretches of 16 holds 20-31 and 48-51, which are its indices 4 to 19.
        """
        if self.ranks == 1:
            return numbers
        return range(self.below(numbers.start), self.below(numbers.stop))


EVERY = Interleave(MAX_ROUND, 0, 1)
"""One rank holds all, in one stretch."""


@dataclass(frozen=True, slots=True)
class Space:
    """Which list of ids addresses a buffer's items, and which positions an item holds.

    - `paged`: position p is entry `p // tokens_per_entry`, found in item `ids[entry //
      entries_per_item]`
    - `slot`: one item per request, no entries
    - `ring`: one item per request; entry e is at step `e % entries_per_item`

    Slots and rings belong to one request and change as it grows: they are transferred whole, with
    its last position. `window`: of n entries those from `n // window_step * window_step - window`
    are alive (None: all). The first `reserved` items are padding. `ids`: the space whose id list
    this one shares (None: it has its own).

    Position 130 in pages of 64 entries is step 2 of item `ids[2]`; where an entry has 4 tokens, it
    is entry 32, of item `ids[0]`; in a ring of 128 it is at step 2, where position 2 was. With
    `window` 128, of 1,000 entries those from 872 are alive.

    `block_pool`: the pool of blocks that the ids come from (None: ids of its own). A block is in
    use by one of the pool's id lists at a time, so their buffers may lie over one another, block
    over block. Block b of an id list is `items_per_block` items, from `b * items_per_block` on.

    `interleave`: the positions whose entries this rank holds, if ranks divide them (context
    parallelism; paged spaces only). Its entries are then numbered densely, as those of a
    request that has no others: entry e of this rank is entry `held.number(e)` of the request,
    and lies in item `ids[e // entries_per_item]`. Windows and `RequestAddress.num_tokens` count
    the whole request's. A stretch is a multiple of `tokens_per_entry`, so that each entry is one
    rank's. None: this rank holds them all.

    `ring`: (paged) an item has room for so many of its entries, the last ones that were written:
    entry e is at step `e % ring` of its item. A row may change until its window closes, so entries
    are transferred with the last position of their `window_step`. None: for all.

    `whole`: (paged, with a window) no prefix cache keeps its entries. So all that are alive move
    with the request's last position, those too of positions that the destination has already.

    `partial`: (paged) an entry of several tokens is written token by token, so that the last one is
    alive before it is full, and `window` counts tokens. False: an entry is what its tokens are
    compressed to, and comes into being with the last of them.
    """

    name: str
    kind: KindName = "paged"
    entries_per_item: int = 1
    tokens_per_entry: int = 1
    window: int | None = None
    reserved: int = 1
    ids: str | None = None
    window_step: int = 1
    block_pool: str | None = None
    interleave: Interleave | None = None
    items_per_block: int = 1
    ring: int | None = None
    whole: bool = False
    partial: bool = False

    def __post_init__(self) -> None:
        subject = f"space {self.name}"
        need_name(self.name, "space")
        if self.kind not in [*KINDS]:
            raise LayoutError(f"{subject} kind: one of {', '.join(KINDS)}, got {self.kind!r}.")
        need_int(self.entries_per_item, 1, f"{subject} entries_per_item")
        need_int(self.tokens_per_entry, 1, f"{subject} tokens_per_entry")
        need_int(self.reserved, 0, f"{subject} reserved")
        need_int(self.window_step, 1, f"{subject} window_step")
        if self.interleave is not None and self.interleave.ranks == 1:
            object.__setattr__(self, "interleave", None)  # one rank holds all, for any size
        self.traits.check(self)
        if self.window is not None:
            need_int(self.window, 1 if self.window_step == 1 else 0, f"{subject} window")
        elif self.window_step != 1:
            raise LayoutError(f"{subject}: a window_step of {self.window_step} needs a window.")
        if self.whole and (self.per_request or self.window is None):
            raise LayoutError(
                f"{subject} whole: of paged spaces with a window. Slots and rings always are."
            )
        for name, value in (("ids", self.ids), ("block_pool", self.block_pool)):
            if value is not None:
                need_name(value, f"{subject} {name}")
        if self.ids is not None and self.block_pool is not None:
            raise LayoutError(
                f"{subject}: its ids are those of space {self.ids}: give that space block_pool "
                f"{self.block_pool!r}, and this one none."
            )
        need_int(self.items_per_block, 1, f"{subject} items_per_block", MAX_ITEMS_PER_BLOCK)
        if self.items_per_block > 1 and self.block_pool is None:
            raise LayoutError(
                f"{subject}: items_per_block {self.items_per_block} without a block_pool. Name the "
                "pool (of ids that are another space's, there), or leave items_per_block out."
            )

    @property
    def traits(self) -> SpaceKind:
        """The rules of its kind."""
        return KINDS[self.kind]

    @property
    def per_request(self) -> bool:
        """Whether a request has exactly one item: slots and rings."""
        return self.traits.per_request

    @property
    def has_entries(self) -> bool:
        """Whether an item has entries, which follow positions: pages and rings."""
        return self.traits.has_entries

    @property
    def wraps(self) -> bool:
        """Whether entries of an item are overwritten by later ones: rings, of requests or pages."""
        return self.traits.wraps or self.ring is not None

    @property
    def steps(self) -> int:
        """Entries for which an item has room: entry e is at step `e % steps` of its item."""
        return self.ring or self.entries_per_item

    @property
    def grows(self) -> bool:
        """Whether the items of a request grow with its tokens: pages without a window."""
        return not self.per_request and self.window is None

    def written(self, tokens: Numbers) -> Numbers:
        """How many entries tokens, or each of `[N]` numbers of tokens, have: of 7 tokens entries of
        4 are 1, or with `partial` 2.
        """
        per = self.tokens_per_entry
        return -(-tokens // per) if self.partial else tokens // per

    @property
    def held(self) -> Interleave:
        """Which entries of a request this rank holds: where ranks share out stretches of 64
        positions and an entry is 4 of them, stretches of 16 entries.
        """
        if self.interleave is None:
            return EVERY
        size = self.interleave.size // self.tokens_per_entry
        return Interleave(size, self.interleave.rank, self.interleave.ranks)

    def alive(self, tokens: int) -> range:
        """Live entries of a request of `tokens` tokens, in this rank's numbers; a slot is one."""
        return self.held.part(self.alive_in_request(tokens))

    def alive_in_request(self, tokens: int) -> range:
        """Live entries of a request of `tokens` tokens on all ranks, in the request's numbers.

        With a window of 8, those of 21 tokens are 13 to 20. With a `window_step` of 4 too, they
        are 12 to 20: `21 // 4 * 4 - 8` is 12.
        """
        return self.traits.alive(self, tokens)

    def alive_items(self, tokens: int) -> range:
        """Items with live entries of a request of `tokens` tokens, by number in the request.

        In pages of 4 and with a window of 8, the items of 16 tokens are 2 and 3. A block table that
        lists freed ones as null reads [NULL, NULL, 7, 8]: `Span([7, 8], first_item=2)`.
        """
        return self.traits.alive_items(self, tokens)

    def needed_entries(self, tokens: range, total: int) -> range:
        """Entries that move with positions `tokens` of a request of `total` tokens: those that are
        alive at its end, in the request's numbers, whichever rank holds them. Of 20
        tokens and with a window of 8, tokens 0 to 15 move entries 12 to 15. With `whole` tokens 16
        to 19 move entries 12 to 19, and those before them none.
        """
        return self.traits.needed_entries(self, tokens, total)

    def needed_items(self, tokens: range, total: int) -> range:
        """Items, by number in the request, that move whole with `tokens`: those with live entries
        whose last position is among them. The last item ends with the request. In pages of 4,
        tokens 0 to 9 of 11 move items 0 and 1, tokens 10 of 11 item 2.
        """
        return self.traits.needed_items(self, tokens, total)

    def place(self, entries: Numbers) -> tuple[Numbers, Numbers]:
        """Of an entry of this rank, or of each of `[N]`: its item's number in the request, and its
        step there. In pages of 16, entry 45 is at step 13 of item 2: 45 = 2 * 16 + 13.
        """
        item = 0 * entries if self.per_request else entries // self.entries_per_item
        return item, entries % self.steps

    @property
    def id_list(self) -> str:
        """Name of the space whose id list this one uses."""
        return self.ids or self.name

    @property
    def tokens_per_item(self) -> int:
        """Positions that one item of a paged space holds."""
        return self.entries_per_item * self.tokens_per_entry

    @property
    def item_span(self) -> int:
        """Positions that lie in items of one number on all ranks together: of a paged space whose
        stretches divide an item, item i of every rank holds positions from `i * item_span` on.
        Of two ranks with pages and stretches of 16 that is 32: item 1 of the first holds positions
        32 to 47, item 1 of the second 48 to 63.
        """
        return self.tokens_per_item * self.held.ranks
