"""Tables of what is not a perplexity: tasks by length, and the gain from a repeat."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from posbench.report.grid import Grid
from posbench.report.lines import NOT_MEASURED, Subject, labels_of, subjects_of, word
from posbench.results import Evaluation, Row, Status

TITLES = {
    "exact_match": "Exact match",
    "token_accuracy": "Token accuracy",
    "induction_gain": "Nats per token gained on a repeat (induction)",
}
ABOUT = {
    "exact_match": (
        "The share of held-out examples whose whole answer is right, which is what greedy decoding "
        "would write. 1x is the longest length trained; training had all lengths up to it."
    ),
    "token_accuracy": (
        "The share of answer tokens that are right, given the right answer up to them. [ ]: as "
        "wide as if the tokens of one example were all right or all wrong together."
    ),
    "induction_gain": (
        "Random tokens and their repeat, half a sequence later: the loss on tokens that come first "
        "less the loss on the same tokens when they come again. Near 0: the model does not look "
        "back that far."
    ),
}
HOW_TO_READ = (
    "1x is the longest length trained, in what the task is made of (symbols, pairs, digits); "
    "training had every length up to it equally often. Lengths within that range stand beside "
    "those beyond.",
    "An interval in brackets is Wilson's at 95 %, over the examples scored for one trained model; "
    "it says nothing of another seed. With several seeds the number after ± is their standard "
    "deviation.",
    "chance: what a guess would score that knows nothing but which tokens an answer may hold.",
    "n/a: the encoding or extension is not defined at that length.",
)
Key = tuple[str, str]  # (task, metric); no task: a probe of a language model


def probe_grids(evaluation: Evaluation) -> list[Grid]:
    """One table for each task and metric, in the order in which they were measured."""
    records = {run["run_id"]: run for run in evaluation.runs}
    groups: dict[Key, list[Row]] = defaultdict(list)
    for row in evaluation.rows:
        if row.metric in TITLES:
            task = str(records.get(row.run_id, {}).get("task", ""))
            groups[task, row.metric].append(row)
    return [_grid(key, rows, evaluation) for key, rows in groups.items()]


def probe_answer(evaluation: Evaluation) -> list[str]:
    """One sentence for each task, and one for the gain from a repeat, at the longest length."""
    said = []
    for grid in probe_grids(evaluation):
        if not grid.title.startswith(TITLES["token_accuracy"]):
            values = [f"{row[0]} {row[-1][0]}" for row in grid.rows]
            said.append(f"{grid.title}, at {grid.header[-1]}: {', '.join(values)}.")
    return said


def probe_title(evaluation: Evaluation) -> str:
    """The heading of a report that holds no perplexity; "" if there is nothing at all."""
    tasks = [str(run["task"]) for run in evaluation.runs if "task" in run]
    probes = [row.protocol for row in evaluation.rows if row.metric in TITLES]
    names = list(dict.fromkeys(tasks or probes))
    return f"Length extrapolation on {', '.join(names)}" if names else ""


def _grid(key: Key, rows: list[Row], evaluation: Evaluation) -> Grid:
    task, metric = key
    by_key = subjects_of(evaluation)
    own = {by_key[row.run_id, row.extension, row.variant]: None for row in rows}
    labels = labels_of(own, evaluation)
    cells: dict[Subject, dict[float, list[Row]]] = {each: defaultdict(list) for each in own}
    for row in rows:
        cells[by_key[row.run_id, row.extension, row.variant]][row.ratio].append(row)
    ratios = sorted({row.ratio for row in rows})
    reasons: dict[str, int] = {}
    lines: list[list[Any]] = []
    for subject, columns in cells.items():
        seeds = sorted({row.seed for column in columns.values() for row in column})
        shown = [_cell(columns.get(ratio, []), metric, reasons) for ratio in ratios]
        lines.append([labels[subject], ", ".join(str(seed) for seed in seeds), *shown])
    chance = _chance(key, rows, evaluation, ratios)
    return Grid(
        TITLES[metric] + (f" by length, {task}" if task else ""),
        ["encoding", "seed", *(_heading(ratio, rows) for ratio in ratios)],
        [*lines, *([["chance", "", *chance]] if chance else [])],
        ABOUT[metric],
        [f"({number}) {reason}" for reason, number in reasons.items()],
    )


def _heading(ratio: float, rows: list[Row]) -> str:
    """`2x (128)`, or `2x` where the same ratio is another length."""
    lengths = {row.eval_length for row in rows if row.ratio == ratio}
    return f"{ratio:g}x ({lengths.pop()})" if len(lengths) == 1 else f"{ratio:g}x"


def _cell(rows: list[Row], metric: str, reasons: dict[str, int]) -> tuple[str, str, str]:
    """The rows of one subject at one length, one per seed: (mean or word, "", spread)."""
    if not rows:
        return NOT_MEASURED, "", ""
    shown: Callable[[float], str] = _gain if metric == "induction_gain" else _share
    good = [row for row in rows if row.status is Status.ok and row.value is not None]
    bad = [row for row in rows if row not in good]
    missing = word(bad[0]) if bad else ""
    if bad and "table" not in missing:
        missing += f" ({reasons.setdefault(bad[0].reason, len(reasons) + 1)})"
    if not good:
        return missing, "", ""
    values = [row.value for row in good if row.value is not None]
    mean = sum(values) / len(values)
    text = shown(mean) + (f" ({len(good)} of {len(rows)} seeds, else {missing})" if bad else "")
    if len(values) > 1:
        deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
        return text, "", f"±{deviation:#.2g}"
    low, high = good[0].ci_lo, good[0].ci_hi
    spread = "" if low is None or high is None else f"[{shown(low)}, {shown(high)}]"
    return text, "", spread


def _share(value: float) -> str:
    return f"{value:.3f}"


def _gain(value: float) -> str:
    return f"{value:.2f}"


def _chance(
    key: Key, rows: list[Row], evaluation: Evaluation, ratios: list[float]
) -> list[tuple[str, str, str]]:
    """The chance level at each length; none where a ratio is not one length."""
    task, metric = key
    records = [run["protocol"] for run in evaluation.runs if task and run.get("task") == task]
    lengths = [{row.eval_length for row in rows if row.ratio == ratio} for ratio in ratios]
    if not records or any(len(each) > 1 for each in lengths):
        return []
    levels = [
        records[0]["token_chance"]
        if metric == "token_accuracy"
        else records[0]["exact_chance"].get(str(each.pop()))
        for each in lengths
    ]
    return [("" if level is None else _level(float(level)), "", "") for level in levels]


def _level(value: float) -> str:
    return f"{value:.3f}" if value >= 0.0005 else "<0.001"
