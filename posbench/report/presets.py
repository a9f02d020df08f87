"""One checkpoint under many protocols, side by side: what the choice of a protocol alone does."""

from __future__ import annotations

from posbench.catalog import PROTOCOL_CARDS
from posbench.report.grid import Grid
from posbench.report.lines import Line, Table

CARDS = {card.id: card for card in PROTOCOL_CARDS}


def several_presets(shown: list[Table], table: Table) -> bool:
    """Whether `table` is one of several presets, which are then shown beside each other."""
    return len(_presets(shown)) > 1 and table in _presets(shown)


def comparisons(shown: list[Table]) -> list[Grid]:
    """For each line a table of all protocols, if there are several presets; else nothing."""
    presets = _presets(shown)
    if len(presets) < 2:
        return []
    ratios = sorted({ratio for table in shown for ratio in table.ratios})
    notes = [f"{table.protocol}: {CARDS[table.protocol].differs}" for table in presets]
    grids = []
    for subject, label in {line.subject: line.label for t in shown for line in t.lines}.items():
        rows = [
            [table.protocol, *(_cell(line, ratio) for ratio in ratios)]
            for table in shown
            for line in table.lines
            if line.subject == subject
        ]
        header = ["protocol", *(shown[0].heading(ratio) for ratio in ratios)]
        title = f"Perplexity of {label} under every protocol"
        grids.append(Grid(title, header, rows, "", notes))
        notes = []  # said once
    return grids


def _cell(line: Line, ratio: float) -> tuple[str, str, str]:
    cell = line.cell(ratio)
    return cell.text, "" if ratio == 1 else cell.ratio_text, cell.spread


def _presets(shown: list[Table]) -> list[Table]:
    return [t for t in shown if t.protocol in CARDS and CARDS[t.protocol].kind == "preset"]
