"""`posbench compare` and `posbench power`: what several seeds allow to say. No torch here."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from posbench.cli.matching import did_you_mean
from posbench.errors import UserError

COMPARE_HELP = """posbench compare PATH... --baseline NAME: differences paired by seed, and tests.

  PATH                folder of an evaluation, or a run or sweep: its newest evaluation below
                      outputs/ that holds all runs named, or else the newest of each run
  --baseline NAME     what to compare with: an encoding, or a line's label such as "rope + yarn"
  --protocol NAME     controlled, or another protocol that was measured
  --ratios 1,2,4      only these lengths, in multiples of the training length
  --allow-mismatch    compare although targets, text, tokenizer or protocol differ; the output
                      then says so
  --out DIR           also write compare.md, compare.csv and compare.json there
  --json              print JSON instead of tables

  posbench compare outputs/eval-extrapolate/20261130-070000-9c41 --baseline rope
  posbench compare outputs/train/20261130-061502-1f3a-sweep --baseline rope --ratios 4"""

POWER_HELP = """posbench power --sd S --diff D: how many seeds find a difference of D nats.

  --sd S         standard deviation, over seeds, of the difference paired by seed: the column
                 sd of posbench compare (in compare.csv too)
  --diff D       true difference of mean losses that is not to be missed, nats
  --alpha 0.05   how often a difference may be reported where there is none
  --power 0.8    how often the difference is to be found where it is there

  posbench power --sd 0.004 --diff 0.01"""

SHOWN_SEEDS = range(3, 11)


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, exit 2."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help.")


def _parser(command: str) -> _Parser:
    return _Parser(prog=f"posbench {command}", add_help=False, allow_abbrev=False)


def _parsed(parser: _Parser, words: list[str]) -> argparse.Namespace:
    """The options in `words`; an unknown one is refused with the one that is near."""
    options = [name for action in parser._actions for name in action.option_strings]
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in options:
            hint = did_you_mean(name, options)
            raise UserError(f"{parser.prog} has no option {name}.{hint}")
    return parser.parse_args(words)


def compare(words: list[str]) -> None:
    """`posbench compare`."""
    if "--help" in words or "-h" in words:
        print(COMPARE_HELP)
        return
    parser = _parser("compare")
    parser.add_argument("paths", nargs="*", metavar="PATH")
    parser.add_argument("--baseline", metavar="NAME")
    parser.add_argument("--protocol", default="controlled", metavar="NAME")
    parser.add_argument("--ratios", type=_ratios, metavar="1,2,4")
    parser.add_argument("--allow-mismatch", action="store_true")
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true")
    asked = _parsed(parser, words)
    if not asked.paths:
        raise UserError(
            "posbench compare takes the folder of an evaluation, a run or a sweep: "
            "posbench compare PATH --baseline NAME."
        )
    _compare(asked)


def _compare(asked: argparse.Namespace) -> None:
    from rich.console import Console

    from posbench.joining import find_evaluations, join
    from posbench.report import answer, comparison, pairs

    parts, missing = find_evaluations(asked.paths)
    evaluation = join(parts, allow_mismatch=asked.allow_mismatch)
    _check_protocol(asked.protocol, {row.protocol for row in evaluation.rows})
    names = pairs.lines_of(evaluation, asked.protocol)
    if asked.baseline is None:
        raise UserError(f"say what to compare with: --baseline NAME, one of {', '.join(names)}.")
    if asked.baseline not in names and (hint := did_you_mean(asked.baseline, names)):
        raise UserError(
            f"--baseline {asked.baseline}: no such line.{hint} There are: {', '.join(names)}."
        )
    found = pairs.compare(evaluation, asked.baseline, asked.protocol, asked.ratios)
    if not found.cells:
        raise UserError(
            f"there is nothing to compare with {asked.baseline}: it is the only line of "
            f"{asked.protocol}. Name evaluations that hold others too."
        )
    warnings = [*answer.mismatches(evaluation), *missing]
    sources = [str(part.folder) for part in parts]
    if asked.out is not None:
        comparison.write_comparison(found, asked.out, sources, warnings)
    if asked.json:
        comparison.print_json(found, sources, warnings)
        return
    comparison.print_comparison(found, warnings, Console(markup=False, highlight=False))
    if asked.out is not None:
        print("\n".join(str(asked.out / name) for name in comparison.FILES))


def _check_protocol(name: str, known: set[str]) -> None:
    if name not in known:
        there = ", ".join(sorted(known)) or "none: the evaluation holds no rows"
        raise UserError(
            f"--protocol {name} was not measured.{did_you_mean(name, known)} There are: {there}."
        )


def _ratios(text: str) -> list[float]:
    try:
        ratios = [float(part) for part in text.strip("[]").split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a list such as 1,2,4") from None
    if not all(0 < ratio < math.inf for ratio in ratios):
        raise argparse.ArgumentTypeError(f"{text}: a ratio must be greater than 0")
    return ratios


def power(words: list[str]) -> None:
    """`posbench power`."""
    if "--help" in words or "-h" in words:
        print(POWER_HELP)
        return
    parser = _parser("power")
    parser.add_argument("--sd", type=_between(0.0, math.inf), required=True)
    parser.add_argument("--diff", type=_between(0.0, math.inf), required=True)
    parser.add_argument("--alpha", type=_between(1e-6, 0.5), default=0.05)
    parser.add_argument("--power", type=_between(0.0, 1.0), default=0.8)
    asked = _parsed(parser, words)
    if asked.power <= asked.alpha:
        raise UserError(f"--power {asked.power:g} must be greater than --alpha {asked.alpha:g}.")
    _power(asked.sd, asked.diff, asked.alpha, asked.power)


def _between(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not low < value < high:
            most = "" if high == math.inf else f" and less than {high:g}"
            raise argparse.ArgumentTypeError(f"{text} must be greater than {low:g}{most}")
        return value

    return number


def _power(sd: float, diff: float, alpha: float, wanted: float) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from posbench import inference

    needed = inference.seeds_needed(sd, diff, alpha, wanted)
    seeds = f"{needed:,} seeds are" if needed else f"More than {inference.MOST_SEEDS:,} seeds are"
    print(
        f"{seeds} needed to find a difference of {diff:g} nats with a paired t test\n"
        f"(two-sided, alpha {alpha:g}, power {wanted:g}, standard deviation of the paired "
        f"differences {sd:g})."
    )
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("seeds", "significant from", f"found at power {wanted:g}", f"power at {diff:g}"):
        table.add_column(name, justify="right")
    for n in SHOWN_SEEDS:
        table.add_row(
            str(n),
            f"{inference.significant_difference(n, sd, alpha):.4g}",
            f"{inference.detectable_difference(n, sd, alpha, wanted):.4g}",
            f"{inference.power_of(n, sd, diff, alpha):.2f}",
        )
    Console(markup=False, highlight=False).print(table)
    print(
        "significant from: the least mean difference measured that the test calls significant.\n"
        f"found at power {wanted:g}: the true difference that so many seeds find so often.\n"
        "Each baseline and line needs these seeds, the same ones. One test; Holm over m tests is\n"
        "at most alpha / m for each. The deviation is the column sd of posbench compare."
    )
