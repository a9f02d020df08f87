"""The numbers of `posbench inspect` as tables and sentences for a person."""

from __future__ import annotations

import json
import math
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from posbench.inspection.facts import Subject
from posbench.plugins import SOURCE

HEADS_PER_TABLE = 6  # what fits beside the distances in 80 columns

CLAIMS = {
    "rotation_keeps_norm": (
        "Rotation keeps the norm of queries and keys",
        "Largest relative change",
    ),
    "score_depends_on_distance_alone": (
        "A score depends on the distance i - j alone",
        "Largest change when both move, relative to the largest score",
    ),
    "embedding_dot_product_depends_on_distance_alone": (
        "The dot product of two position vectors depends on i - j alone",
        "Largest change when both move, relative to the largest product",
    ),
}


def print_table(subject: Subject, facts: dict[str, Any]) -> None:
    """Print the facts to stdout."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(*_heading(subject, facts), sep="\n")
    for kind in ("", "global_"):
        if facts[f"{kind}inverse_frequencies"]:
            console.print()
            console.print(_frequencies(subject, facts, kind))
            console.print(_unfinished(facts, kind))
    if facts["slopes"]:
        console.print()
        console.print(_slopes(facts["slopes"]))
    if facts["bias"] and facts["bias"]["distances"]:
        for table in _bias(facts["bias"]):
            console.print()
            console.print(table)
    console.print()
    for name, check in facts["checks"].items():
        if check is not None:
            console.print(_verdict(name, check))


def _heading(subject: Subject, facts: dict[str, Any]) -> list[str]:
    model = subject.settings.model
    lines = [
        f"encoding    {_options(facts['settings']['encoding'])}",
        f"extension   {_options(facts['settings']['extension'])}",
        f"model       {model.heads} heads of {model.head_size} channels, width {model.width}",
        f"length      trained at {facts['train_length']} tokens, "
        f"looked at {facts['eval_length']} ({subject.length / facts['train_length']:.3g}x)",
        f"parameters  {facts['parameters']:,} of its own",
        f"max length  {_max_length(subject)}",
    ]
    if facts["attention_factor"] is not None:
        factor = facts["attention_factor"]
        lines.append(f"cos, sin    times {factor:.6g}, which multiplies scores by {factor**2:.6g}")
    return lines


def _options(group: dict[str, Any]) -> str:
    values = ", ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in group.items()
        if key not in ("name", SOURCE)
    )
    return f"{group['name']} ({values})" if values else str(group["name"])


def _max_length(subject: Subject) -> str:
    limit = subject.encoding.max_length
    if limit is None:
        return "none"
    beyond = f"; undefined at the {subject.length} looked at" if subject.length > limit else ""
    return f"{limit} tokens{beyond}"


def _grid(title: str, *columns: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="", box=box.SIMPLE, padding=(0, 0, 0, 1)
    )
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _frequencies(subject: Subject, facts: dict[str, Any], kind: str) -> Table:
    """What each pair does; `kind` begins the keys of the layers meant, as in the facts."""
    key = f"{kind}inverse_frequencies"
    trained = subject.trained.describe(facts["train_length"])[key].tolist()
    here, length = facts[key], facts["eval_length"]
    columns = ["pair", "rad/token", "tokens/turn", f"turns in {facts['train_length']}"]
    if subject.extended:
        columns += [facts["extension"], "stretch", f"turns in {length}"]
    elif length != facts["train_length"]:
        columns.append(f"turns in {length}")
    title = f"Rotation of each pair{_layers(facts, kind) or ' of channels'}"
    table = _grid(title, *columns)
    for pair, (before, after) in enumerate(zip(trained, here, strict=True)):
        turn = 2 * math.pi
        row = [pair, before, turn / before if before else math.inf]
        row.append(facts["train_length"] * before / turn)
        if subject.extended:
            row += [after, before / after if after else 1.0, length * after / turn]
        elif length != facts["train_length"]:
            row.append(length * after / turn)
        table.add_row(*[f"{value:.4g}" for value in row])
    return table


def _layers(facts: dict[str, Any], kind: str) -> str:
    """Which layers a table is about, where they differ."""
    if facts["global_inverse_frequencies"] is None:
        return ""
    return " in global layers" if kind else " in local layers"


def _unfinished(facts: dict[str, Any], kind: str) -> str:
    wavelengths, length = facts[f"{kind}wavelengths"], facts["train_length"]
    count = sum(each is None or each > length for each in wavelengths)
    when = "" if facts["extension"] == "none" else f" with {facts['extension']}"
    pairs = f"{count} of {len(wavelengths)} pairs{_layers(facts, kind)}"
    return f"{pairs}{when} need more than {length} tokens for a turn."


def _slopes(slopes: list[float]) -> Table:
    table = _grid("Slope of each head", "head", "slope", "weight halves every (tokens)")
    for head, slope in enumerate(slopes):
        half = math.log(2) / slope if slope > 0 else math.inf
        table.add_row(str(head), f"{slope:.6g}", f"{half:.4g}")
    return table


def _bias(bias: dict[str, Any]) -> list[Table]:
    heads = range(len(bias["values"]))
    tables = []
    for start in range(0, len(heads), HEADS_PER_TABLE):
        shown = heads[start : start + HEADS_PER_TABLE]
        names = [f"head {head}" for head in shown]
        table = _grid("Bias added to the score, by distance", "distance", *names)
        for column, distance in enumerate(bias["distances"]):
            values = [float(bias["values"][head][column]) for head in shown]
            table.add_row(str(distance), *[f"{value:.4g}" for value in values])
        tables.append(table)
    return tables


def _verdict(name: str, check: dict[str, Any]) -> str:
    claim, quantity = CLAIMS[name]
    single, double = check["float32"], check["float64"]
    holds = single["holds"] and double["holds"]
    verdict = "holds" if holds else "does NOT hold" if check["claimed"] else "does not hold"
    return (
        f"{claim}: {verdict}. {quantity}: {float(double['value']):.1e} in float64, "
        f"{float(single['value']):.1e} in float32, over {check['positions']} positions; "
        f"rounding allows {double['tolerance']:.1e} and {single['tolerance']:.1e}."
    )
