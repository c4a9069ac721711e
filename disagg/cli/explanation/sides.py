"""The ranks of both sides of a hand-off, from layout files and model configs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os.path import isfile
from typing import Any

from kvpool.layout import PoolLayout
from kvpool.layout.codec import read_file
from kvpool.layout.sentences import ranges

ITEMS = 1024  # of each kind: how many there are changes no plan
MAX_RANKS = 4096  # of a model


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a side splits and stores models: None for what is not asked, the model's default. With
    `draft`, its models have their draft layers, and its layout files what they have.
    """

    tp: int | None = None
    pp: int | None = None
    page_size: int | None = None
    packing: str | None = None
    draft: bool = False


@dataclass(frozen=True, slots=True)
class SideRank:
    """A rank's layout, and the file or model that it is of; `number` counts a model's ranks, those
    of a stage after one another. None for the only one.
    """

    of: str
    number: int | None
    layout: PoolLayout
    is_file: bool = False


@dataclass(frozen=True, slots=True)
class Side:
    """`name` is prefill or decode."""

    name: str
    ranks: tuple[SideRank, ...]

    @property
    def files(self) -> bool:
        """Whether all ranks are of layout files."""
        return all(rank.is_file for rank in self.ranks)

    @property
    def layouts(self) -> list[PoolLayout]:
        """Of all ranks."""
        return [rank.layout for rank in self.ranks]

    def words(self, numbers: Iterable[int]) -> str:
        """Ranks by number, as text: `prefill a.json, b.json`, `decode deepseek_v3 ranks 0-3`."""
        ranks_of: dict[str, list[int]] = {}
        for number in numbers:
            rank = self.ranks[number]
            ranks_of.setdefault(rank.of, []).extend([] if rank.number is None else [rank.number])
        words = [
            f"{of} rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}" if ranks else of
            for of, ranks in ranks_of.items()
        ]
        return " ".join([self.name, ", ".join(words)]).strip()


def both(text: str | None) -> tuple[str | None, str | None]:
    """An option's value for prefill and for decode: `8` for both, `8:4` for each, `8:` for prefill
    only.
    """
    if text is None:
        return None, None
    first, colon, second = text.partition(":")
    return first or None, (second if colon else first) or None


def whole(option: str, text: str | None, most: int) -> int | None:
    """A number from 1 to `most`, or None. Raises ValueError."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise ValueError(
            f"{option} {text!r}: a number from 1 to {most:,}, or PREFILL:DECODE such as 8:4."
        )
    return int(text)


def read_side(name: str, whats: Sequence[str], geometry: Geometry) -> Side:
    """The ranks of a side: of each layout file one, of each model config all. Raises ValueError for
    a file or config that cannot be read, or split and stored so.
    """
    ranks: list[SideRank] = []
    for what in whats:
        layout = read_file(what) if isfile(what) else None
        if layout is None:
            ranks += _of_model(what, geometry)
        else:
            ranks.append(SideRank(what, None, layout, is_file=True))
    side = Side(name, tuple(ranks))
    if side.files and geometry != Geometry(draft=geometry.draft):
        raise ValueError(
            f"{', '.join(whats)}: --tp, --pp, --page-size and --packing cannot change a layout "
            f"file. Leave {name}'s out, or give a model config."
        )
    return side


def _of_model(config: str, geometry: Geometry) -> list[SideRank]:
    from kvpool.cli.budget import draft_of, storage
    from kvpool.layout.formats import Shard
    from kvpool.models import declare
    from kvpool.models.sizing import stage_pools
    from kvpool.pools.placement import ITEM_COUNTS

    target, tp, pp = declare(config), geometry.tp or 1, geometry.pp or 1
    if tp * pp > MAX_RANKS:
        raise ValueError(f"{config}: {tp * pp:,} ranks, at most {MAX_RANKS:,} are explained.")
    common: dict[str, Any] = {"device": "meta", "page_size": geometry.page_size or target.page_size}
    common |= {**dict.fromkeys(ITEM_COUNTS, ITEMS), **storage(geometry.packing or "bf16")}
    drafted = draft_of(config) if geometry.draft else None
    shards = [stage_pools(target, drafted, pp, shard=Shard(n, tp), **common) for n in range(tp)]
    layouts = [
        PoolLayout.merge(*(pool.layout for pool in pools))
        for stage in zip(*shards)
        for pools in stage
    ]
    numbers = range(len(layouts)) if len(layouts) > 1 else [None]
    return [SideRank(config, number, layout) for number, layout in zip(numbers, layouts)]
