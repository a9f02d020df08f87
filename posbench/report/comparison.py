"""The comparison with a baseline in words: tables for terminal and report, files for programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from posbench.files import write_json, write_text
from posbench.inference import FEWEST_SEEDS, FEWEST_TO_FLIP, NO_SPREAD
from posbench.report.grid import Grid
from posbench.report.lines import HEADLINE
from posbench.report.pairs import Comparison, Comparisons, Quantity, compare, said
from posbench.results import Evaluation, Status, strict

FILES = ("compare.md", "compare.csv", "compare.json")
NO_SEED_INFERENCE = "no seed inference"

HOW_TO_READ = (
    "difference: mean loss less that of the baseline at the same seed, nats per token, averaged "
    "over the seeds that both have; below zero, the line is better. sd: standard deviation of "
    "these differences over seeds. ppl ratio: exp(difference), the ratio of the perplexities.",
    "95 %, seeds: t interval of the mean difference, if training were repeated with other seeds. "
    "Only this one, and the p values, say whether one encoding is better than another.",
    "95 %, documents: the same trained models on other documents of the same kind (bootstrap of "
    "each document's difference, averaged over seeds). It says nothing of another training.",
    "p: paired t test, two-sided. Holm: the same, corrected for all tests made here. d_z: mean "
    "difference over its standard deviation. P(better): share of pairs of a seed of the line and a "
    "seed of the baseline in which the line has the lower loss.",
)
FEW_SEEDS = (
    f"With {FEWEST_SEEDS} to {FEWEST_TO_FLIP - 1} seeds the paired t test leans on the differences "
    f"being normal, which so few cannot show. From {FEWEST_TO_FLIP} seeds on a sign-flip test, "
    "which does not, stands beside it."
)
FLIPS = (
    "sign-flip: p of the test that gives each seed's difference a sign at random; it does not "
    "suppose that differences are normal. Not corrected."
)


def comparison_grids(
    evaluation: Evaluation,
    baseline: str,
    protocol: str = HEADLINE,
    ratios: Sequence[float] | None = None,
) -> list[Grid]:
    """One table for each block, quantity and length, as a report prints them.

    Raises UserError if the evaluation has no such baseline.
    """
    return grids_of(compare(evaluation, baseline, protocol, ratios))


def grids_of(found: Comparisons) -> list[Grid]:
    """The tables of a comparison; what its words mean stands below the last."""
    grids = []
    for title, cells in _tables(found).items():
        flips = any(_flip(cell) for cell in cells)
        header = [name for name in _COLUMNS if flips or name != "sign-flip"]
        rows: list[list[Any]] = [[_COLUMNS[name](cell) for name in header] for cell in cells]
        grids.append(Grid(title, header, rows, notes=_notes(cells)))
    if grids:
        grids[-1].notes += [*found.notes, *_general(found)]
    return grids


def _tables(found: Comparisons) -> dict[str, list[Comparison]]:
    tables: dict[str, list[Comparison]] = {}
    blocks = {(cell.model, cell.train_length) for cell in found.cells}
    for cell in found.cells:
        title = (
            f"{cell.ratio:g}x ({cell.eval_length}): loss against {found.baseline}"
            if cell.quantity is Quantity.loss
            else f"{cell.ratio:g}x ({cell.eval_length}): rise of the loss since 1x, against "
            f"that of {found.baseline}"
        )
        title += f", {found.protocol}"
        title += f", {cell.model} trained at {cell.train_length}" if len(blocks) > 1 else ""
        tables.setdefault(title, []).append(cell)
    return tables


# ---------------------------------------------------------------- cells in words


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.4f}"


def _interval(bounds: tuple[float | None, float | None]) -> str:
    low, high = bounds
    return "" if low is None or high is None else f"[{low:+.4f}, {high:+.4f}]"


def _p(value: float | None) -> str:
    if value is None:
        return ""
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def _difference(cell: Comparison) -> str:
    return cell.word or (_signed(cell.seen.mean) if cell.seen else "")


def _sd(cell: Comparison) -> str:
    return "" if cell.word or not cell.seen or cell.seen.sd is None else f"{cell.seen.sd:.4f}"


def _seeds_interval(cell: Comparison) -> str:
    if cell.word or cell.seen is None:
        return ""
    if cell.seen.n >= FEWEST_SEEDS and cell.seen.p is None:
        return "identical" if abs(cell.seen.mean) < NO_SPREAD else "no spread"
    return _interval((cell.seen.low, cell.seen.high)) or NO_SEED_INFERENCE


def _documents_interval(cell: Comparison) -> str:
    return _interval(cell.documents) if cell.documents else "none" if cell.no_documents else ""


def _perplexity(cell: Comparison) -> str:
    if cell.word or cell.seen is None:
        return ""
    ratio = ppl_ratio(cell.seen.mean)
    return f"{ratio:.3f}x" if ratio <= 100 else ">100x"


def ppl_ratio(nats: float) -> float:
    """What a difference of mean losses makes of a perplexity: exp(nats), infinite past floats."""
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def _flip(cell: Comparison) -> str:
    return _p(cell.seen.p_flip if cell.seen else None)


def _effect(cell: Comparison) -> str:
    effect = cell.seen.effect if cell.seen else None
    return "" if effect is None else f"{effect:+.2f}"


def _better(cell: Comparison) -> str:
    return "" if cell.improvement is None else f"{cell.improvement:.2f}"


_COLUMNS = {
    "encoding": lambda cell: cell.label,
    "seeds": lambda cell: str(len(cell.seeds)),
    "difference": _difference,
    "sd": _sd,
    "95 %, seeds": _seeds_interval,
    "95 %, documents": _documents_interval,
    "ppl ratio": _perplexity,
    "p": lambda cell: _p(cell.seen.p if cell.seen else None),
    "Holm": lambda cell: _p(cell.p_holm),
    "sign-flip": _flip,
    "d_z": _effect,
    "P(better)": _better,
}


# ---------------------------------------------------------------- notes


def _notes(cells: list[Comparison]) -> list[str]:
    """What is missing from one table, and why."""
    notes = []
    few = [cell for cell in cells if cell.seen and not cell.word and cell.seen.n < FEWEST_SEEDS]
    for n in sorted({len(cell.seeds) for cell in few}):
        who = ", ".join(cell.label for cell in few if len(cell.seeds) == n)
        seeds = "1 seed" if n == 1 else f"{n} seeds"
        notes.append(f"{who}: {NO_SEED_INFERENCE} ({seeds}; {FEWEST_SEEDS} are needed).")
    for cell in cells:
        paired = f"paired over {said(cell.seeds)}" if cell.seeds else "not compared"
        if cell.left_out:
            notes.append(f"{cell.label}: {paired}; left out: {'; '.join(cell.left_out)}.")
        if cell.not_finite:
            broken = f"{len(cell.not_finite)} of {len(cell.seeds)} seeds"
            notes.append(f"{cell.label}: not finite in {broken} ({said(cell.not_finite)}).")
    notes += [
        f"{cell.label}: no interval over documents: {cell.no_documents}."
        for cell in cells
        if cell.no_documents
    ]
    return notes


def _general(found: Comparisons) -> list[str]:
    """How to read all of the tables."""
    notes = list(HOW_TO_READ)
    if any(cell.seen and cell.seen.p_flip is not None for cell in found.cells):
        notes.append(FLIPS)
    if any(cell.seen and FEWEST_SEEDS <= cell.seen.n < FEWEST_TO_FLIP for cell in found.cells):
        notes.append(FEW_SEEDS)
    if found.tests:
        notes.append(
            f"Holm over {found.tests} tests: all lengths, lines and quantities shown. Looking at "
            "fewer after seeing them all does not make the others undone."
        )
    return notes


# ---------------------------------------------------------------- terminal


def print_comparison(found: Comparisons, warnings: list[str], console: Console) -> None:
    """The tables, what to be warned of above them, and how to read them below."""
    for warning in warnings:
        console.print(Text(warning, style="bold"))
    for title, cells in _tables(found).items():
        console.print(Text(title, style="bold"))
        console.print(_fitting(cells, console.width))
        _print_notes(_notes(cells), console)
        console.print()
    _print_notes([*found.notes, *_general(found)], console)


def _print_notes(notes: list[str], console: Console) -> None:
    for note in notes:
        console.print(Padding(Text(note, style="dim"), (0, 0, 0, 1)))


# Below each other where a terminal is too narrow for all columns: two of them in one.
_STACKED = (
    ("encoding", "seeds"), ("difference", "sd"), ("95 %, seeds", "95 %, documents"),
    ("ppl ratio",), ("p", "Holm"), ("d_z", "P(better)"),
)  # fmt: skip


def _fitting(cells: list[Comparison], width: int) -> RichTable:
    """One row for each line if `width` columns are enough for that, otherwise two.

    What is too long even so goes on below, so that no number and no word is ever cut.
    """
    flips = any(_flip(cell) for cell in cells)
    names = [(name,) for name in _COLUMNS if flips or name != "sign-flip"]
    wide = _laid_out(cells, names)
    probe = Console(width=10_000)
    if probe.measure(wide).maximum <= width:
        return wide
    stacked = [("p", "Holm", "sign-flip") if flips and "p" in each else each for each in _STACKED]
    tight = _laid_out(cells, stacked, may_wrap=("encoding", "difference"))
    if probe.measure(tight).minimum <= width:
        return tight
    return _laid_out(cells, stacked, may_wrap=[names[0] for names in stacked])


def _laid_out(
    cells: list[Comparison], columns: Sequence[tuple[str, ...]], may_wrap: Sequence[str] = ()
) -> RichTable:
    table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for names in columns:
        table.add_column("\n".join(names), no_wrap=names[0] not in may_wrap, overflow="fold")
    for cell in cells:
        texts = ("\n".join(_COLUMNS[name](cell) for name in names) for names in columns)
        table.add_row(*(Text(text.rstrip("\n")) for text in texts))
    return table


# ---------------------------------------------------------------- files


def record(cell: Comparison) -> dict[str, Any]:
    """One comparison, flat, as compare.csv and compare.json have it."""
    seen = cell.seen
    low, high = cell.documents or (None, None)
    finite = seen is not None and not cell.word
    return {
        "line": cell.label,
        "baseline": cell.baseline,
        "model": cell.model,
        "train_length": cell.train_length,
        "eval_length": cell.eval_length,
        "ratio": cell.ratio,
        "quantity": str(cell.quantity),
        "status": "ok" if finite else str(Status.nonfinite) if seen else "not_compared",
        "reason": "; ".join(filter(None, (cell.word, *cell.left_out, cell.no_documents))),
        "seeds": " ".join(str(seed) for seed in cell.seeds),
        "n_seeds": len(cell.seeds),
        "difference": seen.mean if seen else None,
        "sd": seen.sd if seen else None,
        "seeds_ci_lo": seen.low if seen else None,
        "seeds_ci_hi": seen.high if seen else None,
        "documents_ci_lo": low,
        "documents_ci_hi": high,
        "n_documents": cell.n_documents,
        "ppl_ratio": ppl_ratio(seen.mean) if seen else None,
        "p": seen.p if seen else None,
        "p_holm": cell.p_holm,
        "p_sign_flip": seen.p_flip if seen else None,
        "d_z": seen.effect if seen else None,
        "p_better": cell.improvement,
        "detectable": seen.detectable if seen else None,
    }


def as_json(found: Comparisons, sources: list[str], warnings: list[str]) -> dict[str, Any]:
    """Everything a comparison found, as strict JSON values."""
    notes = [note for cells in _tables(found).values() for note in _notes(cells)]
    saved: dict[str, Any] = strict(
        {
            "schema_version": 1,
            "protocol": found.protocol,
            "baseline": found.baseline,
            "tests": found.tests,
            "sources": sources,
            "warnings": warnings,
            "notes": [*dict.fromkeys(notes), *found.notes, *_general(found)],
            "comparisons": [record(cell) for cell in found.cells],
        }
    )
    return saved


def write_comparison(
    found: Comparisons, folder: Path, sources: list[str], warnings: list[str]
) -> None:
    """Write compare.md, compare.csv and compare.json into `folder`."""
    from posbench.report.pages import comparison_markdown

    rows = [record(cell) for cell in found.cells]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / "compare.csv", text.getvalue())
    write_json(folder / "compare.json", as_json(found, sources, warnings))
    page = comparison_markdown(found.baseline, grids_of(found), warnings, sources)
    write_text(folder / "compare.md", page)


def print_json(found: Comparisons, sources: list[str], warnings: list[str]) -> None:
    """The same as compare.json, on stdout."""
    print(json.dumps(as_json(found, sources, warnings), indent=1, allow_nan=False))
