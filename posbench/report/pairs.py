"""Lines of an evaluation against a baseline, paired by seed: numbers, no words for people yet."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from posbench.errors import UserError
from posbench.inference import FEWEST_SEEDS, SeedInference, holm, infer, probability_of_improvement
from posbench.joining import MISMATCH
from posbench.report.lines import (
    HEADLINE,
    NOT_MEASURED,
    Subject,
    labels_of,
    name_of,
    subjects_of,
    word,
)
from posbench.results import Evaluation, Row, Status
from posbench.statistics import FEWEST_DOCUMENTS, Floats, bootstrap_interval

RESAMPLES = 2000


class Quantity(StrEnum):
    """What is compared, in nats: the mean loss, or how much it rose since 1x."""

    loss = "loss"
    growth = "growth"  # its exponential is the ratio of two extrapolation ratios


@dataclass(frozen=True)
class Comparison:
    """One line against the baseline at one length. Differences are line less baseline."""

    label: str
    baseline: str
    model: str
    train_length: int
    eval_length: int
    ratio: float
    quantity: Quantity
    seeds: tuple[int, ...] = ()  # those that both have
    left_out: tuple[str, ...] = ()  # the other ones, each with its reason
    word: str = ""  # what stands here in place of a number
    not_finite: tuple[int, ...] = ()  # seeds of which a loss is infinite
    seen: SeedInference | None = None
    p_holm: float | None = None
    improvement: float | None = None
    documents: tuple[float, float] | None = None  # 95 % interval, documents resampled
    n_documents: int = 0
    no_documents: str = ""  # why there is no such interval


@dataclass
class Comparisons:
    """All comparisons of one protocol; Holm's procedure was over all `tests` of them."""

    protocol: str
    baseline: str
    cells: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def tests(self) -> int:
        return sum(cell.p_holm is not None for cell in self.cells)


def lines_of(evaluation: Evaluation, protocol: str = HEADLINE) -> list[str]:
    """The names and labels that a baseline can have."""
    return list(dict.fromkeys(_names(_lines(evaluation, protocol))))


def compare(
    evaluation: Evaluation,
    baseline: str,
    protocol: str = HEADLINE,
    ratios: Sequence[float] | None = None,
) -> Comparisons:
    """Every line against the baseline of its block, at each length.

    A block is what can be compared: one model, one training length, one text. Raises UserError if
    there is no such baseline, or if only the text keeps a line from being compared with it.
    """
    lines = _lines(evaluation, protocol)
    _check_baseline(lines, baseline, protocol)
    _check_ratios(lines, ratios)
    documents = _documents(evaluation, protocol)
    found = Comparisons(protocol, baseline)
    blocks: dict[tuple[object, ...], list[_Line]] = defaultdict(list)
    for line in lines:
        blocks[line.block].append(line)
    bases = {block: _baseline(own, baseline) for block, own in blocks.items()}
    for block, own in blocks.items():
        base = bases[block]
        if base is None:
            _check_text(block, own, bases)
            found.notes += [_no_baseline(line, baseline) for line in own]
            continue
        others = [line for line in own if line is not base]
        for quantity, ratio in _columns(own, ratios):
            found.cells += [_cell(line, base, quantity, ratio, documents) for line in others]
        found.notes += [note for line in others for note in _trained_apart(line, base, evaluation)]
    found.cells = _adjusted(found.cells)
    return found


# ---------------------------------------------------------------- lines and blocks


@dataclass(frozen=True)
class _Line:
    """The rows of one subject, by ratio and seed."""

    subject: Subject
    label: str
    block: tuple[object, ...]
    rows: dict[float, dict[int, Row]]

    def side(self, ratio: float, quantity: Quantity) -> _Side:
        """What each seed measured at one length."""
        side = _Side(self.label)
        for seed, row in self.rows.get(ratio, {}).items():
            at_1x = self.rows.get(1.0, {}).get(seed)
            if not _has_number(row):
                side.words[seed] = word(row)
            elif quantity is Quantity.loss:
                side.losses[seed] = _nats(row)
            elif at_1x is None or not _has_number(at_1x):
                side.words[seed] = f"{word(at_1x) if at_1x else NOT_MEASURED} at 1x"
            else:
                side.losses[seed] = _nats(row) - _nats(at_1x)
        return side


@dataclass(frozen=True)
class _Side:
    """One of the two that are compared, at one length, by seed."""

    label: str
    losses: dict[int, float] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)  # of seeds without a number

    def why(self, seed: int) -> str:
        """Why a seed has no number; "" if it has one."""
        return "" if seed in self.losses else f"{self.label}: {self.words.get(seed, NOT_MEASURED)}"


def _has_number(row: Row) -> bool:
    return row.status in (Status.ok, Status.nonfinite)


def _nats(row: Row) -> float:
    """The mean loss; one that is not finite is infinite, and never left out."""
    return row.nll if row.nll is not None and math.isfinite(row.nll) else math.inf


def _lines(evaluation: Evaluation, protocol: str) -> list[_Line]:
    rows = [row for row in evaluation.rows if (row.metric, row.protocol) == ("ppl", protocol)]
    if not rows:
        known = {row.protocol: None for row in evaluation.rows if row.metric == "ppl"}
        there = f"there are {', '.join(known)}" if known else "no perplexity was measured at all"
        raise UserError(f"there are no results of protocol {protocol}; {there}.")
    subjects = subjects_of(evaluation)
    labels = labels_of(subjects.values(), evaluation)
    lines: dict[Subject, _Line] = {}
    any_text = MISMATCH in evaluation.provenance
    for row in rows:
        subject = subjects[row.run_id, row.extension, row.variant]
        text = () if any_text else (row.corpus_fingerprint, row.tokenizer_sha256)
        block = (row.model, row.train_length, *text)
        line = lines.setdefault(subject, _Line(subject, labels[subject], block, {}))
        line.rows.setdefault(row.ratio, {})[row.seed] = row
    return list(lines.values())


def _names(lines: list[_Line]) -> Iterator[str]:
    for line in lines:
        alike = [other for other in lines if name_of(other.subject) == name_of(line.subject)]
        yield name_of(line.subject) if _one_per_block(alike) else line.label


def _one_per_block(lines: list[_Line]) -> bool:
    return len({line.block for line in lines}) == len(lines)


def _check_baseline(lines: list[_Line], baseline: str, protocol: str) -> None:
    if not any(baseline in (line.label, name_of(line.subject)) for line in lines):
        raise UserError(
            f"--baseline {baseline}: no line of {protocol} has that name. There are: "
            f"{', '.join(dict.fromkeys(_names(lines)))}."
        )


def _baseline(block: list[_Line], baseline: str) -> _Line | None:
    """The line of a block that is meant; a label says it more exactly than a name."""
    exact = [line for line in block if line.label == baseline]
    named = exact or [line for line in block if name_of(line.subject) == baseline]
    if len(named) > 1:
        raise UserError(
            f"--baseline {baseline} is the name of {len(named)} lines; choose one by its label: "
            f"{', '.join(line.label for line in named)}."
        )
    return named[0] if named else None


def _check_ratios(lines: list[_Line], ratios: Sequence[float] | None) -> None:
    known = sorted({ratio for line in lines for ratio in line.rows})
    for ratio in ratios or ():
        if ratio not in known:
            there = ",".join(f"{each:g}" for each in known)
            raise UserError(f"--ratios {ratio:g} was not measured; there are {there}.")


def _check_text(
    block: tuple[object, ...], lines: list[_Line], bases: dict[tuple[object, ...], _Line | None]
) -> None:
    """Raise UserError if the baseline was measured on another text, and that alone differs."""
    for other, base in bases.items():
        if base is None or other[:2] != block[:2]:
            continue
        for place, name in enumerate(("corpus_fingerprint", "tokenizer_sha256"), 2):
            here, there = str(block[place]), str(other[place])
            if here != there:
                raise UserError(
                    f"{lines[0].label} and {base.label} cannot be compared: {name} is "
                    f"{here[:12] or 'none'} for the one and {there[:12] or 'none'} for the other. "
                    "Evaluate them on the same text, or add --allow-mismatch, which the output "
                    "then says."
                )


def _no_baseline(line: _Line, baseline: str) -> str:
    rows = [row for by_seed in line.rows.values() for row in by_seed.values()]
    skipped = next((row.reason for row in rows if row.status is Status.skipped), "")
    if skipped:
        return f"{line.label} is left out: skipped, {skipped}"
    return (
        f"{line.label} is left out: no {baseline} of the same model and training length "
        f"({line.subject.model}, {line.subject.train_length})."
    )


def _columns(
    block: list[_Line], ratios: Sequence[float] | None
) -> Iterator[tuple[Quantity, float]]:
    """What is compared in a block: losses at each length, then growth beyond or below 1x."""
    known = sorted({ratio for line in block for ratio in line.rows})
    wanted = [ratio for ratio in known if ratios is None or ratio in ratios]
    yield from ((Quantity.loss, ratio) for ratio in wanted)
    if 1.0 in known:
        yield from ((Quantity.growth, ratio) for ratio in wanted if ratio != 1)


def _trained_apart(line: _Line, base: _Line, evaluation: Evaluation) -> Iterator[str]:
    """A sentence, if the two were not trained on equally many tokens."""
    tokens = {run["run_id"]: run.get("tokens") for run in evaluation.runs}
    ours, theirs = (_tokens(each, tokens) for each in (line, base))
    if ours and theirs and ours != theirs:
        yield (
            f"{line.label} was trained on {_and(ours)} tokens, {base.label} on {_and(theirs)}: the "
            "difference is not that of the encodings alone."
        )


def _tokens(line: _Line, tokens: dict[str, object]) -> set[int]:
    ids = {row.run_id for by_seed in line.rows.values() for row in by_seed.values()}
    return {value for each in ids if isinstance(value := tokens.get(each), int)}


def _and(values: set[int]) -> str:
    return " and ".join(f"{value:,}" for value in sorted(values))


# ---------------------------------------------------------------- one cell

_Losses = dict[str, tuple[float, int]]  # document: summed loss, targets
_Documents = dict[tuple[str, str, str, int], _Losses]  # by run, extension, variant, length


def _documents(evaluation: Evaluation, protocol: str) -> _Documents:
    found: _Documents = defaultdict(dict)
    for each in evaluation.documents:
        if each.protocol == protocol:
            key = each.run_id, each.extension, each.variant, each.eval_length
            found[key][each.document] = each.sum_nll, each.n
    return found


def _cell(
    line: _Line, base: _Line, quantity: Quantity, ratio: float, documents: _Documents
) -> Comparison:
    ours, theirs = line.side(ratio, quantity), base.side(ratio, quantity)
    seeds = tuple(sorted(set(ours.losses) & set(theirs.losses)))
    reasons: dict[str, list[int]] = defaultdict(list)
    for seed in sorted({*ours.losses, *ours.words, *theirs.losses, *theirs.words} - set(seeds)):
        reasons[ours.why(seed) or theirs.why(seed)].append(seed)
    cell = Comparison(
        line.label,
        base.label,
        line.subject.model,
        line.subject.train_length,
        _length(line, base, ratio),
        ratio,
        quantity,
        seeds,
        tuple(f"{said(own)} ({reason})" for reason, own in reasons.items()),
    )
    if not seeds:
        return replace(cell, word=_word(ours, theirs))
    values = np.array([[ours.losses[seed], theirs.losses[seed]] for seed in seeds])
    with np.errstate(invalid="ignore"):  # inf - inf
        seen = infer(values[:, 0] - values[:, 1])
    broken = tuple(n for n, row in zip(seeds, values, strict=True) if not np.isfinite(row).all())
    cell = replace(cell, seen=seen, word=_not_finite(values), not_finite=broken)
    if len(seeds) >= FEWEST_SEEDS and not np.isnan(values).any():
        better = probability_of_improvement(values[:, 0], values[:, 1])
        cell = replace(cell, improvement=better)
    return _with_documents(cell, line, base, documents)


def said(seeds: Sequence[int]) -> str:
    """`seed 3`, or `seeds 0, 1, 2`."""
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _length(line: _Line, base: _Line, ratio: float) -> int:
    rows = line.rows.get(ratio) or base.rows[ratio]
    return next(iter(rows.values())).eval_length


def _word(ours: _Side, theirs: _Side) -> str:
    """Why no seed could be paired."""
    if ours.losses and theirs.losses:
        return "no seed in common"
    if not ours.losses:
        return next(iter(ours.words.values()), NOT_MEASURED)
    return f"{theirs.label}: {next(iter(theirs.words.values()), NOT_MEASURED)}"


def _not_finite(values: Floats) -> str:
    """A word for losses [seeds, 2] that are not all finite; "" if they are."""
    broken = ~np.isfinite(values)
    if not broken.any():
        return ""
    ours, theirs = broken[:, 0].any(), broken[:, 1].any()
    return "both inf" if ours and theirs else "inf" if ours else "baseline inf"


def _with_documents(
    cell: Comparison, line: _Line, base: _Line, documents: _Documents
) -> Comparison:
    """The cell with the interval of its mean difference for these trained models.

    Both models read the same documents, so that one draw of documents serves both: what is
    resampled is the difference of each document, averaged over the seeds.
    """
    if cell.word:
        return cell
    signed = [
        (sign, each.rows[ratio][seed])
        for seed in cell.seeds
        for each, own in ((line, 1), (base, -1))
        for ratio, sign in _terms(cell, own)
    ]
    tables = [
        (sign, row, documents.get((row.run_id, row.extension, row.variant, row.eval_length), {}))
        for sign, row in signed
    ]
    names = sorted(tables[0][2])
    if not names:
        return replace(cell, no_documents="no losses by document were kept")
    counts = np.array([tables[0][2][name][1] for name in names])
    sums = np.zeros(len(names))
    for sign, row, losses in tables:
        if sorted(losses) != names or [losses[name][1] for name in names] != counts.tolist():
            return replace(cell, no_documents="not the same documents")
        own = np.array([losses[name][0] for name in names])
        if not math.isclose(own.sum() / counts.sum(), _nats(row), rel_tol=1e-6):
            return replace(cell, no_documents="the protocol weighs windows, not tokens")
        sums += sign * own / len(cell.seeds)
    interval = bootstrap_interval(sums, counts, RESAMPLES)
    few = "" if interval else f"{len(names)} documents, fewer than {FEWEST_DOCUMENTS}"
    return replace(cell, documents=interval, n_documents=len(names), no_documents=few)


def _terms(cell: Comparison, sign: int) -> list[tuple[float, int]]:
    """The ratios whose losses make up the quantity, each with its sign."""
    if cell.quantity is Quantity.loss:
        return [(cell.ratio, sign)]
    return [(cell.ratio, sign), (1.0, -sign)]


def _adjusted(cells: list[Comparison]) -> list[Comparison]:
    """The cells with Holm's p over all of them that have one."""
    tested = [place for place, cell in enumerate(cells) if cell.seen and cell.seen.p is not None]
    if not tested:
        return cells
    raw = np.array([cell.seen.p for cell in cells if cell.seen and cell.seen.p is not None])
    adjusted = dict(zip(tested, holm(raw), strict=True))
    return [
        replace(cell, p_holm=float(adjusted[place])) if place in adjusted else cell
        for place, cell in enumerate(cells)
    ]
