"""A sweep runs each job in a process of its own: pinned, isolated, and none started in vain.

This is a Hydra launcher (`hydra/launcher=posbench`, the default). Every job is composed and
checked before the first one starts, so a mistake in the last one costs nothing.
"""

from __future__ import annotations

import copy
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from posbench.cli import arguments, compose
from posbench.cli.pool import Job, Outcome, Pool, summary_lines
from posbench.cli.slots import slots, visible_gpus
from posbench.config import Device, EvalSettings, InspectSettings, TrainSettings
from posbench.config.tasks import TaskConfig
from posbench.corpus import Corpus, check_size, load_corpus, split_documents
from posbench.errors import Exit, InterruptedRunError, SweepFailedError, UserError
from posbench.plugins import LOADED
from posbench.runs import MANIFEST

Settings = TrainSettings | EvalSettings

# A job is a run by itself, whatever sweep its experiment asks for.
_SINGLE = ("hydra.mode=RUN", "hydra.sweeper.params=null")

PROGRAM = (sys.executable, "-m", "posbench")


@dataclass
class Sweep:
    """What the launcher has to know and Hydra does not tell it."""

    command: str
    flags: tuple[str, ...]  # that every job needs too
    folder: Path | None = None  # known once Hydra has composed the sweep

    def discard(self) -> None:
        """Take back what Hydra wrote for a sweep of which no job was started."""
        if self.folder is None or not self.folder.is_dir():
            return
        if [path.name for path in self.folder.iterdir()] == ["multirun.yaml"]:
            (self.folder / "multirun.yaml").unlink()
            self.folder.rmdir()


class PosbenchLauncher(Launcher):
    """Runs the jobs of a sweep side by side, one process each."""

    sweep: Sweep  # set by register()

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.context = hydra_context
        self.config = config
        self.sweep.folder = Path(config.hydra.sweep.dir)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run every job; raises SweepFailedError at the end if any failed."""
        if self.jobs is not None and self.jobs < 1:
            raise UserError(f"hydra.launcher.jobs={self.jobs} is too small; the least is 1.")
        given = [word.split("=")[0] for word in self.config.hydra.overrides.hydra]
        if "hydra.run.dir" in given:
            raise UserError("hydra.run.dir is for one run; a sweep's folder is hydra.sweep.dir.")
        numbered = enumerate(job_overrides, start=initial_job_idx)
        plans = [self._plan(number, list(words)) for number, words in numbered]
        jobs = [job for job, _ in plans]
        if len({job.folder for job in jobs}) < len(jobs):
            raise UserError("hydra.sweep.subdir gives two jobs the same folder; leave it out.")
        _check_text(plans)
        _check_plugins(plans)
        on_cpu = all(settings.device is Device.cpu for _, settings in plans)
        pool = Pool(jobs, slots(len(jobs), self.jobs, [] if on_cpu else visible_gpus()))
        self._finish(pool.run(), pool.stopped)
        # Hydra reads one result for each job.
        return [JobReturn(status=JobStatus.COMPLETED) for _ in jobs]

    def _plan(self, number: int, words: list[str]) -> tuple[Job, Settings]:
        """A job's command line, and its settings, checked."""
        composed = self.context.config_loader.load_sweep_config(self.config, words)
        with open_dict(composed):
            composed.hydra.job.id = composed.hydra.job.num = number
        HydraConfig.instance().set_config(composed)
        folder = Path(composed.hydra.sweep.dir) / str(composed.hydra.sweep.subdir)
        label = " ".join(filter_overrides(words))
        try:
            settings = compose.settings_of(_without_hydra(composed))
            assert not isinstance(settings, InspectSettings)
        except UserError as error:
            raise _refused(number, label, error) from error
        target = f"hydra.run.dir={arguments.quote(str(folder))}"
        own = (self.sweep.command, *self.sweep.flags, *words, *_SINGLE, target)
        return Job(number, folder, label, (*PROGRAM, *own)), settings

    def _finish(self, outcomes: list[Outcome], stopped: signal.Signals | None) -> None:
        assert self.sweep.folder is not None
        sweep = self.sweep.folder
        print("\n".join(summary_lines(sweep, outcomes)), file=sys.stderr, flush=True)
        if stopped is not None:
            code = Exit.TERMINATED if stopped is signal.SIGTERM else Exit.INTERRUPTED
            again = "goes on" if self.sweep.command == "train" else "does every job again"
            message = f"stopped; the same command with hydra.sweep.dir={sweep} {again}."
            raise InterruptedRunError(message, code)
        if self.sweep.command == "eval-extrapolate":
            _merge([outcome.job.folder for outcome in outcomes], sweep)
        failed = sum(outcome.code != 0 for outcome in outcomes)
        if failed:
            raise SweepFailedError(f"{failed} of {len(outcomes)} jobs failed.")


def _refused(number: int, label: str, error: UserError) -> UserError:
    return UserError(f"job {number} ({label}): {error} No job was started.")


def _check_text(plans: list[tuple[Job, Settings]]) -> None:
    """Raise UserError unless every training run finds text that fills its context.

    A run that has begun had it then. Tokens are not counted here, for that takes the tokenizer.
    """
    corpora: dict[str, Corpus] = {}  # by the settings they come from, each read once
    for job, settings in plans:
        if not isinstance(settings, TrainSettings) or isinstance(settings.data, TaskConfig):
            continue
        if (job.folder / MANIFEST).exists() and not settings.overwrite:
            continue
        key = repr(settings.data)
        try:
            if key not in corpora:
                corpora[key] = load_corpus(settings.data)
            check_size(corpora[key], settings.context)
            split_documents(corpora[key], settings.data)
        except UserError as error:
            raise _refused(job.number, job.label, error) from error


def _check_plugins(plans: list[tuple[Job, Settings]]) -> None:
    """Raise UserError if a run's plugin breaks a promise that is quick to check."""
    for job, settings in plans:
        if isinstance(settings, TrainSettings) and settings.encoding.name in LOADED:
            from posbench.promises import refuse_broken

            try:
                refuse_broken(settings.encoding, settings.model, settings.context)
            except UserError as error:
                raise _refused(job.number, job.label, error) from error


def _without_hydra(composed: DictConfig) -> DictConfig:
    task = copy.deepcopy(composed)
    with open_dict(task):
        del task["hydra"]
    return task


def _merge(folders: list[Path], sweep: Path) -> None:
    """One table and report over the jobs that gave results."""
    evaluated = [folder for folder in folders if (folder / "results.json").is_file()]
    if evaluated:
        from posbench.jobs.evaluate import merge_evaluations

        merge_evaluations(evaluated, sweep)


def register(command: str, config_dirs: Sequence[Path], plugins: Sequence[Path]) -> Sweep:
    """Make the launcher known to Hydra, for the jobs of `command`."""
    flags = [word for folder in config_dirs for word in ("--config-dir", str(folder.resolve()))]
    flags += [f"plugins={path.resolve()}" for path in plugins]
    PosbenchLauncher.sweep = Sweep(command, tuple(flags))
    Plugins.instance().class_name_to_class[compose.LAUNCHER] = PosbenchLauncher
    return PosbenchLauncher.sweep
