"""Claims against numbers: what was said of an encoding, what was measured, and one rule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np

from posbench.claims import (
    DEGREES,
    ENCODING_CLAIMS,
    EXTENSION_CLAIMS,
    MEANINGS,
    TUTORIAL,
    Claim,
)
from posbench.references import REFERENCES
from posbench.report.grid import Grid
from posbench.report.lines import Line, Subject, Table, subjects_of, unlearned
from posbench.results import DocumentLoss, Evaluation, Row, Status
from posbench.statistics import FEWEST_DOCUMENTS, resampled_means

TITLE = "Claims and measurements"
LEAST_SEEDS = 3  # below, an interval over seeds says nothing
LEAST_RATIO = 2.0  # nearer to 1x, nothing is shown of extrapolation
_RESAMPLES = 2000
_SOURCES = {each.key: each.short for each in REFERENCES} | {TUTORIAL: "a tutorial"}

ABOUT = (
    "What is said of each encoding and extension, read as limits on one number that were set from "
    "the meaning of the words; what was measured; and whether the two agree by one rule, below."
)


def rule() -> list[str]:
    """The rule of the verdicts in words, with its numbers."""
    degrees = "; ".join(f"{word}: {meaning}" for word, meaning in MEANINGS.items())
    return [
        "The number is the perplexity at the longest length measured over that at 1x of the same "
        "run; where a claim names how far it goes, the longest length up to there. Words are read "
        f"so. {degrees[0].upper()}{degrees[1:]}. Praise sets an upper limit only, dispraise a "
        "lower one; of two words the first counts, and a claim without a degree is read as medium. "
        '"Better than X" means a lower perplexity than that of X at that length.',
        "Confirmed: the whole 95 % interval lies within the limits. Refuted: all of it lies "
        "outside. Inconclusive: neither, or there is no interval, or no length of at least "
        f"{LEAST_RATIO:g}x, or the model has not learned more than token frequencies at 1x.",
        f"With {LEAST_SEEDS} seeds or more the interval is Student's t over the logarithms of each "
        'seed\'s own ratio (paired by seed for "better than"), and the number their geometric '
        "mean. With fewer it comes from resampling documents, and the verdict is about these "
        "checkpoints, not about the encoding: it says so.",
    ]


def verdict(low: float, high: float, limits: tuple[float, float]) -> str:
    """What an interval [low, high] says of a claim that a number lies within `limits`.

    `confirmed` if all of it does, `refuted` if none of it, `inconclusive` otherwise; an end that
    is not a number is `inconclusive`. The limits themselves lie within.
    """
    least, most = limits
    if math.isnan(low) or math.isnan(high):
        return "inconclusive"
    if least <= low and high <= most:
        return "confirmed"
    return "refuted" if high < least or low > most else "inconclusive"


def degree_of(ratio: float) -> str:
    """The word for a ratio: the highest praise whose limit it keeps, else how bad it is."""
    praise = [word for word, (least, most) in DEGREES.items() if least == 0 and ratio <= most]
    if praise:
        return praise[0]
    return "none" if ratio > DEGREES["none"][0] else "weak"


@dataclass(frozen=True)
class Measured:
    """One ratio with its 95 % interval, or the words for why there is none."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    seeds: int = 0
    words: str = ""

    @property
    def basis(self) -> str:
        """What a verdict from it is about."""
        if self.seeds >= LEAST_SEEDS:
            return f"{self.seeds} seeds"
        return "two checkpoints" if self.seeds == 2 else "one checkpoint"


def over_seeds(ratios: Sequence[float]) -> Measured:
    """Geometric mean and t interval of three ratios or more, each of one seed.

    An infinite one makes the mean infinite, and the interval reach from the least to infinity.
    """
    if any(math.isinf(ratio) for ratio in ratios):
        return Measured(math.inf, min(ratios), math.inf, len(ratios))
    from scipy.special import stdtrit

    logs = [math.log(ratio) for ratio in ratios]
    half = float(stdtrit(len(logs) - 1, 0.975)) * stdev(logs) / math.sqrt(len(logs))
    centre = mean(logs)
    low, high = math.exp(centre - half), math.exp(centre + half)
    return Measured(math.exp(centre), low, high, len(logs))


def claims(evaluation: Evaluation, table: Table | None) -> Grid | None:
    """The table of claims and verdicts; None if no line has a claim on record."""
    if table is None:
        return None
    judge = _Judge(evaluation, table)
    rows, silent = [], []
    for line in table.lines:
        if line.subject.variant or _never_defined(line):
            continue
        said = _claims_of(line.subject)
        rows += [judge.row(line, claim) for claim in said]
        silent += [] if said else [line.label]
    if not rows:
        return None
    notes = [f"No claim on record: {', '.join(silent)}."] if silent else []
    header = ["encoding", "who", "says", "which means", "at", "measured", "verdict"]
    return Grid(TITLE, header, rows, ABOUT, [*notes, *rule()])


def _claims_of(subject: Subject) -> list[Claim]:
    if subject.extension in ("", "none"):
        return [each for each in ENCODING_CLAIMS if each.about == subject.encoding]
    return [each for each in EXTENSION_CLAIMS if each.about == subject.extension]


def _never_defined(line: Line) -> bool:
    """Whether an extension does not apply to the encoding at all."""
    return all(cell.mean is None and cell.text.startswith("n/a") for cell in line.cells.values())


class _Judge:
    """The numbers of one table, looked up by line and length."""

    def __init__(self, evaluation: Evaluation, table: Table) -> None:
        subjects = subjects_of(evaluation)
        self.table = table
        self.rows: dict[tuple[Subject, str, float], list[Row]] = defaultdict(list)
        for row in evaluation.rows:
            if row.protocol == table.protocol:
                subject = subjects[row.run_id, row.extension, row.variant]
                self.rows[subject, row.metric, row.ratio].append(row)
        self.documents: dict[tuple[str, str, int], list[DocumentLoss]] = defaultdict(list)
        for each in evaluation.documents:
            if each.protocol == table.protocol and not each.variant:
                self.documents[each.run_id, each.extension, each.eval_length].append(each)
        self.unlearned = unlearned(evaluation, table.protocol)

    def row(self, line: Line, claim: Claim) -> list[object]:
        """One row of the table of claims."""
        who = _SOURCES[claim.source]
        if claim.unjudged:
            return [line.label, who, claim.words, "", "", "", f"not judged: {claim.unjudged}"]
        at = self._judged_at(line, claim)
        means = _in_words(claim)
        if at is None:
            return [line.label, who, claim.words, means, "", "nothing from 2x on", "inconclusive"]
        found = self._against(line, claim.than, at) if claim.than else self._own(line, at)
        if found.words:
            return [line.label, who, claim.words, means, f"{at:g}x", found.words, "inconclusive"]
        said = verdict(found.low, found.high, claim.limits)
        reason = found.basis
        if not claim.than and line.subject in self.unlearned:
            said, reason = "inconclusive", "it has learned nothing beyond token frequencies"
        elif math.isnan(found.low):
            reason = "no interval"
        spread = "" if _undefined(found) else f"[{_times(found.low)}, {_times(found.high)}]"
        times = "inf" if math.isinf(found.value) else f"{_times(found.value)}x"
        number = "not defined" if _undefined(found) else times
        degree = "" if claim.than or _undefined(found) else degree_of(found.value)
        cell = (number, degree, "" if math.isnan(found.low) else spread)
        return [line.label, who, claim.words, means, f"{at:g}x", cell, (said, "", reason)]

    def _judged_at(self, line: Line, claim: Claim) -> float | None:
        """The longest length that has a number or is known to have none."""
        ratios = [
            ratio
            for ratio in line.cells
            if LEAST_RATIO <= ratio <= claim.up_to and self._values(line.subject, ratio)
        ]
        return max(ratios, default=None)

    def _values(self, subject: Subject, ratio: float) -> dict[int, float]:
        """Perplexity of each seed; infinite where it is not finite or not defined."""
        return {
            row.seed: math.inf if row.ppl is None or not math.isfinite(row.ppl) else row.ppl
            for row in self.rows[subject, "ppl", ratio]
            if row.status in (Status.ok, Status.nonfinite, Status.unsupported)
        }

    def _own(self, line: Line, at: float) -> Measured:
        """Perplexity at `at` over that at 1x."""
        base, there = self._values(line.subject, 1.0), self._values(line.subject, at)
        ratios = [there[s] / base[s] for s in there if math.isfinite(base.get(s, math.inf))]
        if not ratios:
            return Measured(words="not measured at 1x")
        if len(ratios) >= LEAST_SEEDS or not all(map(math.isfinite, ratios)):
            return over_seeds(ratios)
        rows = self.rows[line.subject, "extrapolation_ratio", at]
        ends = [(row.ci_lo, row.ci_hi) for row in rows if row.status is Status.ok]
        return _hull(ratios, ends)

    def _against(self, line: Line, other: str, at: float) -> Measured:
        """Perplexity at `at` over that of another encoding or extension, by seed."""
        rival = self._rival(line, other)
        if rival is None:
            return Measured(words=f"{_name(line, other)} was not measured")
        ours, theirs = self._values(line.subject, at), self._values(rival.subject, at)
        shared = [seed for seed in ours if math.isfinite(theirs.get(seed, math.inf))]
        if not shared:
            return Measured(words=f"{rival.label} has no number there")
        ratios = [ours[seed] / theirs[seed] for seed in shared]
        if len(ratios) >= LEAST_SEEDS or not all(map(math.isfinite, ratios)):
            return over_seeds(ratios)
        ends = [self._paired(line.subject, rival.subject, at, seed) for seed in shared]
        return _hull(ratios, ends)

    def _rival(self, line: Line, other: str) -> Line | None:
        """The line that a claim compares with: all alike but the encoding, or the extension."""
        mine = line.subject
        extended = mine.extension not in ("", "none")
        for each in self.table.lines:
            its = each.subject
            if (its.model, its.train_length, its.variant) != (mine.model, mine.train_length, ""):
                continue
            plain = its.extension in ("", "none")
            if extended:
                same_run = (its.encoding, its.settings_id) == (mine.encoding, mine.settings_id)
                if same_run and (plain if other == "none" else its.extension == other):
                    return each
            elif plain and its.encoding == other:
                return each
        return None

    def _paired(
        self, mine: Subject, its: Subject, at: float, seed: int
    ) -> tuple[float | None, float | None]:
        """Interval of the ratio of perplexities of one seed, shared documents resampled."""
        losses = []
        for subject in (mine, its):
            row = next(row for row in self.rows[subject, "ppl", at] if row.seed == seed)
            found = self.documents[row.run_id, row.extension, row.eval_length]
            losses.append({each.document: each for each in found})
        shared = sorted({*losses[0]} & {*losses[1]})
        if len(shared) < FEWEST_DOCUMENTS:
            return None, None
        counts = np.array([losses[0][name].n for name in shared])
        sums = np.array([[each[name].sum_nll for name in shared] for each in losses])
        ours, theirs = resampled_means(sums, counts, _RESAMPLES)
        low, high = np.exp(np.percentile(ours - theirs, (2.5, 97.5)))
        return float(low), float(high)


def _hull(ratios: Sequence[float], ends: Iterable[tuple[float | None, float | None]]) -> Measured:
    """One or two checkpoints: the least and the greatest end of their intervals."""
    known = [(low, high) for low, high in ends if low is not None and high is not None]
    value = math.exp(mean(math.log(ratio) for ratio in ratios))
    if len(known) < len(ratios):
        return Measured(value, seeds=len(ratios))
    return Measured(
        value, min(low for low, _ in known), max(high for _, high in known), len(ratios)
    )


def _undefined(found: Measured) -> bool:
    return math.isinf(found.value) and math.isinf(found.low)


def _name(line: Line, other: str) -> str:
    if line.subject.extension in ("", "none"):
        return other
    return line.subject.encoding + ("" if other == "none" else f" + {other}")


def _in_words(claim: Claim) -> str:
    """`at most 1.05x` or `below rope`."""
    if claim.than:
        return "below its own without" if claim.than == "none" else f"below {claim.than}"
    least, most = claim.limits
    return f"at most {most:g}x" if least == 0 else f"above {least:g}x"


def _times(ratio: float) -> str:
    if math.isinf(ratio):
        return "inf"
    return f"{ratio:.{3 if abs(ratio - 1) < 0.1 else 2 if ratio < 100 else 0}f}"
