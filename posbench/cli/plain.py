"""Commands that take plain words: no groups, no sweeps, no Hydra."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posbench import plugins
from posbench.cli.matching import did_you_mean
from posbench.cli.space import PLUGINS_KEY
from posbench.errors import UserError

ALLOW_MISMATCH = "--allow-mismatch"

SAMPLE_HELP = """posbench sample RUN [key=value ...]: let a trained model write.

  RUN               folder of a finished run
  prompt=TEXT       what it goes on from; without one, the first line of a test document, or the
                    question of a test example if the model was trained on a task
  tokens=200        tokens to write; the length of the answer for a task's own question
  temperature=0.8   0 takes the likeliest token each time
  seed=0            same seed, same text
  plugins=FILE      the file of the run's encoding, if that is your own
  plugins_changed=true   although the file has changed since training

  posbench sample outputs/train/20261130-061502-1f3a-rope prompt="def main(" tokens=100"""

SELFTEST_HELP = """posbench selftest: check the evaluator here on models whose losses are known.

Each line names a model, a protocol, the number expected and the number measured on this machine
and device. Exit code 0 if all agree, 1 if any does not."""

REPORT_HELP = """posbench report [PATH...]: write the report of an evaluation again.

  PATH              folder of an evaluation (one that holds results.json), or of a run or a sweep,
                    which stands for its newest evaluation; without any, the newest of all
  --allow-mismatch  although rows of one column were scored on different tokens; the report
                    then says so

Writes report.md, report.html (one file, for print and phone too), table.tex, results.csv, .json
and .parquet, and each figure as PNG and SVG, into the folder of the evaluation.

  posbench report outputs/eval-extrapolate/20261130-070000-9c41"""


TB_EXPORT_HELP = """posbench tb-export PATH... [--out DIR]: write TensorBoard's files again.

  PATH        a run, an evaluation, or a folder with any of them below it: a sweep, outputs
  --out DIR   one new folder for all of them, runs below train/ and evaluations below eval/;
              without it each run and each evaluation gets its own tb/ again

The points come from metrics.jsonl and results.json: they are those that were written live.

  posbench tb-export outputs/train/20261130-061502-1f3a
  posbench tb-export outputs --out all-curves && tensorboard --logdir all-curves"""


def split(
    command: str, words: list[str], kinds: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """Positional words, and `key=value` ones converted by `kinds`; raises UserError."""
    places: list[str] = []
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key in kinds and equals:
            values[key] = _convert(key, value, kinds[key])
        elif equals and key.isidentifier() and not Path(word).exists():
            hint = did_you_mean(key, kinds)
            raise UserError(f"{key} is not a setting of posbench {command}.{hint}")
        elif word.startswith("-"):
            raise UserError(f"posbench {command} has no option {word}; see its --help.")
        else:
            places.append(word)
    return places, values


def _convert(key: str, value: str, kind: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        words = {int: "a whole number", float: "a number", _truth: "true or false"}
        raise UserError(f"{key}={value} is not valid: {key} must be {words[kind]}.") from None


def _truth(value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(value)
    return value.lower() == "true"


def sample(words: list[str]) -> None:
    """`posbench sample`."""
    if "--help" in words or "-h" in words:
        print(SAMPLE_HELP)
        return
    kinds: dict[str, Any] = {"prompt": str, "tokens": int, "temperature": float, "seed": int}
    kinds |= {PLUGINS_KEY: plugins.named_paths, "plugins_changed": _truth}
    places, values = split("sample", words, kinds)
    if len(places) != 1:
        raise UserError("posbench sample takes one run: posbench sample RUN [prompt=TEXT].")
    from posbench.jobs.sample import run_sample

    with plugins.loaded(values.get(PLUGINS_KEY, [])):
        run_sample(
            Path(places[0]),
            values.get("prompt"),
            values.get("tokens"),
            values.get("temperature", 0.8),
            values.get("seed", 0),
            values.get("plugins_changed", False),
        )


def report(words: list[str]) -> None:
    """`posbench report`."""
    if "--help" in words or "-h" in words:
        print(REPORT_HELP)
        return
    places, _ = split("report", [word for word in words if word != ALLOW_MISMATCH], {})
    from posbench.report import run_report

    run_report([Path(place) for place in places], ALLOW_MISMATCH in words)


def tb_export(words: list[str]) -> None:
    """`posbench tb-export`."""
    if "--help" in words or "-h" in words:
        print(TB_EXPORT_HELP)
        return
    out, rest = _option("tb-export", "--out", "DIR", words)
    places, _ = split("tb-export", rest, {})
    if not places:
        raise UserError(
            "posbench tb-export takes runs, sweeps or evaluations: posbench tb-export PATH..."
        )
    from posbench.jobs.export import run_export

    paths = [Path(place).expanduser() for place in places]
    run_export(paths, None if out is None else Path(out).expanduser())


def _option(command: str, name: str, value: str, words: list[str]) -> tuple[str | None, list[str]]:
    """The value of `--name VALUE` or `--name=VALUE`, None without it; and the other words."""
    found: list[str] = []
    rest = []
    following = iter(words)
    for word in following:
        if word == name:
            found.append(next(following, ""))
        elif word.startswith(f"{name}="):
            found.append(word.partition("=")[2])
        else:
            rest.append(word)
    if "" in found or len(found) > 1:
        raise UserError(f"posbench {command} takes {name} {value} once.")
    return (found[0] if found else None), rest


def selftest(words: list[str]) -> None:
    """`posbench selftest`."""
    if "--help" in words or "-h" in words:
        print(SELFTEST_HELP)
        return
    if words:
        raise UserError(f"posbench selftest takes nothing, not {words[0]!r}.")
    from posbench.jobs.selftest import run_selftest

    run_selftest()
