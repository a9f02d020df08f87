"""What a study would do, every run and evaluation composed and checked, and what it costs."""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posbench.cli import apps, arguments, plans
from posbench.cli.compose import LauncherConfig, configure
from posbench.cli.matching import did_you_mean
from posbench.cli.slots import places
from posbench.cli.space import APPS
from posbench.cli.studyfile import ALL, Block, Study
from posbench.config import EvalSettings, TrainSettings
from posbench.config.extensions import EXTENSIONS
from posbench.config.policies import PRESETS
from posbench.errors import UserError
from posbench.jobs.train import located
from posbench.runs import fingerprint, scheme_of


@dataclass(frozen=True, eq=False)
class Planned:
    """One run that a study trains."""

    block: Block
    settings: TrainSettings
    key: str  # of its settings: what a folder's run is known by

    @property
    def scheme(self) -> str:
        """What results call its encoding."""
        return scheme_of(self.settings)


@dataclass(frozen=True, eq=False)
class Part:
    """Runs that differ in nothing but the seed, evaluated under one extension."""

    name: str
    extension: str  # with its settings, as typed
    runs: tuple[Planned, ...]


@dataclass(frozen=True)
class Plan:
    """All of a study."""

    study: Study
    runs: list[Planned]
    parts: list[Part]
    launcher: LauncherConfig  # what was asked of it
    evaluations: dict[str, EvalSettings]  # by extension, as typed

    def places(self, jobs: Sequence[TrainSettings]) -> list[dict[str, str]]:
        """What each place for one of `jobs` adds to its environment, on this machine."""
        return places(jobs, self.launcher.jobs, self.launcher.jobs_per_gpu)

    def settings_of(self, part: Part, runs: Sequence[Path] = ()) -> EvalSettings:
        """What `part` is evaluated with, on the folders `runs`."""
        return replace(self.evaluations[part.extension], runs=[str(path) for path in runs])


def plan_of(study: Study, launcher: Sequence[str] = ()) -> Plan:
    """The plan of a study; raises UserError for the first thing that cannot work.

    `launcher` are settings of the launcher, as typed.
    """
    runs, asked = _runs(study, launcher)
    _check_baseline(study, runs)
    parts = list(_parts(study, runs))
    if not parts:
        raise UserError(f"{study.name} evaluates nothing: no extension has an encoding it trains.")
    evaluations: dict[str, EvalSettings] = {}
    for part in parts:
        if part.extension not in evaluations:
            settings = configure("eval-extrapolate", *study.evaluate_words(part.extension))
            assert isinstance(settings, EvalSettings)
            evaluations[part.extension] = settings
    return Plan(study, runs, parts, asked, evaluations)


def _runs(study: Study, launcher: Sequence[str]) -> tuple[list[Planned], LauncherConfig]:
    """Every run, composed and checked."""
    found: dict[str, Planned] = {}
    asked = LauncherConfig()
    for block in study.train:
        seeds, once = _seeds(block)
        line = arguments.read(APPS["train"], ["-m", *once.words(), *launcher])
        jobs, asked = apps.jobs_of(APPS["train"], line)
        for (label, composed), seed in itertools.product(jobs, seeds):
            assert isinstance(composed, TrainSettings)
            settings = composed if seed is None else replace(composed, seed=seed)
            key = fingerprint(located(settings))
            if key in found:
                other = found[key].block
                where = "" if other is block else f", in {other.name} and in {block.name}"
                raise UserError(f"{study.name} trains {label} twice{where}.")
            found[key] = Planned(block, settings, key)
    return list(found.values()), asked


def _seeds(block: Block) -> tuple[list[int | None], Block]:
    """Seeds that can be set after composing, and what is left to compose, a third of the work."""
    seeds = block.values.get("seed", [])
    if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        return [None], block
    return list(seeds), replace(block, values=block.values | {"seed": seeds[:1]})


def _check_baseline(study: Study, runs: list[Planned]) -> None:
    schemes = sorted({each.scheme for each in runs})
    baseline = study.baseline
    if baseline is not None and baseline.split(" + ")[0] not in schemes:
        hint = did_you_mean(baseline, schemes, "baseline={}")
        raise UserError(
            f"baseline={baseline} is not among the encodings that are trained: "
            f"{', '.join(schemes)}.{hint}"
        )


def _parts(study: Study, planned: list[Planned]) -> Iterator[Part]:
    groups: dict[tuple[str, str], list[Planned]] = {}
    for run in planned:
        key = (run.block.name, fingerprint(run.settings, without_seed=True))
        groups.setdefault(key, []).append(run)
    taken: set[str] = set()
    for (block, _), runs in groups.items():
        prefix = f"{block}-" if len(study.train) > 1 else ""
        for extension, encodings in study.extensions.items():
            if not _applies(extension, encodings, runs[0]):
                continue
            slug = re.sub(r"[^\w.]+", "-", extension.replace("extension.", ""))
            stem = name = f"{prefix}{runs[0].scheme}-{slug}"
            number = 1
            while name in taken:  # schemes that differ in a setting of theirs
                number += 1
                name = f"{stem}-{number}"
            taken.add(name)
            yield Part(name, extension, tuple(runs))


def _applies(extension: str, encodings: list[str], run: Planned) -> bool:
    """Whether a study asks for this pair; `all` is all that the extension can serve."""
    if encodings != [ALL]:
        plain = run.scheme.split("+")[0]  # policies set for all are part of the scheme
        return run.scheme in encodings or (plain in encodings and plain not in PRESETS)
    return run.settings.encoding.takes(EXTENSIONS[extension.split()[0]]())


def listed(paths: Sequence[Path]) -> str:
    """Paths as one setting, a list."""
    return "[" + ",".join(arguments.quote(str(path)) for path in paths) + "]"


# ---------------------------------------------------------------- what it takes


def check_inputs(plan: Plan) -> None:
    """Raise UserError unless every run finds text that fills its context and a plugin that will do.

    The launcher checks its own sweep again; of a study, the last part would be hours away.
    """
    jobs = enumerate(plan.runs)
    plans.check_inputs([plans.Plan(n, run.scheme, run.settings, run.key) for n, run in jobs])


def steps(plan: Plan) -> list[str]:
    """What it does, a line each."""
    study = plan.study
    pairs = sum(len(part.runs) for part in plan.parts)
    tokens = sum(
        run.settings.train.steps * run.settings.train.batch_size * run.settings.context
        for run in plan.runs
    )
    extensions = ", ".join(dict.fromkeys(part.extension for part in plan.parts))
    return [
        f"study      {study.name}: {study.title}",
        *(f"train      {block.runs} runs: {' '.join(block.words())}" for block in study.train),
        f"           {tokens:,} tokens in {len(plan.runs)} runs",
        f"evaluate   {pairs} times, a run under an extension: {extensions}",
        f"compare    with {study.baseline}" if study.baseline else "compare    nothing",
    ]


@dataclass(frozen=True)
class Cost:
    """What a study takes on this machine."""

    disk_bytes: int
    free_bytes: int
    at_a_time: int
    train_seconds: float | None  # None: not calibrated
    evaluate_seconds: float | None
    misfits: list[str]

    def lines(self) -> list[str]:
        """The same for people."""
        from posbench.jobs.estimating import size_in_words
        from posbench.jobs.session import duration

        free = size_in_words(self.free_bytes)
        found = [f"disk       {size_in_words(self.disk_bytes)}, {free} are free"]
        if self.train_seconds is None or self.evaluate_seconds is None:
            found.append("expected   not measured")
        else:
            found.append(
                f"expected   about {duration(self.train_seconds + self.evaluate_seconds)} here, "
                f"{self.at_a_time} jobs at a time: {duration(self.train_seconds)} to train, "
                f"{duration(self.evaluate_seconds)} to evaluate"
            )
        return found + [f"no room    {each}" for each in self.misfits]


def cost_of(plan: Plan, folder: Path, calibrated: bool) -> Cost:
    """What `plan` takes here in `folder`; `calibrated`: a few steps and passes are timed."""
    from posbench.jobs.estimating import Estimator, existing, makespan, size_in_words

    runs = [run.settings for run in plan.runs]
    slots = plan.places(runs)
    threads = int(slots[0].get("OMP_NUM_THREADS", 0)) or None
    config = plan.settings_of(plan.parts[0]).eval
    estimator = Estimator(config.ratios, calibrated, threads)
    estimates = dict(zip((run.key for run in plan.runs), estimator.estimate(runs), strict=True))
    device = estimator.runtime(runs[0]).device.type
    training = [each.training_seconds for each in estimates.values()]
    evaluating = [
        estimates[part.runs[0].key].evaluation_seconds(config, device, len(part.runs))
        for part in plan.parts
    ]
    misfits = [
        f"{run.scheme}: {estimates[run.key].misfit}"
        for run in plan.runs
        if estimates[run.key].misfit
    ]
    disk = sum(each.disk_bytes for each in estimates.values())
    free = shutil.disk_usage(existing(folder.absolute())).free
    if disk > free:
        misfits.append(f"the runs need {size_in_words(disk)} of disk")
    return Cost(
        disk_bytes=disk,
        free_bytes=free,
        at_a_time=len(slots),
        train_seconds=makespan(training, len(slots)),
        evaluate_seconds=makespan(evaluating, len(slots)),
        misfits=list(dict.fromkeys(misfits)),
    )
