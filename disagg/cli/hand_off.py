"""What `kvpool explain` explains: the ranks of both sides, and what travels between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from os.path import isfile
from typing import Any

from disagg.plan import IncompatibleLayouts, TransferPlan
from disagg.plan.explain import Explanation, explain_routes
from disagg.plan.planner import PlanCache
from kvpool.layout import Key, PoolLayout
from kvpool.layout.codec import read_file
from kvpool.layout.sentences import by_layers, ranges

ITEMS = 1024  # of each kind: how many there are changes no plan
MAX_RANKS = 4096  # of a model
BITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSplit:
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


@dataclass(frozen=True, slots=True)
class Side:
    """`name` is prefill or decode; `files`: all ranks are of layout files."""

    name: str
    ranks: tuple[SideRank, ...]
    files: bool

    def words(self, numbers: Iterable[int] | None = None) -> str:
        """Ranks by number, or all: `prefill a.json, b.json`, `decode deepseek_v3 ranks 0-3`."""
        ranks_of: dict[str, list[int]] = {}
        for number in range(len(self.ranks)) if numbers is None else numbers:
            rank = self.ranks[number]
            ranks_of.setdefault(rank.of, []).extend([] if rank.number is None else [rank.number])
        words = [
            f"{of} rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}" if ranks else of
            for of, ranks in ranks_of.items()
        ]
        return " ".join([self.name, ", ".join(words)]).strip()


@dataclass(frozen=True)
class HandOff:
    """A request of `tokens` tokens from all ranks of prefill to each of decode."""

    prefill: Side
    decode: Side
    tokens: int

    @cached_property
    def outcomes(self) -> list[TransferPlan | IncompatibleLayouts]:
        """Of each decode rank its plan, or why there is none."""
        cache, outcomes = PlanCache(), list[TransferPlan | IncompatibleLayouts]()
        sources = [rank.layout for rank in self.prefill.ranks]
        for rank in self.decode.ranks:
            try:
                outcomes.append(cache.plan(sources, rank.layout))
            except IncompatibleLayouts as error:
                outcomes.append(error)
        return outcomes

    @property
    def plans(self) -> dict[int, TransferPlan]:
        """By decode rank."""
        return {n: plan for n, plan in enumerate(self.outcomes) if isinstance(plan, TransferPlan)}

    @cached_property
    def explained(self) -> list[tuple[list[int], Explanation]]:
        """Each explanation that differs, and the decode ranks that it is of."""
        alike: dict[Explanation, list[int]] = {}
        for number, plan in self.plans.items():
            alike.setdefault(plan.explain(self.tokens), []).append(number)
        return [(numbers, explanation) for explanation, numbers in alike.items()]

    def received(self) -> dict[int, int]:
        """Bytes by decode rank."""
        return {n: explanation.nbytes for ranks, explanation in self.explained for n in ranks}

    def sent(self) -> dict[int, int]:
        """Bytes by prefill rank, to all decode ranks."""
        sent = dict.fromkeys(range(len(self.prefill.ranks)), 0)
        for plan in self.plans.values():
            for source in plan.contributors():
                routes = [route for route in plan.routes if route.source == source]
                explanation = explain_routes(plan.sources, plan.dest, routes, self.tokens)
                sent[source] += explanation.nbytes
        return sent

    def refusals(self) -> list[tuple[str, str, str]]:
        """Prefill ranks (or the whole side), decode ranks, and why they cannot be filled."""
        refused: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for number, error in enumerate(self.outcomes):
            if isinstance(error, IncompatibleLayouts):
                by_sources: dict[tuple[int, ...], list[tuple[Key, str]]] = {}
                for r in error.reasons:
                    keyed = (r.owner, r.layer, r.role), f": {r.sentence}"
                    by_sources.setdefault(r.sources, []).append(keyed)
                for sources, reasons in by_sources.items():
                    for line in by_layers(reasons):
                        refused.setdefault((sources, line), []).append(number)
        return [
            (self.prefill.words(sources or None), self.decode.words(numbers), line)
            for (sources, line), numbers in refused.items()
        ]


def parse_link(text: str) -> float:
    """Bytes a second of `400Gb`, `400 Gb/s`, `400Gbps` (bits) or `50GB/s` (bytes)."""
    form = r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kMGT])(b|bit|B)(?:/s|ps)?"
    match = re.fullmatch(form, text.strip())
    rate = float(match[1]) * BITS[match[2]] / (1 if match[3] == "B" else 8) if match else 0.0
    if rate <= 0:
        raise ValueError(
            f"--link {text!r}: bits a second such as 400Gb (kb, Mb, Gb, Tb), or bytes such as 50GB."
        )
    return rate


def parse_sides(
    whats: Sequence[str], wholes: dict[str, str | None], packing: str | None, draft: bool
) -> tuple[Side, Side]:
    """Prefill and decode, of layout files or model configs. `wholes` are the options `tp`, `pp` and
    `page_size`: one value for both sides, or one for each as in `8:4`. Raises ValueError.
    """
    of_sides = {"prefill": whats[:-1] or whats, "decode": whats[-1:]}
    splits = parse_splits(wholes, packing, draft)
    sides = [read_side(name, of, split) for (name, of), split in zip(of_sides.items(), splits)]
    prefill, decode = sides
    if len(whats) == 1 and prefill.files:
        raise ValueError("give at least two layouts: the prefill ranks', then decode's.")
    if draft and prefill.files and decode.files:
        raise ValueError("--draft cannot change layout files. Leave it out, or give a model.")
    return prefill, decode


def parse_splits(
    wholes: dict[str, str | None],
    packing: str | None,
    draft: bool,
    sides: str = "PREFILL:DECODE",
) -> list[RankSplit]:
    """How each of two sides splits and stores a model, of options as `parse_sides` has them;
    `sides` is what a refusal calls them. Raises ValueError.
    """
    most = {"tp": MAX_RANKS, "pp": MAX_RANKS, "page_size": 1 << 20}
    splits = []
    for number in range(2):
        numbers: dict[str, Any] = {
            option: _whole(
                f"--{option.replace('_', '-')}", _of_side(text, number), most[option], sides
            )
            for option, text in wholes.items()
        }
        splits.append(RankSplit(**numbers, packing=_of_side(packing, number), draft=draft))
    return splits


def _of_side(text: str | None, number: int) -> str | None:
    """Of prefill (0) or decode (1): `8` is for both, `8:4` for each, `8:` for prefill only."""
    first, colon, second = (text or "").partition(":")
    return (second if number and colon else first) or None


def _whole(option: str, text: str | None, most: int, sides: str) -> int | None:
    """A number from 1 to `most`, or None. Raises ValueError."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise ValueError(f"{option} {text!r}: a number from 1 to {most:,}, or {sides} such as 8:4.")
    return int(text)


def read_side(name: str, whats: Sequence[str], geometry: RankSplit) -> Side:
    """The ranks of a side. Raises ValueError for what cannot be read, or split and stored so."""
    ranks, files = list[SideRank](), True
    for what in whats:
        layout = read_file(what) if isfile(what) else None
        files &= layout is not None
        ranks += _of_model(what, geometry) if layout is None else [SideRank(what, None, layout)]
    if files and geometry != RankSplit(draft=geometry.draft):
        raise ValueError(
            f"{', '.join(whats)}: --tp, --pp, --page-size and --packing cannot change a layout "
            f"file. Leave {name}'s out, or give a model config."
        )
    return Side(name, tuple(ranks), files)


def _of_model(config: str, geometry: RankSplit) -> list[SideRank]:
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
    stages = chain(*zip(*shards))
    layouts = [PoolLayout.merge(*(pool.layout for pool in pools)) for pools in stages]
    numbers = range(len(layouts)) if len(layouts) > 1 else [None]
    return [SideRank(config, number, layout) for number, layout in zip(numbers, layouts)]
