"""Tables in the terminal that break no word in two."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

GAP = 2  # between columns


class FittedTable(Table):
    """A table whose columns get the terminal's width by need, each at least its longest word.

    Where these do not fit, it is wider than the terminal: print it with `crop=False`. Cells are
    text with rich's markup.
    """

    def __init__(self, *columns: str, title: str | None = None, **options: Any) -> None:
        super().__init__(*columns, title=title, **options)
        self.box, self.show_edge, self.pad_edge, self.collapse_padding = SIMPLE, False, False, True
        self.title_justify = self.caption_justify = "left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        texts = [[_plain(c) for c in (col.header, *col.cells)] for col in self.columns]
        widest = [max(map(_width, cells)) for cells in texts]
        least = [
            most if column.no_wrap else max(_width("\n".join(cell.split())) for cell in cells)
            for column, cells, most in zip(self.columns, texts, widest)
        ]
        between = len(least) - 1
        fits = sum(least) + GAP * between <= options.max_width
        self.padding = (0, GAP - 1 if fits else 0)  # beside one column of the box
        gaps = between * (GAP if fits else 1)
        room = options.max_width - gaps - sum(least)
        wanting = {n: most - low for n, (low, most) in enumerate(zip(least, widest)) if most > low}
        while wanting and room > 0:  # who needs least first; what is left is shared
            number = min(wanting, key=lambda n: wanting[n])
            more = min(wanting.pop(number), room // (len(wanting) + 1))
            least[number] += more
            room -= more
        for column, width in zip(self.columns, least):
            column.width = width
        wide = max(options.max_width, sum(least) + gaps)
        yield from super().__rich_console__(console, options.update(width=wide))


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else Text.from_markup(str(cell)).plain


def _width(text: str) -> int:
    return max(map(cell_len, text.splitlines() or [""]))
