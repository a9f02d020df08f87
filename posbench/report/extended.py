"""Extensions of one trained model beside each other, with no training between them."""

from __future__ import annotations

from collections import defaultdict

from posbench.report.grid import Grid
from posbench.report.lines import Line, Subject, Table
from posbench.report.tables import marked

ABOUT = (
    "The same trained weights under each extension: what differs is done at evaluation, but for "
    "lines that say search or finetune_steps."
)

Key = tuple[str, str, int, str]  # what lines of one checkpoint, or its seeds, share


def is_plain(subject: Subject) -> bool:
    """Whether a line is a model as it was trained."""
    return subject.extension in ("", "none") and not subject.variant


def headline_of(table: Table) -> Table:
    """The table of the models as they were trained.

    With fewer than two of those, extensions are what is compared, and the table stays as it is;
    but what an extension does not apply to is no line of its own.
    """
    plain = {_key(line.subject) for line in table.lines if is_plain(line.subject)}
    kept = [
        line for line in table.lines if is_plain(line.subject) or _key(line.subject) not in plain
    ]
    if len(kept) < 2:
        kept = [line for line in table.lines if is_plain(line.subject) or applies(line)]
    return Table(table.protocol, kept or table.lines, table.ratios)


def shown_lines(table: Table) -> list[Line]:
    """What a figure draws: every line but those that an extension does not apply to."""
    return [line for line in table.lines if is_plain(line.subject) or applies(line)]


def applies(line: Line) -> bool:
    """Whether the line is defined at any length."""
    return any(not cell.text.startswith("n/a") for cell in line.cells.values())


def not_applicable(table: Table) -> set[Subject]:
    """Lines of an extension on an encoding it does not fit, where the model itself has a line."""
    plain = {_key(line.subject) for line in table.lines if is_plain(line.subject)}
    return {
        line.subject
        for line in table.lines
        if not is_plain(line.subject) and not applies(line) and _key(line.subject) in plain
    }


def extension_grids(table: Table | None) -> list[Grid]:
    """For each trained model that was evaluated in several ways, a row for each way."""
    groups: dict[Key, list[Line]] = defaultdict(list)
    for line in table.lines if table else []:
        groups[_key(line.subject)].append(line)
    grids = [
        _grid(table, [line for line in lines if is_plain(line.subject) or applies(line)])
        for lines in groups.values()
        if table and sum(applies(line) for line in lines) > 1
    ]
    if grids:
        grids[0].about = ABOUT
        grids[-1].notes += _foreign([line for lines in groups.values() for line in lines])
    return grids


def _key(subject: Subject) -> Key:
    return subject.encoding, subject.model, subject.train_length, subject.settings_id


def _grid(table: Table, lines: list[Line]) -> Grid:
    lines = sorted(lines, key=lambda line: not is_plain(line.subject))
    numbers = Table(table.protocol, lines, table.ratios).numbered_reasons()
    rows: list[list[object]] = []
    for line in lines:
        cells: list[object] = [_way(line.subject), ", ".join(str(seed) for seed in line.seeds)]
        for ratio in table.ratios:
            cell = line.cell(ratio)
            beside = "" if ratio == 1 else cell.ratio_text
            cells.append((marked(cell, numbers), beside, cell.spread))
        rows.append(cells)
    title = f"Extensions of {lines[0].label if is_plain(lines[0].subject) else _name(lines[0])}"
    header = ["extension", "seed", *(table.heading(ratio) for ratio in table.ratios)]
    notes = [f"({number}) {reason}" for reason, number in numbers.items()]
    return Grid(f"{title}, {table.protocol}", header, rows, "", notes)


def _way(subject: Subject) -> str:
    name = subject.extension or "none"
    return f"{name} ({subject.variant})" if subject.variant else name


def _name(line: Line) -> str:
    return line.subject.encoding


def _foreign(lines: list[Line]) -> list[str]:
    """Which extension does not apply to which encodings."""
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        if not is_plain(line.subject) and not applies(line):
            found.setdefault(_way(line.subject), {})[line.subject.encoding] = None
    ways: dict[tuple[str, ...], list[str]] = {}
    for way, names in found.items():
        ways.setdefault(tuple(names), []).append(way)
    return [f"Not for {', '.join(names)}: {', '.join(each)}." for names, each in ways.items()]
