"""The answer in two sentences, by a stated rule, and what the numbers leave open."""

from __future__ import annotations

import math
from collections.abc import Sequence

from posbench.joining import MISMATCH
from posbench.report.extended import not_applicable
from posbench.report.lines import Cell, Line, Table, number, subjects_of, unlearned
from posbench.report.missing import missing_runs
from posbench.results import Evaluation, Status

TOLERANCE = 0.05
MOST_NAMED = 8  # lines in one group of the first sentence
RULE = (
    "The two sentences at the top follow a rule: a line held if its perplexity at the longest "
    "length is within 5 % of its own at 1x, and rose or fell if it is further away; the lowest "
    "perplexity is named with the lines whose intervals (or, with several seeds, ranges) overlap "
    "with its own."
)


def answer(table: Table | None) -> list[str]:
    """At most two sentences that say what the headline table carries, and nothing more."""
    if table is None:
        return ["Nothing was measured: the evaluation holds no rows."]
    longest = max(table.ratios)
    if longest <= 1:
        return [f"Only lengths up to 1x were measured ({table.protocol}). " + _lowest(table, 1.0)]
    measured = [line for line in table.lines if _has_number(line.cell(longest))]
    if not measured:
        words = {f"{line.label}: {line.cell(longest).text}" for line in table.lines}
        return [f"No line has a number at {table.heading(longest)}: {_and(sorted(words))}."]
    return [_trend(table, longest), _lowest(table, longest)]


def _has_number(cell: Cell) -> bool:
    return cell.mean is not None


def _trend(table: Table, ratio: float) -> str:
    """Who held, fell and rose at `ratio`, and who has no number there."""
    groups: dict[str, list[tuple[float, str]]] = {
        "held": [], "fell": [], "rose": [], "broke": [], "": []
    }  # fmt: skip
    for line in table.lines:
        cell = line.cell(ratio)
        if cell.text.startswith(("inf", "nan")):
            groups["broke"].append((0.0, line.label))
        elif cell.ratio is None:
            groups[""].append((0.0, f"{line.label} [{cell.text}]"))
        else:
            text = f"{line.label} ({cell.ratio_text})"
            groups[_verdict(cell.ratio)].append((cell.ratio, text))
    meanings = {
        "held": "held within 5 % of its value at 1x for",
        "fell": "fell for",
        "rose": "rose for",
        "broke": "was not finite for",
    }
    said = [f"{meanings[key]} {_named(groups[key])}" for key in meanings if groups[key]]
    sentence = f"At {ratio:g}x the training length perplexity ({table.protocol}) {_and(said)}"
    if not said:
        sentence = f"At {ratio:g}x the training length no line can be set against its own 1x"
    if groups[""]:
        sentence += f"; not comparable there: {_named(groups[''])}"
    return sentence + "."


def _named(lines: list[tuple[float, str]]) -> str:
    """All of them if they are few; otherwise how many, and the least and the greatest."""
    if len(lines) <= MOST_NAMED:
        return _and([text for _, text in lines])
    least, greatest = min(lines), max(lines)
    if least[0] == greatest[0]:
        return f"{len(lines)} lines, {lines[0][1]} among them"
    return f"{len(lines)} lines, from {least[1]} to {greatest[1]}"


def _verdict(ratio: float) -> str:
    if abs(ratio - 1) <= TOLERANCE:
        return "held"
    return "fell" if ratio < 1 else "rose"


def _lowest(table: Table, longest: float) -> str:
    """The lowest perplexity at the longest length, and at 1x if that was measured.

    Only lines that were scored on the same tokens are ranked; what stands alone is not named.
    """
    said = []
    apart = False
    for ratio in dict.fromkeys((longest, 1.0)):
        ranked = [line for line in table.lines if math.isfinite(_mean(line.cell(ratio)))]
        ranked.sort(key=lambda line: _mean(line.cell(ratio)))
        alike: dict[frozenset[str], list[Line]] = {}
        for line in ranked:
            alike.setdefault(line.cell(ratio).targets, []).append(line)
        apart = apart or len(alike) > 1
        said += [
            f"at {ratio:g}x {_first(lines, ratio)}"
            for lines in alike.values()
            if len(alike) == 1 or len(lines) > 1
        ]
    if not said:
        return "No two lines share target tokens." if apart else "No line has a finite perplexity."
    name = "Perplexity was" if len(table.lines) == 1 else "The lowest perplexity was"
    among = ", among lines scored on the same tokens," if apart else ""
    return f"{name}{among} {_and(said)}."


def _first(lines: list[Line], ratio: float) -> str:
    """The first of ascending lines, its perplexity, and those it is not separated from."""
    best = lines[0].cell(ratio)
    ties = [line.label for line in lines[1:] if _overlap(best, line.cell(ratio))]
    others = _and(ties) if len(ties) <= MOST_NAMED else f"{len(ties)} others"
    tie = f", not separated from {others}" if ties else ""
    return f"{lines[0].label} ({number(_mean(best))}{tie})"


def _mean(cell: Cell) -> float:
    return math.inf if cell.mean is None else cell.mean


def _overlap(a: Cell, b: Cell) -> bool:
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return False
    return a.low <= b.high and b.low <= a.high


def _and(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


# ---------------------------------------------------------------- what is open


def caveats(evaluation: Evaluation, shown: list[Table]) -> list[str]:
    """Everything a reader must know is missing, broken, or not comparable."""
    return [
        *mismatches(evaluation),
        *_not_ok(shown, evaluation),
        *_remarks(shown, evaluation),
        *_unlearned(evaluation, shown),
        *_targets(evaluation, shown),
        *_split(evaluation),
        *_seeds(shown),
    ]


def _split(evaluation: Evaluation) -> list[str]:
    protocols = [run.get("protocol") for run in evaluation.runs]
    splits = {
        str(each["split"]) for each in protocols if isinstance(each, dict) and "split" in each
    }
    return [
        f"Documents of {'all splits' if split == 'all' else f'the {split} split'} were scored "
        f"(eval.split={split}), not those of the test split."
        for split in sorted(splits - {"test"})
    ]


def mismatches(evaluation: Evaluation) -> list[str]:
    """What stands side by side although it is not alike, in sentences."""
    return [
        f"Not alike, and shown on demand (--allow-mismatch): {each}."
        for each in evaluation.provenance.get(MISMATCH, [])
    ]


def _not_ok(shown: list[Table], evaluation: Evaluation) -> list[str]:
    """One sentence for each line and kind of failure, with its lengths and first reason."""
    found: dict[tuple[str, str], list[tuple[str, int, str]]] = {}
    labels = {line.subject: line.label for table in shown for line in table.lines}
    subjects = subjects_of(evaluation)
    said_elsewhere = {each["run_id"] for each in missing_runs(evaluation)}
    foreign = not_applicable(shown[0]) if shown else set()
    for row in evaluation.rows:
        subject = subjects[row.run_id, row.extension, row.variant]
        told = row.status is Status.skipped and row.run_id in said_elsewhere
        if told or subject in foreign:
            continue
        if row.metric == "ppl" and row.status is not Status.ok:
            label = labels[subject]
            status = row.status.replace("_", " ")
            found.setdefault((label, status), []).append(
                (row.protocol, row.eval_length, row.reason)
            )
    said = []
    for (label, status), cells in found.items():
        lengths = _and([str(n) for n in sorted({length for _, length, _ in cells})])
        protocols = _and(list(dict.fromkeys(protocol for protocol, _, _ in cells)))
        reason = next((reason for _, _, reason in cells if reason), "no reason recorded")
        said.append(f"{label}: {status} at {lengths} tokens ({protocols}): {reason}.")
    return said


def _remarks(shown: list[Table], evaluation: Evaluation) -> list[str]:
    """What cells that do have a number say about it, such as why it has no interval."""
    labels = {line.subject: line.label for table in shown for line in table.lines}
    subjects = subjects_of(evaluation)
    found: dict[str, dict[str, None]] = {}
    for row in evaluation.rows:
        if row.metric == "ppl" and row.status is Status.ok and row.reason:
            label = labels[subjects[row.run_id, row.extension, row.variant]]
            found.setdefault(f"{row.reason} ({row.protocol})", {})[label] = None
    return [f"{_and(list(names))}: {reason}." for reason, names in found.items()]


def _unlearned(evaluation: Evaluation, shown: list[Table]) -> list[str]:
    if not shown:
        return []
    none = unlearned(evaluation, shown[0].protocol)
    return [
        f"{line.label} has learned little or nothing: its perplexity at 1x, "
        f"{line.cells[1].text}, is not below that of token frequencies alone."
        for line in shown[0].lines
        if line.subject in none
    ]


def _targets(evaluation: Evaluation, shown: list[Table]) -> list[str]:
    """The headline compares only what was scored on the same tokens."""
    if not shown:
        return []
    rows = [row for row in evaluation.rows if row.protocol == shown[0].protocol]
    hashes = {row.targets_sha256 for row in rows if row.targets_sha256}
    if len(hashes) < 2:
        return []
    return [
        f"{shown[0].protocol}: the lines were scored on {len(hashes)} different sets of target "
        "tokens; compare perplexities only between lines that share one."
    ]


def _seeds(shown: list[Table]) -> list[str]:
    """A claim about encodings needs several trainings of each."""
    counts = {line.label: len(line.seeds) for table in shown for line in table.lines}
    few = [label for label, count in counts.items() if count < 3]
    if not few:
        return []
    who = "Each line" if len(few) == len(counts) else f"{len(few)} of {len(counts)} lines"
    verb = "rests" if who == "Each line" or len(few) == 1 else "rest"
    most = max(counts[label] for label in few)
    seeds = "one seed" if most == 1 else "two seeds at most"
    return [
        f"{who} {verb} on {seeds}: an interval says how much the choice of documents matters, not "
        "how much another seed would change; no inference about seeds."
    ]
