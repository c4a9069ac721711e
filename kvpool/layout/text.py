"""Layers, axes and names as text, for tables and errors; what a name may be, and how a text that
another process wrote is shown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpool.layout.spaces import Space
    from kvpool.layout.types import Axis, Key

UNPRINTABLE = (
    (0x0, 0x1F),  # controls, line breaks, escapes
    (0x7F, 0xA0),
    (0xAD, 0xAD),
    (0x61C, 0x61C),
    (0x180E, 0x180E),
    (0x2000, 0x200F),  # spaces, and what has no width or turns the direction of writing
    (0x2028, 0x202F),
    (0x205F, 0x206F),
    (0x3000, 0x3000),
    (0xD800, 0xDFFF),  # halves of characters
    (0xFEFF, 0xFEFF),
    (0xFFF9, 0xFFFB),
    (0xE0000, 0xE007F),
)
"""Code points, first and last, that no name has: they break a line, are invisible, or change how
what follows is shown. The same with every Python, unlike `str.isprintable`, which follows the
Unicode version: what one side takes for a name must be one on the other.
"""
_CLASS = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in UNPRINTABLE)
PRINTABLE = rf"\A[^{_CLASS}]*\Z"
"""A regular expression for texts without these."""
_printable, _unprintable = re.compile(PRINTABLE), re.compile(f"[{_CLASS}]+")


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    return ", ".join(map(_span, _spans(numbers)))


def counted(number: int, word: str) -> str:
    """`1 rank`, `1,000 ranks`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


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


def nearest(name: str, names: Iterable[str], most: int = 1) -> str:
    """` Did you mean 'cuda'?`, of the known names most like this; empty if none is."""
    matches = [repr(match) for match in get_close_matches(name, [*names], most)]
    named = " or ".join(filter(None, (", ".join(matches[:-1]), *matches[-1:])))
    return f" Did you mean {named}?" if matches else ""


def is_printable(text: str) -> bool:
    """Whether a text may be shown as it is."""
    return text.isprintable() if text.isascii() else _printable.match(text) is not None


def is_name(text: object, most: int) -> bool:
    """Whether this is a text of 1 to `most` printable characters."""
    return isinstance(text, str) and 0 < len(text) <= most and is_printable(text)


def one_line(text: str, most: int) -> str:
    r"""A text as logs and errors may show it, at most `most` characters: its lines joined by
    spaces, and what is not printable escaped (`\x1b`).
    """
    line = " ".join(text[:most].split())
    escaped = _unprintable.sub(lambda match: match[0].encode("unicode_escape").decode(), line)
    return escaped[:most].rstrip()


def _spans(numbers: Iterable[int]) -> list[list[int]]:
    # consecutive numbers differ from their places in the list by as much
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    return [[run[0][1], run[-1][1]] for run in ([*pairs] for _, pairs in runs)]


def _span(span: list[int]) -> str:
    low, high = span
    return f"{low}-{high}" if low < high else f"{low}"
