"""The table in the terminal, readable at 80 columns; and cells in words for the report."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from posbench.report.gains import gains
from posbench.report.grid import Grid
from posbench.report.lines import HEADLINE, Cell, Line, Table, number, tables
from posbench.report.presets import comparisons, several_presets
from posbench.report.probes import probe_grids
from posbench.report.tuned import learning_rates
from posbench.results import Evaluation

Layout = Callable[[str, str, str], str]  # (perplexity, ratio, spread) to the text of a cell


def _one_line(ppl: str, ratio: str, spread: str) -> str:
    return "  ".join(part for part in (ppl, ratio, spread) if part)


def _spread_below(ppl: str, ratio: str, spread: str) -> str:
    return "\n".join(part for part in (_one_line(ppl, ratio, ""), spread) if part)


def _no_spread(ppl: str, ratio: str, spread: str) -> str:
    return _one_line(ppl, ratio, "")


def _stacked(ppl: str, ratio: str, spread: str) -> str:
    return "\n".join(part for part in (ppl, ratio) if part)


def _split(ppl: str, ratio: str, spread: str) -> str:
    return _stacked(ppl.replace(" (", "\n("), ratio, "")


# From the roomiest to the tightest. Only the headline may take two lines for its intervals.
_HEADLINE: tuple[Layout, ...] = (_one_line, _spread_below, _no_spread, _stacked, _split)
_OTHERS: tuple[Layout, ...] = (_one_line, _no_spread, _stacked, _split)


def terminal_table(evaluation: Evaluation, width: int = 80) -> str:
    """The tables of every protocol as plain text of at most `width` columns where they fit."""
    text = io.StringIO()
    console = Console(file=text, width=width, color_system=None, force_terminal=False)
    print_tables(evaluation, console)
    return text.getvalue()


def print_tables(evaluation: Evaluation, console: Console | None = None) -> None:
    """Print the tables of every protocol, the headline first, with what explains them."""
    console = console or Console()
    shown, probes = tables(evaluation), probe_grids(evaluation)
    if not shown and not probes:
        console.print("No rows: nothing was measured.")
    for table in shown:
        if several_presets(shown, table):
            continue
        console.print(Text(title(table), style="bold"))
        layout, laid_out = _fitting(table, console.width)
        console.print(laid_out)
        for note in notes(table, spreads=layout in (_one_line, _spread_below)):
            console.print(Padding(Text(note, style="dim"), (0, 0, 0, 1)))
        console.print()
        if table is shown[0] and (gained := gains(evaluation)):
            _print_grid(gained, console)
    for grid in comparisons(shown):
        _print_grid(grid, console)
    for probe in probes:
        console.print(Text(probe.title, style="bold"))
        console.print(_probe(probe, console.width))
        for note in probe.notes:
            console.print(Padding(Text(note, style="dim"), (0, 0, 0, 1)))
        console.print()
    for tried in learning_rates(evaluation):
        _print_grid(tried, console)
    if sentence := unigram_sentence(evaluation):
        console.print(sentence, highlight=False)


def _print_grid(grid: Grid, console: Console) -> None:
    """A table of the report; what stands beside or below a cell where there is room."""
    console.print(Text(grid.title, style="bold"))
    probe = Console(width=10_000)
    for parts, gap in ((3, " ("), (2, " ("), (1, " ("), (1, "\n(")):
        table = _plain_table(grid, parts, gap)
        if probe.measure(table).maximum <= console.width:
            break
    console.print(table)
    for note in grid.notes:
        console.print(Padding(Text(note, style="dim"), (0, 0, 0, 1)))
    console.print()


def _plain_table(grid: Grid, parts: int, gap: str) -> RichTable:
    """The first `parts` of each cell; what stands in parentheses may go to a line of its own."""
    table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=True)
    for head in grid.header:
        table.add_column(head, no_wrap=True)
    for row in grid.rows:
        cells = [cell if isinstance(cell, tuple) else (cell,) for cell in row]
        texts = ["  ".join(filter(None, cell[:parts])) for cell in cells]
        table.add_row(*(Text(text.replace(" (", gap)) for text in texts))
    return table


def title(table: Table) -> str:
    """The protocol, and whether it is the headline."""
    role = " (headline)" if table.protocol == HEADLINE else ""
    return f"Perplexity, {table.protocol}{role}"


def notes(table: Table, spreads: bool = True) -> list[str]:
    """What the figures beside a perplexity are, and the numbered reasons of its words."""
    cells = [cell for line in table.lines for cell in line.cells.values()]
    kinds = {cell.spread[:1] for cell in cells if spreads}
    parts = []
    if any(cell.ratio is not None for line in table.lines for r, cell in _beyond(line)):
        parts.append("x: relative to its own 1x")
    if "[" in kinds:
        parts.append("[ ]: 95 % interval, documents resampled")
    if "±" in kinds:
        parts.append("±: standard deviation over seeds")
    lines = ["; ".join(parts) + "."] if parts else []
    return lines + [f"({n}) {reason}" for reason, n in table.numbered_reasons().items()]


def unigram_sentence(evaluation: Evaluation) -> str:
    """What a model that learned nothing but token frequencies would score; "" if not recorded."""
    values = [run.get("unigram_ppl") for run in evaluation.runs]
    known = sorted({round(float(v), 6) for v in values if isinstance(v, int | float)})
    if not known:
        return ""
    scores = number(known[0]) if len(known) == 1 else f"{number(known[0])} to {number(known[-1])}"
    return f"Token frequencies alone (unigram) would score {scores} on this text."


def marked(cell: Cell, numbers: dict[str, int]) -> str:
    """The text of a cell with the numbers of its footnotes."""
    marks = "".join(f" ({numbers[reason]})" for reason in cell.reasons)
    return cell.text + marks


def _beyond(line: Line) -> list[tuple[float, Cell]]:
    return [(ratio, cell) for ratio, cell in line.cells.items() if ratio != 1]


def _fitting(table: Table, width: int) -> tuple[Layout, RichTable]:
    """The first layout that fits into `width` columns; the tightest if none does."""
    layouts = _HEADLINE if table.protocol == HEADLINE else _OTHERS
    candidates = [(layout, _laid_out(table, layout)) for layout in layouts]
    probe = Console(width=10_000)
    fitting = (each for each in candidates if probe.measure(each[1]).maximum <= width)
    return next(fitting, candidates[-1])


def _probe(grid: Grid, width: int) -> RichTable:
    """A table of cells (value, beside, below), from the roomiest to the tightest that fits."""
    columns = [index for index, name in enumerate(grid.header) if name != "seed"]
    # Parts of a cell that are shown, and where its words may be set below each other.
    for parts, gap, line_end in ((3, "", ""), (3, " (", "\n("), (2, " (", "\n("), (2, " ", "\n")):
        table = _empty([grid.header[index].replace(gap, line_end) for index in columns])
        for row in grid.rows:
            cells = [row[index] for index in columns]
            values = [cell if isinstance(cell, tuple) else (cell,) for cell in cells[1:]]
            lines = ["\n".join(filter(None, value[:parts])) for value in values]
            table.add_row(Text(cells[0]), *(Text(line.replace(gap, line_end)) for line in lines))
        if Console(width=10_000).measure(table).maximum <= width:
            break
    return table


def _empty(header: list[str]) -> RichTable:
    grid = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, pad_edge=True)
    for name in header:
        grid.add_column(name, no_wrap=True)
    return grid


def _laid_out(table: Table, layout: Layout) -> RichTable:
    grid = _empty(["encoding", *(table.heading(ratio) for ratio in table.ratios)])
    numbers = table.numbered_reasons()
    for line in table.lines:
        seeds = f" ({len(line.seeds)} seeds)" if len(line.seeds) > 1 else ""
        cells = []
        for ratio in table.ratios:
            cell = line.cell(ratio)
            beside = "" if ratio == 1 else cell.ratio_text
            cells.append(Text(layout(marked(cell, numbers), beside, cell.spread)))
        grid.add_row(Text(line.label + seeds), *cells)
    return grid
