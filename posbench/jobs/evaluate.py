"""`posbench eval-extrapolate`: trained runs in, one results table and its report out."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

from posbench.config import EvalSettings, Tune
from posbench.discovery import find_folders
from posbench.errors import CheckpointError, UserError
from posbench.files import storage
from posbench.joining import Part, measured_twice, merge, read_results, unlike
from posbench.plugins import changed_plugin
from posbench.report.tuned import TUNE
from posbench.results import BASELINE, STUDY, Evaluation, Status
from posbench.rules import check
from posbench.runs import JOB_FILES, MANIFEST, Lock, PluginError, describe, load_run, now
from posbench.saved import to_dict
from posbench.selection import choose, trial_of
from posbench.version import __version__

# What an evaluation writes, in this order; a folder with anything else is somebody's own.
FILES = (
    "results.csv", "position.csv", "per_doc.csv", "attention.csv", "results.json",
    "results.parquet", "report.md", "report.html", "table.tex", "curves.png", "curves.svg",
    "position.png", "position.svg", "gain.png", "gain.svg", "tb",
)  # fmt: skip
SOMETIMES = ("attention.png", "attention.svg")  # where attention was looked at


def evaluate(
    runs: Any = None, settings: EvalSettings | None = None, folder: Path | str | None = None
) -> Evaluation:
    """Evaluate `runs` (folders, a glob, a list; None: the newest) and return all measurements.

    With a `folder`, results and report are also written there. Raises CheckpointError, after the
    good runs were evaluated and written, if a run has no usable checkpoint.
    """
    from posbench.jobs.measuring import raise_damaged

    settings = settings or EvalSettings()
    if runs is not None:
        settings = replace(settings, runs=runs)
    evaluation, damaged = _measure(settings, ["posbench.evaluate"])
    if folder is not None:
        _write(evaluation, Path(folder))
    raise_damaged(damaged)
    return evaluation


def run_evaluation(settings: EvalSettings, folder: Path, command: list[str]) -> None:
    """Evaluate, write everything into `folder`, and print the table.

    A folder that already holds this very evaluation is complete; any other content is refused.
    """
    from posbench.jobs.measuring import raise_damaged

    check(settings)
    if (folder / MANIFEST).exists():
        raise UserError(f"{folder} holds a training run, which is never changed; choose another.")
    lock = Lock(folder)
    try:
        before = earlier(folder, settings)
        if before is not None:
            _show(before)
            print(f"complete: {folder} already holds this evaluation.")
            return
        evaluation, damaged = _measure(settings, command)
        _write(evaluation, folder)
        _show(evaluation)
        announce(folder)
        raise_damaged(damaged)
    except UserError:
        lock.discard()
        raise
    finally:
        lock.release()


def earlier(folder: Path, settings: EvalSettings) -> Evaluation | None:
    """The same evaluation, finished before in `folder`; raises UserError for anything else there.

    One that had to skip a run is not finished: the run may have been repaired.
    """
    names = {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}
    foreign = sorted(names - {*FILES, *SOMETIMES, *JOB_FILES})
    if foreign:
        raise UserError(
            f"{folder} is not empty and holds more than a posbench evaluation (it has "
            f"{foreign[0]}). Choose another hydra.run.dir."
        )
    if not set(FILES) <= names:  # nothing yet, or killed while writing
        return None
    found = read_results(folder)
    done = found.provenance.get("evaluations", [])
    before = done[0].get("asked") if done else None
    if not isinstance(before, dict):
        raise UserError(
            f"{folder / 'results.json'} does not say what was asked for, so it was not written by "
            "posbench or was changed since. Choose another hydra.run.dir."
        )
    wanted = asked(settings)
    changed = {
        key: (before.get(key), wanted[key]) for key in wanted if before.get(key) != wanted[key]
    }
    if changed or len(done) > 1:
        raise UserError(
            f"{folder} holds another evaluation: {describe(changed)}. Choose another hydra.run.dir."
        )
    skipped = any(row.status is Status.skipped for row in found.rows)
    return None if skipped else found


def is_evaluated(settings: EvalSettings, folder: Path) -> bool:
    """Whether `folder` holds this very evaluation, finished."""
    try:
        return folder.is_dir() and earlier(folder, settings) is not None
    except UserError:
        return False


def asked(settings: EvalSettings) -> dict[str, Any]:
    """All that decides the numbers of an evaluation, flat: key -> value."""
    found: dict[str, Any] = {f"eval.{key}": value for key, value in to_dict(settings.eval).items()}
    found |= {f"extension.{key}": value for key, value in to_dict(settings.extension).items()}
    found |= {"dtype": str(settings.dtype), "device": str(settings.device)}
    if settings.models is not None:
        from posbench.jobs.foreign import asked_models

        return found | asked_models(settings)
    found |= {"tune": str(settings.tune)}
    runs = [_checkpoint(folder, settings.plugins_changed) for folder in find_folders(settings.runs)]
    return found | {"runs": runs}


def _checkpoint(folder: Path, plugins_changed: bool) -> str:
    """Which run, at which checkpoint, and the plugin it is evaluated with if that has changed."""
    changed = ""
    try:
        run = load_run(folder, plugins_changed=plugins_changed)
        changed = changed_plugin(run.settings.encoding)
    except CheckpointError:
        return f"{folder.resolve()} (unreadable)"
    except PluginError as error:
        run = error.run
    final = run.manifest.get("checkpoint") or {}
    sha256 = final.get("sha256") if isinstance(final, dict) else None
    beside = f", {changed}" if changed else ""
    return f"{folder.resolve()} ({str(sha256 or 'unfinished')[:12]}{beside})"


def merge_evaluations(
    folders: list[Path],
    folder: Path,
    home: Path | None = None,
    baseline: str | None = None,
    study: list[str] | None = None,
) -> None:
    """One table and report in `folder` over the evaluations in `folders`, printed.

    What it says of runs below `home` names them from there, so that it may be moved with them;
    with a `baseline` the report compares all lines with that one; with the command of a `study` it
    names that instead of each part's. Raises UserError, and writes nothing, if their rows cannot
    stand in one table.
    """
    parts = [Part(each, read_results(each)) for each in folders]
    differences = [*unlike(parts), *measured_twice(parts)]
    if differences:
        raise UserError(
            f"the results of each job are in its folder, but no table was made over all: "
            f"{differences[0]}."
        )
    merged = merge(parts)
    if baseline is not None:
        merged.provenance[BASELINE] = baseline
    if study is not None:
        merged.provenance[STUDY] = {"command": study}
    if home is not None:
        for made in merged.provenance["evaluations"]:
            below = f"{home.resolve()}/"
            made["asked"]["runs"] = [run.removeprefix(below) for run in made["asked"]["runs"]]
    _write(merged, folder)
    _show(merged)
    announce(folder)


def _show(evaluation: Evaluation) -> None:
    """Print the tables, and factors that were found as they are typed to have them again."""
    from posbench.report import print_tables
    from posbench.report.content import found_factors

    print_tables(evaluation)
    for line in found_factors(evaluation):
        print(line)


def announce(folder: Path) -> None:
    """Say where the results are and how to look at them."""
    print(f"report       {folder / 'report.html'}")
    print(f"table        {folder / 'results.csv'}")
    print(f"TensorBoard  tensorboard --logdir {folder / 'tb'}", flush=True)


def _write(evaluation: Evaluation, folder: Path) -> None:
    from posbench.board import write_evaluation_board
    from posbench.report import write_report

    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_report(evaluation, folder)
    write_evaluation_board(evaluation, folder / "tb")


def _tuned(settings: EvalSettings) -> tuple[EvalSettings, dict[str, Any]]:
    """The settings with the runs that tune= leaves, and what provenance says of the choice."""
    if settings.tune is Tune.none:
        return settings, {}
    folders = find_folders(settings.runs)
    runs = [load_run(folder, plugins_changed=settings.plugins_changed) for folder in folders]
    chosen, points = choose([trial_of(run) for run in runs])
    told = {TUNE: [dataclasses.asdict(point) for point in points]}
    return replace(settings, runs=[str(folder) for folder in chosen]), told


def _measure(settings: EvalSettings, command: list[str]) -> tuple[Evaluation, list[str]]:
    """All rows, and one sentence for each run without a usable checkpoint."""
    from posbench.jobs.absent import absent
    from posbench.jobs.measuring import Measurement, find_candidates
    from posbench.runtime import resolve

    check(settings)
    wanted = asked(settings)  # the points, of which only those that are chosen are measured
    settings, tuned = _tuned(settings)
    runtime = resolve(settings.device, settings.dtype, threads=settings.threads, training=False)
    done: dict[str, Any] = {"command": command, "created": now(), "asked": wanted}
    if settings.models is not None:
        from posbench.foreign import transformers_version
        from posbench.jobs.foreign import measure_foreign

        evaluation, damaged = measure_foreign(settings, runtime)
        libraries = {"transformers": transformers_version()}
    else:
        candidates = find_candidates(settings)
        evaluation = Measurement(settings, runtime).evaluate(candidates)
        damaged = [each.damaged for each in candidates if each.damaged]
        libraries = {}
        if not_there := absent(candidates):
            done["missing"] = not_there
    evaluation.provenance = {
        "posbench": __version__,
        **runtime.record(),
        **libraries,
        "evaluations": [done],
        **tuned,
    }
    return evaluation, damaged
