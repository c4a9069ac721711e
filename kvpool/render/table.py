"""Tables in the terminal that break no word in two."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table

GAP = 2  # between columns
MOST = 10_000


class FittedTable(Table):
    """A table whose columns get the terminal's width by need, each at least its longest word.

    Where these do not fit, it is wider than the terminal: print it with `crop=False`.
    """

    def __init__(self, *columns: str, title: str | None = None, **options: Any) -> None:
        super().__init__(*columns, title=title, **options)
        self.box, self.show_edge, self.pad_edge, self.collapse_padding = SIMPLE, False, False, True
        self.title_justify = self.caption_justify = "left"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbound = options.update(width=MOST)  # a cell is measured by its words, not by the screen
        between, least, wanting = len(self.columns) - 1, [], {}
        for number, column in enumerate(self.columns):
            cells = column.header, *column.cells
            sizes = [Measurement.get(console, unbound, cell) for cell in cells]
            most = max(size.maximum for size in sizes)
            least.append(most if column.no_wrap else max(size.minimum for size in sizes))
            wanting[number] = most - least[-1]
        fits = sum(least) + GAP * between <= options.max_width
        self.padding = (0, GAP - 1 if fits else 0)  # beside one column of the box
        wide = max(options.max_width, sum(least) + (GAP if fits else 1) * between)
        room = wide - sum(least) - (GAP if fits else 1) * between
        while wanting:  # who needs least first; what is left is shared
            number = min(wanting, key=lambda n: wanting[n])
            more = min(wanting.pop(number), room // (len(wanting) + 1))
            self.columns[number].width = least[number] + more
            room -= more
        yield from super().__rich_console__(console, options.update(width=wide))
