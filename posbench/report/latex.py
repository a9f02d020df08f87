"""The headline as a LaTeX table for a paper; needs the package booktabs."""

from __future__ import annotations

from posbench.report.lines import HEADLINE, Cell, Table
from posbench.report.tables import marked
from posbench.results import Evaluation

_PLAIN = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "…": r"\dots{}",
} | {sign: f"\\{sign}" for sign in "&%$#_"}


def latex(text: str) -> str:
    """`text` as LaTeX prints it, whatever it holds; letters no plain LaTeX knows become `?`."""
    plain = "".join(_PLAIN.get(letter, letter) for letter in " ".join(text.split()))
    return plain.encode("latin-1", "replace").decode("latin-1")


def table_tex(evaluation: Evaluation, table: Table | None) -> str:
    """A `table` environment for \\input, with its caption; a comment if nothing was measured."""
    if table is None:
        return "% Nothing was measured: the evaluation holds no perplexity.\n"
    numbers = table.numbered_reasons()
    columns = len(table.ratios)
    rows = []
    for line in table.lines:
        cells = [_cell(line.cell(ratio), ratio, numbers) for ratio in table.ratios]
        # After a line's end a bracket or star would be taken for its argument.
        label = "{}" * line.label.startswith(("[", "*")) + latex(line.label)
        rows.append(" & ".join([label, *cells]) + r" \\")
    reasons = [f"({number}) {reason}." for reason, number in numbers.items()]
    return "\n".join(
        [
            "% Written by posbench report. In the preamble: \\usepackage[utf8]{inputenc} and "
            "\\usepackage{booktabs}",
            r"\begin{table}",
            r"  \centering",
            f"  \\caption{{{latex(' '.join([_caption(evaluation, table), *reasons]))}}}",
            r"  \label{tab:posbench}",
            r"  \small",
            f"  \\begin{{tabular}}{{l{'r' * columns}}}",
            r"    \toprule",
            "    " + " & ".join(["encoding", *(latex(table.heading(r)) for r in table.ratios)])
            + r" \\",
            r"    \midrule",
            *(f"    {row}" for row in rows),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )  # fmt: skip


def _cell(cell: Cell, ratio: float, numbers: dict[str, int]) -> str:
    parts = [marked(cell, numbers), f"({cell.ratio_text})" if _beside(cell, ratio) else ""]
    return latex(" ".join(filter(None, [*parts, cell.spread])))


def _beside(cell: Cell, ratio: float) -> bool:
    return ratio != 1 and cell.ratio is not None


def _caption(evaluation: Evaluation, table: Table) -> str:
    """What the numbers are and where they come from, as far as it is recorded."""
    record, runs = evaluation.provenance, evaluation.runs
    several = [len(line.seeds) > 1 for line in table.lines]
    if all(several):
        spread = "Mean and standard deviation over seeds"
    elif any(several):
        spread = "Mean and standard deviation over seeds; of one, a 95 % interval over documents"
    else:
        spread = "95 % intervals over documents"
    parts = [
        f"Perplexity by length, protocol {table.protocol}"
        + (" (posbench-v1)" if table.protocol == HEADLINE else "")
        + ", the ratio to 1x of the same line in parentheses.",
        f"{spread}.",
    ]
    corpora = list(dict.fromkeys(str(run["corpus"]) for run in runs if run.get("corpus")))
    prints = sorted({row.corpus_fingerprint[:12] for row in evaluation.rows} - {""})
    if corpora:
        parts.append(f"Corpus {', '.join(corpora)} ({', '.join(prints)}).")
    digests = sorted(
        {row.targets_sha256[:12] for row in evaluation.rows if row.protocol == table.protocol}
        - {""}
    )
    if digests:
        parts.append(f"Targets {', '.join(digests)}.")
    made = [f"{key} {record[key]}" for key in ("posbench", "torch", "device") if record.get(key)]
    if made:
        parts.append(f"Made with {', '.join(made)}.")
    return " ".join(parts)
