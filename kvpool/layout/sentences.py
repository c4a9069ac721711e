"""Layers, axes and names as text, for tables and errors."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from kvpool.layout.types import Axis, Key, Space


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    return ", ".join(map(_span, _spans(numbers)))


def steps(numbers: Collection[int]) -> str:
    """As `ranges`, but regular ones as `2, 4, ..., 8` or `0-2, 4-6, ..., 44-46`."""
    spans = _spans(numbers)
    low, high = spans[0] if spans else (0, 0)
    apart = spans[1][0] - low if len(spans) > 3 else 0
    regular = [[low + n * apart, high + n * apart] for n in range(len(spans))]
    if apart and spans == regular:
        return f"{_span(spans[0])}, {_span(spans[1])}, ..., {_span(spans[-1])}"
    return ranges(numbers)


def axis_steps(axis: Axis) -> str:
    """`head 8`, or `head 4-7 of 8` where it is sharded."""
    if axis.size == axis.total:
        return f"{axis.name} {axis.size:,}"
    return f"{axis.name} {ranges(range(axis.start, axis.stop))} of {axis.total:,}"


def held_words(space: Space) -> str:
    """`rank 0 of 2 in stretches of 16 tokens`; empty for a space that holds all positions."""
    part = space.interleave
    if part is None:
        return ""
    tokens = "token" if part.size == 1 else "tokens"
    return f"rank {part.rank} of {part.ranks:,} in stretches of {part.size:,} {tokens}"


def by_layers(sentences: Iterable[tuple[Key, str]]) -> list[str]:
    """Sentences about regions, one for all layers that share owner, role and sentence."""
    grouped: dict[tuple[str, str, str], list[int]] = {}
    for (owner, layer, role), sentence in sentences:
        grouped.setdefault((owner, role, sentence), []).append(layer)
    return [
        f"{owner} layer{'s' if len(layers) > 1 else ''} {ranges(layers)} {role}{sentence}"
        for (owner, role, sentence), layers in grouped.items()
    ]


def nearest(name: str, known: Iterable[str], most: int = 1) -> str:
    """` Did you mean 'cuda'?`, of the known names most like this; empty if none is."""
    alike = [repr(other) for other in get_close_matches(name, [*known], most)]
    named = " or ".join(filter(None, (", ".join(alike[:-1]), *alike[-1:])))
    return f" Did you mean {named}?" if alike else ""


def _spans(numbers: Iterable[int]) -> list[list[int]]:
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return spans


def _span(span: list[int]) -> str:
    low, high = span
    return f"{low}-{high}" if low < high else f"{low}"
