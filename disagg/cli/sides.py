"""What options of `kvpool explain` mean: the ranks of both sides, and the link between them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from os.path import isfile
from typing import Any, get_args

from disagg.contract.hand_off import Side, SideRank
from kvpool.layout import PoolLayout
from kvpool.layout.codec import read_file
from kvpool.layout.formats import MHA, Order
from kvpool.pools.placement import Placement

ITEMS = 1024  # of each kind: how many there are changes no plan
MAX_RANKS = 4096  # of a model
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
MOST = {"tp": MAX_RANKS, "pp": MAX_RANKS, "page_size": 1 << 20}
CHOICES = {"order": get_args(Order), "placement": get_args(Placement)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSplit:
    """How a side splits and stores models: None for what is not asked, the model's default. With
    `draft`, its models have their draft layers, and its layout files what they have.
    """

    tp: int | None = None
    pp: int | None = None
    page_size: int | None = None
    packing: str | None = None
    order: str | None = None
    placement: str | None = None
    draft: bool = False


@dataclass(frozen=True, slots=True)
class AskedSide:
    """Prefill or decode as it is asked for: layout files or model configs, and how the models are
    split and stored.
    """

    name: str
    whats: tuple[str, ...]
    split: RankSplit

    def read(self) -> Side:
        """Its ranks. Raises ValueError."""
        return read_side(self.name, self.whats, self.split)


def parse_link(text: str) -> float:
    """Bytes a second of `400Gb`, `400 Gb/s`, `400Gbps` (bits) or `50GB/s` (bytes)."""
    form = r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kMGT])(b|bit|B)(?:/s|ps)?"
    match = re.fullmatch(form, text.strip())
    rate = float(match[1]) * UNITS[match[2]] / (1 if match[3] == "B" else 8) if match else 0.0
    if rate <= 0:
        raise ValueError(
            f"--link {text!r}: bits a second such as 400Gb (kb, Mb, Gb, Tb), or bytes such as 50GB."
        )
    return rate


def parse_run_rate(text: str) -> float:
    """Runs a second of `5M`, `200k` or `1500000`."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([kMG]?)(?:/s)?", text.strip())
    rate = float(match[1]) * UNITS[match[2]] if match else 0.0
    if rate <= 0:
        raise ValueError(f"--run-rate {text!r}: runs a second such as 5M (k, M, G).")
    return rate


def parse_sides(
    whats: Sequence[str], options: dict[str, str | None], draft: bool
) -> tuple[AskedSide, AskedSide]:
    """Prefill and decode, of layout files or model configs. `options` are fields of RankSplit: one
    value for both sides, or one for each as in `8:4`. Raises ValueError.
    """
    if len(whats) == 1 and isfile(whats[0]):
        raise ValueError("give at least two layouts: the prefill ranks', then decode's.")
    splits = parse_splits(options, draft)
    prefill = AskedSide("prefill", tuple(whats[:-1] or whats), splits[0])
    return prefill, AskedSide("decode", tuple(whats[-1:]), splits[1])


def read_sides(prefill: AskedSide, decode: AskedSide) -> tuple[Side, Side]:
    """The ranks of both sides. Raises ValueError."""
    sides = prefill.read(), decode.read()
    if prefill.split.draft and all(side.files for side in sides):
        raise ValueError("--draft cannot change layout files. Leave it out, or give a model.")
    return sides


def parse_splits(
    options: dict[str, str | None], draft: bool, sides: str = "PREFILL:DECODE"
) -> list[RankSplit]:
    """How each of two sides splits and stores a model, of options as `parse_sides` has them;
    `sides` is what a refusal calls them. Raises ValueError.
    """
    splits = []
    for number in range(2):
        fields: dict[str, Any] = {}
        for option, text in options.items():
            value = _of_side(text, number)
            fields[option] = _whole(option, value, sides) if option in MOST else value
            if option in CHOICES:
                _need_choice(option, value, sides)
        splits.append(RankSplit(**fields, draft=draft))
    return splits


def _of_side(text: str | None, number: int) -> str | None:
    """Of prefill (0) or decode (1): `8` is for both, `8:4` for each, `8:` for prefill only."""
    first, colon, second = (text or "").partition(":")
    return (second if number and colon else first) or None


def _whole(option: str, text: str | None, sides: str) -> int | None:
    """A number from 1 to the most of an option, or None. Raises ValueError."""
    if text is None:
        return None
    most = MOST[option]
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise ValueError(
            f"{flag(option)} {text!r}: a number from 1 to {most:,}, or {sides} such as 8:4."
        )
    return int(text)


def _need_choice(option: str, text: str | None, sides: str) -> None:
    """Raises ValueError for a value that an option does not have."""
    choices = CHOICES[option]
    if text is not None and text not in choices:
        raise ValueError(
            f"{flag(option)} {text!r}: one of {', '.join(choices)}, or {sides} such as "
            f"{choices[0]}:{choices[1]}."
        )


def flag(option: str) -> str:
    """How an option is written."""
    return f"--{option.replace('_', '-')}"


def read_side(name: str, whats: Sequence[str], geometry: RankSplit) -> Side:
    """The ranks of a side. Raises ValueError for what cannot be read, or split and stored so."""
    ranks, files = list[SideRank](), True
    for what in whats:
        layout = read_file(what) if isfile(what) else None
        files &= layout is not None
        ranks += _of_model(what, geometry) if layout is None else [SideRank(what, None, layout)]
    if files and geometry != RankSplit(draft=geometry.draft):
        raise ValueError(
            f"{', '.join(whats)}: --tp, --pp, --page-size, --packing, --order and --placement "
            f"cannot change a layout file. Leave {name}'s out, or give a model config."
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
    if geometry.order is not None:
        common["order"] = geometry.order
        if not any(MHA in model.kinds for model in (target, drafted) if model):
            raise ValueError(f"{config}: it has no K and V to order. Leave out --order.")
    if geometry.placement is not None:
        common["placement"] = geometry.placement
    shards = [stage_pools(target, drafted, pp, shard=Shard(n, tp), **common) for n in range(tp)]
    stages = chain(*zip(*shards))
    layouts = [PoolLayout.merge(*(pool.layout for pool in pools)) for pools in stages]
    numbers = range(len(layouts)) if len(layouts) > 1 else [None]
    return [SideRank(config, number, layout) for number, layout in zip(numbers, layouts)]
