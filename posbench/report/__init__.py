"""What people look at after an evaluation: the terminal table, and a report in a folder."""

from __future__ import annotations

from pathlib import Path

from posbench.joining import Part, join, read_results
from posbench.report.tables import print_tables, terminal_table
from posbench.results import Evaluation, write_results

__all__ = ["print_tables", "run_report", "terminal_table", "write_report"]


def write_report(evaluation: Evaluation, folder: Path) -> None:
    """Write the results files, report.md, report.html and curves.png into `folder`."""
    # The numbers first: whatever happens to a picture, they are safe.
    write_results(evaluation, folder)
    from posbench.files import write_text
    from posbench.report import figures, pages
    from posbench.report.content import content_of
    from posbench.report.lines import tables
    from posbench.report.position import traces_of

    content = content_of(evaluation)
    headline = next(iter(tables(evaluation)), None)
    traces = traces_of(evaluation)
    write_text(folder / "report.md", pages.markdown(content))
    svgs = (figures.curves_svg(headline), figures.position_svg(traces))
    write_text(folder / "report.html", pages.html(content, *svgs))
    figures.write_png(folder / "curves.png", headline, traces)


def run_report(paths: list[Path], allow_mismatch: bool = False) -> None:
    """Write the report in each evaluation folder anew from its results.json.

    Raises UserError for rows in one column that were scored on different tokens, unless
    `allow_mismatch`, which is then written on the report.
    """
    # Every folder is read before the first is written: a wrong path changes nothing.
    parts = [Part(path, read_results(path)) for path in paths]
    evaluations = [join([part], allow_mismatch=allow_mismatch) for part in parts]
    for path, evaluation in zip(paths, evaluations, strict=True):
        write_report(evaluation, path)
