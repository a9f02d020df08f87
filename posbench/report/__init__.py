"""What people look at after an evaluation: the terminal table, and a report in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from posbench.errors import UserError
from posbench.joining import Part, find_evaluations, join, newest_evaluation, read_results
from posbench.report.tables import print_tables, terminal_table
from posbench.results import Evaluation, write_results

if TYPE_CHECKING:
    from posbench.report.figures import Picture
    from posbench.report.lines import Table

__all__ = ["print_tables", "run_report", "terminal_table", "write_report"]


def write_report(evaluation: Evaluation, folder: Path) -> None:
    """Write the results files, report.md, report.html, table.tex and the figures into `folder`."""
    # The numbers first: whatever happens to a picture, they are safe.
    write_results(evaluation, folder)
    from posbench.files import write_text
    from posbench.report import pages
    from posbench.report.content import content_of
    from posbench.report.extended import headline_of
    from posbench.report.latex import table_tex
    from posbench.report.lines import tables

    content = content_of(evaluation)
    first = next(iter(tables(evaluation)), None)
    write_text(folder / "report.md", pages.markdown(content))
    write_text(folder / "table.tex", table_tex(evaluation, headline_of(first) if first else None))
    pictures = _pictures(evaluation, first)
    drawings = {name: picture.svg for name, picture in pictures.items()}
    write_text(folder / "report.html", pages.html(content, drawings))
    for name, picture in pictures.items():
        picture.write(folder, name)


def _pictures(evaluation: Evaluation, first: Table | None) -> dict[str, Picture]:
    """Every figure of the report, by name; `first` is the headline with all its lines."""
    from posbench.report import curves, drawing
    from posbench.report.diagnostics import heads_of
    from posbench.report.figures import picture
    from posbench.report.position import traces_of

    by_length = curves.length_figure(first)
    by_position = curves.position_figure(traces_of(evaluation))
    gain, heads = curves.gain_figure(evaluation), heads_of(evaluation)
    drawn = {
        "curves": picture("curves", lambda canvas: drawing.draw_curves(canvas, by_length)),
        "position": picture("position", lambda canvas: drawing.draw_position(canvas, by_position)),
        "gain": picture("gain", lambda canvas: drawing.draw_gain(canvas, gain)),
    }
    if heads:
        drawn["attention"] = picture("attention", lambda canvas: drawing.draw_heads(canvas, heads))
    return drawn


def run_report(paths: list[Path], allow_mismatch: bool = False) -> None:
    """Write the report in each evaluation folder anew from its results.json, and say where.

    A path may be a run or a sweep, which stands for the newest evaluation of what it holds; none
    at all is the newest evaluation. Raises UserError if there is none, if nothing was measured, or
    for rows in one column that were scored on different tokens, unless `allow_mismatch`, which is
    then written on the report.
    """
    found, missing = find_evaluations(paths) if paths else ([newest_evaluation()], [])
    # Every folder is read before the first is written: a wrong path changes nothing.
    parts = [Part(each.folder, read_results(each.folder)) for each in found]
    for part in parts:
        if not part.evaluation.rows:
            raise UserError(
                f"{part.folder} holds no measurement, so there is nothing to report. "
                "Evaluate a trained run first: posbench eval-extrapolate runs=DIR"
            )
    for sentence in missing:
        print(sentence)
    evaluations = [join([part], allow_mismatch=allow_mismatch) for part in parts]
    for part, evaluation in zip(parts, evaluations, strict=True):
        write_report(evaluation, part.folder)
        print(f"report       {part.folder / 'report.html'}")
