"""Why two configurations share state, or do not: what a store compares, name by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from disagg.plan import IncompatibleLayouts, plan
from disagg.protocol.messages import Convention
from disagg.store.chunks import KINDS, kind_of, of_kind
from disagg.store.family import family_of
from disagg.store.geometry import Geometry, namespace, namespace_of
from kvpool.layout import PoolLayout, Space

Same = Literal["same", "different", "not said"]
MODEL = "model", "weights"
"""Names of a namespace that are conventions: a layout alone does not say them."""
Dest = tuple[str, PoolLayout]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What an engine would write, and what it has to fill. `complete`: its conventions are all that
    it says, as in a store; a layout says none, and a config.json not all.
    """

    name: str
    geometry: Geometry
    dests: Sequence[Dest]
    """Layouts to fill, each with words for it."""
    complete: bool
    namespace: str
    text: Mapping[str, Any]

    @property
    def conventions(self) -> Mapping[str, Convention]:
        return self.geometry.conventions


def of_ranks(
    name: str,
    ranks: Sequence[tuple[str, PoolLayout]],
    conventions: Mapping[str, Convention],
    chunk_tokens: int,
) -> Configuration:
    """Of an engine's ranks, each with words for it. Raises ValueError where chunks would cut what
    a pool keeps whole.
    """
    layouts = [layout for _, layout in ranks]
    geometry = Geometry.of(layouts, conventions, chunk_tokens)
    digest, text = namespace(layouts, geometry.conventions, chunk_tokens)
    return Configuration(
        name=name,
        geometry=geometry,
        dests=ranks,
        complete=False,
        namespace=digest,
        text=json.loads(text),
    )


def of_geometry(name: str, geometry: Geometry) -> Configuration:
    """Of what a catalogue has. Raises ValueError for a geometry without state."""
    digest, text = namespace_of(geometry)
    count = len(geometry.parts)
    dests = [
        (f"part {number}" if count > 1 else "", chunk.layout)
        for number, part in enumerate(geometry.parts)
        for chunk in part.values()
    ]
    return Configuration(
        name=name,
        geometry=geometry,
        dests=dests,
        complete=True,
        namespace=digest,
        text=json.loads(text),
    )


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """A name that both sides may say something of; None for a side that does not."""

    name: str
    first: Any
    second: Any
    same: Same


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreComparison:
    """What two configurations have in common. `first_to_second` are reasons why what the first has
    written cannot be read by the second; none if it can. In those of plans, prefill is the
    writer and decode the reader.
    """

    namespaces: tuple[ComparedRow, ...]
    conventions: tuple[ComparedRow, ...]
    first_to_second: tuple[str, ...]
    second_to_first: tuple[str, ...]
    converts_to_second: bool
    """Whether the second can read with `cast` what the first has written."""
    converts_to_first: bool

    @property
    def same_namespace(self) -> bool:
        return all(row.same != "different" for row in self.namespaces)

    @property
    def unsaid(self) -> list[str]:
        """Names that could still tell them apart."""
        return [row.name for row in self.namespaces if row.same == "not said"]

    def shares(self, forth: bool) -> bool:
        """Whether the second can read what the first has written (`forth`), or the other way."""
        reasons = self.first_to_second if forth else self.second_to_first
        return self.same_namespace and not reasons

    def converts(self, forth: bool) -> bool:
        """As `shares`, if the reader converts."""
        return self.converts_to_second if forth else self.converts_to_first


def compare(first: Configuration, second: Configuration) -> StoreComparison:
    """Compares what a store compares."""
    return StoreComparison(
        namespaces=tuple(_namespaces(first, second)),
        conventions=tuple(_conventions(first, second)),
        first_to_second=tuple(reasons(first, second)),
        second_to_first=tuple(reasons(second, first)),
        converts_to_second=_converts(first, second),
        converts_to_first=_converts(second, first),
    )


def _converts(writer: Configuration, reader: Configuration) -> bool:
    """Whether a reader that converts finds and reads what a writer writes."""
    family = [family_of(json.dumps(dict(side.text))) for side in (writer, reader)]
    return family[0] == family[1] and not reasons(writer, reader, cast=True)


def reasons(writer: Configuration, reader: Configuration, cast: bool = False) -> list[str]:
    """Why a reader, which may convert (`cast`), cannot use what a writer writes, beside their
    namespaces.
    """
    lines = [
        f"{row.name}: {row.first!r} of the writer, {row.second!r} of the reader."
        for row in _conventions(writer, reader)
        if row.same == "different"
    ]
    refused: dict[str, list[str]] = {}
    for words, layout in reader.dests:
        for line in _refusals(writer.geometry, layout, cast):
            refused.setdefault(line, []).append(words)
    every = len(reader.dests)
    for why, dests in refused.items():
        only = list(dict.fromkeys(dests))
        lines.append(why if len(dests) == every or only == [""] else f"{', '.join(only)}: {why}")
    return lines


def _refusals(geometry: Geometry, dest: PoolLayout, cast: bool) -> Iterator[str]:
    """Why no plan leads from the objects of a geometry to a layout, by kind of object."""
    for kind in KINDS:
        part = of_kind(dest, kind)
        if part.regions:
            sources = [geometry.parts[n][kind].layout for n in geometry.with_kind(kind)]
            try:
                plan(sources, part, cast=cast)
            except IncompatibleLayouts as error:
                yield from (f"{kind}: {line}" for line in error.lines())


def needs(configuration: Configuration) -> list[str]:
    """What of a prefix a reader needs, by kind of object, in sentences."""
    tokens = configuration.geometry.chunk_tokens
    spaces: dict[str, dict[str, Space]] = {}
    for _, layout in configuration.dests:
        for region in layout.regions:
            space = layout.space_of(region)
            spaces.setdefault(kind_of(space), {}).setdefault(space.name, space)
    sentences = []
    for kind in KINDS:
        if kind not in spaces:
            continue
        if kind == "full":
            sentences.append(f"full: every chunk of {tokens:,} tokens.")
        elif kind == "state":
            sentences.append("state: one object, of exactly the last chunk.")
        else:
            count = max(_window_chunks(space, tokens) for space in spaces[kind].values())
            last = "the last chunk" if count == 1 else f"the last {count:,} chunks"
            sentences.append(f"window: {last}.")
    return sentences


def _window_chunks(space: Space, tokens: int) -> int:
    """How many chunks the window of a long prefix reaches back."""
    reach = ((space.window or 0) + space.window_step) * space.tokens_per_entry
    total = (-(-reach // tokens) + 2) * tokens
    start = space.alive_in_request(total).start * space.tokens_per_entry
    return total // tokens - start // tokens


def _namespaces(first: Configuration, second: Configuration) -> list[ComparedRow]:
    sides = [_flat(side.text) for side in (first, second)]
    rows = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        values = [side.get(name) for side in sides]
        unsaid = name in MODEL and any(
            value is None and not side.complete for value, side in zip(values, (first, second))
        )
        same: Same = "same" if values[0] == values[1] else "different"
        rows.append(ComparedRow(name, values[0], values[1], "not said" if unsaid else same))
    return rows


def _flat(text: Mapping[str, Any]) -> dict[str, Any]:
    """The names of a namespace's text, those of its state apart."""
    flat = {name: value for name, value in text.items() if name != "state"}
    return flat | {f"state {role}": forms for role, forms in text["state"].items()}


def _conventions(first: Configuration, second: Configuration) -> list[ComparedRow]:
    rows = []
    for name in sorted({*first.conventions, *second.conventions}):
        values = [side.conventions.get(name) for side in (first, second)]
        same: Same = "same" if values[0] == values[1] else "different"
        rows.append(ComparedRow(name, values[0], values[1], "not said" if None in values else same))
    return rows


def form_words(forms: Sequence[Sequence[Any]]) -> str:
    """How a role is stored, by layers that differ: `bfloat16 x 1,024`, for each position."""
    words = []
    for dtype, elements, per, packing in forms:
        every = f" every {per:,} tokens" if per > 1 else ""
        packed = f" packed as {packing}" if packing else ""
        words.append(f"{dtype} x {elements:,}{every}{packed}")
    return "; ".join(words)
