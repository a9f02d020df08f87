"""Rows of an evaluation gathered into lines for people: one per encoding, its seeds averaged."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from posbench.report.missing import missing_runs
from posbench.results import Evaluation, Row, Status

HEADLINE = "controlled"
LIMIT = 1e4  # a perplexity above this says "broken"; its digits say nothing more
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Subject:
    """What one line is about: rows that differ in nothing but the seed."""

    encoding: str
    extension: str
    variant: str
    model: str
    train_length: int
    settings_id: str
    part: str  # a run's id, when two runs share everything above and the seed too


@dataclass(frozen=True)
class Cell:
    """One line at one length: a mean over seeds, or the word that stands in its place."""

    text: str
    length: int
    mean: float | None = None  # perplexity; None if no seed has a number, inf if one broke
    low: float | None = None  # one seed: 95 % interval; several: least and greatest
    high: float | None = None
    ratio: float | None = None  # mean over seeds of perplexity over the seed's own at 1x
    spread: str = ""
    reasons: tuple[str, ...] = ()
    targets: frozenset[str] = frozenset()  # digests of the tokens that were scored

    @property
    def ratio_text(self) -> str:
        if self.ratio is None:
            return ""
        return ">100x" if not self.ratio <= 100 else f"{self.ratio:.2f}x"


@dataclass
class Line:
    """One subject under one protocol, its cells by ratio of evaluation to training length."""

    subject: Subject
    label: str
    seeds: list[int]
    cells: dict[float, Cell] = field(default_factory=dict)

    def cell(self, ratio: float) -> Cell:
        return self.cells.get(ratio) or Cell(NOT_MEASURED, round(ratio * self.subject.train_length))


@dataclass
class Table:
    """All lines of one protocol, in the order in which the runs were given."""

    protocol: str
    lines: list[Line]
    ratios: list[float]

    def heading(self, ratio: float) -> str:
        """`2x (256)`, or `2x` if the runs were trained at different lengths."""
        lengths = {line.cells[ratio].length for line in self.lines if ratio in line.cells}
        return f"{ratio:g}x ({lengths.pop()})" if len(lengths) == 1 else f"{ratio:g}x"

    def numbered_reasons(self) -> dict[str, int]:
        """Footnotes: the reasons behind words that do not explain themselves."""
        cells = [line.cells[r] for line in self.lines for r in self.ratios if r in line.cells]
        reasons = [reason for cell in cells for reason in cell.reasons]
        return {reason: 1 + i for i, reason in enumerate(dict.fromkeys(reasons))}


# ---------------------------------------------------------------- words


def number(value: float) -> str:
    """A perplexity in about four digits; above 1e4 only that it is."""
    if value > LIMIT:
        return ">1e4"
    return f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def word(row: Row) -> str:
    """What a cell shows for this row: its perplexity, or what became of it. Never blank."""
    if row.status is Status.ok and row.ppl is not None and not math.isnan(row.ppl):
        return number(row.ppl)
    if row.status in (Status.ok, Status.nonfinite):
        return "nan" if row.ppl is not None and math.isnan(row.ppl) else "inf"
    table = _table_rows(row)
    if table:
        return f"n/a (table {table})"
    return {Status.unsupported: "n/a"}.get(row.status, row.status.replace("_", " "))


def _table_rows(row: Row) -> str | None:
    """The size of the table that ends before the length, if the reason names one."""
    found = re.search(r"\btable\b\D*(\d+) rows", row.reason)
    return found[1] if found and row.status is Status.unsupported else None


def _explains_itself(row: Row) -> bool:
    return row.status is Status.ok or not row.reason or _table_rows(row) is not None


# ---------------------------------------------------------------- lines


def tables(evaluation: Evaluation) -> list[Table]:
    """One table for each protocol, the headline first."""
    rows = [row for row in evaluation.rows if row.metric == "ppl"]
    names = list(dict.fromkeys(row.protocol for row in rows))
    names.sort(key=lambda name: name != HEADLINE)
    subjects = subjects_of(evaluation)
    labels = labels_of(subjects.values(), evaluation)
    return [
        _table(name, [row for row in rows if row.protocol == name], subjects, labels)
        for name in names
    ]


def subjects_of(evaluation: Evaluation) -> dict[tuple[str, str, str], Subject]:
    """The subject of each (run_id, extension, variant) that has a row."""
    settings = {
        each["run_id"]: str(each.get("settings_id", ""))
        for each in (*missing_runs(evaluation), *evaluation.runs)
    }
    subjects = {}
    runs = defaultdict(set)
    for row in evaluation.rows:
        subject = Subject(
            row.encoding,
            row.extension,
            row.variant,
            row.model,
            row.train_length,
            settings.get(row.run_id, ""),
            "",
        )
        subjects[row.run_id, row.extension, row.variant] = subject
        runs[subject, row.seed].add(row.run_id)
    # Two runs of one seed are not two seeds: their settings differ in something rows do not carry.
    twice = {subject for (subject, _), ids in runs.items() if len(ids) > 1}
    return {
        key: replace(subject, part=key[0]) if subject in twice else subject
        for key, subject in subjects.items()
    }


def unlearned(evaluation: Evaluation, protocol: str) -> set[Subject]:
    """Subjects whose perplexity at 1x is not below that of the token frequencies of their text.

    Means over seeds; a subject whose runs did not record that perplexity is not among them.
    """
    floors = {run["run_id"]: run.get("unigram_ppl") for run in evaluation.runs}
    subjects = subjects_of(evaluation)
    found: dict[Subject, list[tuple[float, float]]] = defaultdict(list)
    for row in evaluation.rows:
        floor = floors.get(row.run_id)
        measured = row.status in (Status.ok, Status.nonfinite)
        if (row.protocol, row.metric, row.ratio) == (protocol, "ppl", 1) and measured and floor:
            found[subjects[row.run_id, row.extension, row.variant]].append((_ppl(row), floor))
    return {
        subject
        for subject, pairs in found.items()
        if sum(ppl for ppl, _ in pairs) >= sum(floor for _, floor in pairs)
    }


def name_of(subject: Subject) -> str:
    """What is compared: the encoding, its extension and its variant, as `rope + yarn`."""
    name = subject.encoding
    name += f" + {subject.extension}" if subject.extension not in ("", "none") else ""
    return name + (f" ({subject.variant})" if subject.variant else "")


def labels_of(subjects: Iterable[Subject], evaluation: Evaluation) -> dict[Subject, str]:
    """A short name for each subject that says no more than is needed to tell them apart."""
    distinct = list(dict.fromkeys(subjects))
    models = {subject.model for subject in distinct}
    lengths = {subject.train_length for subject in distinct}
    labels = {}
    for subject in distinct:
        label = name_of(subject)
        label += f" {subject.model}" if len(models) > 1 else ""
        label += f" L={subject.train_length}" if len(lengths) > 1 else ""
        labels[subject] = label
    names = {subject: _run_name(subject, evaluation) for subject in distinct}
    by_name = {subject: f"{label} [{names[subject].name}]" for subject, label in labels.items()}
    by_path = {subject: f"{label} [{names[subject]}]" for subject, label in labels.items()}
    return _first_unique(labels, by_name, by_path)


def _first_unique(*choices: dict[Subject, str]) -> dict[Subject, str]:
    """For each subject its first label that no other subject has in the same choice."""
    counts = [Counter(choice.values()) for choice in choices]
    return {
        subject: next(
            (
                c[subject]
                for c, count in zip(choices, counts, strict=True)
                if count[c[subject]] == 1
            ),
            choices[-1][subject],
        )
        for subject in choices[0]
    }


def _run_name(subject: Subject, evaluation: Evaluation) -> Path:
    """The folder of the subject's first run, or its id if the folder is not recorded."""
    for run in evaluation.runs:
        same = subject.settings_id and subject.settings_id == str(run.get("settings_id", ""))
        if run["run_id"] == subject.part or (not subject.part and same):
            return Path(str(run.get("folder") or run["run_id"]))
    return Path(subject.part or subject.settings_id[:8])


def _table(
    protocol: str,
    rows: list[Row],
    subjects: dict[tuple[str, str, str], Subject],
    labels: dict[Subject, str],
) -> Table:
    groups: dict[Subject, list[Row]] = defaultdict(list)
    for row in rows:
        groups[subjects[row.run_id, row.extension, row.variant]].append(row)
    lines = []
    for subject, own in groups.items():
        line = Line(subject, labels[subject], sorted({row.seed for row in own}))
        at_1x = {row.run_id: row for row in own if row.ratio == 1}
        for ratio in sorted({row.ratio for row in own}):
            here = [row for row in own if row.ratio == ratio]
            line.cells[ratio] = _cell(here, at_1x)
        lines.append(line)
    return Table(protocol, lines, sorted({row.ratio for row in rows}))


def _cell(rows: list[Row], at_1x: dict[str, Row]) -> Cell:
    """The rows of one subject at one length, one per seed, as one cell."""
    good = [row for row in rows if row.status in (Status.ok, Status.nonfinite)]
    reasons = tuple(dict.fromkeys(row.reason for row in rows if not _explains_itself(row)))
    if not good:
        return Cell(word(rows[0]), rows[0].eval_length, reasons=reasons)
    broken = [row for row in good if word(row) in ("inf", "nan")]
    values = [_ppl(row) for row in good]
    mean = math.inf if broken else sum(values) / len(values)
    text = word(broken[0]) if broken else number(mean)
    if len(good) < len(rows):
        text += f" ({len(good)} of {len(rows)} seeds)"
    ratios = [
        _ppl(row) / _ppl(base)
        for row in good
        if not broken and (base := at_1x.get(row.run_id)) and math.isfinite(_ppl(base)) and base.ppl
    ]
    low, high, spread = _spread(good, values) if math.isfinite(mean) else (None, None, "")
    return Cell(
        text,
        rows[0].eval_length,
        mean,
        low,
        high,
        sum(ratios) / len(ratios) if ratios and len(ratios) == len(good) else None,
        spread if mean <= LIMIT else "",
        reasons,
        frozenset(row.targets_sha256 for row in good),
    )


def _ppl(row: Row) -> float:
    value = row.ppl
    return math.inf if value is None or math.isnan(value) else value


def _spread(rows: list[Row], values: list[float]) -> tuple[float | None, float | None, str]:
    """One seed: the interval of its row. Several: least, greatest, and the standard deviation."""
    if len(rows) > 1:
        mean = sum(values) / len(values)
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
        return (
            min(values),
            max(values),
            f"±{deviation:#.2g}" if deviation < 10 else f"±{deviation:.0f}",
        )
    low, high = rows[0].ci_lo, rows[0].ci_hi
    if low is None or high is None:
        return None, None, ""
    return low, high, f"[{number(low)}, {number(high)}]"
