"""A table for terminals of any width: where there is no room for all columns, the least needed ones are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Column:
    """`least`: down to how many characters its cells may be cut; None: figures, of which half would be wrong.
    `spare`: 0: it is always there; of the others the highest is left out first."""

    head: RenderableType
    cells: Sequence[RenderableType]
    is_figure: bool = False
    least: int | None = None
    spare: int = 0


class FittedTable:
    """`gap`: characters between columns."""

    def __init__(self, columns: Sequence[Column], gap: int) -> None:
        self._columns = columns
        self._gap = gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = [self._least_width(column, console, options) for column in self._columns]
        shown = list(range(len(needed)))
        for index in sorted(shown, key=lambda index: -self._columns[index].spare):
            if sum(needed[each] for each in shown) <= options.max_width or not self._columns[index].spare:
                break
            shown.remove(index)
        table = Table(box=None, padding=(0, self._gap, 0, 0), pad_edge=False)
        for column in (self._columns[each] for each in shown):
            no_wrap = column.least is None
            table.add_column(column.head, justify="right" if column.is_figure else "left", no_wrap=no_wrap)
        for row in zip(*(self._columns[each].cells for each in shown), strict=True):
            table.add_row(*row)
        yield table

    def _least_width(self, column: Column, console: Console, options: ConsoleOptions) -> int:
        cells = (column.head, *column.cells)
        width = max(Measurement.get(console, options, cell).maximum for cell in cells)
        return self._gap + (width if column.least is None else min(width, column.least))
